"""Every number has a meaning, and is written so that others can read it. As a script: renews docs/runs.md."""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path

import pytest

from mafrt.storage import checkpoint, load_path
from mafrt.storage.metrics import MetricsWriter, explain, glossary
from mafrt.storage.run_dir import RunDir

DOCS = Path(__file__).parents[2] / "docs" / "runs.md"
BEGIN, END = "<!-- glossary -->\n", "\n<!-- end of glossary -->"


def glossary_markdown() -> str:
    """The glossary as the table that `docs/runs.md` shows."""
    rows = [f"| `{name}` | {meaning.text} | {meaning.unit} |" for name, meaning in glossary().items()]
    return "\n".join(["| metric | meaning | unit |", "|---|---|---|", *rows])


def lines(run: RunDir, name: str) -> list[dict]:
    path = run.path / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def curves(run: RunDir) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would show."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run.tensorboard))
    found.Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


# ------------------------------------------------------------------------------------------------------ the glossary


def test_patterns_stand_for_names_and_numbers():
    assert explain("kl/Problem-Solver_2.1") is glossary()["kl/AGENT"]
    assert explain("eval/avg@16") is glossary()["eval/avg@K"]
    assert explain("grad_norm/critic") is glossary()["grad_norm/critic"]
    assert explain("eval/measure/points/ann") is glossary()["eval/measure/MEASURE"]
    assert explain("measure/share of the way") is glossary()["measure/MEASURE"]
    for name in ("kl/a/b", "kl/", "eval/avg@", "eval/avg@0", "kl/AGENT/x", "kl"):
        with pytest.raises(KeyError):
            explain(name)
    with pytest.raises(KeyError, match=r"metric 'entrpoy/solver' is not in .*glossary.yaml.*is it entropy/AGENT\?"):
        explain("entrpoy/solver")


def test_entries_are_one_line_of_plain_words():
    for name, (text, unit) in glossary().items():
        assert 5 < len(text) < 110 and "\n" not in text and "|" not in text + unit and not text.endswith("."), name
        assert len(unit) < 30, name


def test_the_docs_show_the_glossary():
    shown = DOCS.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    assert shown == glossary_markdown(), "docs/runs.md is out of date; run: python tests/project/test_metrics.py"


@pytest.mark.slow
def test_everything_that_a_run_writes_is_explained(tmp_path):
    """With all optional parts switched on, so that their metrics appear."""
    from toy import train

    train(tmp_path / "a", iterations=2, eval_interval=1, kl_coef=0.01, entropy_coef=0.01, target_kl=9.0)
    train(tmp_path / "b", iterations=2, level="action", agent_iteration_interval=1, warmup_steps=1)
    train(tmp_path / "c", iterations=1, algorithm="qmix", n_samples=4)
    train(tmp_path / "d", iterations=1, algorithm="dapo", n_samples=4)
    for run in ("a", "b", "c", "d"):
        for name in ("metrics", "evaluations", "timings"):
            content = (tmp_path / run / f"{name}.jsonl").read_text().splitlines()
            assert content
            for metric in {key for line in content for key in json.loads(line)}:
                explain(metric)


@pytest.mark.parametrize("rule", ["gae", "grpo", "gigpo", "reinforce_pp", "maporl", "vdn"])
def test_everything_that_credit_reports_is_explained(rule):
    from mafrt import algorithms
    from mafrt.core.types import Episode, Turn

    def turn(agent: str, index: int) -> Turn:
        return Turn(agent, [1], [2], [-1.0], "eos", "x", index, index, 0, 1.0, values=[0.5], ref_logprobs=[-1.0])

    episodes = [Episode(str(i), "g", [turn("a", 0), turn("b", 1)], float(i)) for i in range(3)]
    for metric in algorithms.assign(episodes, rule=rule):
        explain(metric)


# ------------------------------------------------------------------------------------------------------- the writer


def test_numbers_go_to_lines_and_to_tensorboard(tmp_path):
    import torch

    with RunDir.open(tmp_path / "run", {}) as run, MetricsWriter(run) as writer:
        writer.write_evaluation(0, "before", {"eval/greedy": 0.25})
        for iteration in (1, 2):
            values = {"score": iteration / 2, "kl/a": torch.tensor(0.5), "episodes": 3, "trained/a": True}
            writer.write(iteration, values, {"seconds_play": 9.0})
    first = {"iteration": 1, "score": 0.5, "kl/a": 0.5, "episodes": 3, "trained/a": 1, "nonfinite_values": 0}
    assert lines(run, "metrics")[0] == first
    assert lines(run, "timings") == [{"iteration": i, "seconds_play": 9.0} for i in (1, 2)]
    assert lines(run, "evaluations") == [{"iteration": 0, "when": "before", "eval/greedy": 0.25}]
    shown = curves(run)
    assert shown["score"] == [(1, 0.5), (2, 1.0)]
    assert shown["seconds_play"] == [(1, 9.0), (2, 9.0)] and shown["eval/greedy"] == [(0, 0.25)]


def test_what_is_not_finite_is_null_and_counted(tmp_path, caplog):
    values = {"score": math.nan, "kl/a": math.inf, "kl/b": 1.0, "explained_variance/a": None}
    with RunDir.open(tmp_path / "run", {}) as run, MetricsWriter(run) as writer:
        writer.write(1, values)
    expected = {"score": None, "kl/a": None, "kl/b": 1.0, "explained_variance/a": None, "nonfinite_values": 2}
    assert lines(run, "metrics") == [{"iteration": 1, **expected}]
    assert "iteration 1: not finite: score, kl/a" in caplog.text
    assert set(curves(run)) == {"kl/b", "nonfinite_values"}


def test_an_unknown_name_is_written_and_warned_about_once(tmp_path, caplog):
    with RunDir.open(tmp_path / "run", {}) as run, MetricsWriter(run, trackers=()) as writer:
        for iteration in (1, 2):
            writer.write(iteration, {"my_own": 1.0})
    assert [line["my_own"] for line in lines(run, "metrics")] == [1.0, 1.0]
    assert [r.levelno for r in caplog.records] == [logging.WARNING] and "'my_own'" in caplog.text
    assert not run.tensorboard.exists()


def test_a_resumed_run_hides_what_is_played_again(tmp_path):
    path = tmp_path / "run"
    with RunDir.open(path, {}) as run, MetricsWriter(run) as writer:
        for iteration in (1, 2, 3):
            writer.write(iteration, {"score": 0.0})
            if iteration == 2:
                checkpoint.save(run.checkpoints, 2, {"state/x": lambda target: target.write_text("x")})
    time.sleep(1.0)  # TensorBoard orders a run's files by their names, of which only the seconds are numbers in order
    with RunDir.open(path, {}, load_path.resolve(path)) as run, MetricsWriter(run) as writer:
        writer.write(3, {"score": 1.0})
        writer.write(4, {"score": 1.0})
    assert curves(run)["score"] == [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0)]
    assert [line["score"] for line in lines(run, "metrics")] == [0.0, 0.0, 1.0, 1.0]


def test_a_board_that_breaks_does_not_end_the_run(tmp_path, caplog):
    class Full:
        def scalars(self, *_):
            raise OSError(28, "No space left on device")

    with RunDir.open(tmp_path / "run", {}) as run, MetricsWriter(run, trackers=()) as writer:
        writer._trackers.open["TensorBoard"] = Full()
        writer.write(1, {"score": 0.5})
        writer.write(2, {"score": 0.5})
    assert len(lines(run, "metrics")) == 2
    assert caplog.text.count("TensorBoard cannot be written any more") == 1


if __name__ == "__main__":  # writes the table of docs/runs.md
    page = DOCS.read_text(encoding="utf-8")
    head, tail = page.split(BEGIN)[0], page.split(END)[1]
    DOCS.write_text(head + BEGIN + glossary_markdown() + END + tail, encoding="utf-8")
