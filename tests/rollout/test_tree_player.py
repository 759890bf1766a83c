"""Trees: forks of environments, what is tried, scored and carried on, and what credit makes of it, by hand."""

from __future__ import annotations

import random

import pytest
import torch
from helpers_models import tiny_tokenizer
from helpers_runs import adapters, cut_and_resumed, metrics, same
from toy import Digits, settings

from bench._tasks import TwoRoundEnv
from mafrt import algorithms
from mafrt.coach import make_coach
from mafrt.config.team import Team
from mafrt.config.train_config import CoachConfig, TrainConfig
from mafrt.core import records
from mafrt.core.errors import ConfigError, EnvError
from mafrt.core.seeding import seed_of
from mafrt.core.types import SamplingParams, Scored, StepResult
from mafrt.engines.scripted import ScriptedEngine
from mafrt.environment.base import Env
from mafrt.environment.checker import check_env
from mafrt.environment.session import session_of
from mafrt.envs.math import MathEnv
from mafrt.rollout.player import Player, Start
from mafrt.rollout.tree_player import TreePlayer, no_score, to_learn
from mafrt.runners.algorithm import resolve_rule
from mafrt.runners.checks import check_tree
from mafrt.runners.identity import Provenance
from mafrt.runners.on_policy import OnPolicy

DUO = Team.of(["a", "b"])


class Bids(Env):
    """a says a number, b says one, a says another; each is paid what it says at once, and a again at the end."""

    agents = ("a", "b")
    max_steps = 8

    def reset(self, seed=None, options=None):
        self.said, self.luck = [], self.rng.random()
        return {"a": "begin"}, {"task": "t"}

    def step(self, actions):
        [(name, text)] = actions.items()
        if text == "x":
            raise ValueError("not a number")
        self.said.append(f"{name}:{text}")
        over = len(self.said) == 3
        pay = {} if text == "0" else {name: float(text)}
        if over:
            pay["b"] = 100.0  # long after b spoke
        seen = {} if over else {"b" if name == "a" else "a": " ".join(self.said)}
        return StepResult(seen, pay, over, False, {"outcome": 1.0} if over else {})


class Together(Env):
    """Both speak at once. a is paid its number; b is paid a's number minus its own."""

    agents = ("a", "b")

    def reset(self, seed=None, options=None):
        return {"a": "x", "b": "y"}, {}

    def step(self, actions):
        a, b = float(actions["a"]), float(actions["b"])
        return StepResult({}, {"a": a, "b": a - b}, True, False, {})


def worth(episodes):
    return algorithms.turn_rewards(episodes, "at_grpo", outcome_to="end", outcome_weight=0.5)


def grow(env, answers, samples=3, team=DUO, starts=1, engine=None):
    tokenizer = tiny_tokenizer()
    engine = engine or ScriptedEngine(answers, tokenizer)
    how = {name: SamplingParams(max_new_tokens=20) for name in team.names}
    player = TreePlayer(engine, tokenizer, team, how, 500, samples=samples, worth=worth)
    queue = iter([Start(f"e{i}", f"g{i}", i, i) for i in range(starts)])
    episodes, stats = player.play([env], lambda slot, done: next(queue, None))
    return episodes, stats, engine


# --------------------------------------------------------------------------------------------------------------- fork


def test_a_fork_goes_on_from_the_same_place_and_disturbs_nobody():
    env = session_of(Bids())
    env.reset(seed=3)
    env.step({"a": "2"})
    fork = env.fork()
    assert fork.luck == env.luck and fork.said == env.said and fork.step_count == 1
    assert fork.step({"b": "5"}).observations == {"a": "a:2 b:5"}
    assert env.said == ["a:2"] and env.step({"b": "7"}).observations == {"a": "a:2 b:7"}
    assert fork.step({"a": "1"}).terminated and not env.done
    twice = env.fork().fork()
    assert twice.said == ["a:2", "b:7"]


def test_a_fork_without_a_seed_draws_what_the_episode_drew():
    env = session_of(Bids())
    env.reset()
    assert env.fork().luck == env.luck


def test_what_cannot_be_forked_says_why():
    class Moody(Bids):
        def reset(self, seed=None, options=None):
            self.said = []
            return {"a": str(random.random())}, {}

    env = session_of(Moody())
    with pytest.raises(EnvError, match=r"Moody.fork\(\) was called before reset"):
        env.fork()
    env.reset(seed=1)
    with pytest.raises(EnvError, match=r"Moody cannot be forked: .* draw from self.rng only"):
        env.fork()
    env = session_of(Together())
    env.reset(seed=1)
    env.step({"a": "1", "b": "1"})
    with pytest.raises(EnvError, match="after the episode ended"):
        env.fork()


def test_check_env_finds_a_fork_that_shares_what_an_episode_changes():
    class Shared(Bids):
        def step(self, actions):
            return super().step({name: str(len(text)) for name, text in actions.items()})

    class Sharing(Shared):
        def fork(self):
            other = self.spawn()
            vars(other).update(vars(self))  # `said` is one list for both
            return other

    check_env(Shared())
    check_env(MathEnv())
    with pytest.raises(EnvError, match=r"fork\(\) after 0 steps does not go on as the episode does"):
        check_env(Sharing())


@pytest.mark.parametrize("make", [MathEnv, lambda: MathEnv(horizon=2), TwoRoundEnv])
def test_forks_of_math_copy_their_state_and_equal_the_default(make):
    env = session_of(make())
    env.reset(seed=5)
    env.step({"reasoner": "Add 1 to 2."})
    fork, replayed = env.fork(), env._played_again(env.spawn())
    steps = [e.step({"actor": "1 + 2 = 3. \\boxed{-77}"}) for e in (fork, replayed)]
    assert steps[0][:4] == steps[1][:4] and env.step_count == 1 and not env.done
    assert env.step({"actor": f"\\boxed{{{env.task.answer}}}"}).info["outcome"] == 1.0
    assert fork.rng.random() == replayed.rng.random()


# --------------------------------------------------------------------------------------------------------------- play


def test_the_best_is_carried_on_and_those_after_it_see_it():
    episodes, stats, engine = grow(Bids(), {"a": ["1", "9", "4", "3", "2", "8"], "b": ["5", "7", "6"]})
    [episode] = episodes
    assert [(t.agent, t.text, t.turn) for t in episode.turns] == [("a", "9", 0), ("b", "7", 1), ("a", "8", 2)]
    shown = [tiny_tokenizer().decode(r.prompt_ids) for r in engine.requests]
    assert ["a:9" in text for text in shown] == [False] * 3 + [True] * 6
    assert all("b:7" in text for text in shown[6:]) and not any("a:1" in text or "b:5" in text for text in shown)
    assert episode.outcome == 1.0 and len(engine.requests) == 9 and stats.tree_turns == 3
    # All alternatives of all turns, each as an episode of one turn; only the last step's have an outcome.
    found = [(b.turns[0].agent, b.turns[0].turn, b.turns[0].text, b.turns[0].reward) for b in episode.branches]
    assert found == [
        *[("a", 0, text, float(text)) for text in ("1", "9", "4")],
        *[("b", 1, text, float(text)) for text in ("5", "7", "6")],
        *[("a", 2, text, float(text)) for text in ("3", "2", "8")],
    ]
    assert [b.outcome for b in episode.branches] == [None] * 6 + [1.0] * 3
    assert [b.info["carried"] for b in episode.branches] == [False, True, False, False, True, False, False, False, True]
    assert len({b.id for b in episode.branches}) == 9 and {b.group for b in episode.branches} == {episode.group}


def test_advantages_by_hand_and_what_was_not_carried_on_learns_too():
    """1, 9, 4: mean 14/3, squares 13.444 + 18.778 + .444 = 32.667, std sqrt(32.667 / 2) = 4.0415.

    So (1 - 4.6667) / 4.0415 = -.9073, 1.0722, -.1650. 5, 7, 6 (the 100 that b is paid later is nobody's): -1, 1, 0.
    The last three earn half the outcome besides, all alike: 3, 2, 8 has mean 13/3, std sqrt(20.667 / 2) = 3.2146.
    """
    episodes, _, _ = grow(Bids(), {"a": ["1", "9", "4", "3", "2", "8"], "b": ["5", "7", "6"]})
    learnt = to_learn(episodes)
    found = algorithms.assign(learnt, "at_grpo", outcome_to="end", outcome_weight=0.5)
    want = [-0.9073, 1.0722, -0.1650, -1.0, 1.0, 0.0, -0.4148, -0.7259, 1.1407]
    assert [b.turns[0].advantages[0] for b in learnt] == pytest.approx(want, abs=1e-4)
    assert learnt[8].turns[0].returns[0] == 8.5 and learnt[4].turns[0].returns[0] == 7.0
    assert (found["groups"], found["groups_of_one"], found["turns"]) == (3.0, 0.0, 9.0)


def test_of_equal_scores_the_first_is_carried_on_and_unscored_turns_are_counted():
    episodes, stats, _ = grow(Bids(), {"a": ["2", "2", "2", "0", "0", "0"], "b": ["0", "0", "0"]})
    [episode] = episodes
    assert [b.info["carried"] for b in episode.branches] == [True, False, False] * 3
    # b's zeros are paid nothing and end nothing; a's last ones have the outcome.
    assert stats.tree_unscored == 1 and no_score(episode.branches[3:6]) and not no_score(episode.branches[6:])


def test_those_who_speak_at_once_are_tried_beside_what_was_kept():
    [episode], _, _ = grow(Together(), {"a": ["1", "5", "3"], "b": ["4", "0", "2"]})
    # a's are paid themselves, whatever b says. b's are tried beside a's 5, which was kept: 1, 5, 3.
    assert [b.turns[0].reward for b in episode.branches] == [1.0, 5.0, 3.0, 1.0, 5.0, 3.0]
    assert [(t.agent, t.text, t.reward, t.turn) for t in episode.turns] == [("a", "5", 5.0, 0), ("b", "0", 5.0, 1)]
    assert [b.turns[0].turn for b in episode.branches] == [0, 0, 0, 1, 1, 1]


def test_an_alternative_that_the_environment_cannot_take_is_left_out():
    episodes, stats, _ = grow(Bids(), {"a": ["x", "1", "4"], "b": ["5"]})
    [episode] = episodes
    assert episode.turns[0].text == "4" and stats.tree_errors == 2 and stats.env_errors == 0
    assert [b.turns[0].text for b in episode.branches if b.turns[0].turn == 0] == ["1", "4"]
    episodes, stats, _ = grow(Bids(), {"a": ["x"], "b": ["5"]}, starts=1)
    assert episodes == [] and stats.env_errors == 1 and stats.tree_errors == 3


def test_a_coach_judges_alternatives_before_one_is_carried_on():
    tokenizer = tiny_tokenizer()
    engine = ScriptedEngine({"a": ["1", "9", "4"], "b": ["5"]}, tokenizer)
    how = {name: SamplingParams(max_new_tokens=20) for name in DUO.names}

    def judged(episodes):
        return algorithms.turn_rewards(episodes, "at_grpo", outcome_to="end", coach=True, reward_weight=0.0)

    def judge(pairs):  # likes small numbers, and cannot judge a 1
        for episode, turn in pairs:
            assert episode.turns == [turn] and turn.coach is None
            turn.coach = None if turn.text == "1" else Scored(10.0 - float(turn.text))

    player = TreePlayer(engine, tokenizer, DUO, how, 500, samples=3, worth=judged, judge=judge)
    queue = iter([Start("e", "g", 0, 0)])
    [episode], _ = player.play([Bids()], lambda slot, done: next(queue, None))
    assert episode.turns[0].text == "4"


def test_the_first_alternative_is_what_a_player_without_trees_would_say():
    def said(request):
        return str(request.seed % 1000)

    tokenizer = tiny_tokenizer()
    how = {name: SamplingParams(max_new_tokens=20) for name in DUO.names}
    plain = Player(ScriptedEngine(said, tokenizer), tokenizer, DUO, how, 500)
    queue = iter([Start("e", "g", 0, 0)])
    [one], _ = plain.play([Bids()], lambda slot, done: next(queue, None))
    [tree], _, engine = grow(Bids(), None, engine=ScriptedEngine(said, tokenizer))
    assert tree.branches[0].turns[0].text == one.turns[0].text
    assert [r.seed for r in engine.requests[:3]] == [
        seed_of(0, "a", 0),
        *[seed_of(seed_of(0, "a", 0), "alternative", k) for k in (1, 2)],
    ]


# ---------------------------------------------------------------------------------------------------------------- run


class Counted(Digits):
    """Digits, where each turn is paid its own share of digits at once."""

    def step(self, actions):
        [(name, text)] = actions.items()
        result = super().step(actions)
        return result._replace(rewards={name: sum(c.isdigit() for c in text) / max(len(text), 1)})


def make(run_dir=None, load_path=None, **changes):
    from helpers_models import tiny_base

    from mafrt.storage.load_path import resolve

    torch.set_num_threads(1)
    env = Counted()
    wanted = {"algorithm": "at_grpo", "tree_samples": 4, "n_rollout_threads": 4, "outcome_weight": 0.0, **changes}
    return OnPolicy(
        env,
        Team.of(env.agents),
        tiny_base(),
        settings(**wanted),
        run_dir=run_dir,
        provenance=Provenance(resolve(load_path) if load_path else None),
    )


@pytest.mark.slow
def test_groups_hold_the_alternatives_of_one_state_and_nothing_else():
    runner = make(n_rollout_threads=6)
    runner.stop = type("Never", (), {"requested": False, "reason": None})()
    episodes, stats, _ = runner.collector.play(runner.state.iteration, runner.state.drawn)
    assert len(episodes) == 6 and stats.tree_turns == 12
    groups = {}
    for branch in to_learn(episodes):
        [turn] = branch.turns
        groups.setdefault((branch.group, turn.agent, turn.turn), []).append(turn)
    assert len(groups) == 12
    for turns in groups.values():
        assert len(turns) == 4 and len({tuple(turn.prompt_ids) for turn in turns}) == 1
    # What was carried on is an alternative with the highest score, and what the next agent was shown.
    for episode in episodes:
        for turn in episode.turns:
            mine = [b for b in episode.branches if b.turns[0].turn == turn.turn]
            assert turn.reward == max(b.turns[0].reward for b in mine)
            assert [b.turns[0].action_ids for b in mine if b.info["carried"]] == [turn.action_ids]
    # Playing them one by one gives the same trees.
    alone = make(n_rollout_threads=6)
    alone.stop, alone.collector.envs = runner.stop, alone.collector.envs[:1]
    again = []
    for start in range(6):
        stream = iter([Start(e.id, e.group, *_seeds(alone, e)) for e in episodes[start : start + 1]])
        again += alone.player.play(alone.collector.envs, lambda slot, done, s=stream: next(s, None))[0]
    assert [[b.turns[0].text for b in e.branches] for e in again] == [
        [b.turns[0].text for b in e.branches] for e in episodes
    ]


def _seeds(runner, episode):
    """reset_seed, seed and task of an episode of the first iteration, from its group."""
    from mafrt.rollout.task_stream import task_at

    draw, seed = int(episode.group.split("-")[1]), runner.config.run.seed
    return seed_of(seed, "draw", draw), seed_of(seed, "episode", draw, 0), task_at(draw, runner.env.num_tasks, seed)


@pytest.mark.slow
@pytest.mark.ci
def test_it_learns_moves_no_other_adapter_and_says_what_it_did(tmp_path):
    runner = make(tmp_path / "run", iterations=14, n_rollout_threads=8, freeze=("second",), eval_episodes=0)
    before = adapters(runner)
    runner.run()
    after = adapters(runner)
    assert same(before["second"], after["second"]) and not same(before["first"], after["first"])
    lines = metrics(tmp_path / "run")
    assert lines[-1]["reward/first"] > lines[0]["reward/first"] + 0.1
    assert lines[0]["turns"] == 8 * 2 * 4 and lines[0]["episodes"] == 8 and lines[0]["groups"] == 16
    assert lines[0]["tree_unscored"] == 0.0 and lines[0]["tree_errors"] == 0.0
    import json

    record = json.loads((tmp_path / "run" / "episodes.jsonl").read_text().splitlines()[0])
    assert len(record["turns"]) == 2 and len(record["alternatives"]) == 6
    assert all("advantage" in turn for turn in [*record["turns"], *record["alternatives"]])


@pytest.mark.slow
@pytest.mark.ci
def test_a_stopped_run_goes_on_exactly(tmp_path, monkeypatch):
    import helpers_runs as loop

    monkeypatch.setattr(loop, "make", make)
    monkeypatch.setattr(loop, "train", lambda *args, **kwargs: make(*args, **kwargs).run())
    whole, cut = cut_and_resumed(tmp_path, 2, iterations=4)
    assert whole == cut


def test_trees_survive_the_way_between_processes():
    [episode], _, _ = grow(Bids(), {"a": ["1", "9", "4", "3", "2", "8"], "b": ["5", "7", "6"]})
    import json

    assert records.unpack_episode(json.loads(json.dumps(records.pack_episode(episode)))) == episode


# ------------------------------------------------------------------------------------------------- what is refused


def resolve(**changes):
    return resolve_rule(TrainConfig.of(n_rollout_threads=8, **changes), DUO)


def test_at_grpo_grows_trees_unless_it_is_given_samples_to_compare():
    tree = resolve(algorithm="at_grpo")
    assert tree.tree_samples == 4 and tree.settings.outcome_to == "end"
    assert resolve(algorithm="at_grpo", tree_samples=8).tree_samples == 8
    parallel = resolve(algorithm="at_grpo", n_samples=4)
    assert parallel.tree_samples == 1 and parallel.settings.outcome_to == "all"
    assert resolve(algorithm="grpo", n_samples=4).tree_samples == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithm": "grpo", "tree_samples": 4}, "'grpo' does not compare alternatives"),
        ({"algorithm": "at_grpo", "tree_samples": 4, "n_samples": 4}, "leave one of the two out"),
        ({"algorithm": "at_grpo", "outcome_to": "all"}, "scored before later turns are known"),
        ({"algorithm": "at_grpo", "tree_samples": 1}, "at least 2 per problem"),
        ({"tree_samples": 0}, "tree_samples is 0"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(changes, words):
    with pytest.raises(ConfigError, match=words) as caught:
        resolve(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.ci
def test_environments_whose_turns_cannot_be_scored_are_refused_before_anything_is_sampled():
    with pytest.raises(ConfigError, match=r"MathEnv neither pays reasoner in the step .* --coach rules"):
        check_tree(MathEnv(), 4, None)
    check_tree(MathEnv(), 4, make_coach(CoachConfig(coach="rules"), None))
    check_tree(MathEnv(), 1, None)
    check_tree(TwoRoundEnv(), 4, None)
    check_tree(Bids(), 4, None)
    with pytest.raises(ConfigError, match="Digits neither pays first"):
        check_tree(Digits(), 4, None)
