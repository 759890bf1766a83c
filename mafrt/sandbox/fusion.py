"""A SandboxFusion server as sandbox: `POST /run_code`, and what has to be known about it.

The server is not believed more than the snippet: the size of what it sends is bounded, every type is looked at, and
what it cannot do or does not say is no verdict about the code but a SandboxError.
"""

from __future__ import annotations

import base64
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mafrt.core.errors import ConfigError, SandboxError
from mafrt.sandbox.fair_semaphore import Slots
from mafrt.sandbox.inside import launcher, limits, names
from mafrt.sandbox.text import readable
from mafrt.sandbox.types import EVERYTHING, Execution, Status
from mafrt.sandbox.zygote_sandbox import Counts, checked_request

ANSWER_MIB = 2 * limits.FETCH_TOTAL_MIB
"""Longest answer that is read."""
START_S = 60.0
"""For the server's own queue and the interpreter's start, on top of the snippet's time."""
LAUNCHER_MIB = 768
"""For the launcher, which packs the files, and for libraries, on top of the snippet's memory."""
PAUSE_S = 0.5
"""Before the second and last try."""


class FusionSandbox:
    """See `mafrt.sandbox.types.Sandbox`. The snippet runs where the server runs."""

    tier = "fusion"

    def __init__(self, url: str, workers: int = 2) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"found the sandbox address {parts.path or url!r}, expected fusion:http://HOST:PORT")
        if parts.username or parts.password or parts.query:
            raise ConfigError("found a user, a password or a query in the sandbox's address, expected host and port")
        self.url = url.rstrip("/")
        self.counts = Counts()
        self._slots = Slots(workers)
        # No proxy of the environment: what models write goes to this server and nowhere else.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._launcher = Path(launcher.__file__).read_text(encoding="utf-8")
        done = self.execute("print(6 * 7)", timeout_s=30.0)
        if done.stdout.strip() != "42":
            raise SandboxError(f"the SandboxFusion server at {self.url} does not run Python: it said {done.stderr!r}")
        self.counts = Counts()

    def execute(
        self,
        code: str,
        files: Mapping[str, bytes] = {},
        fetch: Sequence[str] = (),
        timeout_s: float = 10.0,
        memory_mib: int = 1024,
    ) -> Execution:
        """Run `code` over there. Raises SandboxError when two tries in a row say nothing about it."""
        checked = checked_request(code, files, fetch, timeout_s, memory_mib)
        refused = {name: why for name in fetch if name != EVERYTHING and (why := names.fault(name))}
        order = {
            "names": list(files),
            "fetch": [name for name in fetch if name not in refused],
            "timeout_s": timeout_s,
            "half": limits.OUTPUT_HEAD_BYTES,
            "fetch_files": limits.FETCH_FILES,
            "memory_mib": memory_mib,
            "fetch_file_bytes": limits.FETCH_FILE_MIB * limits.MIB,
            "fetch_bytes": limits.FETCH_TOTAL_MIB * limits.MIB,
        }
        sent = {
            **files,
            launcher.ORDER: json.dumps(order).encode(),
            launcher.SNIPPET: checked["code"].encode(),
        }
        request = {
            "language": "python",
            "code": self._launcher,
            "stdin": "",
            "compile_timeout": START_S,
            "run_timeout": timeout_s + 5.0,
            "memory_limit_MB": memory_mib + LAUNCHER_MIB,
            "files": {name: base64.b64encode(content).decode() for name, content in sent.items()},
            "fetch_files": [launcher.RESULT],
        }
        with self._slots:
            self.counts.executions += 1
            try:
                answer = self._post(request, timeout_s)
            except SandboxError:
                self.counts.repeated += 1
                time.sleep(PAUSE_S)
                answer = self._post(request, timeout_s)
        return self._read(answer, list(fetch), refused)

    def close(self) -> None:
        """Nothing is held between two requests."""

    def __enter__(self) -> FusionSandbox:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _post(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The server's answer, which is about the code; SandboxError where it is about the server."""
        posted = urllib.request.Request(
            f"{self.url}/run_code", json.dumps(request).encode(), {"Content-Type": "application/json"}
        )
        where = f"the SandboxFusion server at {self.url}"
        try:
            with self._opener.open(posted, timeout=timeout_s + START_S) as reply:
                data = reply.read(ANSWER_MIB * limits.MIB + 1)
        except urllib.error.HTTPError as error:
            with error:
                raise SandboxError(f"{where} answered {error.code} ({error.reason})") from error
        except (OSError, http.client.HTTPException) as error:
            raise SandboxError(f"{where} cannot be reached: {getattr(error, 'reason', error)}") from error
        if len(data) > ANSWER_MIB * limits.MIB:
            raise SandboxError(f"{where} sent more than {ANSWER_MIB} MiB")
        try:
            answer = json.loads(data)
            status = answer["status"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise SandboxError(f"{where} sent what is not an answer to run_code: {data[:100]!r}") from error
        if status not in ("Success", "Failed"):
            raise SandboxError(f"{where} failed: {status}: {str(answer.get('message'))[:300]}")
        return answer

    def _read(self, answer: dict[str, Any], fetch: list[str], refused: dict[str, str]) -> Execution:
        """An Execution from the file the launcher wrote or, where it could not, from what the server saw."""
        try:
            packed = (answer.get("files") or {}).get(launcher.RESULT)
            if not packed:
                return self._without_result(answer["run_result"], fetch, refused)
            result = json.loads(base64.b64decode(packed))
            code = result["exit_code"]
            status: Status = "ok" if code == 0 else "error"
            if result["late"]:
                status = "timeout"
            elif result["memory"] and code != 0:
                status = "memory"
            elif code < 0:
                status = "killed"
            contents = {str(name): base64.b64decode(text) for name, text in result["files"].items()}
            refused = {**refused, **{str(name): str(why) for name, why in result["refused"].items()}}
            everything = fetch == [EVERYTHING]
            missing = result["gone"] if everything else [name for name in fetch if name not in contents]
            if any(names.fault(name) for name in contents) or not (everything or contents.keys() <= set(fetch)):
                raise ValueError("files that nobody asked for")
            return Execution(
                status=status,
                stdout=readable(base64.b64decode(result["streams"][0])),
                stderr=readable(base64.b64decode(result["streams"][1])),
                exit_code=None if result["late"] else int(code),
                files=contents,
                missing=tuple(str(name) for name in missing),
                refused=refused,
                seconds=float(result["seconds"]),
                tier=self.tier,
            )
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise SandboxError(
                f"the SandboxFusion server at {self.url} sent a result that is not as agreed: {error!r}"
            ) from error

    def _without_result(self, seen: dict[str, Any], fetch: list[str], refused: dict[str, str]) -> Execution:
        """The launcher was ended too: by the server's own limits, or by the snippet."""
        code = seen.get("return_code")
        late = seen["status"] == "TimeLimitExceeded"
        return Execution(
            status="timeout" if late else "killed",
            stdout=readable(str(seen.get("stdout") or "").encode()[: limits.OUTPUT_TAIL_BYTES]),
            stderr=readable(str(seen.get("stderr") or "").encode()[: limits.OUTPUT_TAIL_BYTES])
            + "[sandbox] ended by the server, for its time or its memory\n",
            exit_code=None if late or not isinstance(code, int) else code,
            missing=() if fetch == [EVERYTHING] else tuple(fetch),
            refused=refused,
            seconds=float(seen.get("execution_time") or 0.0),
            tier=self.tier,
        )
