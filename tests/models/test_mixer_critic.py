"""The mixer as a stage: monotone, target by copy, temporal differences by hand, exact resume, learning."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers_models import tiny_base
from helpers_runs import adapters, cut_and_resumed, same
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import make

from mafrt import algorithms
from mafrt.algorithms.rewards import Row
from mafrt.config.team import Team
from mafrt.config.train_config import LearnConfig, TrainConfig
from mafrt.core.errors import CheckpointError, ConfigError
from mafrt.core.types import Episode, Turn
from mafrt.models.q_mixer import Monotone, TeamValue, follow, target_of
from mafrt.models.value_head import load_critic
from mafrt.runners.algorithm import resolve_rule
from mafrt.storage.load_path import resolve
from mafrt.training.mixer_critic import MixerCritic

AGENTS = ("first", "second")


def said(base, agent: str, index: int, prompt: str, text: str) -> Turn:
    ids = base.tokenizer.encode(text, add_special_tokens=False)
    prompt_ids = base.tokenizer.encode(prompt, add_special_tokens=False)
    return Turn(agent, prompt_ids, ids, [-1.0] * len(ids), "eos", text, index, index, 0)


def batch(base, rewards=(0.25, 0.5, 1.0)) -> list[Episode]:
    """Episodes of two joint steps: both together, then `first` alone. Each step's first turn earns the reward."""
    found = []
    for i, reward in enumerate(rewards):
        turns = [
            said(base, "first", 0, "ash", f"a{i}"),
            said(base, "second", 1, f"ash a{i}", f"bcd{i}"),
            said(base, "first", 2, f"ash bcd{i}", f"e{i}{i}"),
        ]
        for turn, worth in zip(turns, (reward, 0.0, 2 * reward), strict=True):
            turn.returns = [worth] * len(turn.action_ids)
            turn.env_step = int(turn is turns[2])
        found.append(Episode(str(i), "p", turns))
    return found


def make_mixer(kind: str = "qmix", gamma: float = 0.5, td_lambda: float = 0.0, **learn) -> MixerCritic:
    wanted = {"critic_hidden_size": 16, "critic_lr": 1e-2, "critic_epoch": 4, **learn}
    mine = {name: wanted.pop(name) for name in list(wanted) if name not in vars(LearnConfig())}
    settings = algorithms.algorithm(kind, gamma=gamma, gae_lambda=td_lambda, **mine)
    return MixerCritic(tiny_base(), LearnConfig(**wanted), settings, AGENTS, seed=3)


def annotate(stage: MixerCritic, episodes: list[Episode], *, reference: bool = False):
    return stage.annotate(episodes, dict.fromkeys(AGENTS, 1.0), values=True, reference=reference)


# ------------------------------------------------------------------------------------------------------ the networks


def test_monotone_mixer_by_hand():
    # 1 agent, width 1, a state of two features. layer_norm([0, 2]) = [-1, 1], over sqrt(2): [-.70711, .70711].
    # W1 = |(-2 + 0) * .70711| ... with weights [2, 0]: |-1.41421| ; b1 = .5 ; W2 weights [0, -4]: |-2.82843| ; V = 3.
    # q = 1: ELU(1.41421 + .5) = 1.91421 ; Q_tot = 1.91421 * 2.82843 + 3 = 8.41421
    # q = -1: ELU(-.91421) = exp(-.91421) - 1 = -.59917 ; Q_tot = -.59917 * 2.82843 + 3 = 1.30531
    mixer = Monotone(agents=1, state_size=2, width=1)
    with torch.no_grad():
        mixer.w1.weight.copy_(torch.tensor([[2.0, 0.0]]))
        mixer.w2.weight.copy_(torch.tensor([[0.0, -4.0]]))
        for layer, bias in ((mixer.w1, 0.0), (mixer.w2, 0.0), (mixer.b1, 0.5), (mixer.v[2], 3.0)):
            layer.bias.fill_(bias)
    got = mixer(torch.tensor([[1.0], [-1.0]]), torch.tensor([[0.0, 2.0], [0.0, 2.0]]))
    assert got.tolist() == pytest.approx([8.41421, 1.30531], abs=1e-3)


@pytest.mark.slow
@given(seed=st.integers(0, 10_000), agents=st.integers(1, 4), scale=st.floats(0.1, 10))
@settings(max_examples=30, deadline=None)
def test_q_tot_never_falls_when_a_q_rises(seed, agents, scale):
    torch.manual_seed(seed)
    mixer = Monotone(agents, 8)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(0.0, scale)
    q = (torch.randn(16, agents) * scale).requires_grad_()
    s = torch.randn(16, 8)
    (slope,) = torch.autograd.grad(mixer(q, s).sum(), q)
    assert (slope >= 0).all() and (slope > 0).any()
    better = q.detach().clone()
    better[:, seed % agents] += 1.0
    assert (mixer(better, s) >= mixer(q, s) - 1e-4 * scale**3).all()


def test_qmix_starts_near_the_sum():
    torch.manual_seed(0)
    q, s = 0.1 * torch.randn(64, 3), torch.randn(64, 64)
    assert (Monotone(3, 64)(q, s) - q.sum(-1)).abs().max() < 0.1


@pytest.mark.parametrize("kind", ["vdn", "qmix"])
def test_target_and_target_mixer_start_as_copies_and_follow(kind):
    net = TeamValue(kind, 2, 8, 4)
    target = target_of(net)
    names = {name for name, _ in target.named_parameters()}
    assert any("heads" in name for name in names) and (kind == "vdn" or any("mixer.w1" in name for name in names))
    for (name, slow), fast in zip(target.named_parameters(), net.parameters(), strict=True):
        assert torch.equal(slow, fast) and slow is not fast and not slow.requires_grad, name
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)
    before = copy.deepcopy(target)
    follow(target, net, 0.25)  # a quarter of the way: + .25
    for slow, was in zip(target.parameters(), before.parameters(), strict=True):
        assert torch.allclose(slow, was + 0.25)


def test_who_is_silent_counts_nothing_and_learns_nothing():
    net = TeamValue("vdn", 2, 8, 4)
    x, spoke = torch.randn(3, 2, 8), torch.tensor([[True, False]] * 3)
    q_tot = net(x, spoke, torch.zeros(3, 0))
    assert torch.equal(q_tot, net.heads[0](x[:, 0]))
    q_tot.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in net.heads[1].parameters())


# --------------------------------------------------------------------------------------------------------- the stage


@pytest.mark.parametrize("kind", ["vdn", "qmix"])
def test_features_are_the_hidden_states_before_a_turn_and_over_it(kind):
    stage = make_mixer(kind)
    episodes = batch(stage.base)
    features = annotate(stage, episodes, reference=True)
    steps = features.steps
    assert steps.spoke.tolist() == [[True, True], [True, False]] * 3
    assert steps.last.tolist() == [False, True] * 3
    turn = episodes[1].turns[1]
    with torch.no_grad():  # alone, without padding
        ids = torch.tensor([[*turn.prompt_ids, *turn.action_ids]])
        states = stage.base.forward(ids, None, torch.tensor([-1]))[0].float()
        begin = len(turn.prompt_ids)
        parts = states[begin - 1], states[begin:].mean(0)
        alone = torch.cat([(part - part.mean()) / (part.var(correction=0) + 1e-5).sqrt() for part in parts])
        want = stage.net.heads[1](alone).item()
    assert torch.allclose(steps.x[2, 1], alone, atol=1e-5)
    assert turn.values == pytest.approx([want] * 4, abs=1e-5)
    from mafrt.training.critic import Critic

    twins = batch(stage.base)
    Critic(stage.base, stage.learn, None, "token", 1).annotate(
        twins, dict.fromkeys(AGENTS, 1.0), values=False, reference=True
    )
    for one, other in zip(episodes, twins, strict=True):
        for a, b in zip(one.turns, other.turns, strict=True):
            assert a.ref_logprobs == pytest.approx(b.ref_logprobs, abs=1e-5)


def test_joint_puts_other_values_in_the_place_of_ones_own():
    stage = make_mixer("vdn")
    episodes = batch(stage.base)
    features = annotate(stage, episodes)
    joint, (a, b, alone) = features.credit["joint"], episodes[0].turns
    row_a, row_alone = Row(a, 0, "p", 0), Row(alone, 0, "p", 2)
    assert joint(row_a, [1.0, a.values[0]]) == pytest.approx([1.0 + b.values[0], a.values[0] + b.values[0]], abs=1e-6)
    assert joint(row_alone, [7.0]) == [7.0]


def test_one_step_of_temporal_differences_by_hand():
    """y = r + gamma Q_tot' of the target, gamma .5; nothing follows the last step. Loss = mean of (Q_tot - y)^2 / 2."""
    stage = make_mixer("vdn", critic_epoch=1)
    episodes = batch(stage.base, rewards=(0.25,))
    features = annotate(stage, episodes)
    q = [turn.values[0] for turn in episodes[0].turns]
    # Step 0: both speak, r = .25 + 0; then `first` alone, r = .5. At the start the target is the net.
    errors = (q[0] + q[1] - (0.25 + 0.5 * q[2])), q[2] - 0.5
    want = sum(e * e / 2 for e in errors) / 2
    metrics = stage.update(features, 0)
    assert metrics["value_loss"] == pytest.approx(want, abs=1e-6) and metrics["replay_steps"] == 2.0


def test_targets_by_hand():
    """gamma .5, lambda .8; two episodes of two steps with r = .25, .5 and 1, 2. y of a last step is its reward.

    y of a first step: r + .5 (.2 Q' + .8 y'), and r + .5 Q' where the next step's reward is not known.
    """
    stage = make_mixer("vdn", td_lambda=0.8, critic_epoch=1)
    episodes = batch(stage.base, rewards=(0.25, 1.0))
    features = annotate(stage, episodes)
    q = [episode.turns[2].values[0] for episode in episodes]
    stage.net.requires_grad_(False).heads[0].out.bias.add_(9.0)  # the target is a copy: this must not be read
    steps = features.steps
    steps.reward, steps.known = torch.tensor([0.25, 0.5, 1.0, 2.0]), torch.tensor([True] * 4)
    stage.memory = steps
    first = [0.25 + 0.5 * (0.2 * q[0] + 0.8 * 0.5), 1.0 + 0.5 * (0.2 * q[1] + 0.8 * 2.0)]
    assert stage._targets().tolist() == pytest.approx([first[0], 0.5, first[1], 2.0], abs=1e-6)
    steps.known[3] = False
    assert stage._targets()[:3].tolist() == pytest.approx([first[0], 0.5, 1.0 + 0.5 * q[1]], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vdn", "qmix"])
def test_it_learns_what_the_team_earns(kind):
    # Steps are worth r + .5 * 2r = 2r and 2r: with r = .25, .5, 1 the values are .5, 1, 2 in both.
    stage = make_mixer(kind, critic_epoch=20, critic_lr=6e-3)
    features = annotate(stage, batch(stage.base))
    for iteration in range(16):
        metrics = stage.update(features, iteration)
    with torch.no_grad():
        m = features.steps
        q_tot = stage.net(m.x, m.spoke, m.s)
    assert q_tot.tolist() == pytest.approx([0.5, 0.5, 1.0, 1.0, 2.0, 2.0], abs=0.15), metrics
    assert metrics["value_loss"] < 0.01


def test_a_step_of_unknown_reward_is_remembered_but_never_learnt_from():
    stage = make_mixer("vdn", critic_epoch=1, replay_steps=5)
    episodes = batch(stage.base)
    episodes[0].turns[1].returns = None
    stage.update(annotate(stage, episodes), 0)
    # Of 6 steps the oldest is forgotten, and it was the unknown one.
    assert len(stage.memory) == 5 and stage.memory.known.all()
    episodes = batch(stage.base)
    episodes[2].turns[2].returns = None
    stage.update(annotate(stage, episodes), 1)
    assert stage.memory.known.tolist() == [True, True, True, True, False]
    only = batch(stage.base)[:1]
    only[0].turns[0].returns = None
    fresh = make_mixer("vdn")
    before = copy.deepcopy(fresh.net.state_dict())
    assert fresh.update(annotate(fresh, only), 0)["replay_steps"] == 2.0
    # The last step is known, and it is the only one that moves anything: `second` did not speak in it.
    after = fresh.net.state_dict()
    assert {name[:7] for name in before if not torch.equal(before[name], after[name])} == {"heads.0"}


@pytest.mark.parametrize("kind", ["vdn", "qmix"])
def test_order_of_the_episodes_changes_not_one_bit(kind):
    stages = make_mixer(kind), make_mixer(kind)
    for stage, order in zip(stages, ((0, 1, 2), (2, 0, 1)), strict=True):
        episodes = batch(stage.base)
        for iteration in range(2):
            stage.update(annotate(stage, [episodes[i] for i in order]), iteration)
    a, b = (stage.net.state_dict() for stage in stages)
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vdn", "qmix"])
def test_saved_and_loaded_it_goes_on_exactly(kind, tmp_path):
    from mafrt.core.atomic_files import load_tensors, save_tensors

    whole, cut = make_mixer(kind), make_mixer(kind)
    for stage in (whole, cut):
        stage.update(annotate(stage, batch(stage.base)), 0)
    cut.save(tmp_path / "critic.pth")
    save_tensors(tmp_path / "state.pt", cut.state())
    again = make_mixer(kind, critic_lr=1e-2)
    again.load(tmp_path / "critic.pth")
    again.load_state(load_tensors(tmp_path / "state.pt"))
    for stage in (whole, again):
        stage.update(annotate(stage, batch(stage.base, (0.0, 3.0, 1.0))), 1)
    for one, other in ((whole.net, again.net), (whole.target, again.target)):
        a, b = one.state_dict(), other.state_dict()
        assert all(torch.equal(a[name], b[name]) for name in a)
    other = "vdn" if kind == "qmix" else "qmix"
    with pytest.raises(CheckpointError, match=f"holds {kind} .* expected {other}"):
        make_mixer(other).load(tmp_path / "critic.pth")


# ----------------------------------------------------------------------------------------------------------- the run


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("kind", ["vdn", "qmix"])
def test_a_stopped_run_goes_on_exactly(kind, tmp_path):
    # 8 steps an iteration; of 3 iterations the memory keeps two.
    wanted = {"algorithm": kind, "n_samples": 4, "iterations": 3, "replay_steps": 16, "kl_coef": 0.01}
    whole, cut = cut_and_resumed(tmp_path, 2, **wanted)
    assert whole == cut
    # PPO started from it says what is wrong with its critic.
    with pytest.raises(CheckpointError, match="no critic"):
        load_critic(resolve(tmp_path / "whole").path / "critic.pth")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vdn", "qmix"])
def test_the_learning_adapters_move_and_no_other(kind):
    runner = make(None, algorithm=kind, n_samples=4, iterations=2, freeze=("second",), eval_episodes=0)
    before = adapters(runner)
    runner.run()
    after = adapters(runner)
    assert same(before["second"], after["second"]) and not same(before["first"], after["first"])


def test_what_it_needs_is_said_before_a_model_is_loaded():
    def rule(agents=("a", "b"), **changes):
        return resolve_rule(TrainConfig.of(n_rollout_threads=8, **changes), Team.of(list(agents)))

    assert rule(algorithm="qmix", n_samples=4, gamma=0.9).settings.gamma == 0.9
    assert rule(algorithm="vdn", n_samples=4, gae_lambda=0.5, residual_weight=0.0).settings.residual_weight == 0.0
    with pytest.raises(ConfigError, match="at least 2 per problem"):
        rule(algorithm="vdn")
    with pytest.raises(ConfigError, match="several agents"):
        rule(("a",), algorithm="qmix", n_samples=4)
    with pytest.raises(ConfigError, match="target_tau"):
        rule(target_tau=0.0)
