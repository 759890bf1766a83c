"""Transcripts: recorded as played and paid, exact on resume, bounded, readable as far as they are whole."""

from __future__ import annotations

import gzip
import json

import pytest
from helpers_models import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from toy import make

from mafrt.config.team import AgentSpec, Team
from mafrt.core.types import Episode, Evidence, Scored, Turn
from mafrt.storage.transcript_files import read_transcript, transcript_files
from mafrt.storage.transcripts import TranscriptWriter, token_ends, transcript_of

TEAM = Team((AgentSpec("solver", prompt="Solve."), AgentSpec("critic")))


def said(text="ab", advantages=None, **more) -> Turn:
    """A turn of which every character is a token."""
    ids = [ord(c) for c in text]
    return Turn("solver", [1], ids, [-0.1] * len(ids), "eos", text, 0, 0, 0, advantages=advantages, **more)


def decode(ids) -> str:
    return "".join(map(chr, ids))


def contents(run):
    return {file.path.name: read_transcript(file) for file in transcript_files(run)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of four iterations with evaluations before and after."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    make(folder, iterations=4, eval_interval=2).run()
    return folder


def test_a_run_records_observations_prompts_rewards_and_advantages(whole):
    found = contents(whole)
    assert [*found] == [
        "evaluation_000000.jsonl.gz",
        "train_000001.jsonl.gz",
        "train_000002.jsonl.gz",
        "evaluation_000002.jsonl.gz",
        "train_000003.jsonl.gz",
        "train_000004.jsonl.gz",
        "evaluation_000004.jsonl.gz",
    ]
    train = found["train_000002.jsonl.gz"]
    assert train.header["episodes"] == train.header["recorded"] == len(train.episodes) == 16
    lines = [json.loads(line) for line in (whole / "episodes.jsonl").read_text().splitlines()]
    of_iteration = {line["id"]: line for line in lines if line["iteration"] == 2}
    for episode in train.episodes:
        first, second = episode["turns"]
        assert second["observation"] == f"{episode['info']['task']} {first['text']}"
        assert second["paid"] == pytest.approx(episode["outcome"])  # the outcome goes to the last turn
        # The path from the pay to the advantage.
        parts = {"outcome": second["paid"]} if second["paid"] else {}
        assert second.get("parts", {}) == pytest.approx(parts, rel=1e-3)
        assert "return" in second
        mean = of_iteration[episode["id"]]["turns"][0]["advantage"]
        per_token = first["advantages"]
        shown = sum(per_token) / len(per_token) if isinstance(per_token, list) else per_token
        assert mean == pytest.approx(shown, rel=1e-3, abs=1e-3)  # four digits of each token
    evaluation = found["evaluation_000004.jsonl.gz"]
    assert len(evaluation.episodes) == 4 * (2 + 1)  # tasks; two sampled and a greedy one
    assert "advantages" not in evaluation.episodes[0]["turns"][0]


@pytest.mark.slow
def test_recording_changes_no_number(whole, tmp_path):
    make(tmp_path / "bare", iterations=4, eval_interval=2, transcript_share=0.0).run()
    assert not (tmp_path / "bare" / "transcripts").exists()
    for name in ("metrics.jsonl", "evaluations.jsonl", "episodes.jsonl"):
        assert (tmp_path / "bare" / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow
def test_a_resumed_run_has_the_transcripts_of_an_uninterrupted_one(whole, tmp_path):
    folder = tmp_path / "run"
    make(folder, iterations=3, eval_interval=2, save_interval=2).run()
    # The evaluation after iteration 3 is one that the uninterrupted run never made; step 2 is gone on with.
    make(folder, folder / "checkpoints" / "step_000002", iterations=4, eval_interval=2).run()
    assert contents(folder).keys() == contents(whole).keys()
    for name in contents(whole):
        assert (folder / "transcripts" / name).read_bytes() == (whole / "transcripts" / name).read_bytes(), name
    make(tmp_path / "branch", folder / "checkpoints" / "step_000002", iterations=3, eval_interval=2).run()
    assert "train_000003.jsonl.gz" in contents(tmp_path / "branch") and "train_000004.jsonl.gz" not in contents(
        tmp_path / "branch"
    )
    assert "train_000001.jsonl.gz" in contents(tmp_path / "branch")


def test_share_takes_whole_groups_and_the_limit_bounds_a_file(tmp_path):
    episodes = [Episode(f"{g:03d}-{n}", f"{g:03d}", [said("x" * 1000)]) for g in range(40) for n in range(2)]
    writer = TranscriptWriter(tmp_path / "transcripts", TEAM, decode, share=0.5, max_mib=1.0)
    writer.write("train", 1, episodes)
    writer.write("evaluation", 0, episodes[:40])
    found = contents(tmp_path)
    train, evaluation = found["train_000001.jsonl.gz"], found["evaluation_000000.jsonl.gz"]
    groups = [episode["group"] for episode in train.episodes]
    assert all(groups.count(group) == 2 for group in groups) and 10 < len(groups) < 70
    assert {e["group"] for e in evaluation.episodes} == {group for group in groups if int(group) < 20}
    assert train.header["episodes"] == 80 and train.header["recorded"] == len(groups)
    prompts = {name: agent["prompt"] for name, agent in train.header["team"].items()}
    assert prompts == {"solver": "Solve.", "critic": ""}
    TranscriptWriter(tmp_path / "transcripts", TEAM, decode, share=1.0, max_mib=0.01).write("train", 2, episodes)
    small = contents(tmp_path)["train_000002.jsonl.gz"]
    # Two lines of a group have 2.4 kB: four groups fit in 10.5 kB.
    assert small.header["recorded"] == len(small.episodes) == 8 and len({e["group"] for e in small.episodes}) == 4
    TranscriptWriter(tmp_path / "transcripts", TEAM, decode, share=1.0, max_mib=0.0015).write("train", 3, episodes)
    assert len(contents(tmp_path)["train_000003.jsonl.gz"].episodes) == 1  # half a group is better than none


def test_a_disk_that_refuses_ends_the_recording_and_not_the_run(tmp_path, caplog):
    (tmp_path / "transcripts").write_text("a file in the way")
    writer = TranscriptWriter(tmp_path / "transcripts", TEAM, decode, share=1.0, max_mib=1.0)
    writer.write("train", 1, [Episode("e", "g", [said()])])
    writer.write("train", 2, [Episode("e", "g", [said()])])
    assert caplog.text.count("transcripts cannot be written any more") == 1


def test_a_turn_keeps_its_evidence_verdict_and_token_ends():
    turn = said("12", [1.23456, -2.0], coach=Scored(7.0, "fine"), evidence=Evidence(tool_output="4"), paid=0.5)
    line = transcript_of(Episode("e", "g", [turn]), decode)["turns"][0]
    assert line["advantages"] == [1.235, -2.0] and line["token_ends"] == [1, 2]
    assert line["coach"]["reason"] == "fine" and line["evidence"] == {"tool_output": "4"} and line["paid"] == 0.5
    flat = transcript_of(Episode("e", "g", [said("12", [0.5, 0.5])]), decode)["turns"][0]
    assert flat["advantages"] == 0.5 and "token_ends" not in flat


@given(st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=40))
def test_token_ends_add_up_to_the_text(text):
    """Tokens are the bytes of the text, as those of a byte-level tokenizer can be."""

    def decode_bytes(ids):
        return bytes(ids).decode("utf-8", "replace")

    ends = token_ends(list(text.encode()), text, decode_bytes)
    assert ends is not None and len(ends) == len(text.encode())
    assert ends == sorted(ends) and (not ends or ends[-1] == len(text))


def test_token_ends_of_a_real_tokenizer():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("12 34 elm", add_special_tokens=False)
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    ends = token_ends(ids, text, lambda some: tokenizer.decode(some, skip_special_tokens=True))
    assert ends is not None and ends[-1] == len(text)


@pytest.mark.parametrize(
    ("damage", "left", "says"),
    [
        (lambda data: data[: len(data) * 2 // 3], range(0, 20), "is damaged after line"),
        (lambda data: gzip.compress(gzip.decompress(data)[:-20]), range(19, 20), "no whole JSON object in line 21"),
        (lambda data: b"no gzip at all", range(0, 1), "is damaged after line 0"),
        (lambda data: gzip.compress(b'{"format": 99}\n{}\n'), range(0, 1), "has format 99; this version"),
        (lambda data: gzip.compress(b"[1]\n{}\n"), range(0, 1), "no whole JSON object in line 1"),
        (lambda data: b"", range(0, 1), ""),
    ],
)
def test_a_damaged_file_is_read_as_far_as_it_goes(tmp_path, damage, left, says):
    writer = TranscriptWriter(tmp_path / "transcripts", TEAM, decode, share=1.0, max_mib=1.0)
    writer.write("train", 1, [Episode(f"{n:03d}", f"{n * 7919}", [said(f"{n}" * 50)]) for n in range(20)])
    [file] = transcript_files(tmp_path)
    file.path.write_bytes(damage(file.path.read_bytes()))
    found = read_transcript(file)
    assert len(found.episodes) in left
    assert says in (found.problem or "")
