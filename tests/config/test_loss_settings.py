"""Settings of the update: each of them reaches a gradient, a reward or a coefficient, and does there what it says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers_credit import assign
from helpers_learner import AGENTS, CONFIG, close, make_base, make_turns
from helpers_runs import adapters, cut_and_resumed, metrics, same
from toy import make, train

from mafrt import algorithms
from mafrt.algorithms import Algorithm
from mafrt.config.algorithm_groups import ValueHeadSettings
from mafrt.config.team import Team
from mafrt.config.train_config import LearnConfig, TrainConfig
from mafrt.core.errors import ConfigError
from mafrt.core.types import Episode, Turn
from mafrt.runners.algorithm import resolve_rule
from mafrt.training.critic import Critic
from mafrt.training.learner import Learner
from mafrt.training.policy_objective import Objective

pytestmark = pytest.mark.takes(slow=7)

TEMPERATURES = dict(zip(AGENTS, (1.0, 0.7), strict=True))
DUO = Team.of(["a", "b"])


def gradients(turns, config=CONFIG, weights=None, cut=frozenset(), **settings):
    """The gradients of one step and its metrics."""
    base, seen = make_base(), {}
    learner = Learner(
        base,
        Team.of(AGENTS),
        config,
        Objective(Algorithm(**{"importance_cap": None, **settings}), cut=cut),
        seed=3,
        temperatures=TEMPERATURES,
    )
    for name in AGENTS:
        learner.optimizers[name].step = lambda name=name: seen.update(
            {name: [p.grad.clone() for p in base.adapter_parameters(name)]}
        )
    return seen, learner.update(turns, AGENTS, 0, weights)


def largest(grads) -> float:
    return max((float(g.abs().max()) for of in grads.values() for g in of), default=0.0)  # no step: no gradient


def by_the_trainer(turns):
    """The turns with log-probabilities of the trainer's own."""
    learner = Learner(make_base(), Team.of(AGENTS), CONFIG, Objective(), 3, temperatures=TEMPERATURES)
    learner.recompute_logprobs(turns)
    return turns


# ------------------------------------------------------------------------------------------- another engine's samples


@pytest.mark.parametrize("level", ["token", "action"])
def test_importance_weights_are_the_truncated_ratio_of_trainer_and_engine(level):
    """Turn i was sampled at 1 / c_i of the trainer's probability, so its terms weigh min(c_i, 2)."""
    turns = by_the_trainer(make_turns())
    ratios = (0.5, 1.0, 1.5, 2.5, 40.0, 0.1, 1.0, 3.0, 0.9)
    for turn, ratio in zip(turns, ratios, strict=True):
        tokens = len(turn.action_ids)
        # At action level the ratio is the turn's, the product over its tokens.
        share = math.log(ratio) / (tokens if level == "action" else 1)
        turn.logprobs = [logprob - share for logprob in turn.old_logprobs]
    want, _ = gradients(turns, weights=[min(c, 2.0) for c in ratios], level=level)
    got, found = gradients(turns, level=level, importance_cap=2.0)
    off, _ = gradients(turns, level=level, importance_cap=None)
    assert close(got, want) and not close(got, off)
    for name in AGENTS:
        mine = [(c, len(t.action_ids)) for t, c in zip(turns, ratios, strict=True) if t.agent == name]
        tokens = sum(n for _, n in mine)
        mean = sum(min(c, 2.0) * n for c, n in mine) / tokens
        assert found[f"importance_weight_mean/{name}"] == pytest.approx(mean, rel=1e-4)
        assert found[f"importance_weight_clipped/{name}"] == pytest.approx(sum(n for c, n in mine if c > 2) / tokens)


def test_importance_weights_multiply_happos_ratio():
    turns = by_the_trainer(make_turns())
    for turn in turns:
        turn.logprobs = [logprob - math.log(1.5) for logprob in turn.old_logprobs]
    want, _ = gradients(turns, weights=[1.5 * 3.0] * len(turns))
    got, _ = gradients(turns, weights=[3.0] * len(turns), importance_cap=2.0)
    assert close(got, want)


def test_no_importance_weights_for_the_trainers_own_samples_and_for_a_cut_support():
    turns = make_turns()
    plain, found = gradients(turns, importance_cap=2.0)
    assert not any("importance" in name for name in found)
    turns = by_the_trainer(turns)  # whose sampler says something else
    off, _ = gradients(turns)
    bob, found = gradients(turns, importance_cap=2.0, cut=frozenset({"ann"}))
    assert close({"ann": bob["ann"]}, {"ann": off["ann"]}) and not close({"bob": bob["bob"]}, {"bob": off["bob"]})
    assert found["importance_weight_mean/ann"] == 1.0
    assert not close(plain, off)


@pytest.mark.slow
def test_a_run_whose_engine_is_another_weighs_and_one_with_its_own_does_not(tmp_path):
    def run(name, foreign, **settings):
        runner = make(tmp_path / name, iterations=1, eval_episodes=0, **settings)
        generate = runner.engine.generate
        runner.engine.foreign = foreign

        def shifted(requests):  # an engine that finds every token half as likely
            return [replace(a, logprobs=[x - math.log(2) for x in a.logprobs]) for a in generate(requests)]

        if foreign:
            runner.engine.generate = shifted
        runner.run()
        return metrics(tmp_path / name)[0], adapters(runner)

    own, moved = run("own", False)
    assert not any("importance" in name for name in own)
    weighed, moved_weighed = run("weighed", True, importance_cap=1.5)
    assert weighed["importance_weight_mean/first"] == pytest.approx(1.5)
    assert weighed["importance_weight_clipped/first"] == 1.0 and weighed["engine_kl/first"] > 0.1
    plain, moved_plain = run("plain", True, importance_cap=None)
    assert not any("importance" in name for name in plain)
    # Without weights only the recomputed log-probabilities count, which are the sampler's own up to rounding.
    near = [torch.allclose(a, b, atol=1e-4) for a, b in zip(moved["first"], moved_plain["first"], strict=True)]
    assert all(near) and not same(moved_weighed["first"], moved_plain["first"])


# -------------------------------------------------------------------------------------------------- the policy's loss


@pytest.mark.slow
def test_dual_clip_cuts_the_gradient_of_bad_words_that_became_likely():
    """A < 0 and ratio e^3: without it the loss is -A e^3, with it the constant 1.5 |A|."""
    turns = by_the_trainer(make_turns())
    for turn in turns:
        turn.old_logprobs = [logprob - 3.0 for logprob in turn.old_logprobs]
        turn.advantages = [-1.0] * len(turn.action_ids)
    plain, _ = gradients(turns)
    bounded, _ = gradients(turns, dual_clip=1.5)
    loose, _ = gradients(turns, dual_clip=30.0)  # e^3 is about 20: nothing to bound
    assert largest(plain) > 1e-3 and largest(bounded) == 0.0 and close(plain, loose)


@pytest.mark.slow
def test_kl_in_the_loss_has_the_gradient_of_k3():
    """Reference: coef * mean over an agent's tokens of exp(d) - d - 1, written out over full tables, advantages 0."""
    turns, base = make_turns(), make_base()
    generator = torch.Generator().manual_seed(1)
    for turn in turns:
        turn.advantages = [0.0] * len(turn.action_ids)
        turn.ref_logprobs = (-3 + torch.randn(len(turn.action_ids), generator=generator)).tolist()
    seen, found = gradients(turns, kl_coef=0.3, kl_estimator="k3")
    for name, heat in (("ann", 1.0), ("bob", 0.7)):
        terms = []
        for turn in (t for t in turns if t.agent == name):
            hidden = base.forward(
                torch.tensor([turn.prompt_ids + turn.action_ids]), None, torch.tensor([base.adapter_index(name)])
            )
            table = (base.logits(hidden)[0] / heat).log_softmax(-1)[len(turn.prompt_ids) - 1 : -1]
            own = table.gather(1, torch.tensor(turn.action_ids)[:, None])[:, 0]
            gap = torch.tensor(turn.ref_logprobs) - own
            terms.append(gap.exp() - gap - 1)
        mean = torch.cat(terms).mean()
        assert found[f"ref_kl/{name}"] == pytest.approx(mean.item(), rel=1e-4)
        expected = torch.autograd.grad(0.3 * mean, base.adapter_parameters(name))
        assert close({name: seen[name]}, {name: expected})


# ------------------------------------------------------------------------------------------------- KL in the reward


def spoke(agent="a", index=0, reward=0.0, ref=(-1.0, -1.0), group="g", own=(-0.5, -2.0)):
    """Two tokens whose k1 is .5 and -1: with weight .1 they earn -.05 and .1."""
    turn = Turn(agent, [1], [2, 3], list(own), "eos", "x", index, index, 0, reward=reward, ref_logprobs=list(ref))
    turn.values = [0.0, 0.0]
    return turn


def test_kl_in_the_reward_by_hand():
    # token by token with lambda 1: A_2 = 1 + .1, A_1 = -.05 + A_2; a turn as one action earns 1 + .05 at once.
    episode = Episode("e", "g", [spoke(reward=1.0)])
    found = assign([episode], "gae", gae_lambda=1.0, kl_coef=0.1, kl_in="reward")
    assert episode.turns[0].returns == pytest.approx([1.05, 1.1])
    assert found["reward/a"] == pytest.approx(1.05)
    assign([episode], "gae", gae_lambda=1.0, level="action", kl_coef=0.1, kl_in="reward")
    assert episode.turns[0].returns == pytest.approx([1.05, 1.05])
    # a group of one agent: 1.05 against 0 + .1 * ((-.5 + .5) - (-2 + 2)) = 0: mean .525, unbiased std .7425
    other = Episode("f", "g", [spoke(ref=(-0.5, -2.0))])
    assign([episode, other], "grpo", kl_coef=0.1, kl_in="reward", eps=0.0)
    assert episode.turns[0].advantages[0] == pytest.approx(0.7071, abs=1e-4)
    assert (episode.turns[0].returns[0], other.turns[0].returns[0]) == (pytest.approx(1.05), 0.0)
    # What is paid for divergence is nobody else's: the sum over the team is taken before.
    pair = Episode("p", "g", [spoke(reward=1.0), spoke("b", 1, reward=2.0, ref=(-0.5, -2.0))])
    assign([pair], "cory", gae_lambda=1.0, kl_coef=0.1, kl_in="reward")
    assert [turn.returns[0] for turn in pair.turns] == pytest.approx([3.05, 3.0])


def test_kl_in_the_reward_is_the_turns_own_in_maporl():
    # Two rounds of a and b; V 0, 1 then 1, 0, every turn with k1 rewards -.05 and .1 (in all .05).
    turns = [spoke("a", 0), spoke("b", 1, 1.0), spoke("a", 2, 1.0), spoke("b", 3)]
    assign([Episode("e", "g", turns)], "maporl", round_gamma=1.0, kl_coef=0.1, kl_in="reward", gae_lambda=1.0)
    # R of the first round: (0 + .5) / 2 and (1 + .5) / 2, of the second 1 and 0.
    assert [turn.returns[0] for turn in turns] == pytest.approx([0.3, 0.8, 1.05, 0.05])
    assert [turn.returns[1] for turn in turns] == pytest.approx([0.35, 0.85, 1.1, 0.1])


def test_reinforce_pp_pays_it_in_the_reward_unless_told_otherwise_and_others_in_the_loss():
    def rule(**settings):
        return resolve_rule(TrainConfig.of(n_rollout_threads=8, kl_coef=0.1, **settings), DUO)

    found = rule(algorithm="reinforce_pp")
    assert found.settings.kl_in == "reward" and found.settings.kl_coef == 0.1 and found.reference
    found = rule(algorithm="reinforce_pp", kl_in="loss")
    assert found.settings.kl_in == "loss" and found.reference
    found = rule()
    assert found.settings.kl_in == "loss" and found.reference
    found = rule(kl_in="reward")
    assert found.settings.kl_in == "reward"
    with pytest.raises(ConfigError, match="needs the reference"):
        algorithms.check_needs(
            algorithms.algorithm("grpo", kl_coef=0.1), critic=None, samples_per_problem=2, reference=False, agents=1
        )


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "reinforce_pp"])
def test_a_run_with_kl_in_the_reward_stays_nearer_to_the_base(algorithm, tmp_path):
    wanted = {"algorithm": algorithm, "iterations": 5, "eval_episodes": 0, "ppo_epoch": 1, "num_mini_batch": 1}
    train(tmp_path / "near", kl_coef=1.0, kl_in="reward", **wanted)
    train(tmp_path / "far", kl_coef=1e-6, kl_in="reward", **wanted)
    near, far = (metrics(tmp_path / name)[-1]["ref_kl/first"] for name in ("near", "far"))
    assert 0 <= near < 0.5 * far


@pytest.mark.slow
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_the_weight_follows_its_target_and_a_resumed_run_goes_on_with_it(kl_in, tmp_path):
    wanted = {"kl_coef": 0.2, "kl_target": 0.02, "kl_horizon": 64.0, "kl_in": kl_in, "iterations": 4}
    whole, cut = cut_and_resumed(tmp_path, 2, **wanted)
    assert whole == cut
    lines = metrics(tmp_path / "whole")
    coefs = [line["kl_coef"] for line in lines]
    assert coefs[0] == 0.2
    for line, after in zip(lines, coefs[1:], strict=False):
        kl = (line["ref_kl/first"] + line["ref_kl/second"]) / 2
        error = min(max(kl / 0.02 - 1, -0.2), 0.2)
        assert after == pytest.approx(line["kl_coef"] * (1 + error * line["turns"] / 64))
    assert len(set(coefs)) == 4


# -------------------------------------------------------------------------------------------------------- the critic


def critic_norm(**settings) -> float:
    """Norm of the critic's first gradient where it is off by about 100."""
    base, turns = make_base(), make_turns(12)
    critic = ValueHeadSettings(critic_epoch=1, value_norm=False, **settings)
    stage = Critic(base, LearnConfig(max_grad_norm=1e9), critic, "token", seed=0)
    episodes = [Episode(str(index), "g", [turn]) for index, turn in enumerate(turns)]
    features = stage.annotate(episodes, dict.fromkeys(AGENTS, 1.0), values=True, reference=False)
    for turn in turns:
        turn.returns = [100.0] * len(turn.action_ids)
    return stage.update(features, 0)["grad_norm/critic"]


def test_huber_bounds_the_critics_gradient_and_none_leaves_it():
    # Where every error is beyond delta, the slope is delta: twice the delta, twice the gradient; squared: the error.
    one, two, squared = (critic_norm(value_clip=None, huber_delta=delta) for delta in (1.0, 2.0, None))
    assert two == pytest.approx(2 * one, rel=1e-4)
    assert squared == pytest.approx(100 * one, rel=0.05)


@pytest.mark.slow
def test_value_clip_stops_the_critic_where_it_has_moved_far_enough():
    """Targets 5 above pull up in every epoch; with the clip, a value that has risen by .2 is pulled no further."""

    def moved(clip) -> float:
        base, turns = make_base(), make_turns(12)
        critic = ValueHeadSettings(
            critic_lr=1e-3, critic_epoch=150, value_clip=clip, huber_delta=None, value_norm=False
        )
        stage = Critic(base, LearnConfig(), critic, "token", seed=0)
        episodes = [Episode(str(index), "g", [turn]) for index, turn in enumerate(turns)]
        heat = dict.fromkeys(AGENTS, 1.0)
        features = stage.annotate(episodes, heat, values=True, reference=False)
        before = [v for turn in turns for v in turn.values]
        for turn in turns:
            turn.returns = [v + 5.0 for v in turn.values]
        stage.update(features, 0)
        stage.annotate(episodes, heat, values=True, reference=False)
        after = [v for turn in turns for v in turn.values]
        return sum(b - a for a, b in zip(before, after, strict=True)) / len(before)

    assert moved(None) > 4.0 and 0.15 < moved(0.2) < 1.0  # momentum and the shared head carry it beyond


# ------------------------------------------------------------------------------------------------------------ MAPoRL


def test_maporls_settings_reach_the_rule_and_no_other_has_them():
    wanted = {"alpha0": 0.1, "alpha1": 0.2, "alpha2": 0.3, "alpha3": 0.4, "round_gamma": 0.5, "right_above": 0.6}
    found = resolve_rule(TrainConfig.of(n_rollout_threads=8, algorithm="maporl", **wanted), DUO).settings
    assert {name: getattr(found, name) for name in wanted} == wanted
    for name in wanted:
        with pytest.raises(ConfigError, match=f"'ppo' has no {name}"):
            resolve_rule(TrainConfig.of(n_rollout_threads=8, **{name: 0.5}), DUO)


@pytest.mark.slow
def test_a_bonus_moves_other_adapters_than_none(tmp_path):
    def moved(**settings):
        runner = make(None, algorithm="maporl", iterations=1, eval_episodes=0, episode_length=2, **settings)
        env = runner.collector.envs[0]

        def step(self, actions):  # two rounds: a turn with a digit is right
            [(name, text)] = actions.items()
            self.said = f"{self.said} {text}"
            worth = float(any(c.isdigit() for c in text))
            other = "second" if name == "first" else "first"
            over = self.step_count >= 3
            seen = {} if over else {other: self.said}
            return StepResult(seen, {name: worth}, over, False, {})

        rounds = type("Rounds", (type(env.unwrapped),), {"step": step})
        runner.collector.envs = [session_of(rounds()) for _ in runner.collector.envs]
        runner.run()
        return adapters(runner)

    from mafrt.core.types import StepResult
    from mafrt.environment.session import session_of

    plain, bonus = moved(), moved(alpha0=2.0, alpha1=2.0)
    assert not same(plain["first"], bonus["first"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kl_target": 0.1}, "kl_target steers kl_coef, which is 0"),
        ({"kl_coef": 0.1, "kl_target": 0.0}, "kl_target is 0.0"),
        ({"importance_cap": 0.0}, "importance_cap is 0.0"),
        ({"huber_delta": -1.0}, "huber_delta is -1.0"),
        ({"kl_in": "rewards"}, "choose one of loss, reward"),
        ({"algorithm": "maporl", "round_gamma": 2.0}, "round_gamma is 2.0"),
    ],
)
def test_values_that_cannot_be_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        TrainConfig.of(**settings)
