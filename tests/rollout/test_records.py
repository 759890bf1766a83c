"""Records without play: strict files, faithful episodes, and who learns from what when."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from helpers_models import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from toy import Digits, make

from mafrt.config.agent import AgentSpec
from mafrt.config.team import Team
from mafrt.core.errors import DataError
from mafrt.core.types import Turn
from mafrt.rollout.prompts import encode_prompt
from mafrt.runners.offline.dataset import Record, batch_at, digest, encode, fit, read_answers, steps_per_epoch
from mafrt.runners.offline.dpo import pairs_of
from mafrt.runners.offline.replay import RecordedTurn, read_episodes, recorded_turns
from mafrt.runners.offline.sft import examples_of

TEAM = Team((AgentSpec("solver", prompt="Solve."), AgentSpec("critic")))
PAIR = ("chosen", "rejected")
EOS = 1


def written(path, *lines):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


# --------------------------------------------------------------------------------------------------------------- files


def test_records_become_the_tokens_that_play_would_have_shown(tmp_path):
    messages = [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "?"},
    ]
    path = written(
        tmp_path / "a.jsonl",
        {"agent": "solver", "prompt": "1+1", "response": "2", "source": "ignored"},
        "",
        {"agent": "critic", "messages": messages, "response": "4"},
    )
    tokenizer = tiny_tokenizer()
    first, second = encode(read_answers([path], ("response",), TEAM), TEAM, tokenizer)
    assert first.turns[0].prompt_ids == encode_prompt(tokenizer, "Solve.", "1+1")
    assert second.turns[0].prompt_ids == encode_prompt(tokenizer, "", messages)
    assert first.turns[0].action_ids == [*tokenizer.encode("2"), EOS]
    assert (second.agent, second.where) == ("critic", f"{path}, line 3")


def test_the_two_answers_of_a_pair_share_their_prompt(tmp_path):
    path = written(tmp_path / "a.jsonl", {"agent": "solver", "prompt": "1+1", "chosen": "2", "rejected": ""})
    [record] = encode(read_answers([path], PAIR, TEAM), TEAM, tiny_tokenizer())
    assert record.turns[0].prompt_ids == record.turns[1].prompt_ids
    assert record.turns[1].action_ids == [EOS]  # silence is an answer that one may not want


GOOD = {"agent": "solver", "prompt": "p", "chosen": "a", "rejected": "b"}


def without(name, **more):
    return {key: value for key, value in GOOD.items() if key != name} | more


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: is not one JSON object"),
        ("[1]", "line 2: expected an object with fields, found list"),
        ('{"agent": NaN}', "line 2: is not one JSON object (NaN is no number)"),
        (without("agent"), "line 2: lacks the field 'agent'; it has the keys 'prompt', 'chosen', 'rejected'"),
        (without("chosen", choosen="a"), "line 2: lacks the field 'chosen'; it has .*'choosen'"),
        (without("prompt"), "line 2: expected either 'prompt' or 'messages', found neither"),
        ({**GOOD, "messages": []}, "line 2: expected either 'prompt' or 'messages', found both"),
        ({**GOOD, "agent": "slover"}, "line 2: There is no agent 'slover'; did you mean 'solver'?"),
        ({**GOOD, "agent": 3}, "line 2: 'agent' must be a text that is not empty, found int 3"),
        ({**GOOD, "chosen": None}, "line 2: 'chosen' must be a text that is not empty, found NoneType None"),
        ({**GOOD, "chosen": " "}, "line 2: 'chosen' must be a text that is not empty"),
        ({**GOOD, "rejected": 1.5}, "line 2: 'rejected' must be a text, found float 1.5"),
        ({**GOOD, "rejected": "a"}, "line 2: chosen and rejected are the same text"),
        (without("prompt", messages=[]), "line 2: 'messages' must be a list of"),
        (without("prompt", messages=[{"role": "boss", "content": ""}]), "line 2: 'messages' must be a list of"),
        (without("prompt", messages=[{"role": "assistant", "content": "x"}]), "line 2: 'messages' must end before"),
        (
            without("prompt", messages=[{"role": "tools", "content": "{"}, {"role": "user", "content": "x"}]),
            "line 2: 'messages': the schemas of tools must be JSON",
        ),
    ],
)
def test_a_bad_record_is_refused_by_file_and_line(tmp_path, line, says):
    import re

    path = written(tmp_path / "bad.jsonl", GOOD, line)
    pattern = re.escape(f"{path}, ") + (says if ".*" in says else re.escape(says))
    with pytest.raises(DataError, match=pattern):
        read_answers([path], PAIR, TEAM)


def test_a_bad_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_answers([tmp_path / "none.jsonl"], PAIR, TEAM)
    with pytest.raises(DataError, match="holds no records"):
        read_answers([written(tmp_path / "empty.jsonl", "", "")], PAIR, TEAM)
    (tmp_path / "latin.jsonl").write_bytes(b'{"agent": "\xe9"}\n')
    with pytest.raises(DataError, match="line 1: is not UTF-8"):
        read_answers([tmp_path / "latin.jsonl"], PAIR, TEAM)


def test_what_does_not_fit_is_refused_or_left_out(tmp_path):
    path = written(tmp_path / "a.jsonl", {**GOOD, "rejected": "b" * 300}, GOOD)
    records = encode(read_answers([path], PAIR, TEAM), TEAM, tiny_tokenizer())
    assert fit(records, 256, skip=True) == records[1:]
    with pytest.raises(DataError, match=r"line 1: prompt and answer have \d+ tokens, more than the context window"):
        fit(records, 256, skip=False)


# ---------------------------------------------------------------------------------------------------------------- order


@given(count=st.integers(1, 60), size=st.integers(1, 20), seed=st.integers(0, 3))
def test_every_pass_takes_every_record_once_in_batches_of_about_one_size(count, size, seed):
    steps = steps_per_epoch(count, size)
    for epoch in range(2):
        batches = [batch_at(epoch * steps + step, count, size, seed, "solver") for step in range(steps)]
        assert sorted(index for batch in batches for index in batch) == list(range(count))
        assert max(map(len, batches)) <= size and max(map(len, batches)) - min(map(len, batches)) <= 1


def test_passes_and_adapters_have_orders_of_their_own():
    def first(step, name, seed=1):
        return batch_at(step, 40, 10, seed, name)

    assert first(0, "a") == first(0, "a")
    assert len({tuple(first(*key)) for key in ((0, "a"), (4, "a"), (0, "b"), (0, "a", 2))}) == 4


def test_the_digest_tells_order_agents_and_tokens_apart():
    def record(agent="solver", prompt=(1, 2), action=(3,)):
        return Record((turn_of(agent, prompt, action),), "here")

    found = {
        digest([record(), record("critic")]),
        digest([record("critic"), record()]),
        digest([record()]),
        digest([record(prompt=(1,), action=(2, 3))]),
    }
    assert len(found) == 4


# ------------------------------------------------------------------------------------------------- recorded episodes


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A finished toy run, and the turns as they really were."""
    path = tmp_path_factory.mktemp("runs") / "toy"
    runner = make(path, iterations=2, n_samples=4, eval_episodes=0)
    turns, value = {}, runner.updater.value

    def watch(episodes, *rest, **more):
        turns.update({episode.id: list(episode.turns) for episode in episodes})
        return value(episodes, *rest, **more)

    runner.updater.value = watch
    runner.run()
    return path, runner.team, runner.base.tokenizer, turns


def test_playing_again_finds_the_very_prompts(played):
    path, team, tokenizer, turns = played
    episodes = read_episodes(path, team)
    said, counts = recorded_turns(episodes, team, tokenizer, env=Digits(), seed=1)
    assert counts["episodes"] == len(turns) == 32 and not counts["not_reproduced"] and not counts["no_return"]
    real = [turn for _, episode in episodes for turn in turns[episode["id"]]]
    assert [one.turn.prompt_ids for one in said] == [turn.prompt_ids for turn in real]
    # Special tokens leave no text behind, bar the one at the end that says that an answer is over.
    plain = [min([9, *turn.action_ids[: len(turn.action_ids) - (turn.stop == "eos")]]) > 4 for turn in real]
    same = [one.turn.action_ids == turn.action_ids for one, turn in zip(said, real, strict=True)]
    assert same == plain and counts["retokenised"] == plain.count(False) > 0
    worth = {(episode["id"], turn["turn"]): episode["outcome"] for _, episode in episodes for turn in episode["turns"]}
    assert [one.worth for one in said] == list(worth.values())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda e: e["turns"][0].update(text=e["turns"][0]["text"] + "1"),
        lambda e: e["turns"][1].update(prompt_tokens=e["turns"][1]["prompt_tokens"] + 1),
        lambda e: e["turns"].reverse(),
        lambda e: e["info"].update(task="another"),
        lambda e: e.update(outcome=0.123),
        lambda e: e.update(group="somewhere else"),
        lambda e: e["turns"].append(dict(e["turns"][1], env_step=2)),
    ],
)
def test_an_episode_that_comes_out_otherwise_is_left_out_and_counted(played, spoil):
    path, team, tokenizer, _ = played
    episodes = read_episodes(path, team)[:3]
    spoil(episodes[1][1])
    said, counts = recorded_turns(episodes, team, tokenizer, env=Digits(), seed=1)
    assert counts["not_reproduced"] == 1 and {one.where for one in said} == {episodes[0][0], episodes[2][0]}


def test_another_seed_reproduces_nothing_and_no_environment_is_refused(played):
    path, team, tokenizer, _ = played
    episodes = read_episodes(path, team)
    _, counts = recorded_turns(episodes, team, tokenizer, env=Digits(), seed=2)
    assert counts["not_reproduced"] > len(episodes) / 2  # five tasks: a few are drawn in the same place
    with pytest.raises(DataError, match="line 1: holds no token ids, and there is no environment"):
        recorded_turns(episodes, team, tokenizer)


def test_recorded_token_ids_are_taken_as_they_are(played):
    path, team, tokenizer, turns = played
    episodes = read_episodes(path, team)
    for _, episode in episodes:
        for line, turn in zip(episode["turns"], turns[episode["id"]], strict=True):
            line |= {"prompt_ids": turn.prompt_ids, "action_ids": turn.action_ids}
    said, counts = recorded_turns(episodes, team, tokenizer)
    real = [turn for _, episode in episodes for turn in turns[episode["id"]]]
    assert [(o.turn.prompt_ids, o.turn.action_ids) for o in said] == [(t.prompt_ids, t.action_ids) for t in real]
    assert counts == Counter(episodes=32)
    episodes[0][1]["turns"][0]["action_ids"] = [10**6]
    with pytest.raises(DataError, match="line 1: token ids must be whole numbers below"):
        recorded_turns(episodes, team, tokenizer)


def test_the_return_is_the_episodes_or_the_agents_own(played):
    _, team, tokenizer, _ = played

    def episode(outcome, *rewards):
        turns = [
            {
                "agent": agent,
                "text": "x",
                "stop": "eos",
                "env_step": i,
                "tokens": 2,
                "prompt_tokens": 1,
                "reward": reward,
            }
            | {"prompt_ids": [9], "action_ids": [10, 1]}
            for i, (agent, reward) in enumerate(rewards)
        ]
        return ("here", {"group": "g", "outcome": outcome, "info": {}, "turns": turns})

    both = [
        episode(None, ("first", 1.0), ("second", 0.5), ("first", 0.25)),
        episode(0.75, ("first", 1.0), ("second", None)),
        episode(None, ("first", None), ("second", None)),
    ]
    said, counts = recorded_turns(both, team, tokenizer)
    assert [one.worth for one in said] == [1.75, 1.75, 1.75, 0.75, 0.75] and counts["no_return"] == 2
    said, counts = recorded_turns(both, team, tokenizer, return_of="agent")
    assert [one.worth for one in said] == [1.25, 0.5, 0.25, 1.0] and counts["no_return"] == 3


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"a": 1}, "line 1: is no episode"),
        (
            {"group": "g", "info": {}, "outcome": "good", "turns": []},
            "line 1: 'outcome' must be a finite number or null",
        ),
        ({"group": "g", "info": {}, "turns": []}, "line 1: 'outcome' must be a finite number or null, found nothing"),
        ('{"group": "g", "info": {}, "outcome": 1e999, "turns": []}', "line 1: 'outcome' must be a finite number"),
        ({"group": "g", "info": {}, "outcome": 1, "turns": [3]}, "line 1: a turn must be an object"),
        (
            {"group": "g", "info": {}, "outcome": 1, "turns": [{"agent": "solver", "text": "", "reward": None}]},
            "line 1: a turn lacks env_step, stop, tokens, prompt_tokens",
        ),
        (
            {"group": "g", "info": {}, "outcome": 1, "turns": [{"agent": "critik", "text": "", "reward": None}]},
            "line 1: There is no agent 'critik'; did you mean 'critic'?",
        ),
    ],
)
def test_a_bad_episode_is_refused_by_file_and_line(tmp_path, line, says):
    written(tmp_path / "episodes.jsonl", line)
    with pytest.raises(DataError) as caught:
        read_episodes(tmp_path, TEAM)
    assert says in str(caught.value) and str(tmp_path / "episodes.jsonl") in str(caught.value)


def test_half_a_line_of_a_killed_run_is_passed_over(tmp_path):
    path = written(tmp_path / "episodes.jsonl", {"group": "g", "info": {}, "outcome": 1, "turns": []})
    path.write_text(path.read_text() + '{"group": "g", "inf')
    assert len(read_episodes(tmp_path, TEAM)) == 1
    with pytest.raises(DataError, match=r"holds no episodes\.jsonl"):
        read_episodes(tmp_path / "elsewhere", TEAM)


# ----------------------------------------------------------------------------------------------------- what is chosen


def turn_of(agent, prompt, action):
    return Turn(agent, list(prompt), list(action), [], "eos", "", turn=0, env_step=0, adapter_version=0)


def said_of(worth, action, *, agent="solver", prompt=(5,), problem="p"):
    return RecordedTurn(turn_of(agent, prompt, action), problem, worth, "here")


def shown(pairs):
    return [tuple(tuple(turn.action_ids) for turn in pair.turns) for pair in pairs]


def test_pairs_share_problem_agent_and_prompt_and_differ_in_return():
    # In one context: answer 7 has returns 1 and 0, mean .5; 8 has 1; 9 has 0; 6 has .5. Sorted: 9, (6, 7), 8.
    # Best with worst: 8 over 9. Then 7 against 6: both .5, no preference.
    said = [said_of(1, [7]), said_of(0, [7]), said_of(1, [8]), said_of(0, [9]), said_of(0.5, [6])]
    assert shown(pairs_of(said)) == [((8,), (9,))]
    # With returns 0, .25, .5, 1: 4 over 1 (gap 1) and 3 over 2 (gap .25).
    said = [said_of(0, [1]), said_of(0.25, [2]), said_of(0.5, [3]), said_of(1, [4])]
    assert shown(pairs_of(said)) == [((4,), (1,)), ((3,), (2,))]
    assert shown(pairs_of(said, min_gap=0.25)) == [((4,), (1,))]
    for other in ({"problem": "q"}, {"agent": "critic"}, {"prompt": (6,)}):
        assert pairs_of([said_of(1, [8]), said_of(0, [9], **other)]) == []


@given(st.permutations(range(8)))
def test_pairs_do_not_depend_on_the_order_of_what_was_said(order):
    worths = [0.1, 0.2, 0.3, 1.0, 0.7, 0.0, 0.0, 0.9]
    said = [said_of(worths[i], [i % 6], prompt=(5 + i % 2,)) for i in range(8)]
    assert shown(pairs_of([said[i] for i in order])) == shown(pairs_of(said)) != []


def test_examples_are_what_was_worth_enough_each_once():
    said = [said_of(1, [7]), said_of(1, [7]), said_of(0.9, [8]), said_of(2, [9]), said_of(1, [7], agent="critic")]
    found = [(record.agent, record.turns[0].action_ids) for record in examples_of(said, min_return=1)]
    assert found == [("solver", [7]), ("solver", [9]), ("critic", [7])]


@pytest.mark.slow
def test_a_run_that_logs_its_tokens_needs_no_environment(tmp_path):
    runner = make(tmp_path / "run", iterations=1, eval_episodes=0, log_tokens=True)
    runner.run()
    episodes = read_episodes(tmp_path / "run", runner.team)
    said, counts = recorded_turns(episodes, runner.team, runner.base.tokenizer)
    assert len(said) == 32 and not counts["retokenised"]
    again, _ = recorded_turns(
        [
            (w, {**e, "turns": [{k: v for k, v in t.items() if not k.endswith("_ids")} for t in e["turns"]]})
            for w, e in episodes
        ],
        runner.team,
        runner.base.tokenizer,
        env=Digits(),
        seed=1,
    )
    assert [one.turn.prompt_ids for one in said] == [one.turn.prompt_ids for one in again]


@pytest.mark.parametrize(
    ("fields", "records"),
    [
        (("response",), [{"prompt": "1+1", "completion": "2"}, {"prompt": "1+2", "completion": "3"}]),
        (("response",), [{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}]),
        (("chosen", "rejected"), [{"prompt": "1+1", "chosen": "2", "rejected": "3"}]),
    ],
)
def test_records_of_libraries_that_know_one_model_are_of_one_agent(tmp_path, fields, records):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(f"{json.dumps(each)}\n" for each in records))
    found = read_answers([file], fields, None)
    assert len(found) == len(records) and {answer.agent for group in found for answer in group} == {"solver"}
    with open(file, "a") as more:
        more.write(json.dumps({**records[0], "agent": "actor"}) + "\n")
    with pytest.raises(DataError, match="There is no agent 'actor'"):
        read_answers([file], fields, None)
    file.write_text("\n".join(json.dumps(each) for each in ({**records[0], "agent": "actor"}, records[0])))
    with pytest.raises(DataError, match="line 2: lacks the field 'agent'"):
        read_answers([file], fields, None)
