"""The update: which adapters move, by which gradient, and what cannot move them."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from helpers_learner import AGENTS, CONFIG, close, make_base, make_learner, make_turns, weights

from mafrt.algorithms import Algorithm
from mafrt.config.agent import AgentSpec
from mafrt.config.algorithm_groups import ValueHeadSettings
from mafrt.config.team import Team
from mafrt.config.train_config import LearnConfig
from mafrt.core.types import Episode
from mafrt.training.batch import collate, split
from mafrt.training.critic import Critic, central_prompts
from mafrt.training.learner import Learner
from mafrt.training.policy_objective import Objective


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def gradients_of_one_step(turns, config=CONFIG, level="token", adapters=AGENTS):
    """The gradients that the optimizers see in the first step."""
    base = make_base()
    learner = make_learner(base, config, level)
    seen = {}
    for name in AGENTS:
        original = learner.optimizers[name].step

        def step(name=name, original=original):
            seen[name] = [p.grad.clone() for p in base.adapter_parameters(name)]
            return original()

        learner.optimizers[name].step = step
    metrics = learner.update(turns, adapters, iteration=0)
    return seen, metrics


@pytest.mark.parametrize("level", ["token", "action"])
def test_the_gradient_is_that_of_the_formula_turn_by_turn(level):
    """Reference: PPO's objective written out over full log-softmax tables, one turn at a time."""
    turns, base = make_turns(), make_base()
    seen, _ = gradients_of_one_step(turns, CONFIG, level)
    heat = dict(zip(AGENTS, (1.0, 0.7), strict=True))
    for name in AGENTS:
        mine = [t for t in turns if t.agent == name]
        count = sum(len(t.action_ids) for t in mine) if level == "token" else len(mine)
        loss = torch.zeros(())
        for t in mine:
            ids = torch.tensor([t.prompt_ids + t.action_ids])
            hidden = base.forward(ids, None, torch.tensor([base.adapter_index(name)]))
            table = (base.logits(hidden)[0] / heat[name]).log_softmax(-1)
            at = len(t.prompt_ids) - 1
            logp = table[at : at + len(t.action_ids)].gather(1, torch.tensor(t.action_ids)[:, None])[:, 0]
            ratio = logp - torch.tensor(t.logprobs)
            ratio = ratio.exp() if level == "token" else ratio.mean().exp()
            advantage = t.advantages[0]
            loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / count
        expected = torch.autograd.grad(loss, base.adapter_parameters(name))
        assert close({name: seen[name]}, {name: expected})


@pytest.mark.parametrize("level", ["token", "action"])
def test_neither_micro_batches_nor_order_nor_the_others_change_a_gradient(level):
    turns = make_turns()
    whole, _ = gradients_of_one_step(turns, level=level)
    tiny, _ = gradients_of_one_step(turns, replace(CONFIG, micro_batch_tokens=1), level)
    mixed, _ = gradients_of_one_step(turns[::-1], level=level)
    alone, _ = gradients_of_one_step([t for t in turns if t.agent == "bob"], level=level)
    assert close(whole, tiny) and close(whole, mixed)
    assert close({"bob": whole["bob"]}, alone)


def test_only_the_learning_adapter_moves_and_all_else_is_bit_identical():
    base = make_base()
    before = {name: weights(base, name) for name in (*AGENTS, "cat")}
    frozen = [p.detach().clone() for p in base.model.parameters() if not p.requires_grad]
    metrics = make_learner(base).update(make_turns(), ["bob"], iteration=0)
    assert not same(before["bob"], weights(base, "bob"))
    assert same(before["ann"], weights(base, "ann")) and same(before["cat"], weights(base, "cat"))
    assert same(frozen, [p for p in base.model.parameters() if not p.requires_grad])
    assert metrics["grad_norm/bob"] > 0 and "grad_norm/ann" not in metrics
    assert base.versions["bob"] == 2 and base.versions["ann"] == 1


def test_turns_out_of_the_loss_and_silent_turns_teach_nothing():
    turns = make_turns()
    kept, _ = gradients_of_one_step(turns)
    extra = make_turns(seed=9)
    for turn in extra:
        turn.advantages = None
    silent = replace(turns[0], action_ids=[], logprobs=[], advantages=[])
    padded, _ = gradients_of_one_step([*turns, *extra, silent])
    assert close(kept, padded)


def test_what_is_not_finite_never_reaches_a_gradient_and_is_counted():
    turns = make_turns()
    turns[0].advantages = [float("nan")] * len(turns[0].action_ids)
    turns[1].logprobs = [float("-inf")] * len(turns[1].action_ids)
    seen, metrics = gradients_of_one_step(turns)
    assert all(torch.isfinite(g).all() for grads in seen.values() for g in grads)
    assert metrics["nonfinite_terms"] == len(turns[0].action_ids) + len(turns[1].action_ids)


def test_a_gradient_that_is_not_finite_skips_the_step_of_that_adapter_only():
    base = make_base()
    learner = make_learner(base)
    poisoned = base.adapter_parameters("ann")[0]
    poisoned.register_hook(lambda grad: grad * float("inf"))
    before = {name: weights(base, name) for name in AGENTS}
    metrics = learner.update(make_turns(), AGENTS, iteration=0)
    assert same(before["ann"], weights(base, "ann")) and not same(before["bob"], weights(base, "bob"))
    assert metrics["skipped_updates"] == 1


def test_an_adapter_that_is_no_longer_finite_rolls_back_alone(caplog):
    base = make_base()
    learner = make_learner(base)
    before = {name: weights(base, name) for name in AGENTS}
    original = learner.optimizers["ann"].step

    def explode():
        original()
        with torch.no_grad():
            base.adapter_parameters("ann")[0].fill_(float("nan"))

    learner.optimizers["ann"].step = explode
    metrics = learner.update(make_turns(), AGENTS, iteration=0)
    assert metrics["rollbacks"] == 1
    assert "Adapter ann had weights that are not finite; it was rolled back to its last finite weights." in caplog.text
    assert same(before["ann"], weights(base, "ann")) and not same(before["bob"], weights(base, "bob"))


def test_weights_that_were_not_finite_before_the_update_are_never_called_good(caplog):
    base = make_base()
    learner = make_learner(base)
    with torch.no_grad():
        base.adapter_parameters("ann")[0].fill_(float("nan"))
    version = base.versions["ann"]
    metrics = learner.update([turn for turn in make_turns() if turn.agent == "ann"], ["ann"], iteration=0)
    assert metrics["rollbacks"] == 0 and base.versions["ann"] == version
    assert "rolled back" not in caplog.text
    assert "Adapter ann is not finite, and was not before the update; nothing is restored." in caplog.text


def test_out_of_memory_halves_the_micro_batch_and_gives_the_same_gradient():
    turns = make_turns()
    whole, _ = gradients_of_one_step(turns)
    base = make_base()
    learner = make_learner(base, replace(CONFIG, micro_batch_tokens=512))
    forward, seen = base.forward, {}

    def small(input_ids, *args, **kwargs):
        if input_ids.numel() > 140:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return forward(input_ids, *args, **kwargs)

    base.forward = small
    for name in AGENTS:
        original = learner.optimizers[name].step

        def step(name=name, original=original):
            seen[name] = [p.grad.clone() for p in base.adapter_parameters(name)]
            return original()

        learner.optimizers[name].step = step
    learner.update(turns, AGENTS, iteration=0)
    assert learner.micro_batch_tokens < 512 and close(whole, seen)


def test_target_kl_ends_the_epochs_early():
    config = replace(CONFIG, ppo_epoch=20, lr=0.05)
    base = make_base()
    learner, turns = make_learner(base, config, target_kl=0.01), make_turns()
    learner.recompute_logprobs(turns)
    metrics = learner.update(turns, AGENTS, iteration=0)
    assert 1 < metrics["epochs"] < 20


def test_recomputed_logprobs_are_those_of_the_adapters_at_the_agents_temperature():
    base, turns = make_base(), make_turns(3)
    make_learner(base).recompute_logprobs(turns)
    for turn in turns:
        ids = torch.tensor([turn.prompt_ids + turn.action_ids])
        hidden = base.forward(ids, None, torch.tensor([base.adapter_index(turn.agent)]))[0]
        table = (base.logits(hidden) / {"ann": 1.0, "bob": 0.7}[turn.agent]).log_softmax(-1)
        at = len(turn.prompt_ids) - 1
        expected = table[at : at + len(turn.action_ids)].gather(1, torch.tensor(turn.action_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(turn.old_logprobs), expected.detach(), atol=1e-5)


def test_updates_repeat_exactly_from_the_same_state():
    results = []
    for _ in range(2):
        base = make_base()
        learner = make_learner(base, replace(CONFIG, ppo_epoch=3, num_mini_batch=2))
        learner.update(make_turns(), AGENTS, iteration=4)
        state = copy.deepcopy(learner.state())
        learner.update(make_turns(), AGENTS, iteration=5)
        results.append((weights(base, "ann"), state))
    assert same(results[0][0], results[1][0])


def test_split_keeps_every_turn_once_and_the_token_limit():
    turns = make_turns(30)
    groups = split(turns, 64)
    assert sorted(row for group in groups for row in group) == list(range(30))
    for group in groups:
        width = max(len(turns[row].prompt_ids) + len(turns[row].action_ids) for row in group)
        assert len(group) == 1 or len(group) * width <= 64


def test_split_of_packed_turns_counts_a_prompt_once():
    def turn(prompt, answer, agent="ann"):
        return replace(make_turns(1)[0], agent=agent, prompt_ids=prompt, action_ids=answer)

    def tokens(group):
        own = {(turns[row].agent, *turns[row].prompt_ids): len(turns[row].prompt_ids) for row in group}
        return sum(own.values()) + sum(len(turns[row].action_ids) for row in group)

    first, second = [1] * 40, [2] * 40
    turns = [turn(prompt, [n] * n, agent) for n in (9, 3, 5) for prompt in (second, first) for agent in ("ann", "bob")]
    groups = split(turns, 120, packs=True)
    assert sorted(row for group in groups for row in group) == list(range(12))
    assert [tokens(group) for group in groups] == [114, 114]
    assert [{turns[row].prompt_ids[0] for row in group} for group in groups] == [{1}, {2}]
    # Long answers do not share a short prompt, and padding has a bound of its own.
    alone = [turn([1] * 20, [7 + n] * 30) for n in range(4)]
    assert [len(group) for group in split(alone, 100, packs=True)] == [2, 2]
    assert max(map(len, split([turn(first, [7 + n]) for n in range(99)], 60, packs=True))) == 5


def test_gather_and_scatter_are_inverse():
    turns = make_turns(4)
    batch = collate(turns, lambda turn: -1, 0, torch.device("cpu"))
    for found, turn in zip(batch.scatter(batch.gather([t.logprobs for t in turns])), turns, strict=True):
        assert found == pytest.approx(turn.logprobs, abs=1e-6)
    flat = batch.input_ids.flatten()
    assert flat[batch.predict + 1].tolist() == batch.targets.tolist()


@pytest.mark.parametrize("level", ["token", "action"])
def test_the_critic_learns_returns_that_its_features_tell_and_is_cheap_to_repeat(level):
    base, turns = make_base(), make_turns(24)
    critic = ValueHeadSettings(critic_lr=1e-2, critic_epoch=60, value_clip=None)
    critic = Critic(base, LearnConfig(), critic, level, seed=0)
    heat = dict.fromkeys(AGENTS, 1.0)
    episodes = [Episode(f"{index}", "g", [turn]) for index, turn in enumerate(turns)]
    features = critic.annotate(episodes, heat, values=True, reference=True)
    for turn in turns:
        assert len(turn.values) == len(turn.action_ids) == len(turn.ref_logprobs)
        turn.returns = [float(turn.agent == "ann")] * len(turn.action_ids)
    first = critic.update(features, iteration=0)["value_loss"]
    features = critic.annotate(episodes, heat, values=True, reference=False)
    last = critic.update(features, iteration=1)["value_loss"]
    assert last < 0.5 * first


def test_a_central_critic_reads_what_everybody_said_and_who_speaks():
    base = make_base()
    first, second = make_turns(2)
    first.agent, second.agent, first.text = "bob", "ann", "seven"
    episodes = [Episode("e", "g", [first, second])]
    seen = central_prompts(episodes, base.tokenizer, 200)
    begin = base.tokenizer.decode(first.prompt_ids, skip_special_tokens=True).rstrip()
    assert base.tokenizer.decode(seen[0][0]) == f"{begin}\nbob:"
    assert base.tokenizer.decode(seen[0][1]) == f"{begin}\nbob: seven\nann:"
    short = central_prompts(episodes, base.tokenizer, 4 + len(second.action_ids))
    assert base.tokenizer.decode(short[0][1]) == "ann:"
    critic = Critic(base, LearnConfig(), ValueHeadSettings(), "token", seed=0, central=True)
    with torch.no_grad():  # a fresh head is nearly 0 everywhere, so differences would not show
        critic.head.out.weight.mul_(1000)
    critic.annotate(episodes, dict.fromkeys(AGENTS, 1.0), values=True, reference=True)
    before = second.values
    first.text = "eight"
    critic.annotate(episodes, dict.fromkeys(AGENTS, 1.0), values=True, reference=False)
    assert second.values != before and len(second.ref_logprobs) == len(second.action_ids)


def test_a_weight_scales_the_gradient_and_weight_one_changes_nothing():
    turns = make_turns()

    def gradients(weight):
        base = make_base()
        learner = make_learner(base)
        seen = {}
        for name in AGENTS:
            learner.optimizers[name].step = lambda name=name: seen.update(
                {name: [p.grad.clone() for p in base.adapter_parameters(name)]}
            )
        learner.update(turns, AGENTS, 0, None if weight is None else [weight] * len(turns))
        return seen

    plain, ones, twice = gradients(None), gradients(1.0), gradients(2.0)
    assert close(plain, ones)
    assert close({n: [2 * g for g in gs] for n, gs in plain.items()}, twice)


# ------------------------------------------------------------------------------------------- settings of one adapter


def test_an_adapters_own_settings_are_as_if_all_had_them():
    """Each adapter ends where a run ends whose settings all are its own: optimizer, clips, entropy and KL."""
    special = {"lr": 3e-3, "weight_decay": 0.3, "max_grad_norm": 0.01}
    usual = Algorithm(importance_cap=None, kl_coef=0.1)
    own = Algorithm(importance_cap=None, kl_coef=0.7, clip_param=0.01, entropy_coef=0.5, dual_clip=1.5)

    def moved(special_of, objective):
        base = make_base()
        team = Team(tuple(AgentSpec(name, **(special if name in special_of else {})) for name in AGENTS))
        learner = Learner(base, team, replace(CONFIG, ppo_epoch=2), objective, 3)
        turns = make_turns()
        for turn in turns:
            turn.ref_logprobs = [-3.0] * len(turn.action_ids)
        metrics = learner.update(turns, AGENTS, 0)
        return {name: weights(base, name) for name in AGENTS}, metrics

    mixed, metrics = moved(["ann"], Objective(usual, {"ann": own}))
    of_ann, _ = moved(AGENTS, Objective(own))
    of_bob, _ = moved([], Objective(usual))
    assert same(mixed["ann"], of_ann["ann"]) and same(mixed["bob"], of_bob["bob"])
    assert not same(mixed["ann"], of_bob["ann"]) and not same(mixed["bob"], of_ann["bob"])
    assert metrics["skipped_updates"] == 0.0
