"""Programs that speak Responses, keep clients of the whole process, or find their address in the environment."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import toy
from helpers_models import tiny_base

from mafrt.config import permission
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError, EnvError
from mafrt.environment.registry import make_env
from mafrt.envs.program.own_process import Source
from mafrt.runners.on_policy import OnPolicy

pytestmark = pytest.mark.takes(slow=29)

PROGRAMS = Path(__file__).parents[1] / "programs_sdk.py"
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def program(name, **more):
    return make_env("program", program=f"{PROGRAMS}:{name}", timeout_s=60, **more)


def played(env, *answers, seed=1):
    """All observations and the last result of an episode; the last answer is given again and again."""
    seen, _ = env.reset(seed=seed)
    shown = [seen]
    while True:
        answer = answers[min(len(shown), len(answers)) - 1]
        result = env.step(dict.fromkeys(seen, answer))
        if result.terminated or result.truncated:
            return shown, result
        seen = result.observations
        shown.append(seen)


@pytest.mark.slow
def test_the_default_mode_of_the_agents_sdk_is_played_side_by_side():
    env = program("default_mode", agents=["planner", "solver"])
    others = [env.spawn() for _ in range(3)]
    seen = [other.reset(seed=seed)[0] for seed, other in enumerate(others)]
    assert len({str(each) for each in seen}) == 3  # each call reached its own episode
    assert seen[0]["planner"][0] == {"role": "system", "content": "You plan."}
    for number, other in enumerate(others):
        assert list(other.step({"planner": f"plan {number}"}).observations["solver"]) == [
            {"role": "user", "content": f"plan {number}"}
        ]
    assert [other.step({"solver": "1a"}).info["outcome"] for other in others] == [0.5] * 3


@pytest.mark.slow
@pytest.mark.cases(1)  # which programs get processes is told below, without starting any
@pytest.mark.parametrize("name", ["run_sync", "sets_the_environment", "sets_the_client"])
def test_programs_with_globals_of_their_own(name):
    env = program(name, agents=["solver"])
    others = [env, env.spawn()]
    for other in others:
        assert list(other.reset(seed=1)[0]) == ["solver"]
    assert all(other.step({"solver": "answer"}).terminated for other in others)


@pytest.mark.slow
@pytest.mark.ci
def test_processes_of_programs_outlive_the_thread_that_started_the_first():
    env = program("sets_the_environment", agents=["solver"])
    seen: list[dict] = []

    def begin(other, seed):
        seen.append(other.reset(seed=seed)[0])

    for seed in range(3):
        thread = threading.Thread(target=begin, args=(env.spawn(), seed))
        thread.start()
        thread.join()
        time.sleep(0.1)  # a process that dies with its thread does so a moment later
    assert [list(each) for each in seen] == [["solver"]] * 3


@pytest.mark.slow
def test_tools_of_the_agents_sdk_travel_as_text():
    shown, result = played(program("tools", agents=["solver"]), CALLED, "answer")
    assert '"name": "add"' in shown[0]["solver"][0]["content"]
    assert shown[1]["solver"][2:] == [{"role": "assistant", "content": CALLED}, {"role": "tool", "content": "5"}]
    assert result.info["outcome"] == 1.0 and result.rewards == {"solver": 3.0}


def graph(name):
    path = PROGRAMS.with_name("programs_graph.py")
    return make_env("program", program=f"{path}:{name}", timeout_s=60, agents=["solver", "checker"])


@pytest.mark.slow
@pytest.mark.ci
def test_langgraph_with_a_model_that_is_made_once():
    shown, result = played(graph("run_episode"), "first", "answer")
    assert [list(seen) for seen in shown] == [["solver"], ["checker"]] and result.info["outcome"] == 1.0
    assert shown[1]["checker"] == [{"role": "user", "content": "first"}]
    assert played(graph("calls_a_tool"), CALLED)[1].info["outcome"] == 1.0
    assert played(graph("streams"), "answer")[1].info["outcome"] == 1.0


def test_a_client_that_a_coroutine_program_keeps_stays_usable(tmp_path):
    file = tmp_path / "keeps.py"
    file.write_text(
        "from openai import AsyncOpenAI\n"
        "KEPT = AsyncOpenAI(base_url='http://127.0.0.1:9/v1', api_key='x', max_retries=0)\n"
        "async def run(task, base_url):\n"
        "    llm = KEPT.with_options(base_url=base_url)\n"
        "    reply = await llm.chat.completions.create(model='a', messages=[{'role': 'user', 'content': 'x'}])\n"
        "    return float(reply.choices[0].message.content == 'answer')\n"
    )
    env = make_env("program", program=f"{file}:run", agents=["a"])
    assert [played(env, "answer", seed=seed)[1].info["outcome"] for seed in range(4)] == [1.0] * 4


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("made", ["Bot()", "Bot().__call__"])
def test_an_object_that_keeps_its_first_client_gets_a_process(tmp_path, made):
    file = tmp_path / "keeps_itself.py"
    file.write_text(
        "from openai import OpenAI\n"
        "class Bot:\n"
        "    llm = None\n"
        "    def __call__(self, task, base_url):\n"
        "        if self.llm is None:\n"
        "            self.llm = OpenAI(base_url=base_url, api_key='x', max_retries=0)\n"
        "        reply = self.llm.chat.completions.create(model='a', messages=[{'role': 'user', 'content': 'x'}])\n"
        "        return float(reply.choices[0].message.content == 'answer')\n"
        f"run = {made}\n"
    )
    env = make_env("program", program=f"{file}:run", agents=["a"], timeout_s=60)
    assert [played(env, "answer", seed=seed)[1].info["outcome"] for seed in range(2)] == [1.0, 1.0]


def test_coroutines_that_block_do_not_hold_up_each_other(tmp_path):
    file = tmp_path / "blocks.py"
    file.write_text(
        "from openai import OpenAI\n"
        "async def run(task, base_url):\n"
        "    with OpenAI(base_url=base_url, api_key='x') as llm:\n"
        "        llm.chat.completions.create(model='a', messages=[{'role': 'user', 'content': 'x'}])\n"
        "    return 1.0\n"
    )
    env = make_env("program", program=f"{file}:run", agents=["a"])
    others = [env, env.spawn(), env.spawn()]
    assert all(list(other.reset(seed=1)[0]) == ["a"] for other in others)
    assert all(other.step({"a": "x"}).terminated for other in others)


@pytest.mark.parametrize(
    ("source", "own"),
    [
        ("def run(task):\n    return 1.0", True),
        ("def run():\n    return 1.0", True),
        ("import os\ndef run(task, url):\n    os.environ['OPENAI_BASE_URL'] = url\n    return 1.0", True),
        ("from os import environ\ndef run(task, url):\n    environ.update(OPENAI_BASE_URL=url)", True),
        ("import os\ndef run(task, url):\n    os.environ.setdefault('OPENAI_API_BASE', url)", True),
        ("import os\ndef run(task, url):\n    os.putenv('OPENAI_BASE_URL', url)", True),
        ("import openai\ndef run(task, url):\n    openai.base_url = url", True),
        ("C = None\ndef run(task, url):\n    global C\n    C = make(url)", True),
        ("C = None\ndef run(task, url):\n    global C\n    made = make(url)\n    C = made", True),
        ("C = {}\ndef run(task, url):\n    C['llm'] = make(url)", True),
        ("import x\ndef run(task, url):\n    x.set_default_openai_client(make(url))", True),
        ("import dspy\ndef run(task, url):\n    dspy.configure(lm=dspy.LM('a', api_base=url))", True),
        ("def setup(base_url):\n    openai.base_url = base_url\ndef run(task, url):\n    setup(url)", True),
        ("from openai import OpenAI\nC = OpenAI()\ndef run(task, url):\n    C.f()", True),
        ("import agents\nasync def run(task, url):\n    return agents.f()", True),
        ("import os\ndef run(task, url):\n    e = os.environ\n    e['OPENAI_BASE_URL'] = url", True),
        ("import os\ndef run(task, url):\n    os.environ |= {'OPENAI_BASE_URL': url}", True),
        ("from agents import set_default_openai_client as s\ndef run(task, url):\n    s(make(url))", True),
        ("C = []\ndef run(task, url):\n    C.append(make(url))", True),
        ("def run(task, url):\n    globals()['C'] = make(url)", True),
        ("class A:\n    llm = None\ndef run(task, url):\n    A.llm = make(url)", True),
        ("import os\ndef run(task, url):\n    os.chdir('/tmp')", True),
        ("import contextlib\ndef run(task, url):\n    with contextlib.redirect_stdout(f):\n        make(url)", True),
        ("import sys\ndef run(task, url):\n    sys.stdout = open('x', 'w')", True),
        ("import asyncio\nasync def run(task, url):\n    [t.cancel() for t in asyncio.all_tasks()]", True),
        ("async def run(task, url):\n    await loop().shutdown_default_executor()", True),
        ("C = AsyncOpenAI(base_url='x')\ndef run(task, url):\n    asyncio.run(C.with_options(url))", True),
        ("def run(task, url):\n    asyncio.run(go(AsyncOpenAI(base_url=url)))", False),
        ("C = AsyncOpenAI(base_url='x')\nasync def run(task, url):\n    await C.with_options(url)", False),
        ("def run(task, url):\n    made = []\n    made.append(make(url))", False),
        ("def run(task, url):\n    make(url).f()['x'] = url", False),
        ("def run(task, url):\n    llm = make(url)\n    llm.timeout = 3\n    return 1.0", False),
        ("def run(task, base_url):\n    return 1.0", False),
        ("N = 0\ndef run(task, url):\n    global N\n    N += 1\n    return make(url)", False),
        ("import os\nos.environ['TOKENIZERS_PARALLELISM'] = 'false'\ndef run(task, url):\n    make(url)", False),
        ("def run(task, url):\n    with make(url) as llm:\n        return llm.f()", False),
        ("import agents\nasync def run(task, url):\n    return agents.f(url)", False),
        ("class A:\n    def __init__(self, base_url):\n        self.url = base_url\ndef run(t, u):\n    A(u)", False),
    ],
)
def test_a_program_shows_whether_it_needs_a_process(tmp_path, source, own):
    file = tmp_path / "program.py"
    file.write_text(source)
    assert Source.read(f"{file}:run").needs_process == own


@pytest.mark.slow
@pytest.mark.parametrize("head", ["task, *, base_url", "task, base_url, more", "*, task"])
def test_programs_that_cannot_be_called_are_refused_at_once(tmp_path, head):
    file = tmp_path / "program.py"
    file.write_text(f"import agents\nAGENTS = ('a',)\ndef run({head}):\n    return 1.0\n")
    with pytest.raises(ConfigError, match="must take"):
        make_env("program", program=f"{file}:run")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("AGENTS = 'solver'\ndef run(task, base_url):\n    return 1.0\n", "names its agents as str 'solver'"),
        ("AGENTS = 'solver'\ndef run(task):\n    return 1.0\n", "names its agents as str 'solver'"),
        ("AGENTS = ('a', 2)\ndef run(task, base_url):\n    return 1.0\n", "names its agents as"),
        ("AGENTS = 5\ndef run(task, base_url):\n    return 1.0\n", "names its agents as int 5"),
        ("AGENTS = ('a',)\ndef run(task, base_url):\n    yield 1.0\n", "has a `yield` in it"),
        ("AGENTS = ('a',)\nasync def run(task, base_url):\n    yield 1.0\n", "has a `yield` in it"),
    ],
)
def test_programs_that_cannot_be_played_are_refused_with_a_sentence(tmp_path, source, says):
    file = tmp_path / "program.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=says):
        make_env("program", program=f"{file}:run")


@pytest.mark.parametrize("how", ["asyncio.create_task(exits())", "asyncio.get_running_loop().stop()"])
def test_a_program_does_not_end_the_loop_of_the_others(tmp_path, how):
    file = tmp_path / "program.py"
    file.write_text(
        "import asyncio\nfrom openai import AsyncOpenAI\n"
        "async def exits():\n    raise SystemExit(3)\n"
        "async def run(task, base_url):\n"
        "    async with AsyncOpenAI(base_url=base_url, api_key='x') as llm:\n"
        f"        {how}\n"
        "        await llm.chat.completions.create(model='a', messages=[{'role': 'user', 'content': 'x'}])\n"
        "    return 1.0\n"
    )
    env = make_env("program", program=f"{file}:run", agents=["a"])
    assert not Source.read(f"{file}:run").needs_process
    others = [env, env.spawn(), env.spawn()]
    assert all(list(other.reset(seed=1)[0]) == ["a"] for other in others)
    assert all(other.step({"a": "x"}).info["outcome"] == 1.0 for other in others)


@pytest.mark.slow
def test_a_program_that_lies_in_a_run_is_not_started_without_consent(tmp_path):
    file = tmp_path / "run" / "program.py"
    file.parent.mkdir()
    file.write_text("AGENTS = ('a',)\ndef run(task):\n    return 1.0\n")
    with permission.of_command():
        permission.reading(tmp_path / "run")
        with pytest.raises(ConfigError, match="lies inside the run"):
            make_env("program", program=f"{file}:run")
        with pytest.raises(ConfigError, match="installed package"):
            make_env("program", program="subprocess:list2cmdline")
        permission.typed([f"{file}:run"])
        assert make_env("program", program=f"{file}:run").agents == ("a",)


@pytest.mark.slow
def test_programs_in_processes_fail_with_a_sentence(tmp_path):
    file = tmp_path / "fails.py"
    file.write_text(
        "import time\nAGENTS = ('a',)\n"
        "def hangs(task):\n    time.sleep(60)\n"
        "async def waits(task):\n    import asyncio\n    await asyncio.sleep(60)\n"
        "def raises(task):\n    raise KeyError('lost')\n"
        "def dies(task):\n    import os\n    os._exit(3)\n"
        "def leaves(task):\n    raise SystemExit(3)\n"
    )
    for name, says, timeout_s in (
        ("hangs", f"did not end within 1 s ({file}, line 4)", 1),
        ("waits", f"did not end within 1 s ({file}, line 7)", 1),
        ("raises", f"raised KeyError: 'lost' ({file}, line 9)", 300),
        ("dies", "ended without a result", 300),
        ("leaves", "raised SystemExit: 3", 300),
    ):
        with pytest.raises(EnvError) as error:
            make_env("program", program=f"{file}:{name}", timeout_s=timeout_s).reset(seed=1)
        assert says in str(error.value)
    file.write_text("AGENTS = ('a',)\nimport nothing_like_it\ndef run(task):\n    return 1.0\n")
    with pytest.raises(EnvError, match="nothing_like_it"):
        make_env("program", program=f"{file}:run").reset(seed=1)


@pytest.mark.slow
@pytest.mark.ci
def test_events_and_earlier_responses():
    shown, result = played(program("streams", agents=["solver"]), CALLED, "answer")
    assert len(shown) == 2 and result.info["outcome"] == 1.0
    shown, _ = played(program("remembers", agents=["solver"]), "first", "answer")
    assert [m["content"] for m in shown[1]["solver"]] == ["one", "first", "two"]


@pytest.mark.slow
def test_agents_are_those_that_the_first_episodes_call():
    assert program("default_mode").agents == ("planner", "solver")
    assert program("handoffs").agents == ("first", "second")
    with pytest.raises(ConfigError, match=r"the agents of .* are not known"):
        make_env("program", command="false")


@pytest.mark.nightly
@pytest.mark.slow
def test_the_default_mode_trains(tmp_path):
    env = program("default_mode", agents=["planner", "solver"])
    config = toy.settings(n_rollout_threads=8, iterations=2, ppo_epoch=1, num_mini_batch=1, eval_episodes=0)
    OnPolicy(env, Team.of(env.agents), tiny_base(), config, run_dir=tmp_path / "run").run()
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert text.count('"env_errors": 0') == 2
