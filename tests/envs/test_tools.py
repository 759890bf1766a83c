"""Tools: calculator, files, Python, search and real MCP servers; wrong calls; fuzzed texts; the workflow."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from helpers_models import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from mafrt.config.agent import AgentSpec
from mafrt.config.team import Team
from mafrt.core import deadline
from mafrt.core.errors import ConfigError, EnvError, MafrtError
from mafrt.environment.checker import check_env
from mafrt.environment.session import Session
from mafrt.environment.tool_calls import BadCall, ToolCall, find_calls
from mafrt.envs.math import MathEnv, Task
from mafrt.envs.search import SearchEnv
from mafrt.envs.search.generated import generated
from mafrt.envs.tools import Failed, Tool, Toolbox, base, make_toolbox, mcp_servers
from mafrt.envs.tools.calculator import calculator, compute
from mafrt.envs.tools.checker import Checker
from mafrt.envs.tools.files import inside
from mafrt.envs.tools.mcp_servers import McpServer, ServerSpec, read_servers
from mafrt.envs.workflows.task_env import TaskEnv
from mafrt.rollout.prompts import encode_prompt, messages_of
from mafrt.scripts import train_code

TASKS = [Task("t:0", "What is 3 + 4?", "7")]


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answers(toolbox, text: str) -> list[str]:
    return [called.answer for called in toolbox.run(text)]


# ------------------------------------------------------------------------------------------------ reading calls


def test_calls_in_tags_fences_and_bare_json_are_found():
    two = f"Let me see. {call('a', x=1)} and {call('b')}"
    assert find_calls(two) == [ToolCall("a", {"x": 1}), ToolCall("b", {})]
    assert find_calls('<|python_tag|>{"name": "a", "parameters": {"x": 1}}') == [ToolCall("a", {"x": 1})]
    assert find_calls('[TOOL_CALLS][{"name": "a", "arguments": {}}]') == [ToolCall("a", {})]
    assert find_calls(f"<think>{call('a')}</think> no call") == []
    assert find_calls('{"name": "Ada", "age": 36}') == [] and find_calls("[1, 2]") == []
    assert find_calls("```python\n1\n```") == [ToolCall("python", {"code": "1\n"})]
    assert find_calls("```python\n1\n```", fences=False) == []
    assert isinstance(find_calls("<tool_call>{")[0], BadCall)
    assert find_calls('{"name": "a", "arguments": "{\\"x\\": 2}"}') == [ToolCall("a", {"x": 2})]


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", "```python\n", "```\n", "```", '{"name": "calculator",',
     '"arguments": {"expression": "1+1"}}', "{" * 200, "[" * 5000, "<|im_end|>", "<|im_start|>assistant", "\\boxed{7}",
     "工具调用", "الأداة", "\u202e", "\x00", "\ud800", "<search>", "</search>", "<verify>yes</verify>", "<answer>",
     "Verdict: approve", '{"name": 5}', '{"name": "write_file", "arguments": {"path": "../x", "content": 1}}', "\n"]
)  # fmt: skip
FUZZED = st.lists(PIECES | st.text(max_size=20), max_size=12).map("".join)
ENVS: dict[str, TaskEnv] = {
    name: MathEnv(tasks=TASKS, team=Team(tuple(AgentSpec(n, with_answer=n in answering) for n in "abc")), workflow=name)
    for name, answering in (("chain", "c"), ("vote", "abc"), ("debate", "abc"), ("summary", "abc"))
}
ENVS["tools"] = MathEnv(
    tasks=TASKS, team=Team.of(("a", "b")), workflow="tools", tools=("calculator", "files"), tool_turns=2
)
ENVS["search"] = SearchEnv(questions=generated("test").questions[:3])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(ENVS)), texts=st.lists(FUZZED, min_size=12, max_size=12))
def test_no_text_crashes_a_workflow_or_a_tool(name, texts):
    session = Session(ENVS[name].spawn())
    observations, _ = session.reset(seed=1)
    for step in range(100):
        result = session.step({agent: texts[step % len(texts)] for agent in observations})
        if result.terminated or result.truncated:
            break
        observations = result.observations
    assert 0.0 <= result.info.get("outcome", 0.0) <= 1.0


# ------------------------------------------------------------------------------------------------ single tools


def test_the_calculator_computes_and_evaluates_nothing():
    assert compute("(3 + 4) * 2 ^ 3") == 56 and compute("max(sqrt(16), 2 * pi) // 1") == 6.0
    for expression, words in (
        ("__import__('os').system('true')", "only numbers"),
        ("().__class__", "only numbers"),
        ("open('x')", "there is no function 'open'"),
        ("9 ** 9 ** 9", "too large"),
        ("2 ** 4000 * 2 ** 4000", "too large"),
        ("1 / 0", "has no value"),
        ("(" * 300, "cannot be computed"),
        ("1 if 2 else 3", "only numbers"),
        ("1e308 * 10", "no finite value"),
        ("'a' * 9", "only numbers"),
        ("(-8) ^ 0.5", "cannot be computed"),
    ):
        with pytest.raises(Failed, match=words):
            compute(expression)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "~/x", "", ".", "a\\b", "a\x00b", "x" * 201])
def test_no_path_leads_out_of_the_workspace(path):
    with pytest.raises(Failed, match="no path within the workspace"):
        inside(path)


NO_NAMES = ("a\nb", "a\rb", "\ta", "a\x1b[2Jb", "a\x7fb", "a\x85b", "é" * 128, "\U0001f642" * 64, "a/" * 17, "\ud800")


@pytest.mark.parametrize("path", NO_NAMES)
def test_a_file_whose_name_no_program_could_see_is_not_written(path):
    with pytest.raises(Failed, match="no path within the workspace"):
        inside(path)
    toolbox = make_toolbox(["files"])
    assert toolbox.answer(ToolCall("write_file", {"path": path, "content": "x"})).startswith("Error: ")
    assert toolbox.files == {}


@pytest.mark.parametrize("paths", [("a", "a/b"), ("a/b", "a"), ("a/b/c", "./a/b"), ("a", "a/b/c/d")])
def test_no_file_takes_the_place_of_a_folder(paths):
    toolbox = make_toolbox(["files"])
    said = [toolbox.answer(ToolCall("write_file", {"path": path, "content": "x"})) for path in paths]
    assert "is both a file and a folder" in said[1] and said[1].startswith("Error: ")
    assert list(toolbox.files) == [paths[0]]


@pytest.mark.slow
def test_files_last_one_episode_and_links_are_left_out(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("alpha")
    (tmp_path / "out").symlink_to("/etc/passwd")
    toolbox = make_toolbox([f"files:{tmp_path}"])
    assert answers(toolbox, call("list_files")) == ["sub/a.txt (5 bytes)"]
    assert answers(toolbox, call("write_file", path="./b.txt", content="beta")) == ["4 bytes written to b.txt."]
    fork = toolbox.copy()
    fork.run(call("write_file", path="c.txt", content="x"))
    assert answers(toolbox, call("read_file", path="b.txt")) == ["beta"] and set(fork.files) - set(toolbox.files)
    assert answers(toolbox.fresh(), call("read_file", path="b.txt"))[0].startswith("Error: there is no file")
    assert not (tmp_path / "b.txt").exists()
    big = answers(toolbox, call("write_file", path="d", content="x" * (17 * 2**20)))
    assert big == ["Error: the workspace holds at most 16 MiB."]
    with pytest.raises(ConfigError, match="no such folder"):
        make_toolbox(["files:nowhere"])


@pytest.mark.slow
def test_python_runs_in_the_sandbox_with_the_files():
    toolbox = make_toolbox(["python", "files"], sandbox="degraded")
    toolbox.run(call("write_file", path="a.txt", content="41"))
    [failed] = answers(toolbox, "```python\nopen('c.txt', 'w').write('y')\n1 / 0\n```")
    assert failed.startswith("Error: ") and "ZeroDivisionError" in failed and toolbox.files["c.txt"] == b"y"
    said = answers(toolbox, "```python\nopen('b.txt', 'w').write('x')\nprint(int(open('a.txt').read()) + 1)\n```")
    assert said == ["42"] and toolbox.files["b.txt"] == b"x"


def test_search_as_a_tool(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"title": "Paris", "text": "The Seine crosses it."}\n{"text": "Rome lies on the Tiber."}')
    toolbox = make_toolbox([f"search:{path}"])
    assert answers(toolbox, call("search", query="Seine", topk=1)) == ["(Paris) The Seine crosses it."]
    assert answers(toolbox, call("search", query="xyzzy")) == ["Nothing was found."]
    assert answers(toolbox, call("search", query="x", topk=99))[0].startswith("Error: the arguments of search do not")
    with pytest.raises(ConfigError, match="cannot be reached"):
        make_toolbox(["search:http://127.0.0.1:9/retrieve"])


def test_wrong_calls_are_sentences_for_the_agent():
    toolbox = make_toolbox(["calculator"])
    for text, words in (
        (call("calculater", expression="1"), "did you mean 'calculator'"),
        (call("calculator"), "'expression' is a required property"),
        (call("calculator", expression=5), "do not fit at expression: 5 is not of type 'string'"),
        (call("calculator", expression="1", more=2), "'more' was unexpected"),
        ("<tool_call>{'name'}</tool_call>", "not JSON"),
        ("<tool_call>[]</tool_call>", "found something else"),
    ):
        [said] = answers(toolbox, text)
        assert said.startswith("Error: ") and words in said
    many = answers(toolbox, call("calculator", expression="1") * 10)
    assert many[:8] == ["1"] * 8 and many[8].startswith("Error: at most 8 calls")
    for names, words in (
        ([], "tools is empty"),
        (["calculater"], "did you mean 'calculator'"),
        (["python:x"], "takes nothing behind a colon"),
        (["mcp"], "expected mcp:FILE"),
        (["calculator", "calculator"], "two tools are called"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_toolbox(names)


# ------------------------------------------------------------------------------------------------ the workflow


def test_an_agent_calls_reads_the_answer_and_goes_on():
    env = MathEnv(tasks=TASKS, team=Team.of(("a",)), workflow="tools", tools=["calculator"], tool_turns=2)
    check_env(env)
    session = Session(env)
    [seen] = session.reset(seed=0)[0].values()
    assert [message["role"] for message in seen] == ["tools", "user"]
    assert json.loads(seen[0]["content"])[0]["function"]["name"] == "calculator"
    result = session.step({"a": call("calculator", expression="3 + 4")})
    chat = result.observations["a"]
    assert [m["role"] for m in chat] == ["tools", "user", "assistant", "tool"] and chat[-1]["content"] == "7"
    assert result.info["evidence"]["a"].facts == {"calls": 1, "failed": 0}
    result = session.step({"a": call("calculate")})
    assert result.info["evidence"]["a"].rules.score == 1.0
    result = session.step({"a": call("calculator", expression="1") + "\\boxed{7}"})  # its last turn: nothing is called
    assert result.terminated and result.info["outcome"] == 1.0
    assert result.info["measures"] == {"tool_turns": 2.0, "tool_errors": 0.5}
    with pytest.raises(ConfigError, match="no setting tools"):
        MathEnv(tasks=TASKS, team=Team.of(("a",)), workflow="single", tools=["calculator"])


def test_agents_have_tools_of_their_own(tmp_path):
    (tmp_path / "team.json").write_text(
        json.dumps(
            [
                {"role": "scribe", "tools": ["files"]},
                {"role": "reckoner"},
                {"role": "writer", "tools": [], "with_answer": True},
            ]
        )
    )
    team = Team.load(tmp_path / "team.json")
    assert [agent.tools for agent in team.agents] == [("files",), None, ()]
    (tmp_path / "again.json").write_text(team.to_json())
    assert Team.load(tmp_path / "again.json") == team
    env = MathEnv(tasks=TASKS, team=team, workflow="tools", tools=["calculator", "files"])
    check_env(env)
    session = Session(env)
    seen = session.reset(seed=0)[0]["scribe"]
    names = {schema["function"]["name"] for schema in json.loads(seen[0]["content"])}
    assert names == {"list_files", "read_file", "write_file"}
    said = session.step({"scribe": call("calculator", expression="3 + 4")}).observations["scribe"][-1]["content"]
    assert said.startswith("Error: ") and "no tool 'calculator'" in said  # the reckoner's, not its own
    session.step({"scribe": call("write_file", path="a.txt", content="7")})
    seen = session.step({"scribe": "It is in a.txt."}).observations["reckoner"]
    assert '"calculator"' in seen[0]["content"]
    assert session.step({"reckoner": call("read_file", path="a.txt")}).observations["reckoner"][-1]["content"] == "7"
    seen = session.step({"reckoner": "7"}).observations["writer"]
    assert isinstance(seen, str) and "scribe: It is in a.txt." in seen
    result = session.step({"writer": call("calculator", expression="1") + " \\boxed{7}"})  # nothing is called
    assert result.terminated and result.info["outcome"] == 1.0 and result.info["measures"]["tool_turns"] == 3.0


def test_tools_of_an_agent_that_do_not_fit_are_refused_in_one_sentence():
    def built(workflow: str, *tools: tuple[str, ...] | None) -> None:
        agents = (AgentSpec(name, tools=own, with_answer=True) for name, own in zip("ab", tools, strict=False))
        MathEnv(tasks=TASKS, team=Team(tuple(agents)), workflow=workflow)

    for workflow, tools, words in (
        ("tools", (None, ("calculater",)), "agent 'b': tools: .*did you mean 'calculator'"),
        ("tools", (("files", "files"), None), "agent 'a': tools: two tools are called"),
        ("tools", ((), ()), "no agent of the team has tools"),
        ("chain", (None, ("calculator",)), "agent 'b' has tools of its own, which workflow 'chain' does not use"),
        ("tools", ((5,), None), "agent 'a': tools must be a list of texts"),
    ):
        with pytest.raises(ConfigError, match=words):
            built(workflow, *tools)  # type: ignore[arg-type]


def test_environments_without_workflows_refuse_tools_of_agents(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "team.json").write_text('[{"role": "coder", "with_answer": true, "tools": ["calculator"]}]')
    assert train_code.main(["--profile_path", "team.json", "--run_dir", "run", "--sandbox", "degraded"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]  # after the warning about the sandbox
    assert "Agent 'coder' of the team file has the key 'tools', which CodeEnv does not use" in said
    assert said.startswith("error: ") and not (tmp_path / "run").exists()


def test_a_fork_has_files_of_its_own():
    env = MathEnv(tasks=TASKS, team=Team.of(("a",)), workflow="tools", tools=["files"])
    session = Session(env)
    session.reset(seed=0)
    twin = session.fork()
    twin.step({"a": call("write_file", path="x", content="1")})
    assert isinstance(env, TaskEnv) and env.tool.files == {} and twin.unwrapped.tool.files == {"x": b"1"}


def test_the_chat_template_gets_the_schemas_in_its_own_format():
    tokenizer = tiny_tokenizer()
    schema = make_toolbox(["calculator"]).schemas()
    seen = [{"role": "tools", "content": json.dumps(schema)}, {"role": "user", "content": "hi"}]
    assert [m["role"] for m in messages_of("be brief", seen)] == ["tools", "system", "user"]
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    text = tokenizer.decode(encode_prompt(tokenizer, "", seen))
    assert "[calculator]" in text and "You may call" not in text
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    text = tokenizer.decode(encode_prompt(tokenizer, "be brief", seen))
    assert "You may call these tools" in text and '"calculator"' in text and "tools:" not in text


# ------------------------------------------------------------------------------------------------ MCP servers


def servers(tmp_path, **entries) -> str:
    path = tmp_path / "servers.json"
    path.write_text(json.dumps({"mcpServers": entries}))
    return f"mcp:{path}"


STDIO = {"command": sys.executable, "args": ["-m", "mcp_server_time", "--local-timezone", "UTC"]}
CONVERT = call("convert_time", source_timezone="UTC", time="12:00", target_timezone="Asia/Kathmandu")


@pytest.mark.slow
def test_a_server_from_pypi_over_stdio(tmp_path):
    env = MathEnv(tasks=TASKS, team=Team.of(("a",)), workflow="tools", tools=[servers(tmp_path, time=STDIO)])
    assert {tool.name for tool in env.tool.boxes["a"].tools} == {"get_current_time", "convert_time"}
    session = Session(env)
    session.reset(seed=0)
    said = session.step({"a": CONVERT}).observations["a"][-1]["content"]
    assert "17:45" in said and "+5.75h" in said
    [wrong] = answers(
        env.tool.boxes["a"], call("convert_time", source_timezone="UTC", time="25:00", target_timezone="UTC")
    )
    assert wrong.startswith("Error: ") and "time" in wrong
    [unknown] = answers(env.tool.boxes["a"], call("get_current_time", timezone="Mars/Olympus"))
    assert unknown.startswith("Error: ")


@pytest.mark.slow
def test_a_server_from_pypi_over_http(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = f"from mcp_server_time.server import create_server as c\nc('UTC').run('streamable-http', port={port})"
    server = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    try:
        for _ in range(900):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        entry = {"url": f"http://127.0.0.1:{port}/mcp", "timeout_s": 60}
        toolbox = make_toolbox([servers(tmp_path, time=entry)])
        [said] = answers(toolbox, CONVERT)
        assert "17:45" in said
    finally:
        server.kill()
        server.wait()
    for _ in range(2):
        [said] = answers(toolbox, CONVERT)
        assert said.startswith("Error: the server time")


def test_a_connection_whose_loop_ended_by_itself_is_made_again(tmp_path):
    server = McpServer(ServerSpec("time", "python3", ("-c", "pass"), {}, None, 5.0))
    gone = asyncio.new_event_loop()
    gone.close()
    server._loop, server._client, server._ended, server._process = gone, object(), asyncio.Event(), os.getpid()
    server.close()
    server._loop, server._client, server._process = gone, object(), os.getpid()
    with pytest.raises(Failed, match="the server time"):
        server.call("anything", {})


ENDLESS = """
import json, os, sys, resource
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    if asked["method"] == "initialize":
        info = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                "serverInfo": {"name": "s", "version": "1"}}
    elif asked["method"] == "tools/list":
        info = {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in ("long", "endless")]}
    elif asked["method"] == "tools/call" and asked["params"]["name"] == "long":
        info = {"content": [{"type": "text", "text": "x" * 2_000_000}]}
    elif asked["method"] == "tools/call":
        while True:
            os.write(1, b"x" * 65536)
    else:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": {"code": -32601, "message": "no"}}), flush=True)
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": info}), flush=True)
"""


def test_a_line_without_end_is_not_kept_in_memory(tmp_path):
    entry = {"command": sys.executable, "args": ["-c", ENDLESS], "timeout_s": 60}
    toolbox = make_toolbox([servers(tmp_path, s=entry)])
    [said] = answers(toolbox, call("long"))
    assert said.startswith("xxxx")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    [said] = answers(toolbox, call("endless"))
    assert said.startswith("Error: the server s failed") and "losed" in said
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB
    # It is connected again.
    [said] = answers(toolbox, call("long"))
    assert said.startswith("xxxx")


class OverHttp(BaseHTTPRequestHandler):
    """An MCP server whose tool's name says how it answers."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answered(b"", 405)

    do_DELETE = do_GET

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "id" not in asked:
            self.answered(b"", 202)
        elif asked["method"] == "tools/call" and (name := asked["params"]["name"]) != "good":
            self.lie(name)
        else:
            known = {
                "initialize": {"capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}},
                "tools/list": {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in HTTP_LIES]},
                "tools/call": {"content": [{"type": "text", "text": "good"}]},
            }.get(asked["method"])
            if asked["method"] == "initialize":
                known["protocolVersion"] = asked["params"]["protocolVersion"]
            said = {"error": {"code": -32601, "message": "no"}} if known is None else {"result": known}
            self.answered(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **said}).encode())

    def answered(self, body, status=200, kind="application/json", **headers):
        self.send_response(status)
        for name, value in {"content-type": kind, "content-length": len(body), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def lie(self, name):
        if name == "gzip":
            return self.answered(gzip.compress(b"x" * 50_000_000, 1), **{"content-encoding": "gzip"})
        if name == "page":
            return self.answered(b"<html>", kind="text/html")
        if name == "elsewhere":
            return self.answered(b"", 307, location="http://127.0.0.1:1/x")
        self.send_response(500 if name == "failing" else 200)
        self.send_header("content-type", "text/event-stream" if name == "events" else "application/json")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        with suppress(OSError):
            for _ in range(20_000):
                self.wfile.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        self.close_connection = True


HTTP_LIES = {"good": "good", "endless": "more than 4 MiB", "failing": "error response", "gzip": "compressed",
             "events": "exceeded", "page": "content type", "elsewhere": "not followed"}  # fmt: skip


def test_bodies_over_http_are_bounded(tmp_path, caplog):
    with ThreadingHTTPServer(("127.0.0.1", 0), OverHttp) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        entry = {"url": f"http://127.0.0.1:{server.server_address[1]}/mcp", "timeout_s": 60}
        toolbox = make_toolbox([servers(tmp_path, s=entry)])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for name, words in HTTP_LIES.items():
            [said] = answers(toolbox, call(name))
            assert words in said and (name == "good" or said.startswith("Error: the server s ")), said
            assert answers(toolbox, call("good")) == ["good"]
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB
        server.shutdown()
    assert "Traceback" not in caplog.text


PAGED = """
import json, sys
mode = sys.argv[1]
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    cursor = int((asked.get("params") or {}).get("cursor") or 0)
    said = {"content": [{"type": "resource", "resource": {"uri": "x:y", "text": "inside"}}]}
    if asked["method"] == "initialize":
        said = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}}}
        said["serverInfo"] = {"name": "s", "version": "1"}
    elif asked["method"] == "tools/list":
        said = {"tools": [{"name": f"t{cursor}", "inputSchema": {"type": "object"}}]}
        if mode == "without end" or mode == "pages" and cursor < 4:
            said["nextCursor"] = str(cursor + 1)
        elif mode == "no more":
            said = {"tools": [], "nextCursor": "1"}
        elif mode == "none":
            said = {"tools": []}
        elif mode == "the same":
            said["nextCursor"] = "7"
    elif mode == "no JSON":
        print("{", flush=True)
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": said}), flush=True)
"""


def paged(tmp_path, mode):
    (tmp_path / "paged.py").write_text(PAGED)
    entry = {"command": sys.executable, "args": [str(tmp_path / "paged.py"), mode], "timeout_s": 60}
    return make_toolbox([servers(tmp_path, s=entry)])


def test_tools_on_later_pages_are_taken_and_pages_without_end_refused(tmp_path):
    toolbox = paged(tmp_path, "pages")
    assert [tool.name for tool in toolbox.tools] == [f"t{page}" for page in range(5)]
    assert answers(toolbox, call("t4")) == ["inside"]
    assert [tool.name for tool in paged(tmp_path, "the same").tools] == ["t0", "t7"]
    for mode, words in (("without end", "at most 128"), ("none", "offers no tools"), ("no more", "offers no tools")):
        with pytest.raises(ConfigError, match=words):
            paged(tmp_path, mode)


def test_lines_of_a_server_that_are_no_json_are_not_shown(tmp_path, capfd, caplog):
    logging.getLogger("mcp.client").setLevel(logging.NOTSET)
    assert answers(paged(tmp_path, "no JSON"), call("t0")) == ["inside"]
    assert "Traceback" not in caplog.text + capfd.readouterr().err


def doubled(levels):
    defs = {"0": {"type": "integer"}}
    return defs | {str(n): {"anyOf": [{"$ref": f"#/$defs/{n - 1}"}] * 2} for n in range(1, levels)}


STRUCTURED = """
import json, sys
schemas = json.loads(sys.argv[1])
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    said = {"content": [{"type": "text", "text": "fine"}], "structuredContent": {"a": "a" * 40 + "!"}}
    if asked["method"] == "initialize":
        said = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}}}
        said["serverInfo"] = {"name": "s", "version": "1"}
    elif asked["method"] == "tools/list":
        own = [{"type": "object", **schema} for schema in schemas]
        said = {"tools": [{"name": f"t{n}", "inputSchema": {"type": "object"}, "outputSchema": schema}
                          for n, schema in enumerate(own)]}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": said}), flush=True)
"""
ENDLESS_SCHEMAS = [
    {"properties": {"a": {"pattern": "^(a+)+$"}}},
    {"patternProperties": {"^(a|a)*$": {"pattern": "^(a|aa)+$"}}},
    {"$defs": doubled(27), "properties": {"a": {"$ref": "#/$defs/26"}}},
    {"allOf": [{"$ref": "#"}]},
    {"$ref": "http://127.0.0.1:9/x"},
    {"properties": {"a": {"type": 5}}},
    {"required": ["b"]},
]


@pytest.mark.slow
@pytest.mark.ci
def test_no_schema_of_answers_holds_this_process_up(tmp_path):
    (tmp_path / "structured.py").write_text(STRUCTURED)
    arguments = [str(tmp_path / "structured.py"), json.dumps(ENDLESS_SCHEMAS)]
    run = f"""
from mafrt.envs.tools import make_toolbox
from mafrt.environment.tool_calls import ToolCall
toolbox = make_toolbox([{servers(tmp_path, s={"command": sys.executable, "args": arguments, "timeout_s": 60})!r}])
print(*(toolbox.answer(ToolCall(tool.name, {{}})) for tool in toolbox.tools))
"""
    # In a process of its own, which a pattern that takes for ever would leave deaf to all but SIGKILL.
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.split() == ["fine"] * len(ENDLESS_SCHEMAS), done.stderr


def test_servers_that_hang_lie_or_are_not_there(tmp_path):
    hangs = {"command": sys.executable, "args": ["-c", "import time; time.sleep(60)"], "timeout_s": 1}
    lies = {"command": sys.executable, "args": ["-c", "print('hello', flush=True)"], "timeout_s": 30}
    started = time.monotonic()
    for entry, words in (
        (hangs, "did not answer within 1 s"),
        (lies, "cannot be reached"),
        ({"command": os.path.join(tmp_path, "nothing")}, "cannot be reached"),
        ({"url": "http://127.0.0.1:9/mcp", "timeout_s": 30}, "cannot be reached"),
        ({"command": "x", "url": "y"}, "either 'command' or 'url'"),
        ({"command": "x", "argz": []}, "did you mean 'args'"),
        ({"command": "x", "args": "y"}, "args as a list"),
        ({"command": "x", "timeout_s": 1e400}, "up to 3600"),
        ({"command": "x", "timeout_s": True}, "up to 3600"),
        ({"command": "x", "timeout_s": 0}, "up to 3600"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_toolbox([servers(tmp_path, s=entry)])
    assert time.monotonic() - started < 120
    for name in ("a\nb", "", "x" * 129):
        with pytest.raises(ConfigError, match="plain characters"):
            make_toolbox([servers(tmp_path, **{name: {"command": "x"}})])
    (tmp_path / "servers.json").write_text("{}")
    with pytest.raises(MafrtError, match=r"expected .*mcpServers"):
        read_servers(str(tmp_path / "servers.json"))


@pytest.mark.parametrize(
    "expression",
    ["round(1, -10**9)", "round(10**400, -10**9)", "round(1, -10**400)", "round(1.5, 10**9)", "9**9**9", "2**-10**9",
     "1/0", "min()", "round()", "round(1, 2, 3)", "round(1, 1.5)", "log(-1)", "sqrt(-1)", "floor(1e999)", "10**400 % 7",
     "gcd(1.5)", "(" * 250 + "1" + ")" * 249, "-" * 499 + "1", "1" * 499, "exp(1000)"],
)  # fmt: skip
def test_no_expression_keeps_the_calculator(expression):
    [said] = answers(make_toolbox(["calculator"]), call("calculator", expression=expression))
    assert said
    assert computed(expression) is not None


def computed(expression):
    try:
        return str(compute(expression))
    except Failed as failure:
        return str(failure)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"pattern": "^(a+)+$"}}},
        {"properties": {"a": {"pattern": "^(.*a){25}$"}}},
        {"patternProperties": {"^(a+)+$": {"type": "string"}}},
        {"$defs": doubled(27), "properties": {"a": {"$ref": "#/$defs/26"}}},
        {"properties": {"a": {"$ref": "#"}}, "allOf": [{"$ref": "#"}]},
        {"properties": {"a": {"$ref": "#/nothing"}}},
        {"properties": {"a": {"pattern": "("}}},
        {"properties": {"a": {"multipleOf": 1e-400}}},
    ],
)
def test_a_schema_that_takes_for_ever_is_a_sentence_for_the_agent(schema):
    tool = Tool("slow", "It says yes.", schema, lambda arguments, toolbox: "yes")
    try:
        toolbox = Toolbox([tool, calculator()])
    except ConfigError as error:
        assert "slow" in str(error)
        return
    [said] = answers(toolbox, call("slow", a="a" * 40 + "!", **{"a" * 40 + "!": 1}))
    assert said == "yes" or said.startswith("Error: ")
    assert answers(toolbox, call("calculator", expression="1 + 1")) == ["2"]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"not": {"$ref": "#"}},
        {"if": {"$ref": "#"}, "then": {}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$dynamicRef": "#x", "$dynamicAnchor": "x", "type": "object"},
        {"type": "object", "unevaluatedProperties": False, "allOf": [{"$ref": "#"}]},
    ],
)
def test_a_schema_that_no_arguments_fit_is_refused_at_the_start(schema):
    """Every call of such a tool was answered with an error."""
    with pytest.raises(ConfigError, match="refers to itself without end"):
        Toolbox([Tool("f", "d", schema, lambda arguments, box: "ran")])


@pytest.mark.parametrize(
    "reference", ["http://127.0.0.1:PORT/x", "file:///etc/hostname", "x.json", "//127.0.0.1:PORT/x", "/etc/hostname#/a"]
)
@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef", "$recursiveRef"])
def test_no_schema_has_an_address_fetched_or_a_file_read(reference, keyword):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        reference = reference.replace("PORT", str(server.getsockname()[1]))
        for schema in (
            {keyword: reference},
            {"properties": {"a": {"items": [{keyword: reference}]}}},
            {"$schema": "http://json-schema.org/draft-07/schema#", "not": {keyword: reference}},
        ):
            with pytest.raises(ConfigError, match="another document"):
                Toolbox([Tool("t", "", schema, lambda arguments, toolbox: "yes")])
        # A base that is an address makes no reference within the schema a foreign one.
        inner = {"$id": f"http://127.0.0.1:{server.getsockname()[1]}/", "properties": {"a": {"$ref": "#/$defs/b"}}}
        toolbox = Toolbox([Tool("t", "", inner, lambda arguments, toolbox: "yes")])
        assert answers(toolbox, call("t", a=1))[0].startswith(("Error: ", "yes"))
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize(
    ("name", "description", "schema", "words"),
    [
        ("a\nb", "", {}, "called"),
        ("", "", {}, "called"),
        ("a" * 129, "", {}, "called"),
        ("a\u202eb", "", {}, "called"),
        ("a", "x" * 5 * 2**20, {}, "description"),
        ("a", "", {"description": "x" * 5 * 2**20}, "characters"),
        ("a", "", {"enum": [float("inf")], "type": 7}, "schema"),
        ("a", "", {"type": "nothing"}, "schema"),
    ],
)
def test_tools_that_no_prompt_can_hold_are_refused(name, description, schema, words):
    with pytest.raises(ConfigError, match=words):
        Toolbox([Tool(name, description, schema, lambda arguments, toolbox: "")])


def test_a_server_with_thousands_of_tools_is_refused(tmp_path, monkeypatch):
    offered = [SimpleNamespace(name=f"t{n}", description="", input_schema={}) for n in range(5000)]
    monkeypatch.setattr(mcp_servers.McpServer, "tools", lambda self: offered)
    with pytest.raises(ConfigError, match="5000"):
        mcp_servers.server_tools(servers(tmp_path, s={"command": "x"}).removeprefix("mcp:"))


def test_a_long_line_with_a_fence_is_read_at_once():
    assert find_calls("```" + "a" * 200_000 + "`") == []
    assert find_calls(("`" * 5000 + " \t" * 5000 + "x`\n") * 5) == []


@pytest.mark.slow
def test_the_checking_process_is_started_again():
    checker = Checker()
    assert checker.compute("1 + 1") == 2
    checker.worker.process.kill()
    assert checker.compute("1 + 2") == 3
    checker.close()


def test_a_tool_of_the_users_that_hangs_is_a_sentence_and_changes_nothing_later(monkeypatch):
    monkeypatch.setattr(base, "TOOL_S", 0.2)
    released, done = threading.Event(), threading.Event()

    def hangs(arguments, toolbox):
        released.wait(20)
        toolbox.files = {"late": b"x"}
        done.set()
        return "late"

    def quick(arguments, toolbox):
        toolbox.files = {**toolbox.files, "now": b"y"}
        return "done"

    def raises(arguments, toolbox):
        raise Failed("no luck.")

    tools = [Tool(f.__name__, "d", {"type": "object"}, f) for f in (hangs, quick, raises)]
    box = Toolbox(tools)
    assert "the tool hangs did not answer within 0.2 s" in box.answer(ToolCall("hangs", {}))
    assert box.answer(ToolCall("quick", {})) == "done" and box.answer(ToolCall("raises", {})) == "Error: no luck."
    released.set()
    assert done.wait(20) and box.files == {"now": b"y"}


def test_code_that_hangs_again_and_again_is_not_called_any_more(monkeypatch):
    monkeypatch.setattr(deadline, "_hanging", [])
    released = threading.Event()
    try:
        for _ in range(deadline.MOST_LEFT):
            with pytest.raises(deadline.LateError):
                deadline.call_within(0.01, "the retriever", released.wait, 20)
        with pytest.raises(EnvError, match="still hang"):
            deadline.call_within(0.01, "the retriever", released.wait, 20)
    finally:
        released.set()


def test_a_retriever_of_the_users_that_hangs_loses_the_episode():
    released = threading.Event()

    class Hangs:
        def search(self, query, topk):
            released.wait(20)
            return []

    env = SearchEnv(split="test", retriever=Hangs(), retriever_timeout_s=0.2)
    with pytest.raises(EnvError, match=r"Hangs did not answer within 0\.2 s"):
        env.tool.run("who")
    released.set()


def test_a_server_that_never_answers_leaves_no_thread_behind():
    before = set(threading.enumerate())  # of servers that other tests are still connected to
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/mcp"
        with pytest.raises(Failed, match="did not answer within"):
            McpServer(ServerSpec("silent", url=url, timeout_s=0.3)).tools()
        for thread in set(threading.enumerate()) - before:
            if thread.name == "mafrt-mcp":
                thread.join(10)
                assert not thread.is_alive()
