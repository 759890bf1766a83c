"""Playing: who is asked what, what becomes of rewards, outcomes, errors and prompts that are too long."""

from __future__ import annotations

import threading

import pytest
from helpers_models import tiny_tokenizer

from mafrt.config.team import Team
from mafrt.core.errors import EnvError
from mafrt.core.types import SamplingParams, StepResult
from mafrt.engines.scripted import ScriptedEngine
from mafrt.environment.base import Env
from mafrt.rollout.player import Player, Start
from mafrt.rollout.prompts import encode_prompt, messages_of


class Relay(Env):
    """a speaks, b speaks, a speaks again; b is paid when it speaks, a is paid for its first words on the last step."""

    agents = ("a", "b")

    def reset(self, seed=None, options=None):
        self.said = []
        return {"a": "start"}, {"task": "t"}

    def step(self, actions):
        self.said += [f"{name}:{text}" for name, text in actions.items()]
        over = len(self.said) == 3
        rewards = {1: {}, 2: {"b": 0.5}, 3: {"a": 2.0, "b": 0.25}}[len(self.said)]
        who = "b" if len(self.said) == 1 else "a"
        seen = {} if over else {who: "|".join(self.said)}
        return StepResult(seen, rewards, over, False, {"outcome": 1.0} if over else {})


class Together(Env):
    agents = ("a", "b")

    def reset(self, seed=None, options=None):
        return {"a": "x", "b": "y"}, {}

    def step(self, actions):
        return StepResult({}, {"a": 1.0}, True, False, {})


class Fragile(Relay):
    def step(self, actions):
        if self.step_count == 1 and self.rng.random() < 2:
            raise ValueError("broken pipe")
        return super().step(actions)


def play(env, answers, starts=1, window=500, tokens=20, team=("a", "b")):
    tokenizer = tiny_tokenizer()
    engine = ScriptedEngine(answers, tokenizer)
    team = Team.of(team)
    player = Player(engine, tokenizer, team, {n: SamplingParams(max_new_tokens=tokens) for n in team.names}, window)
    queue = iter([Start(f"e{i}", "g", i, i) for i in range(starts)])
    episodes, stats = player.play([env], lambda slot, done: next(queue, None))
    return episodes, stats, engine


def test_turns_are_recorded_in_speaking_order_with_exactly_what_was_fed_and_said():
    episodes, stats, engine = play(Relay(), {"a": ["one", "three"], "b": ["two"]})
    [episode] = episodes
    assert [(t.agent, t.text, t.turn, t.env_step) for t in episode.turns] == [
        ("a", "one", 0, 0),
        ("b", "two", 1, 1),
        ("a", "three", 2, 2),
    ]
    tokenizer = tiny_tokenizer()
    assert episode.turns[1].prompt_ids == encode_prompt(tokenizer, "", "a:one")
    assert [list(r.prompt_ids) for r in engine.requests] == [t.prompt_ids for t in episode.turns]
    assert episode.outcome == 1.0 and episode.info["ended"] == "terminated" and episode.info["task"] == "t"
    assert stats.tokens == sum(len(t.action_ids) for t in episode.turns)


def test_equal_observations_of_a_step_are_encoded_once(monkeypatch):
    encoded = []

    def counted(tokenizer, system, observation, at, own):
        encoded.append(observation)
        return encode_prompt(tokenizer, system, observation, at, own)

    monkeypatch.setattr("mafrt.rollout.player.encode_prompt", counted)
    tokenizer = tiny_tokenizer()
    engine = ScriptedEngine({"a": ["p", "p"], "b": ["q", "q"]}, tokenizer)
    player = Player(engine, tokenizer, Team.of(("a", "b")), dict.fromkeys("ab", SamplingParams(max_new_tokens=20)), 500)
    queue = iter([Start(f"e{i}", "g", i, i) for i in range(2)])
    episodes, _ = player.play([Together(), Together()], lambda slot, done: next(queue, None))
    assert sorted(encoded) == ["x", "y"] and len(episodes) == 2
    first, second = ([turn.prompt_ids for turn in episode.turns] for episode in episodes)
    assert first == second == [encode_prompt(tokenizer, "", seen) for seen in ("x", "y")]
    # A list each, so that a change of one turn's prompt leaves the other's as it was.
    assert all(left is not right for left, right in zip(first, second, strict=True))


def test_a_reward_goes_to_the_agents_latest_turn_and_none_is_not_zero():
    [episode], _, _ = play(Relay(), {"a": ["one", "three"], "b": ["two"]})
    # b: .5 when it spoke, .25 more on the last step. a: nothing for "one" (None), 2 for "three".
    assert [t.reward for t in episode.turns] == [None, 0.75, 2.0]


def test_simultaneous_speakers_share_a_step():
    [episode], _, _ = play(Together(), {"a": ["p"], "b": ["q"]})
    assert [(t.agent, t.env_step, t.reward) for t in episode.turns] == [("a", 0, 1.0), ("b", 0, None)]


def test_an_environment_that_raises_loses_its_episode_and_the_slot_goes_on():
    episodes, stats, _ = play(Fragile(), {"a": ["one"], "b": ["two"]}, starts=2)
    assert episodes == [] and stats.env_errors == 2
    assert "broken pipe" in str(stats.last_error) and "Fragile.step()" in str(stats.last_error)


def test_a_prompt_without_room_ends_the_episode_and_is_counted():
    room = len(encode_prompt(tiny_tokenizer(), "", "start"))
    episodes, stats, _ = play(Relay(), {"a": ["one"], "b": ["two"]}, window=room + 2, starts=2)
    # "start" fits; "a:one" has the same length and fits as well; "a:one|b:two" does not.
    assert [e.info["ended"] for e in episodes] == ["prompt_too_long"] * 2
    assert stats.prompt_too_long == 2 and [len(e.turns) for e in episodes] == [2, 2]


def test_agents_that_the_team_lacks_are_named():
    _, stats, _ = play(Relay(), {"a": ["one"]}, team=("a",))
    assert "'b'" in str(stats.last_error) and "the team has a" in str(stats.last_error)


def test_a_reward_before_the_agent_spoke_is_an_error():
    class Eager(Relay):
        def step(self, actions):
            return super().step(actions)._replace(rewards={"b": 1.0})

    _, stats, _ = play(Eager(), {"a": ["one"], "b": ["two"]})
    assert "before it has acted" in str(stats.last_error)


def test_seeds_follow_from_the_start_and_differ_between_turns():
    _, _, first = play(Relay(), {"a": ["one"], "b": ["two"]})
    _, _, again = play(Relay(), {"a": ["one"], "b": ["two"]})
    seeds = [r.seed for r in first.requests]
    assert seeds == [r.seed for r in again.requests] and len(set(seeds)) == 3


@pytest.mark.parametrize(
    ("system", "seen", "roles"),
    [
        ("", "hi", ["user"]),
        ("You are a.", "hi", ["system", "user"]),
        ("You are a.", [{"role": "system", "content": "own"}, {"role": "user", "content": "x"}], ["system", "user"]),
        ("", [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], ["user", "assistant"]),
    ],
)
def test_the_system_message_is_the_role_prompt_unless_the_environment_has_its_own(system, seen, roles):
    messages = messages_of(system, seen)
    assert [m["role"] for m in messages] == roles
    assert system == "" or isinstance(seen, list) or messages[0]["content"] == system


def test_env_error_is_a_sentence_without_a_trace():
    _, stats, _ = play(Fragile(), {"a": ["one"], "b": ["two"]})
    assert isinstance(stats.last_error, EnvError) and "\n" not in str(stats.last_error)


def test_an_environment_that_mostly_raises_ends_the_play():
    with pytest.raises(EnvError, match=r"3 episodes were lost, 0 finished, .*the last because: Fragile"):
        play(Fragile(), {"a": ["one"], "b": ["two"]}, starts=1000)


def test_an_answer_ends_where_the_context_window_does():
    room = len(encode_prompt(tiny_tokenizer(), "", "start"))
    [episode], _, engine = play(Relay(), {"a": ["one hundred"], "b": ["two"]}, window=room + 4)
    assert engine.requests[0].sampling.max_new_tokens == 4
    assert len(episode.turns[0].action_ids) == 4 and episode.turns[0].stop == "length"


def test_equal_warnings_become_one_with_a_count_and_lost_episodes_are_a_share(caplog):
    class Often(Relay):
        def step(self, actions):
            if self.rng.random() < 0.5:
                raise ValueError("broken pipe")
            return super().step(actions)

    tokenizer, team = tiny_tokenizer(), Team.of(("a", "b"))
    how = {n: SamplingParams(max_new_tokens=20) for n in team.names}
    said = ScriptedEngine(lambda request: "x", tokenizer)
    queue = iter([Start(f"e{i}", "g", i, i) for i in range(200)])
    with caplog.at_level("WARNING"):
        episodes, stats = Player(said, tokenizer, team, how, 500, max_lost=1.0).play(
            [Often() for _ in range(4)], lambda slot, done: next(queue, None)
        )
    lost = [record.getMessage() for record in caplog.records]
    assert len(episodes) + stats.env_errors == 200 and stats.env_errors > 120
    assert stats.lost_share(len(episodes)) == stats.env_errors / 200
    # Three steps in which it may happen, so three sentences, and one that counts them.
    assert len(lost) == 4 and f"{stats.env_errors} episodes were lost: " in lost[-1] and "times because" in lost[-1]


@pytest.mark.parametrize(("max_lost", "ends"), [(0.0, True), (0.2, True), (0.3, False), (1.0, False)])
def test_play_ends_above_the_stated_share_of_lost_episodes(max_lost, ends):
    class Quarter(Together):
        def step(self, actions):
            if self.seed % 4 == 0:
                raise ValueError("broken pipe")
            return super().step(actions)

        def reset(self, seed=None, options=None):
            self.seed = seed
            return super().reset(seed, options)

    tokenizer, team = tiny_tokenizer(), Team.of(("a", "b"))
    how = {n: SamplingParams(max_new_tokens=20) for n in team.names}
    player = Player(ScriptedEngine(lambda r: "x", tokenizer), tokenizer, team, how, 500, max_lost=max_lost)
    queue = iter([Start(f"e{i}", "g", i, i) for i in range(80)])
    envs = [Quarter() for _ in range(8)]
    if ends:
        with pytest.raises(EnvError, match=rf"more than env_max_lost \({max_lost:g}\) allows"):
            player.play(envs, lambda slot, done: next(queue, None))
    else:
        episodes, stats = player.play(envs, lambda slot, done: next(queue, None))
        assert len(episodes) == 60 and stats.lost_share(60) == 0.25


def test_environments_that_wait_start_together_and_hear_how_answers_were_sampled():
    """All resets wait for the last one: started one after the other they would fail."""
    together = threading.Barrier(4)

    class Waits(Env):
        agents = ("a",)
        blocking = True

        def reset(self, seed=None, options=None):
            together.wait(timeout=10)
            return {"a": "hello"}, {}

        def sampled(self, answers):
            self.told = dict(answers)

        def step(self, actions):
            assert self.told["a"].stop == "length"
            return StepResult({}, {}, True, False, {"outcome": float(self.told["a"].tokens)})

    tokenizer = tiny_tokenizer()
    engine = ScriptedEngine({"a": ["four!"] * 4}, tokenizer)
    player = Player(engine, tokenizer, Team.of(("a",)), {"a": SamplingParams(max_new_tokens=4)}, 500)
    queue = iter([Start(f"e{i}", "g", i, i) for i in range(4)])
    episodes, stats = player.play([Waits() for _ in range(4)], lambda slot, done: next(queue, None))
    assert [episode.id for episode in episodes] == ["e0", "e1", "e2", "e3"] and stats.env_errors == 0
    assert [episode.outcome for episode in episodes] == [4.0] * 4
