"""Plays environments of `verifiers` in the interpreter that has the package: a script of its own.

It imports that package and the standard library only, since nothing else of ours is installed there. Requests come as
JSON lines on the standard input, and answers go out as JSON lines on what was the standard output; whatever the
environments print goes to the standard error. It ends when its input does.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.metadata
import itertools
import json
import os
import sys
import threading
import time
import types
import typing
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

LARGEST = 16 << 20
"""Bytes of one line."""
SHOWN = 2000
"""Characters of a task's prompt that are told."""
TOGETHER = 200
"""Tasks in one line."""
MOST_NUMBERS = 256
"""Metrics and rewards of one trace."""
MOST_TRACES = 1024
"""Of one episode."""
ATTEMPTS = 4
"""To reach the package's own server in this process."""
END_S = 5.0
"""To put everything away after the end of the input."""
CHAT = "mafrt_chat"
"""Module name of our harness, by which the package finds it."""
SPLITS = {"train": ("train",), "validation": ("validation", "valid", "val"), "test": ("test", "eval")}
"""Our splits, and how tasksets name theirs."""
BOUNDS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens")
"""Of an agent's settings; the package takes any number."""
PARTS = 10
"""A split that the taskset does not have is one of so many parts of its tasks."""


class Refused(Exception):
    """A request that cannot be granted, with the reason in a sentence."""


def sentence(error: BaseException) -> str:
    """What was raised, in one line; of a settings error the settings and what is wrong with them."""
    try:
        listed = getattr(error, "errors", None)
        if type(error).__name__ == "ValidationError" and callable(listed):
            parts = [f"{'.'.join(map(str, each['loc'])) or 'the settings'}: {each['msg']}" for each in listed()[:3]]
            return "; ".join(parts)
        text = " ".join(str(error).split())
    except Exception as failure:  # the error is of a class of the environment's
        text = f"(its text raises {type(failure).__name__})"
    frames, here = [], os.path.dirname(os.path.abspath(__file__))
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if os.path.isfile(file) and not file.startswith((here, sys.prefix, sys.base_prefix)):
            frames.append(f" ({file}, line {trace.tb_lineno})")
        trace = trace.tb_next
    return (type(error).__name__ + (text and f": {text}"))[:600] + (frames[-1] if frames else "")


def importable(name: str) -> str:
    """The name of a module; a file is made importable, here and in the interpreters that tools are started in."""
    if not name.endswith(".py"):
        return name
    folder, file = os.path.split(os.path.abspath(os.path.expanduser(name)))
    if not os.path.isfile(os.path.join(folder, file)):
        raise Refused(f"is not there: there is no file {os.path.join(folder, file)}")
    if folder not in sys.path:
        sys.path.append(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join((os.environ["PYTHONPATH"], folder))
    return file.removesuffix(".py")


def share_certificates() -> None:
    """Have the package's clients share one TLS context: each made its own, 60 ms of the 70 that an episode costs."""
    base = importlib.import_module("verifiers.v1.clients.base")
    context = base.httpx.create_ssl_context()

    def build(config: Any) -> Any:
        timeout = base.httpx.Timeout(**config.timeout.model_dump())
        return base.httpx.AsyncClient(timeout=timeout, limits=base.DEFAULT_LIMITS, verify=context)

    for module in (base, importlib.import_module("verifiers.v1.clients.eval")):
        vars(module)["build_async_httpx"] = build


def chat_module(vf: Any) -> types.ModuleType:
    """A harness that talks in this process. The package's own (`null`) starts an interpreter for each turn."""
    compaction = importlib.import_module("verifiers.v1.harnesses.utils.compaction")
    mcp = importlib.import_module("verifiers.v1.harnesses.utils.mcp")
    clients = importlib.import_module("verifiers.v1.clients.base")
    to_wire = importlib.import_module("verifiers.v1.dialects.chat").message_to_wire

    class ChatConfig(vf.HarnessConfig):
        id: str = CHAT

    class ChatHarness(vf.Harness[ChatConfig]):
        """Calls the model, and its MCP tools until an answer has no call."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        SUPPORTS_TOOL_INTERCEPTION = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False
        http: Any = None

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
            tool_interception_url: str | None = None,
        ) -> Any:
            if ChatHarness.http is None:
                ChatHarness.http = clients.build_async_httpx(vf.EvalClientConfig(base_url=endpoint, api_key_var=CHAT))
            system, prompt = self.resolve_prompt(data)
            given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(to_wire, prompt or [])
            messages = [*([{"role": "system", "content": system}] if system else []), *given]
            auth = {"Authorization": f"Bearer {secret}"}
            async with AsyncExitStack() as stack:
                servers = {n: {"url": url, "timeout": self.config.tool_timeout} for n, url in mcp_urls.items()}
                tools, dispatch, open_servers = await mcp.connect_mcp({"mcpServers": servers}, stack)
                off = self.config.disabled_tools or ()
                tools = [tool for tool in tools if tool["function"]["name"] not in off]
                while True:
                    body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                    reply = await self.asked(f"{endpoint}/chat/completions", body, auth)
                    if reply.status_code != 200:
                        over = trace.stop_condition is not None or "context_length_exceeded" in reply.text
                        return vf.ProgramResult(0 if over else 1, "", reply.text[:600])
                    message = reply.json()["choices"][0]["message"]
                    messages.append({key: value for key, value in message.items() if value is not None})
                    calls = message.get("tool_calls")
                    if not calls:
                        return vf.ProgramResult(0, "", "")
                    for call in calls:
                        answer = await self.called(call, dispatch, open_servers, tool_interception_url, auth)
                        if answer is None:
                            return vf.ProgramResult(0, "", "")
                        messages.append(compaction.bound_tool_message(answer))

        async def asked(self, url: str, body: Any, auth: dict[str, str]) -> Any:
            """The reply. A connection that breaks is made again; the mark tells that it is the same call."""
            for attempt in range(ATTEMPTS):
                again = {"x-stainless-retry-count": str(attempt)} if attempt else {}
                try:
                    return await self.http.post(url, json=body, headers={**auth, **again})
                except clients.httpx.TransportError:
                    if attempt + 1 == ATTEMPTS:
                        raise
                    await asyncio.sleep(0.1 * 2**attempt)

        async def called(
            self, call: Any, dispatch: Any, servers: Any, gate: str | None, auth: dict[str, str]
        ) -> dict[str, Any] | None:
            """The tool's message; None if the rollout was stopped."""
            name, given = call["function"]["name"], call["function"]["arguments"] or "{}"
            try:
                arguments = json.loads(given)
            except (ValueError, RecursionError) as error:
                arguments, content = given, f"error: invalid JSON in tool arguments ({error}); resend the call"
            else:
                content = "error: tool arguments must be a JSON object; resend the call"
            if gate is not None:
                asked = {"tool_call_id": call["id"], "name": name, "arguments": arguments}
                decision = (await self.http.post(gate, json=asked, headers=auth)).json()
                if decision["action"] == "stop":
                    return None
                if decision["action"] == "deny":
                    return dict(decision["message"])
            if isinstance(arguments, dict):
                known = name in dispatch
                content = (
                    await mcp.call_mcp(servers, dispatch, name, arguments) if known else f"error: no tool {name!r}"
                )
            return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}

    module = types.ModuleType(CHAT)
    vars(module).update(ChatHarness=ChatHarness, ChatConfig=ChatConfig, __all__=["ChatHarness"])
    return module


class Loaded:
    """An environment with its tasks, open until the end of the process."""

    def __init__(self, vf: Any, chat: Any, name: str, given: dict[str, Any], split: str, most: int | None) -> None:
        self.vf, self.name = vf, name
        env_id, taskset_id = (importable(part) for part in name.rpartition("+")[::2])
        if not isinstance(given.get("taskset", {}), dict):
            raise Refused("does not take these settings: taskset: Input should be a valid dictionary")
        for kind, values in (("taskset", given.get("taskset", {})), ("environment", {} if not env_id else given)):
            if "id" in values:
                raise Refused(f"names its {kind} twice: leave the id {str(values['id'])[:80]!r} out of its settings")
        given = {
            **given,
            "taskset": {**given.get("taskset", {}), "id": taskset_id},
            **({"id": env_id} if env_id else {}),
        }
        for kind, ident in (("environment", env_id), ("taskset", taskset_id)):
            self._find(kind, ident)
        try:
            cut = self._named_split(given["taskset"], taskset_id, split)
            self.config, self.agents = self._with_our_agents(chat, vf.resolve_env_config(given), taskset_id)
        except Refused:
            raise
        except ValueError as error:
            raise Refused(f"does not take these settings: {sentence(error)}") from error
        except (TypeError, ModuleNotFoundError) as error:  # a module without the one class that it must export
            raise Refused(f"could not be loaded: {sentence(error)}") from error
        self.env = vf.load_environment(self.config)
        self.infinite = bool(getattr(self.env.taskset, "INFINITE", False))
        most = most or (1000 if self.infinite else 10_000)
        tasks = list(itertools.islice(self.env.taskset, most))
        if not tasks:
            raise Refused("has no tasks")
        self.tasks = self._cut(tasks, cut)
        self.untrained: list[str] = []

    def _find(self, kind: str, ident: str) -> None:
        if not ident:
            if kind == "taskset":
                raise Refused("names no taskset; expected verifiers:ID")
            return
        try:
            getattr(self.vf, f"import_{kind}")(ident)
        except ModuleNotFoundError as error:
            wanted = ident.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
            if (
                error.name is not None
                and error.name.split(".")[-1] != wanted
                and not isinstance(error.__cause__, ModuleNotFoundError)
            ):
                raise
            missing = getattr(error.__cause__, "name", wanted)
            if missing is not None and missing.split(".")[-1] != wanted:
                raise Refused(f"could not be loaded: it needs the package {missing!r}, which is not there") from error
            raise Refused(
                f"is not there: there is no {kind} {ident!r}, which is a package {wanted!r} that exports it in __all__"
            ) from error

    def _named_split(self, taskset: dict[str, Any], taskset_id: str, split: str) -> str | None:
        """Ask for the taskset's own split of that name, where it has one. Returns the part to cut from the tasks.

        What is known are the values of a setting `split` or `dataset_split` that lists them.
        """
        fields = self.vf.taskset_config_type(taskset_id).model_fields
        for setting in ("split", "dataset_split"):
            if setting not in fields or setting in taskset:
                continue
            values = typing.get_args(fields[setting].annotation)
            names = {ours: next((each for each in theirs if each in values), None) for ours, theirs in SPLITS.items()}
            if names["train"] is None or names["test"] is None:
                continue
            ours = names[split]
            taskset[setting] = ours or names["train"]
            if ours is None:
                return "validation of train"
            return "train of train" if split == "train" and names["validation"] is None else None
        return split

    def _cut(self, tasks: list[Any], part: str | None) -> list[Any]:
        """The tasks of a split, by the hash of their content: equal tasks are never on two sides."""
        if part is None:
            return tasks
        hashes = [content(self.vf, task) for task in tasks]
        ordered = sorted(set(hashes))
        each = max(1, round(len(ordered) / PARTS))
        if len(ordered) < 3:
            return tasks  # too few to hold any out
        test = 0 if part.endswith("of train") else each
        parts = {"test": ordered[:test], "validation": ordered[test : test + each], "train": ordered[test + each :]}
        hashes_of_part = set(parts[part.partition(" ")[0]])
        return [task for task, task_hash in zip(tasks, hashes, strict=True) if task_hash in hashes_of_part]

    def _with_our_agents(self, chat: Any, config: Any, taskset_id: str) -> tuple[Any, list[str]]:
        """The settings with agents that are played here, and the names of these agents."""
        changed, names = {}, []
        for name, value in config:
            if not isinstance(value, self.vf.AgentConfig) or value.client is not None:
                continue
            if value.model is not None:
                raise Refused(
                    f"names the model {value.model!r} for its agent {name!r}, which is to be trained here; leave the "
                    "model out, or give the agent a client of its own too"
                )
            for bound in BOUNDS:
                if (most := getattr(value, bound, None)) is not None and most < 1:
                    raise Refused(f"gives its agent {name!r} {bound}={most}, with which it never speaks; at least 1")
            update: dict[str, Any] = {"model": name}
            harness = value.harness.id if value.harness is not None else self.vf.default_harness_id(taskset_id)
            if harness == "null" or (value.harness is None and harness == "bash"):
                options = {} if value.harness is None else value.harness.model_dump(exclude={"id"}, exclude_unset=True)
                update["harness"] = chat.ChatConfig(**options)
            named = "runtime" in value.model_fields_set
            if "harness" not in update and not named:
                seat = value.harness or self.vf.harness_config_type(harness)(id=harness)
                if self.vf.load_harness(seat).EXECUTES_CODE:
                    raise Refused(
                        f"runs what its agent {name!r} writes (harness {harness!r}); name the place, such as "
                        f'{{"{name}": {{"runtime": {{"type": "docker"}}}}}} in --env_kwargs'
                    )
            if not named:
                update["runtime"] = self.vf.SubprocessConfig()
            changed[name] = value.model_copy(update=update)
            names.append(name)
        if not names:
            raise Refused("has no agent that could be played here: it declares none, or each has a client of its own")
        return config.model_copy(update=changed), names

    async def open(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self.env.serving())

        def make(name: str, spec: Any) -> Any:
            return self.vf.make_agent(spec if spec.model else spec.model_copy(update={"model": name}))

        agents = self.vf.Agents(self.config, make)
        await self.env.setup(agents)
        self.untrained = [name for name in self.agents if not getattr(agents, name).trainable]

    async def play(self, place: int, base_url: str) -> dict[str, Any]:
        """One episode: its traces with their rewards and metrics, and why it failed, if it did."""
        client = self.vf.EvalClientConfig(base_url=base_url, api_key_var=CHAT)
        context = self.vf.ModelContext(model="", client=client)
        (slot,) = self.env.slots(self.tasks[place])
        episode = await self.env.run_slot(slot, context)
        traces = [told(trace) for trace in episode.traces[:MOST_TRACES] if trace.agent.name in self.agents]
        errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
        why = None
        if not self.env.complete(episode):
            why = f"{errors[0].type}: {' '.join(errors[0].message.split())}"[:600] if errors else "it gave no reason"
        return {"traces": traces, "failed": why}


def content(vf: Any, task: Any) -> str:
    """Hash of a task's content; its own key, where its class has one."""
    if type(task).key is not vf.Task.key:
        return hashlib.sha256(str(task.key).encode()).hexdigest()
    data = task.data.model_dump(mode="json", exclude={"idx", "name"}, exclude_none=True)
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def told(trace: Any) -> dict[str, Any]:
    """What the trainer learns of a trace. Without a recorded reward it has none, which is not 0."""
    rewards = {name: float(each.value) for name, each in trace.rewards.items() if each is not None}
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    numbers = dict(itertools.islice({**rewards, **metrics}.items(), MOST_NUMBERS))
    return {
        "id": trace.id,
        "agent": trace.agent.name,
        "reward": sum(rewards.values()) if rewards else None,
        "numbers": {str(name)[:100]: value for name, value in numbers.items()},
    }


class Server:
    """Answers requests."""

    def __init__(self, vf: Any, chat: Any, out: Any) -> None:
        self.vf, self.chat, self.out = vf, chat, out
        self.loaded: dict[int, Loaded] = {}
        self.playing: dict[int, asyncio.Task[None]] = {}
        self.stack = AsyncExitStack()
        self.ended = asyncio.Event()
        self.lock = threading.Lock()

    def tell(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        if len(line) > LARGEST:
            line = (
                json.dumps({"id": message.get("id"), "error": f"gave an answer of {len(line)} bytes"}).encode() + b"\n"
            )
        with self.lock:
            self.out.write(line)
            self.out.flush()

    async def answer(self, asked: dict[str, Any]) -> None:
        number = asked["id"]
        try:
            if asked["op"] == "load":
                await self.load(number, asked)
            else:
                ended = await self.loaded[asked["env"]].play(asked["task"], asked["base_url"])
                self.tell({"id": number, "ended": ended})
        except asyncio.CancelledError:
            self.tell({"id": number, "error": "was given up"})
        except Refused as error:
            self.tell({"id": number, "error": str(error)})
        except BaseException as error:  # SystemExit too: an environment does not end the process of the others
            self.tell({"id": number, "error": f"raised {sentence(error)}"})
        finally:
            self.playing.pop(number, None)

    async def load(self, number: int, asked: dict[str, Any]) -> None:
        env = Loaded(self.vf, self.chat, asked["name"], asked["config"], asked["split"], asked["most"])
        await env.open(self.stack)
        for first in range(0, len(env.tasks), TOGETHER):
            shown = [
                task.data.prompt_text[:SHOWN] or str(task.data.name or "") for task in env.tasks[first:][:TOGETHER]
            ]
            self.tell({"id": number, "tasks": shown})
        self.loaded[number] = env
        about = {"agents": env.agents, "untrained": env.untrained, "infinite": env.infinite}
        self.tell({"id": number, "loaded": about})

    def take(self, asked: dict[str, Any]) -> None:
        if asked["op"] == "give_up":
            if (task := self.playing.get(asked["of"])) is not None:
                task.cancel()
            return
        self.playing[asked["id"]] = asyncio.ensure_future(self.answer(asked))

    async def serve(self, lines: Any) -> None:
        loop = asyncio.get_running_loop()

        def read() -> None:
            for line in iter(lambda: lines.readline(LARGEST), b""):
                loop.call_soon_threadsafe(self.take, json.loads(line))
            loop.call_soon_threadsafe(self.ended.set)
            time.sleep(END_S)
            os._exit(1)  # an environment that blocks the loop does not outlive the trainer

        threading.Thread(target=read, daemon=True).start()
        await self.ended.wait()
        playing = list(self.playing.values())
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        await self.stack.aclose()


def main() -> int:
    out, lines = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    # Not our folder, in which the script lies, but the user's, where environments may lie that are not installed.
    here = sys.path[0] = os.getcwd()
    # The package starts interpreters of its own for tools.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))

    def tell(message: Mapping[str, Any]) -> None:
        out.write(json.dumps(message).encode() + b"\n")
        out.flush()

    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        tell({"missing": True})
        return 1
    tell({"version": version})
    try:
        vf = importlib.import_module("verifiers.v1")
        share_certificates()
        chat = chat_module(vf)
    except Exception as error:
        tell({"error": sentence(error)})
        return 1
    sys.modules[CHAT] = chat
    tell({"ready": True})

    async def serve() -> None:
        await Server(vf, chat, out).serve(lines)

    asyncio.run(serve())
    os._exit(0)  # threads of environments do not hold it


if __name__ == "__main__":
    sys.exit(main())
