"""A SandboxFusion server as sandbox, through `POST /run_code`.

The server is trusted no more than the snippet: response sizes are bounded and every type is checked. A malformed or
missing answer is a SandboxError, never a verdict about the code.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mafrt.core.errors import ConfigError, SandboxError
from mafrt.core.http_request import StatusError, http_request, is_http_address
from mafrt.core.text import readable, readable_name, shortened
from mafrt.sandbox.fair_semaphore import Slots
from mafrt.sandbox.inside import launcher, limits, names
from mafrt.sandbox.types import EVERYTHING, Execution, Status
from mafrt.sandbox.zygote_sandbox import DAY_S, SandboxCounts, checked_request, not_run, unfit

ANSWER_MIB = 2 * limits.FETCH_TOTAL_MIB
"""Longest answer that is read."""
START_S = 60.0
"""For the server's own queue and the interpreter's start, on top of the snippet's time."""
LAUNCHER_MIB = 768
"""For the launcher, which packs the files, and for libraries, on top of the snippet's memory."""
PAUSE_S = 0.5
"""Before the second and last try."""


def check_address(url: str) -> None:
    """Raises ConfigError for an address that is no server's."""
    if not is_http_address(url):
        raise ConfigError(f"found the sandbox address {shortened(url, 200)!r}, expected fusion:http://HOST:PORT")
    parts = urllib.parse.urlsplit(url)
    # The address is logged, and a password in it would be too.
    if parts.username or parts.password or parts.query:
        raise ConfigError("found a user, a password or a query in the sandbox's address, expected host and port")


class FusionSandbox:
    """See `mafrt.sandbox.types.Sandbox`. The snippet runs where the server runs."""

    tier = "fusion"

    def __init__(self, url: str, workers: int = 2) -> None:
        check_address(url)
        self.url = url.rstrip("/")
        self.counts = SandboxCounts()
        self._slots = Slots(workers)
        self._launcher = Path(launcher.__file__).read_text(encoding="utf-8")
        # Tried at once, so that a wrong address costs seconds and not the first batch.
        done = self.execute("print(6 * 7)", timeout_s=30.0)
        if done.stdout.strip() != "42":
            raise SandboxError(f"the SandboxFusion server at {self.url} does not run Python: it said {done.stderr!r}")
        self.counts = SandboxCounts()

    @property
    def description(self) -> str:
        """The tier and its means, in one line."""
        return f"fusion: a SandboxFusion server at {self.url}"

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
        if (fault := unfit(code, files)) is not None:
            return not_run(fault, fetch, self.tier)
        refused = {name: why for name in fetch if name != EVERYTHING and (why := names.fault(name))}
        key = secrets.token_bytes(32)
        order = {
            "key": key.hex(),
            "names": list(files),
            "fetch": [name for name in fetch if name not in refused],
            "timeout_s": timeout_s,
            "half": limits.OUTPUT_HEAD_BYTES,
            "most_output": limits.OUTPUT_BYTES,
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
            # Longer than the snippet's own deadline, so that the launcher can still report which files there are.
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
                # Once more only: a program has no effect outside, so that it may be run twice, but a server that is
                # down stays so.
                time.sleep(PAUSE_S)
                answer = self._post(request, timeout_s)
        return self._read(answer, list(fetch), refused, key, timeout_s)

    def close(self) -> None:
        """Nothing is held between two requests."""

    def __enter__(self) -> FusionSandbox:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _post(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The server's answer, which is about the code; SandboxError where it is about the server."""
        where, within_s, most = f"the SandboxFusion server at {self.url}", timeout_s + START_S, ANSWER_MIB * limits.MIB
        headers, content = {"Content-Type": "application/json"}, json.dumps(request).encode()
        try:
            # No proxy, no redirection: model-written code must reach this server and no other host.
            data = http_request(f"{self.url}/run_code", content, headers=headers, within_s=within_s, most=most)
        except StatusError as error:
            raise SandboxError(f"{where} failed: {error}") from error
        except OSError as error:
            raise SandboxError(f"{where} cannot be reached: {error}") from error
        try:
            answer: dict[str, Any] = json.loads(data)
            ended = answer["status"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise SandboxError(f"{where} sent something other than an answer to run_code: {data[:100]!r}") from error
        # Failed is about the program, and everything else about the server; only the first may count against the model.
        if ended not in ("Success", "Failed"):
            raise SandboxError(f"{where} failed: {ended}: {str(answer.get('message'))[:300]}")
        return answer

    def _read(
        self, answer: dict[str, Any], fetch: list[str], refused: dict[str, str], key: bytes, timeout_s: float
    ) -> Execution:
        """An Execution from the launcher's file, if the server saw the launcher end well and the file has its seal.

        The snippet runs beside the launcher: it may end it and leave a file of its own. Such a file is not read.
        """
        try:
            seen = answer["run_result"]
            packed = (answer.get("files") or {}).get(launcher.RESULT)
            ended_well = seen["status"] == "Finished" and seen.get("return_code") == 0
            text = _unsealed(packed, key) if packed and ended_well else None
            if text is None:
                return self._without_result(seen, fetch, refused)
            result = json.loads(text)
            code = result["exit_code"]
            # Although sealed, the numbers come from a machine that ran a model's code, and NaN or a huge integer would
            # break what reads them.
            if not result["late"] and (isinstance(code, bool) or not isinstance(code, int) or abs(code) > 255):
                raise ValueError("an exit code that is none")
            seconds = _seconds(result["seconds"])
            if seconds is None or seconds > timeout_s + START_S:
                raise ValueError("a time that cannot be")
            status: Status = "ok" if code == 0 else "error"
            if result["late"]:
                status = "timeout"
            elif result["memory"] and code != 0:
                status = "memory"
            elif code < 0:
                status = "killed"
            contents = {str(name): base64.b64decode(text) for name, text in result["files"].items()}
            shown = {name: name for name in fetch}
            refused = refused | {
                shown.get(name, readable_name(name)): readable_name(str(why)) for name, why in result["refused"].items()
            }
            everything = fetch == [EVERYTHING]
            missing = result["gone"] if everything else [name for name in fetch if name not in contents]
            if any(names.fault(name) for name in contents) or not (everything or contents.keys() <= set(fetch)):
                raise ValueError("files that were not asked for")
            return Execution(
                status=status,
                stdout=readable(base64.b64decode(result["streams"][0])),
                stderr=readable(base64.b64decode(result["streams"][1])),
                exit_code=None if result["late"] else int(code),
                files=contents,
                missing=tuple(shown.get(name, readable_name(str(name))) for name in missing),
                refused=refused,
                seconds=seconds,
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
            stdout=readable(str(seen.get("stdout") or "").encode("utf-8", "replace")[: limits.OUTPUT_TAIL_BYTES]),
            stderr=readable(str(seen.get("stderr") or "").encode("utf-8", "replace")[: limits.OUTPUT_TAIL_BYTES])
            + "[sandbox] ended by the server for its time or its memory, or the snippet ended what ran it\n",
            exit_code=code if isinstance(code, int) and not late and 0 < abs(code) <= 255 else None,
            missing=() if fetch == [EVERYTHING] else tuple(fetch),
            refused=refused,
            seconds=_seconds(seen.get("execution_time")) or 0.0,
            tier=self.tier,
        )


def _seconds(value: Any) -> float | None:
    """A number of seconds between none and a day; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= DAY_S:
        return None
    return float(value)


def _unsealed(packed: str, key: bytes) -> bytes | None:
    """The launcher's text; None where the file was not written by the launcher that was sent this key."""
    seal, _, text = base64.b64decode(packed).partition(b"\n")
    expected = hmac.new(key, text, hashlib.sha256).hexdigest().encode()
    return text if hmac.compare_digest(seal, expected) else None
