"""Agents that already exist: the user's program against the chat API, its failures, and training through it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import toy
from helpers_models import add_random_adapter, tiny_base
from helpers_warm import start_python

from mafrt.config.algorithm import make_algorithm
from mafrt.config.team import AgentSpec, Team
from mafrt.config.train_config import LearnConfig
from mafrt.core.errors import ConfigError, EnvError
from mafrt.core.types import Sampled, SamplingParams
from mafrt.engines.local.engine import LocalEngine
from mafrt.environment.chat_api.completions import parse_call
from mafrt.environment.chat_api.protocol import ApiError, ChatCall
from mafrt.environment.registry import make_env
from mafrt.envs.program.env import read_tasks
from mafrt.envs.program.episode import ProgramEpisode
from mafrt.envs.program.runner import command_runner, kill
from mafrt.rollout.player import Player, Start
from mafrt.rollout.prompts import encode_prompt
from mafrt.runners.identity import Provenance
from mafrt.runners.on_policy import OnPolicy
from mafrt.scripts import train
from mafrt.storage.load_path import resolve
from mafrt.training.learner import Learner
from mafrt.training.policy_objective import Objective

pytestmark = pytest.mark.takes(slow=15)

PROGRAMS = Path(__file__).parents[1] / "programs.py"


def line_of(words: str) -> int:
    return next(n for n, line in enumerate(PROGRAMS.read_text().splitlines(), 1) if words in line)


def program(name: str, **more):
    return make_env("program", program=f"{PROGRAMS}:{name}", **more)


def played(name: str, answer: str = "answer", **more):
    """All observations and the last result of one episode in which every agent gives the same answer."""
    env = program(name, **more)
    seen, _ = env.reset(seed=1)
    shown = [seen]
    while True:
        result = env.step(dict.fromkeys(seen, answer))
        if result.terminated or result.truncated:
            return shown, result
        seen = result.observations
        shown.append(seen)


# ---------------------------------------------------------------------------------------------------------- what works


def test_calls_are_observations_and_answers_completions():
    shown, result = played("two_calls", answer="1a")
    assert [list(seen) for seen in shown] == [["first"], ["second"]]
    assert shown[1]["second"] == [{"role": "user", "content": "go on 1a"}]
    assert result.info["outcome"] == 0.5  # half of 1a1a are digits


def test_rewards_may_be_posted():
    _, result = played("posts")
    assert result.info["outcome"] == 0.5 and result.rewards == {"first": 0.25}


def test_calls_side_by_side_are_answered_together():
    shown, result = played("side_by_side", settle_s=0.3)
    assert sorted(shown[0]) == ["first", "second"] and list(shown[1]) == ["first"]  # one call of an agent at a time
    assert result.rewards == {"first": 3.0, "second": 1.0} and "outcome" not in result.info


def test_streams():
    assert played("streams")[1].info["outcome"] == 1.0


def test_usage_and_finish_reason_are_those_of_the_sampling():
    env = program("usage")
    seen, _ = env.reset(seed=1)
    env.sampled({"first": Sampled(prompt_tokens=7, tokens=5, stop="length")})
    assert env.step(dict.fromkeys(seen, "answer")).info["outcome"] == 7005.5


def asking(folder, how, *lines):
    """A program that calls agent `a` once, with further arguments, and looks at the `choices`; after its reset."""
    file = folder / "asks.py"
    file.write_text(
        "from openai import OpenAI\n"
        "def run(task, base_url):\n"
        "    with OpenAI(base_url=base_url, api_key='x') as llm:\n"
        "        ask = {'model': 'a', 'messages': [{'role': 'user', 'content': 'x'}]}\n"
        f"        choices = llm.chat.completions.create(**ask, {how}).choices\n" + "".join(f"    {x}\n" for x in lines)
    )
    env = make_env("program", program=f"{file}:run", agents=["a"])
    env.reset(seed=1)
    return env


def test_stop_texts_and_log_probabilities_reach_the_program(tmp_path):
    env = asking(
        tmp_path,
        "stop=['END'], logprobs=True",
        "assert choices[0].message.content == 'one '",
        "return sum(token.logprob for token in choices[0].logprobs.content)",
    )
    env.sampled({"a": Sampled(7, 3, "eos", lambda: [("one", -0.25), (" END", -0.5)])})
    assert env.step({"a": "one END two"}).info["outcome"] == -0.75


def strict(**parameters):
    schema = {"type": "object", "properties": {"n": parameters}, "required": ["n"], "additionalProperties": False}
    return [{"type": "function", "function": {"name": "say", "parameters": schema, "strict": True}}]


@pytest.mark.parametrize(
    ("parameters", "given", "fits"),
    [
        ({"type": "integer"}, 4, True),
        ({"type": "integer"}, "four", False),
        ({"type": "string", "pattern": "^(a+)+$"}, "a" * 60 + "b", False),  # nobody waits for its end
    ],
)
def test_a_call_that_does_not_fit_a_strict_tool_is_words(tmp_path, parameters, given, fits):
    env = asking(
        tmp_path,
        f"tools={strict(**parameters)!r}",
        "return float(bool(choices[0].message.tool_calls)) + 2 * float('say' in (choices[0].message.content or ''))",
    )
    said = json.dumps({"name": "say", "arguments": {"n": given}})
    assert env.step({"a": f"<tool_call>{said}</tool_call>"}).info["outcome"] == (1.0 if fits else 2.0)


def test_a_strict_tool_without_a_schema_that_is_one_is_named(tmp_path):
    env = asking(tmp_path, f"tools={strict(type='frog')!r}", "return 1.0")
    with pytest.raises(EnvError, match="'parameters' that are no JSON schema"):
        env.step({"a": '<tool_call>{"name": "say", "arguments": {"n": 1}}</tool_call>'})


def test_several_answers_to_a_call_are_a_turn_each(tmp_path):
    env = asking(
        tmp_path,
        "n=3",
        "assert [choice.index for choice in choices] == [0, 1, 2]",
        "return float(''.join(choice.message.content for choice in choices))",
    )
    assert not env.step({"a": "1"}).terminated and not env.step({"a": "2"}).terminated
    assert env.step({"a": "3"}).info["outcome"] == 123.0


def test_posted_rewards_are_read_at_once_and_not_kept_without_bound():
    episode = ProgramEpisode("key", ("first",))
    with pytest.raises(ApiError) as error:
        episode.post({"rewards": {"nobody": 1.0}})
    assert error.value.status == 400
    for _ in range(100):
        episode.post(0.5)
    assert episode.posted == 2
    for number in range(100):
        with pytest.raises(ApiError, match="give one of them"):
            episode.begin(ChatCall(f"model{number}", []))
    assert len(episode.unknown) < 10


def test_tools_travel_as_text():
    env = program("tools")
    seen, _ = env.reset(seed=1)
    system, user = seen["first"]
    assert '"name": "add"' in system["content"] and user == {"role": "user", "content": "2+3"}
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    seen = env.step({"first": called}).observations
    assert seen["first"][2:] == [{"role": "assistant", "content": called}, {"role": "tool", "content": "5"}]
    assert env.step({"first": "answer"}).info["outcome"] == 1.0


@pytest.mark.slow
def test_a_command_is_a_program_too(tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(
        "import json, os\nfrom openai import OpenAI\n"
        "llm = OpenAI()\n"
        "task = json.loads(os.environ['MAFRT_TASK'])\n"
        "reply = llm.chat.completions.create(model='solver', messages=[{'role': 'user', 'content': task['q']}])\n"
        "print(json.dumps({'reward': float(reply.choices[0].message.content == task['a'])}))\n"
    )
    (tmp_path / "tasks.jsonl").write_text('{"q": "2+2", "a": "4"}\n\n{"q": "1+1", "a": "2"}\n')
    env = make_env(
        "program", command=f"{sys.executable} {script}", agents=["solver"], tasks=str(tmp_path / "tasks.jsonl")
    )
    assert env.num_tasks == 2
    seen, info = env.reset(seed=1, options={"task": 1})
    assert seen["solver"][0]["content"] == "1+1" and '"a": "2"' in info["problem"]
    assert env.step({"solver": "2"}).info["outcome"] == 1.0
    script.write_text("raise SystemExit('out of luck')")
    with pytest.raises(EnvError, match="the program ended with code 1: out of luck"):
        env.reset(seed=1, options={"task": 0})


def test_a_command_that_is_given_up_ends_while_its_output_is_read():
    for _ in range(20):  # two threads that read one pipe would fail now and then
        process = subprocess.Popen(
            ["sleep", "60"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        with ThreadPoolExecutor(1) as threads:
            read = threads.submit(process.communicate)
            kill(process)
            assert read.result(timeout=300) == (b"", b"")
        assert process.returncode == -signal.SIGKILL


# ------------------------------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "raises",
            f"the program raised KeyError: 'lost' ({PROGRAMS}, line {line_of('the line that the error names')})",
        ),
        ("exits", f"the program raised SystemExit: 3 ({PROGRAMS}, line {line_of('raise SystemExit')})"),
        ("hangs", f"did not end within 0.5 s ({PROGRAMS}, line {line_of('the line where it hangs')})"),
        ("never_calls", "the program ended without a call to an agent"),
        ("unknown_model", "ended without a call to an agent; it asked for 'gpt-5'"),
        ("no_reward", "the program gave no reward"),
        ("empty_reward", "the reward must be a number or an object"),
        ("two_rewards", "the program gave 2 rewards"),
        ("bad_reward", "the reward must be a number or an object"),
    ],
)
def test_a_program_that_fails_loses_its_episode_with_a_sentence(name, says):
    with pytest.raises(EnvError) as error:
        played(name, timeout_s=0.5 if name == "hangs" else 20)
    assert says in str(error.value)


def test_calls_after_the_end_are_refused(caplog):
    from programs import LATE

    assert played("calls_late")[1].info["outcome"] == 0.5
    deadline = time.monotonic() + 60
    while not LATE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "410" in LATE[0] and "the episode has ended" in LATE[0]


def test_an_episode_that_is_given_up_gets_the_standard_error():
    """A prompt beyond the window ends an episode without a step; the next reset tells its program."""
    env = program("raises")
    env.reset(seed=1)
    waiting = next(iter(env.unwrapped._calls.values()))
    env.reset(seed=2)
    error = waiting.answer.exception(timeout=60)
    assert isinstance(error, ApiError) and (error.status, error.code) == (400, "context_length_exceeded")
    env.close()


def test_an_episode_without_end_is_truncated():
    shown, result = played("forever")
    assert result.truncated and len(shown) == 64


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ([], "expected a JSON object"),
        ({}, "'model' must be the name of an agent"),
        ({"model": "a"}, "'messages' must be a list"),
        ({"model": "a", "messages": [{"role": "boss"}]}, "messages[0] must be an object whose 'role'"),
        ({"model": "a", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "images and sound"),
        ({"model": "a", "messages": [{"role": "user"}]}, "messages[0]: 'content' must be a text"),
        ({"model": "a", "messages": [{"role": "user", "content": "x"}], "top_p": 2}, "'top_p' must be at most 1"),
        ({"model": "a", "messages": [{"role": "user", "content": "x"}], "n": 0}, "'n' must be a whole number of 1"),
        ({"model": "a", "messages": [{"role": "user", "content": "x"}], "n": 33}, "'n' must be at most 32"),
        ({"model": "a", "messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "'max_tokens' must be"),
        ({"model": "a", "messages": [{"role": "user", "content": "x"}], "temperature": "hot"}, "'temperature' must be"),
        ({"model": "a", "messages": [{"role": "user", "content": "x"}], "stop": [1]}, "'stop' must be"),
        ({"model": "a", "messages": [{"role": "user", "content": "x"}], "tools": "all"}, "'tools' must be"),
    ],
)
def test_bad_requests_name_the_field(body, says):
    with pytest.raises(ApiError) as error:
        parse_call(body)
    assert error.value.status == 400 and says in str(error.value)


def test_the_server_refuses_what_is_no_request():
    env = program("raises")
    env.reset(seed=1)
    from mafrt.envs.program.env import SERVER

    base = SERVER.open(env.unwrapped._episode)
    with httpx.Client(timeout=60) as http:
        assert http.post(f"{base}/chat/completions", content=b"{").status_code == 400
        assert http.post(f"{base}/chat/completions", content=b"x" * (9 * 2**20)).status_code == 413
        # Told at once, and not when the body has not come in time.
        address = urlsplit(base)
        with socket.create_connection((address.hostname, address.port), timeout=300) as raw:
            head = f"POST {address.path}/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
            raw.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n{{".encode())
            assert b" 413 " in raw.recv(100)
        assert http.get(base.replace("/episodes/", "/episodes/x")).status_code == 404
        wrong = base.replace("/episodes/", "/episodes/x")
        assert http.get(f"{wrong}/models").json()["error"]["code"] == "episode_ended"
        assert [model["id"] for model in http.get(f"{base}/models").json()["data"]] == ["first", "second"]
    env.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "give either a program"),
        ({"program": "nothing.py:run"}, "there is no file nothing.py"),
        ({"program": f"{PROGRAMS}:ask"}, "must take (task, base_url)"),
        ({"program": f"{PROGRAMS}:two_calls", "command": "x"}, "give either a program"),
        ({"command": "python x.py"}, "the agents of python x.py are not known"),
        ({"program": f"{PROGRAMS}:two_calls", "tasks": "none.jsonl"}, "tasks none.jsonl cannot be read"),
    ],
)
def test_bad_settings_get_a_sentence(settings, says):
    with pytest.raises((ConfigError, EnvError)) as error:
        make_env("program", **settings)
    assert says in str(error.value)


def test_bad_tasks_name_their_line(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"a": 1}\n[2]\n')
    with pytest.raises(ConfigError, match="line 2: expected an object, found list"):
        read_tasks(str(tmp_path / "t.jsonl"))


def test_a_program_that_edits_its_task_changes_no_other_episode(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"items": [1, 2], "deep": {"x": [1]}}\n')
    (tmp_path / "edits.py").write_text(
        "from openai import OpenAI\n"
        "def run(task, base_url):\n"
        "    task['items'].append(3), task['deep']['x'].clear()\n"
        "    with OpenAI(base_url=base_url, api_key='x') as llm:\n"
        "        said = [{'role': 'user', 'content': str(task)}]\n"
        "        llm.chat.completions.create(model='a', messages=said)\n"
    )
    env = make_env("program", program=f"{tmp_path}/edits.py:run", agents=("a",), tasks=str(tmp_path / "t.jsonl"))
    shown = [env.reset(seed=n, options={"task": 0}) for n in (1, 1)]
    assert shown[0] == shown[1] and '"items": [1, 2]' in shown[0][1]["problem"]
    assert env.tasks == [{"items": [1, 2], "deep": {"x": [1]}}]
    env.close()


# ------------------------------------------------------------------------------------------------------------ training


def trainer(folder=None, load_path=None, name="two_calls", **changes):
    env = program(name)
    config = toy.settings(**{"n_rollout_threads": 32, "ppo_epoch": 1, "num_mini_batch": 1, **changes})
    resume = resolve(load_path) if load_path else None
    return OnPolicy(env, Team.of(env.agents), tiny_base(), config, run_dir=folder, provenance=Provenance(resume))


@pytest.mark.slow
def test_a_program_trains_and_a_resumed_run_is_the_same(tmp_path):
    summary = trainer(tmp_path / "whole", iterations=12, lr=5e-2).run()
    # Eight seeds gained .075 to .23.
    assert summary.after["eval/avg@2"] > summary.before["eval/avg@2"] + 0.05
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    # Log-probs through the API are the trainer's: the ratio of the first pass is 1.
    assert all(
        line[f"ratio_mean/{agent}"] == pytest.approx(1, abs=1e-4) for line in lines for agent in ("first", "second")
    )
    trainer(tmp_path / "part", tmp_path / "whole" / "checkpoints" / "step_000010", iterations=12, lr=5e-2).run()
    assert (tmp_path / "part" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_a_run_without_a_team_file_goes_on_as_it_advises(tmp_path, named):
    """Its agents are those of the module, or those that the first episodes call: the record holds them either way."""
    source = Path(__file__).parents[1].joinpath("programs.py").read_text()
    (tmp_path / "mine.py").write_text(source if named else source.replace("AGENTS = ", "NOBODY = "))
    words = ["--program", f"{tmp_path / 'mine.py'}:two_calls", "--model_name_or_path", "teaching-base"]
    sizes = ["--n_rollout_threads", "2", "--n_samples", "2", "--max_new_tokens", "4", "--eval_episodes", "0"]
    run = tmp_path / "run"
    assert train.main([*words, *sizes, "--iterations", "1", "--run_dir", str(run)]) == 0
    assert train.main(["--load_path", str(run), "--iterations", "2"]) == 0
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_program_that_rewrites_its_history_gets_the_training_rows_of_each_call():
    from programs import SENT

    base, tokens = tiny_base(), SamplingParams(max_new_tokens=6)
    team = Team((AgentSpec("first", prompt="Role."), AgentSpec("second")))
    for seed, name in enumerate(team.names):
        add_random_adapter(base, name, seed=seed)
    player = Player(LocalEngine(base, eos_ids=()), base.tokenizer, team, dict.fromkeys(team.names, tokens), 250)
    SENT.clear()
    starts = iter([Start("e", "g", 1, 1)])
    [episode], stats = player.play([program("rewrites")], lambda slot, finished: next(starts, None))
    assert stats.env_errors == 0 and len(episode.turns) == len(SENT) == 5
    for turn, sent in zip(episode.turns, SENT, strict=True):
        assert turn.observation == sent
        assert turn.prompt_ids == encode_prompt(base.tokenizer, "Role.", sent)
        assert turn.text == base.tokenizer.decode(turn.action_ids, skip_special_tokens=True)
    assert [m["content"] for m in SENT[2][:3]] == ["S", "one", "edited"]
    assert SENT[3][0]["content"] == "two" and SENT[4][1]["content"] == "two"
    learner = Learner(base, team, LearnConfig(), Objective(make_algorithm("grpo")), seed=0)
    # The log-probabilities that were recorded through the address are the trainer's on the same ids.
    for turn, again in zip(episode.turns, learner.logprobs(episode.turns), strict=True):
        assert turn.logprobs == pytest.approx(again, abs=1e-4)


@pytest.mark.slow
def test_sixty_four_episodes_at_once(tmp_path):
    trainer(tmp_path / "run", iterations=1, n_rollout_threads=64).run()
    [line] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert line["episodes"] == 64 and line["env_errors"] == 0


KILLED = """
import sys
sys.path[:0] = {folders!r}
from pathlib import Path
from test_program import trainer
trainer(Path({folder!r}), name={name!r}, iterations=100000, **{settings!r}).run()
"""

FEW = {"n_rollout_threads": 16, "lr": 5e-2, "save_interval": 2, "eval_episodes": 0}


def killed(folder: Path, name: str) -> None:
    """A run that gets kill -9 after the fifth iteration."""
    script = folder.with_suffix(".py")
    script.write_text(
        KILLED.format(
            folders=[str(Path(__file__).parent), str(PROGRAMS.parent)], folder=str(folder), name=name, settings=FEW
        )
    )
    process = start_python(script)
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 240
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 5):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait(timeout=300)


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_that_was_killed_goes_on_exactly(tmp_path):
    killed(tmp_path / "killed", "two_calls")
    step = resolve(tmp_path / "killed").step
    assert step >= 4
    trainer(tmp_path / "killed", tmp_path / "killed", iterations=step + 3, **FEW).run()
    trainer(tmp_path / "whole", iterations=step + 3, **FEW).run()
    for name in ("metrics.jsonl", "episodes.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.ci
def test_a_program_that_is_not_deterministic_is_counted_and_goes_on(tmp_path):
    killed(tmp_path / "run", "flaky")
    step = resolve(tmp_path / "run").step
    trainer(tmp_path / "run", tmp_path / "run", name="flaky", iterations=step + 4, **FEW).run()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(1, step + 5))
    assert sum(line["env_errors"] for line in lines) > 0 and all(line["episodes"] == 16 for line in lines)


def test_failing_episodes_are_counted(tmp_path):
    env = program("raises")
    with pytest.raises(EnvError, match="episodes were lost"):
        OnPolicy(env, Team.of(env.agents), tiny_base(), toy.settings(n_rollout_threads=8, iterations=1)).run()


# ---------------------------------------------------------------------------------------------- programs that misbehave


def commanded(tmp_path, text, tasks=None, timeout_s=300):
    """The outcome of one episode of a command without a call to an agent, as the environment sees its end."""
    script = tmp_path / "program.py"
    script.write_text(text)
    start = command_runner(f"{sys.executable} {script}", timeout_s)
    episode = ProgramEpisode("key", ("solver",))
    start(episode, tasks or {"q": 1}, "http://127.0.0.1:9/v1")
    return episode.events.get(timeout=300)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import os\nwhile True: os.write(1, b'x' * 65536)", "wrote more than 64 MiB"),
        ("import os\nwhile True: os.write(2, b'x' * 65536)", "wrote more than 64 MiB"),
        ("print('[' * 100_000)", None),
        ("print('{\"a\":' * 100_000)", None),
        ("print('9' * 100_000)", None),
        ("print('x' * 10_000_000); print(0.5)", 0.5),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\x00\\n0.25')", 0.25),
        ("import os; os.close(1); os.close(2); import time; time.sleep(60)", "did not end within 2 s"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended with code 139"),
        ("import os, sys, time\nif os.fork():\n print(0.5)\nelse:\n time.sleep(60)", 0.5),
    ],
)
def test_no_output_of_a_command_costs_more_than_its_episode(tmp_path, text, says):
    ended = commanded(tmp_path, text, timeout_s=2 if "sleep(60)" in text else 60)
    if isinstance(says, str):
        assert says in ended.error
    else:
        assert ended.error is None and ended.returned == says


def test_a_long_task_arrives_on_standard_input(tmp_path):
    read = (
        "import json, os, sys\ntask = json.load(sys.stdin)\nprint(len(task['q']) / 1e6 + ('MAFRT_TASK' in os.environ))"
    )
    assert commanded(tmp_path, read, {"q": "x" * 300_000}).returned == 0.3
    assert commanded(tmp_path, read, {"q": "x" * 3_000}).returned == 1.003


@pytest.mark.parametrize("how", ["double fork", "session", "ignores signals", "twenty"])
@pytest.mark.parametrize("given_up", [False, True])
def test_no_child_outlives_its_episode(tmp_path, how, given_up):
    mark = tmp_path / "pids"
    child = {
        "double fork": "if os.fork(): os._exit(0)\nos.setsid()",
        "session": "os.setsid()",
        "ignores signals": "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 15)]; os.setsid()",
        "twenty": "[os.fork() for _ in range(4)]",
    }[how]
    noted = f"while not (os.path.exists({str(mark)!r}) and os.path.getsize({str(mark)!r})): time.sleep(0.01)"
    wait = "time.sleep(60)" if given_up else f"{noted}\nprint(0.5)"
    text = (
        "import os, signal, time\nif not os.fork():\n"
        + "".join(f" {line}\n" for line in child.splitlines())
        + f" open({str(mark)!r}, 'a').write(f'{{os.getpid()}}\\n')\n time.sleep(60); os._exit(0)\n{wait}"
    )
    ended = commanded(tmp_path, text, timeout_s=1.5 if given_up else 300)
    assert (ended.error is None) != given_up
    pids = [int(pid) for pid in mark.read_text().split()]
    assert pids and not [pid for pid in pids if alive(pid)]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_command_that_is_not_there_is_named():
    start = command_runner("no-such-command-here", 5)
    episode = ProgramEpisode("key", ("solver",))
    start(episode, {}, "http://127.0.0.1:9/v1")
    assert "no-such-command-here" in episode.events.get(timeout=300).error
