"""Several processes: what one would have learnt, one writer, and an end for all when one is gone."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_warm import WarmProcess, start_python
from safetensors.torch import load_file
from toy import make, settings, train

from mafrt.core import records
from mafrt.core.distributed import ALONE, Processes, packed_error, unpacked_error
from mafrt.core.errors import BudgetSpentError, ConfigError, DataError, MafrtError
from mafrt.core.types import Episode, Evidence, Scored, Turn, Unscored
from mafrt.rollout.task_stream import TaskStream, own_slots, shuffled_passes
from mafrt.runners.checks import check_processes
from mafrt.storage.load_path import resolve

pytestmark = pytest.mark.takes(slow=45)

SCRIPT = Path(__file__).parents[1] / "toy_processes.py"
# Adam divides by the gradient's size: a larger epsilon keeps the rounding of gradients near zero from being magnified.
SHORT = {"iterations": 2, "save_interval": 0, "eval_episodes": 4, "opti_eps": 1e-5}
NEED_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: ZeRO is NOT tested here"
)
LAYOUTS = (
    *("ddp", "fsdp", pytest.param("zero2", marks=NEED_DEEPSPEED)),
    # Between these: one shares less than zero2, the other the base as fsdp does.
    *(pytest.param(f"zero{n}", marks=[NEED_DEEPSPEED, pytest.mark.nightly]) for n in (1, 3)),
)
ROUNDING = 1e-4
"""Weights move by about .2 here. Other micro-batches in one process already move them by up to 4e-5: rows that begin
alike share their beginning within a micro-batch, so roundings differ, and AdamW makes them larger. A wrong denominator
or a lost turn shows as 1e-2."""
RULES: dict[str, dict[str, Any]] = {
    "ppo": {"num_mini_batch": 2, "target_kl": 10.0},
    "action": {"level": "action", "kl_coef": 0.01, "entropy_coef": 0.01},
    "happo": {"algorithm": "happo"},
    "grpo": {"algorithm": "grpo", "n_samples": 4},
    "dapo": {"algorithm": "dapo", "n_samples": 2, "dynamic_sampling_rounds": 2, "max_new_tokens": 2},
    "reinforce_pp": {"algorithm": "reinforce_pp", "episode_length": 2},
    "qmix": {"algorithm": "qmix", "n_samples": 2},
    "cory": {"algorithm": "cory"},
}


def start(job: dict[str, Any], size: int = 2) -> list[WarmProcess]:
    """`size` processes that find each other, as a launcher would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    Path(job["out"]).mkdir(parents=True, exist_ok=True)
    found = []
    for rank in range(size):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        found.append(start_python(SCRIPT, json.dumps(job), env=env))
    return found


def finish(some: list[WarmProcess], timeout: float = 240.0) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each; whoever is still there after `timeout` fails the test."""
    found = []
    try:
        for process in some:
            found.append((process.wait(timeout), process.stdout, process.stderr))
    finally:
        for process in some:
            process.kill()
            process.wait()
    return found


def run(out: Path, layout: str, runs: list[dict[str, Any]], size: int = 2) -> list[dict[str, Any]]:
    """Let `size` processes do all `runs`; what each of them found."""
    ended = finish(start({"layout": layout, "out": str(out), "runs": runs}, size))
    assert [code for code, _, _ in ended] == [0] * size, ended[0][2] + ended[-1][2]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(size)]


def gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[key] - other[key]).abs().max().item() for key in one)


def adapters(runner: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name in ("first", "second"):
        found |= {f"{name}/{key}": value for key, value in runner.base.adapter_state(name).items()}
    return found


def alone(**changes: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """The adapters that one process learns, and the run's summary."""
    runner = make(None, **{**SHORT, **changes})
    before = adapters(runner)
    summary = runner.run()
    assert gap(before, adapters(runner)) > 1e-2, "it has to move, or the comparison means nothing"
    return adapters(runner), summary


# ------------------------------------------------------------------------------------------------- two are like one


@pytest.mark.slow
@pytest.mark.ci
def test_two_processes_learn_what_one_learns_with_every_kind_of_rule(tmp_path):
    runs = [{"name": name, "settings": {**SHORT, **changes}} for name, changes in RULES.items()]
    told = run(tmp_path, "ddp", runs)
    assert all("gloo" not in thread for one in told for thread in one["threads"]), told[0]["threads"]
    for name, changes in RULES.items():
        expected, summary = alone(**changes)
        mine, other = (load_file(tmp_path / f"{name}.{rank}.safetensors") for rank in (0, 1))
        assert gap(mine, other) == 0.0, name
        assert gap(mine, expected) < ROUNDING, (name, gap(mine, expected))
        for one in told:
            assert one[name]["before"] == pytest.approx(summary.before) and one[name]["iterations"] == 2


OFTEN = {"iterations": 4, "save_interval": 2, "eval_episodes": 0, "keep_last": 9, "gradient_checkpointing": True}


@pytest.fixture(scope="module")
def from_one(tmp_path_factory):
    """Folder with the run of one process, `whole`, and its first half, `cut`, which all layouts are compared with."""
    folder = tmp_path_factory.mktemp("one")
    train(folder / "whole", **OFTEN)
    train(folder / "cut", **{**OFTEN, "iterations": 2})
    return folder


@pytest.fixture(scope="module")
def from_two(from_one, tmp_path_factory):
    """Layout -> folder and findings of two processes."""
    done: dict[str, tuple[Path, list[dict[str, Any]]]] = {}

    def of(layout: str) -> tuple[Path, list[dict[str, Any]]]:
        if layout not in done:
            out = tmp_path_factory.mktemp("two")
            cut = out / layout / "cut"
            shutil.copytree(from_one / "cut", cut)  # one process ...
            runs = [{"name": f"{layout}_all", "run_dir": str(out / layout / "all"), "settings": OFTEN}]
            runs += [{**runs[0], "name": f"{layout}_on", "run_dir": str(cut), "load_path": str(cut)}]  # ... then two
            told = run(out, layout, runs)
            done[layout] = out, [{"all": rank[f"{layout}_all"], "on": rank[f"{layout}_on"]} for rank in told]
        return done[layout]

    return of


@pytest.mark.slow
@pytest.mark.cases()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_learns_what_one_process_learns_and_goes_on_with_another_number(
    tmp_path, layout, from_one, from_two
):
    expected = load_all(from_one / "whole" / "checkpoints" / "step_000004")
    out, told = from_two(layout)
    folder = out / layout
    for name in ("all", "on"):
        mine, other = (load_file(out / f"{layout}_{name}.{rank}.safetensors") for rank in (0, 1))
        assert gap(mine, other) == 0.0
        assert gap(mine, flat(expected)) < ROUNDING, (name, gap(mine, flat(expected)))
    train(tmp_path / "back", folder / "all" / "checkpoints" / "step_000002", **OFTEN)  # and two, then one
    assert gap(flat(load_all(tmp_path / "back" / "checkpoints" / "step_000004")), flat(expected)) < ROUNDING
    # One writer: rank 1 was given a folder of its own and left it alone.
    assert not (folder / "all.1").exists() and not (folder / "cut.1").exists()
    lines = (folder / "all" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2, 3, 4]
    assert same_lines(folder / "all", from_one / "whole")
    held, numbers = [one["all"]["held"] for one in told], told[0]["all"]["numbers"]
    if layout in ("fsdp", "zero3"):
        assert sum(held) == numbers and max(held) < 0.52 * numbers, "the parts add up to one base"
        assert [one["all"]["moves"] for one in told] == [0, 0], "no GPU ever holds the whole"
    else:
        assert held == [numbers, numbers]
    moments = [one["all"]["moments"] for one in told]
    if layout.startswith("zero"):
        assert max(moments) < 0.52 * sum(moments), "each process has half of the moments"
    else:
        assert moments[0] == moments[1]


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.cases(1)  # each night that of DeepSpeed, whose import takes seconds in every process
@pytest.mark.parametrize("layout", ["fsdp", pytest.param("zero2", marks=NEED_DEEPSPEED)])
def test_processes_keep_the_adapters_near_those_that_the_run_started_from(tmp_path, layout):
    train(tmp_path / "before", iterations=3, eval_episodes=0)
    adapted, learnt = tmp_path / "adapters", load_all(resolve(tmp_path / "before").path)
    shutil.copytree(resolve(tmp_path / "before").path, adapted, ignore=lambda _, names: {*names} - LEARNT)
    of = {"eval_episodes": 0, "save_interval": 1, "opti_eps": 1e-5, "reference": "initial", "kl_coef": 0.2}
    of |= {"ppo_epoch": 1, "num_mini_batch": 1}  # so that nothing has moved when the first batch is learnt from
    rules = {"loss": of, "reward": {**of, "algorithm": "dr_mas", "n_samples": 4, "kl_in": "reward"}}
    runs = []
    for name, rule in rules.items():
        where = str(tmp_path / f"two_{name}")
        for done, begin in ((2, str(adapted)), (3, where)):  # and goes on
            wanted = {**rule, "iterations": done}
            runs.append({"name": f"{name}_{done}", "run_dir": where, "load_path": begin, "settings": wanted})
    run(tmp_path / "out", layout, runs)
    for name, rule in rules.items():
        train(tmp_path / f"one_{name}", adapted, **{**rule, "iterations": 3})
        expected = load_all(resolve(tmp_path / f"one_{name}").path)
        mine, other = (load_file(tmp_path / "out" / f"{name}_3.{rank}.safetensors") for rank in (0, 1))
        assert gap(mine, other) == 0.0
        assert gap(mine, flat(expected)) < ROUNDING < 1e-3 < gap(flat(learnt), flat(expected))
        kls = [
            [line["ref_kl/first"] for line in map(json.loads, (tmp_path / run / "metrics.jsonl").open())]
            for run in (f"two_{name}", f"one_{name}")
        ]
        assert kls[0] == pytest.approx(kls[1], rel=1e-2, abs=1e-6) and abs(kls[0][0]) < 1e-5 < abs(kls[0][2])


LEARNT = {"first", "second", "adapter_config.json", "adapter_model.safetensors"}


def load_all(checkpoint: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {name: load_file(checkpoint / name / "adapter_model.safetensors") for name in ("first", "second")}


def flat(adapters: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"{name}/{key}": value for name, state in adapters.items() for key, value in state.items()}


def same_lines(run: Path, other: Path) -> bool:
    """Whether both played the same: who said what, token for token, and what came of it to five digits."""

    def read(path: Path) -> list[Any]:
        return [json.loads(line, parse_float=lambda text: round(float(text), 4)) for line in path.open()]

    def said(path: Path) -> list[Any]:
        return [(e["id"], e["group"], e["outcome"], [t["text"] for t in e["turns"]]) for e in read(path)]

    return said(run / "episodes.jsonl") == said(other / "episodes.jsonl")


# ---------------------------------------------------------------------------------------------------- when one is gone


def wait_for(process: WarmProcess, line: str) -> None:
    while line not in process.stdout:
        assert process.poll() is None, f"no {line!r} came: {process.stderr}"
        time.sleep(0.05)


LONG = {"iterations": 400, "save_interval": 2, "eval_episodes": 0}


def long_job(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    runs = [{"name": "long", "run_dir": str(tmp_path / "run"), "settings": LONG}]
    return {"layout": "ddp", "out": str(tmp_path / "out"), "timeout_s": 30, "runs": runs, **changes}


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_killed_ends_the_others_with_one_line_and_one_process_goes_on(tmp_path, victim):
    some = start(long_job(tmp_path))
    wait_for(some[0], "iteration 5")
    some[victim].kill()
    began = time.monotonic()
    ended = finish(some, timeout=120)
    assert time.monotonic() - began < 120
    code, _, err = ended[1 - victim]
    assert code == 2 and ended[victim][0] == -signal.SIGKILL
    lines = [line for line in err.splitlines() if line.startswith("error")]
    assert len(lines) == 1 and "another of the 2 processes is gone" in lines[0] and "--load_path" in lines[0]
    assert "Traceback" not in err
    newest = max(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step_??????"))
    until = newest + 2
    train(tmp_path / "run", tmp_path / "run", **{**LONG, "iterations": until})
    train(tmp_path / "whole", **{**LONG, "iterations": until})
    found, expected = (load_all(tmp_path / name / "checkpoints" / f"step_{until:06d}") for name in ("run", "whole"))
    assert gap(flat(found), flat(expected)) < 5e-4  # rounding grows from step to step
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == list(range(1, until + 1))


@pytest.mark.slow
@pytest.mark.ci
def test_a_process_that_hangs_is_given_up_after_the_timeout(tmp_path):
    some = start(long_job(tmp_path, timeout_s=6))
    wait_for(some[0], "iteration 3")
    os.kill(some[1].pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        assert some[0].wait(timeout=120) == 2 and time.monotonic() - began < 120
    finally:
        some[1].kill()
        some[1].wait()
    assert "silent for 6 s (process_timeout_s)" in some[0].stderr and "Traceback" not in some[0].stderr


@pytest.mark.slow
def test_sigterm_to_one_process_stops_all_with_a_checkpoint(tmp_path):
    some = start(long_job(tmp_path))
    wait_for(some[0], "iteration 3")
    some[1].send_signal(signal.SIGTERM)
    ended = finish(some, timeout=240)
    assert [code for code, _, _ in ended] == [0, 0], ended[0][2]
    told = [json.loads((tmp_path / "out" / f"{rank}.json").read_text())["long"] for rank in (0, 1)]
    assert {one["stopped_by"] for one in told} == {"SIGTERM"}
    assert told[0]["iterations"] == told[1]["iterations"] >= 3
    assert (tmp_path / "run" / "checkpoints" / f"step_{told[0]['iterations']:06d}").is_dir()


# --------------------------------------------------------------------------------------------------------- the parts


def test_a_process_of_several_ends_in_order_and_without_taking_the_interpreter_apart(tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(
        "import atexit, sys\n"
        "from mafrt.core import distributed\n"
        "from mafrt.scripts.cli.run_main import run_main\n"
        "class Last:\n"
        "    def __del__(self): print('taken apart')\n"
        "last = Last()\n"
        "atexit.register(print, 'registered')\n"
        "distributed._joined = 'joined' in sys.argv\n"
        "sys.exit(run_main(lambda argv: print('worked') or 3, None))\n"
    )
    for words, said in (["joined"], "worked\nregistered\n"), ([], "worked\nregistered\ntaken apart\n"):
        done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (3, said, "")


def test_alone_everything_is_a_no_op():
    tensor = torch.tensor([1.0])
    ALONE.sum([tensor])
    assert ALONE.gather((1, 2)) == [(1, 2)] and ALONE.main and ALONE.lead(lambda: 3) == 3 and tensor.item() == 1.0
    assert ALONE.share([1, 2, 3]) == [1, 2, 3] and ALONE.any(True) and not ALONE.any(False)
    parameter = torch.nn.Parameter(torch.ones(2))
    ALONE.sum_gradients([parameter])
    assert parameter.grad is None


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_blocks_of_samples_are_shared_whole_and_each_once(size):
    slots = [own_slots(Processes(rank, size), 24, 4) for rank in range(size)]
    assert sorted(slot for some in slots for slot in some) == list(range(24))
    owner = {slot: rank for rank, some in enumerate(slots) for slot in some}
    assert all(owner[slot] == owner[slot - slot % 4] for slot in range(24))
    assert max(map(len, slots)) - min(map(len, slots)) <= 4


def test_what_is_different_is_named():
    class Two(Processes):
        def gather(self, value):
            return [value, {**value, "settings": {"lr": 2.0, "seed": 1}}]

    Two(0, 2).same({"settings": {"lr": 2.0, "seed": 1}}, "the run")
    with pytest.raises(ConfigError, match=r"the run: settings: lr differs .*process 0 has 1\.0, process 1 has 2\.0"):
        Two(0, 2).same({"settings": {"lr": 1.0, "seed": 1}}, "the run")


def test_episodes_cross_whole_and_bit_for_bit():
    turn = Turn("a", [1, 2], [3, 4], [-0.1, float("-inf")], "eos", "x\ud800\U0001f600", 0, 1, 7, reward=1 / 3)
    turn.coach = Scored(7.5, "good", (("x", 3.0), ("y", 0.1)))
    turn.evidence = Evidence("42", Scored(10.0), {"status": "ok", "files": [["a", 2]]})
    turn.values = [0.1 + 0.2, 1e-300]
    other = Turn("b", [1], [], [], "length", "", 1, 2, 7, coach=Unscored("no answer"))
    episode = Episode("e", "g", [turn, other], outcome=0.5, info={"task": "ash", "level": None})
    crossed = records.unpack_episode(json.loads(json.dumps(records.pack_episode(episode))))
    assert crossed == episode and isinstance(crossed.turns[0].coach, Scored)
    verdicts = json.loads(json.dumps(records.pack_verdicts([episode])))
    for one in crossed.turns:
        one.coach = None
    records.unpack_verdicts([crossed], verdicts)
    assert crossed == episode


def test_errors_cross_with_their_class():
    for error in (DataError("no file"), BudgetSpentError("spent")):
        again = unpacked_error(json.loads(json.dumps(packed_error(error))))
        assert type(again) is type(error) and str(again) == str(error)
    assert type(unpacked_error({"kind": "Popen", "text": "x"})) is MafrtError


def test_more_processes_than_tasks_and_feedback_are_refused():
    with pytest.raises(ConfigError, match=r"makes 4 tasks in an iteration, too few for 8 processes; raise it to .* 32"):
        check_processes(Processes(0, 8), settings(n_rollout_threads=16, n_samples=4))
    check_processes(Processes(0, 4), settings(n_rollout_threads=16, n_samples=4))
    with pytest.raises(ConfigError, match="coach_feedback"):
        check_processes(Processes(0, 2), settings(coach="rules", coach_feedback=True))


def test_a_stream_played_in_two_parts_deals_the_same_episodes_as_in_one():
    """What `play_together` relies on: starts depend on the slot, not on who else plays."""

    def deal(slots):
        stream = TaskStream(
            slots=8, n_samples=2, turns=2, order=shuffled_passes(5, seed=3), seed=3, iteration=1, drawn=10
        )
        return [stream.next_start(slot, None) for slot in slots], stream.drawn

    whole, drawn = deal(range(8))
    parts = [deal(own_slots(Processes(rank, 2), 8, 2)) for rank in (0, 1)]
    key = lambda start: start.id  # noqa: E731
    assert sorted((start for some, _ in parts for start in some), key=key) == sorted(whole, key=key)
    assert max(position for _, position in parts) == drawn
