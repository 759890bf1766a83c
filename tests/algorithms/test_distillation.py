"""On-policy distillation: rewards by hand, the exact gradient of the KL, every kind of teacher, and refusals."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from helpers_models import tiny_base
from toy import Digits, make, settings

from mafrt.algorithms import algorithm, assign
from mafrt.config.agent import LoraSpec
from mafrt.config.team import Team
from mafrt.core.errors import CheckpointError, ConfigError, PromptTooLongError
from mafrt.core.types import Episode, Turn
from mafrt.rollout.teacher import Teacher, filled
from mafrt.runners.on_policy import OnPolicy

RULES = ("opd", "self_distill")


def spoken(logprobs, teacher, *, agent="a", old=None):
    ids = [3] * len(logprobs)
    turn = Turn(agent, [7], ids, logprobs, "eos", "x", 0, 0, 0, old_logprobs=old)
    turn.teacher_logprobs = teacher
    return turn


@pytest.mark.parametrize("rule", RULES)
def test_every_token_is_paid_by_itself_or_with_those_after_it(rule):
    turn = spoken([-1.0, -2.0, -0.5], [-0.5, -4.0, -0.25])
    metrics = assign([Episode("e", "g", [turn], outcome=1.0)], rule)
    # -.5 + 1 = .5 ; -4 + 2 = -2 ; -.25 + .5 = .25. The outcome is not read.
    assert turn.advantages == turn.returns == [0.5, -2.0, 0.25]
    assert metrics["teacher_kl/a"] == pytest.approx(1.25 / 3) and metrics["reward/a"] == turn.paid == -1.25
    assign([Episode("e", "g", [turn])], rule, gamma=0.5)
    # .25 ; -2 + .125 = -1.875 ; .5 - .9375
    assert turn.advantages == [-0.4375, -1.875, 0.25]


def test_the_trainers_own_log_probabilities_go_before_the_samplers():
    turn = spoken([-9.0], [-1.0], old=[-2.0])
    assign([Episode("e", "g", [turn])], "opd")
    assert turn.advantages == [1.0]


def test_a_turn_that_the_teacher_did_not_score_leaves_the_loss():
    turns = [spoken([-1.0], None), spoken([-1.0], [math.nan]), spoken([-1.0], [-2.0]), spoken([], [])]
    metrics = assign([Episode(str(n), "g", [turn]) for n, turn in enumerate(turns)], "opd")
    assert [turn.advantages for turn in turns] == [None, None, [-1.0], []] and metrics["turns_unjudged"] == 2


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_the_expected_gradient_is_that_of_the_kl(gamma):
    """All answers of two tokens out of three; the student's logits depend on the token before, the teacher's too."""
    rng = torch.Generator().manual_seed(3)
    student = torch.randn(4, 3, generator=rng, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(4, 3, generator=rng, dtype=torch.float64).log_softmax(-1)
    own = student.log_softmax(-1)
    surrogate, kl = torch.zeros(()), torch.zeros(())
    for first, second in itertools.product(range(3), repeat=2):
        chosen = torch.stack([own[0, first], own[1 + first, second]])
        wanted = torch.stack([teacher[0, first], teacher[1 + first, second]])
        turn = spoken(chosen.tolist(), wanted.tolist())
        assign([Episode("e", "g", [turn])], "opd", gamma=gamma)
        chance = chosen.sum().exp()
        surrogate = surrogate - chance.detach() * (torch.tensor(turn.advantages, dtype=torch.float64) * chosen).sum()
        # Of whole answers, or of the next token where the student is.
        kl = kl + chance * (chosen - wanted).sum()
    if gamma == 0.0:
        at_first = (own[0].exp() * (own[0] - teacher[0])).sum()
        reached = own[0].exp().detach()[:, None]
        kl = at_first + (reached * own[1:].exp() * (own[1:] - teacher[1:])).sum()
    [found] = torch.autograd.grad(surrogate, student, retain_graph=True)
    [right] = torch.autograd.grad(kl, student)
    torch.testing.assert_close(found, right, atol=1e-12, rtol=1e-9)


# ------------------------------------------------------------------------------------------------------- teachers


class Facts(Digits):
    """`Digits` with a fact of each episode."""

    def reset(self, seed=None, options=None):
        observations, info = super().reset(seed, options)
        return observations, {**info, "answer": "7"}


def runner(rule, env=None, **changes):
    env = Facts() if env is None else env
    base = changes.pop("base", None) or tiny_base()
    return OnPolicy(env, Team.of(env.agents), base, settings(algorithm=rule, eval_episodes=0, **changes))


def scored(run):
    batch = run.collect()
    plan = run.rule.schedule.plan(0)
    run.updater.value(batch.episodes, plan, 0)
    return [turn for episode in batch.episodes for turn in episode.turns]


@pytest.mark.slow
def test_the_base_is_the_teacher_where_none_is_named():
    base = tiny_base()
    run = runner("opd", base=base)
    for turn in scored(run):  # fresh adapters change nothing, so the student is the base
        assert turn.teacher_logprobs == pytest.approx(turn.logprobs, abs=1e-4)
    with torch.no_grad():
        for name in ("first", "second"):
            for parameter in base.adapter_parameters(name):
                parameter.add_(0.3)
    before = scored(run)
    assert any(abs(t - o) > 0.01 for x in before for t, o in zip(x.teacher_logprobs, x.logprobs, strict=True))


@pytest.mark.slow
def test_adapters_of_a_folder_teach_and_score_their_own_samples_alike(tmp_path):
    taught = tiny_base()
    for name in ("first", "second"):
        taught.add_adapter(name, LoraSpec(rank=3), seed=5)
        with torch.no_grad():
            for parameter in taught.adapter_parameters(name):
                parameter.add_(0.2)
        taught.save_adapter(name, tmp_path / "teachers" / name)
    run = runner("opd", teacher_path=str(tmp_path / "teachers"))
    turns = scored(run)
    # The same numbers as those of the base that has the teachers' weights as its agents' own.
    other = OnPolicy(Facts(), run.team, taught, settings(algorithm="reinforce_pp", eval_episodes=0))
    wanted = other.updater.learner.logprobs(turns)
    for turn, values in zip(turns, wanted, strict=True):
        assert turn.teacher_logprobs == pytest.approx(values, abs=1e-4)
    with pytest.raises(CheckpointError, match="does not exist"):
        runner("opd", teacher_path=str(tmp_path / "none"))


@pytest.mark.slow
def test_a_longer_prompt_is_put_behind_the_observation():
    run = runner("opd", teacher_prompt="Say {answer}, {task}.")
    turns = scored(run)
    # The same adapter after the same tokens: the base itself asked with the longer prompt.
    from dataclasses import replace

    from mafrt.rollout.prompts import encode_prompt, with_note

    for turn in turns[:3]:
        spec = run.team.agent(turn.agent)
        word = str(turn.observation).split()[0]
        seen = with_note(turn.observation, f"Say 7, {word}.")
        prompt = encode_prompt(run.base.tokenizer, spec.prompt, seen, spec.prompt_at)
        assert len(prompt) > len(turn.prompt_ids)
        [wanted] = run.updater.learner.logprobs([replace(turn, prompt_ids=prompt)])
        assert turn.teacher_logprobs == pytest.approx(wanted, abs=1e-4)


@pytest.mark.slow
def test_a_student_is_its_own_teacher_after_what_it_learnt():
    run = runner("self_distill")
    assert run.updater.teacher.adapters is None and not [n for n in run.base.adapters if "@" in n]
    turns = scored(run)
    assert any(abs(t - o) > 1e-4 for x in turns for t, o in zip(x.teacher_logprobs, x.logprobs, strict=True))


def test_facts_are_filled_in_and_missing_ones_are_named():
    assert filled("The answer is {answer}. {{x}}", {"answer": 3}) == "The answer is 3. {x}"
    with pytest.raises(ConfigError, match=r"names \{solution\}.*it has answer, task"):
        filled("{solution}", {"task": 1, "answer": 2})
    run = runner("self_distill", env=Digits())
    with pytest.raises(ConfigError, match=r"names \{answer\}.*it has"):
        scored(run)


def test_a_prompt_that_does_not_fit_is_refused():
    base = tiny_base()
    teacher = Teacher(base, Team.of(("first", "second")), "x" * 10 * base.context_window, None, themselves=False)
    turn = Turn("first", [1], [2], [-1.0], "eos", "x", 0, 0, 0, observation="ash")
    with pytest.raises(PromptTooLongError, match="shorten teacher_prompt"):
        teacher.fill([Episode("e", "g", [turn])], None, {})


@pytest.mark.parametrize(
    ("rule", "given", "words"),
    [
        ("self_distill", {"teacher_prompt": ""}, "nothing to teach"),
        ("self_distill", {"teacher_path": "x"}, "'self_distill' has no teacher_path; it belongs to opd"),
        ("opd", {"outcome_weight": 1.0}, "'opd' has no outcome_weight"),
        ("opd", {"gamma": 1.5}, "gamma"),
    ],
)
def test_what_has_no_effect_or_no_sense_is_refused(rule, given, words):
    with pytest.raises(ConfigError, match=words):
        algorithm(rule, **given)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_whole_update_moves_the_agent_that_learns_and_no_other(rule):
    run = runner(rule, freeze=("second",))
    names = [*run.base.adapters]
    with torch.no_grad():
        for parameter in run.base.adapter_parameters("first"):
            parameter.add_(0.2)  # away from the teacher
    before = {name: run.base.adapter_state(name) for name in names}
    metrics = run.learn(run.collect()).metrics
    moved = {n: any((before[n][k] != v).any() for k, v in run.base.adapter_state(n).items()) for n in names}
    assert (
        moved == {name: name == "first" for name in names}
        and metrics["teacher_kl/first"] == metrics["teacher_kl/first"]
    )


@pytest.mark.slow
def test_a_student_that_equals_its_teacher_stays_where_it_is():
    run = runner("opd")  # whose fresh adapters change nothing; two passes differ by rounding, which Adam would follow
    before = {name: run.base.adapter_state(name) for name in run.base.adapters}
    run.learn(run.collect())
    for name, tensors in before.items():
        assert all(torch.equal(value, run.base.adapter_state(name)[key]) for key, value in tensors.items())


@pytest.mark.slow
def test_the_student_comes_nearer_to_its_teacher(tmp_path: Path):
    taught = tiny_base()
    for name in ("first", "second"):
        taught.add_adapter(name, LoraSpec(rank=4, alpha=8.0), seed=5)
        with torch.no_grad():
            for parameter in taught.adapter_parameters(name):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        taught.save_adapter(name, tmp_path / "teachers" / name)
    run = runner("opd", teacher_path=str(tmp_path / "teachers"), iterations=12, n_rollout_threads=32, ppo_epoch=1)
    found = [run.learn(run.collect()).metrics for _ in range(12)]
    first, last = (sum(m[f"teacher_kl/{name}"] for name in ("first", "second")) for m in (found[0], found[-1]))
    assert first > 0.05 and last < 0.6 * first


@pytest.mark.slow
def test_a_resumed_run_has_the_same_teacher(tmp_path):
    common = {"algorithm": "opd", "save_interval": 1, "eval_episodes": 0}
    whole = make(tmp_path / "whole", iterations=3, **common)
    whole.run()
    make(tmp_path / "half", iterations=2, **common).run()
    again = make(tmp_path / "half", tmp_path / "half", iterations=3, **common)
    again.run()
    for name in ("first", "second"):
        one, other = whole.base.adapter_state(name), again.base.adapter_state(name)
        assert all((one[key] == other[key]).all() for key in one)
