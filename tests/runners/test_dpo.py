"""DPO: numbers worked by hand, TRL's own code, the gradient of the formula, references, and that it learns."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers_models import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sft import (
    LEARN,
    TEAM,
    check_resume,
    close,
    gradients,
    lines,
    make_base,
    make_records,
    offline,
    same,
    table_logprobs,
    weights,
)

from mafrt.algorithms.preference_losses import dpo_loss
from mafrt.core.errors import CheckpointError, ConfigError, DataError
from mafrt.runners.offline.dataset import Record, turn_of
from mafrt.runners.offline.dpo import Dpo
from mafrt.runners.offline.sft import RecordLearner
from mafrt.scripts import train_dpo, train_math, train_sft
from mafrt.scripts.cli import offline as offline_command
from mafrt.storage.args_file import write_args
from mafrt.storage.load_path import resolve
from mafrt.storage.run_record import load_record

pytestmark = pytest.mark.takes(slow=7)

HAND = {
    "chosen": [-2.0, -4.0],
    "rejected": [-3.0, -1.0],
    "ref_chosen": [-2.5, -3.0],
    "ref_rejected": [-2.0, -1.5],
}


def tensors(**values):
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def make_pairs(count=9, seed=0):
    return make_records(count, answers=2, seed=seed)


# ------------------------------------------------------------------------------------------------------------ the loss


def test_the_loss_by_hand():
    # beta = .5. First pair: r(chosen) = .5 (-2 + 2.5) = .25, r(rejected) = .5 (-3 + 2) = -.5, margin .75,
    # -log sigmoid(.75) = ln(1 + e^-.75) = ln 1.4723666 = .3868710.
    # Second: r(chosen) = .5 (-4 + 3) = -.5, r(rejected) = .5 (-1 + 1.5) = .25, margin -.75, ln(1 + e^.75) = 1.1368710.
    data = tensors(**HAND)
    for name in ("chosen", "rejected"):
        data[name].requires_grad_()
    loss, stats = dpo_loss(**data, beta=0.5, denominator=2)
    assert loss.item() == pytest.approx((0.3868710 + 1.1368710) / 2, abs=1e-7)
    assert {name: float(value) for name, value in stats.items()} == pytest.approx(
        {"count": 2, "accuracy": 1, "margin": 0, "chosen_reward": -0.25, "rejected_reward": -0.25, "nonfinite": 0}
    )
    # d/d chosen = -beta sigmoid(-margin) / 2: sigmoid(-.75) = .4723666 / 1.4723666 = .3208213, sigmoid(.75) = .6791787.
    chosen, rejected = torch.autograd.grad(loss, (data["chosen"], data["rejected"]))
    assert chosen.tolist() == pytest.approx([-0.0802053, -0.1697947], abs=1e-7)
    assert rejected.tolist() == pytest.approx([0.0802053, 0.1697947], abs=1e-7)


def test_before_the_first_step_the_loss_is_ln_2_and_no_preference_is_met():
    logps = torch.tensor([-3.0, -7.5])
    loss, stats = dpo_loss(logps, logps - 1, logps, logps - 1, beta=0.3, denominator=2)
    assert loss.item() == pytest.approx(math.log(2)) and stats["accuracy"] == 0 and stats["margin"] == 0


def test_what_is_not_finite_is_masked_and_counted_and_stays_in_the_denominator():
    data = tensors(**HAND)
    data["ref_chosen"][1] = float("-inf")
    data["rejected"].requires_grad_()
    loss, stats = dpo_loss(**data, beta=0.5, denominator=2)
    assert loss.item() == pytest.approx(0.3868710 / 2, abs=1e-7)
    assert (stats["count"], stats["nonfinite"], stats["accuracy"]) == (1, 1, 1)
    assert torch.autograd.grad(loss, data["rejected"])[0].tolist() == pytest.approx([0.0802053, 0], abs=1e-7)


def test_extreme_margins_stay_finite():
    far = torch.tensor([1e4], requires_grad=True)
    zero = torch.zeros(1)
    loss, _ = dpo_loss(zero, far, zero, zero, beta=1.0, denominator=1)
    assert loss.item() == 1e4 and torch.autograd.grad(loss, far)[0].item() == 1
    assert dpo_loss(far, zero, zero, zero, beta=1.0, denominator=1)[0].item() == 0


@pytest.mark.parametrize("bad", [{"beta": 0.0}, {"beta": float("nan")}, {"denominator": 0}])
def test_settings_that_mean_nothing_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        dpo_loss(**tensors(**HAND), **{"beta": 0.1, "denominator": 2, **bad})
    if "beta" in bad:
        with pytest.raises(ConfigError, match="beta"):
            Dpo(**bad)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_loss_gradient_and_metrics_are_trl_s(seed):
    """TRL computes its loss in a method of its trainer, called here unbound with the few fields that it reads."""
    trainer = pytest.importorskip("trl", reason="install trl to compare with it").DPOTrainer
    pairs, time, beta = 4, 9, 0.2
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return -torch.rand(2 * pairs, time - 1, generator=generator, dtype=torch.float64)

    mask = torch.arange(time) < torch.randint(3, time + 1, (2 * pairs, 1), generator=generator)
    mask[:, :2] = False  # the prompt
    new, ref = (draw() * mask[:, 1:] for _ in range(2))
    new.requires_grad_()
    outputs = SimpleNamespace(
        log_probs=new, entropy=torch.zeros_like(ref), mean_logits=torch.zeros_like(ref), is_top1=mask[:, 1:]
    )
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    stand_in = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        beta=beta,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    ref_chosen, ref_rejected = ref.sum(1).chunk(2)
    inputs = {
        "input_ids": torch.zeros(2 * pairs, time, dtype=torch.long),
        "attention_mask": mask.long(),
        "completion_mask": mask.long(),
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    want = trainer._compute_loss(stand_in, lambda **_: outputs, inputs, False)
    (want_grad,) = torch.autograd.grad(want, new)
    chosen, rejected = new.sum(1).chunk(2)
    got, stats = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=beta, denominator=pairs)
    (got_grad,) = torch.autograd.grad(got, new)
    torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-8)
    torch.testing.assert_close(got_grad, want_grad, atol=1e-10, rtol=1e-8)
    assert got_grad.abs().max() > 1e-3
    theirs = {"accuracy": "accuracies", "margin": "margins", "chosen_reward": "chosen", "rejected_reward": "rejected"}
    for name, other in theirs.items():
        assert float(stats[name]) / pairs == pytest.approx(stand_in._metrics["train"][f"rewards/{other}"][0])


# -------------------------------------------------------------------------------------------------------- the gradient


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["base", "initial"])
def test_the_gradient_is_that_of_the_formula_pair_by_pair(reference):
    """Reference: DPO's objective written out over full log-softmax tables, one answer at a time."""
    pairs, base, beta = make_pairs(), make_base(), 0.3
    seen, metrics = gradients(pairs, Dpo(beta, reference))
    for name in ("ann", "bob"):
        mine = [pair.turns for pair in pairs if pair.agent == name]
        terms = []
        for turns in mine:
            now = [table_logprobs(base, turn, name).sum() for turn in turns]
            was = [table_logprobs(base, turn, None if reference == "base" else name).sum().detach() for turn in turns]
            margin = beta * ((now[0] - was[0]) - (now[1] - was[1]))
            terms.append(torch.log1p(torch.exp(-margin)))
        loss = torch.stack(terms).mean()
        want = torch.autograd.grad(loss, base.adapter_parameters(name))
        assert close(seen[name], want) and max(float(g.abs().max()) for g in want) > 1e-3
        assert metrics[f"loss/{name}"] == pytest.approx(loss.item(), rel=1e-4)
        assert metrics[f"margin/{name}"] == pytest.approx(
            metrics[f"chosen_reward/{name}"] - metrics[f"rejected_reward/{name}"], abs=1e-6
        )
    if reference == "initial":
        assert metrics["loss/bob"] == pytest.approx(math.log(2), abs=1e-5)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(order=st.permutations(range(9)), tokens=st.sampled_from([1, 90, 200, 100_000]))
def test_neither_micro_batches_nor_padding_nor_order_nor_the_others_change_it(order, tokens):
    pairs, rule = make_pairs(), Dpo(0.3)
    whole, _ = gradients(pairs, rule)
    found, _ = gradients([pairs[i] for i in order], rule, replace(LEARN, micro_batch_tokens=tokens))
    alone, _ = gradients([pairs[i] for i in order if pairs[i].agent == "bob"], rule)
    assert all(close(whole[name], found[name]) for name in whole) and close(whole["bob"], alone["bob"])


def test_a_pair_lies_in_one_micro_batch_of_the_size_asked_for():
    base, pairs, shapes = make_base(), make_pairs(30), []
    forward = base.forward

    def watch(input_ids, mask, *args, **kwargs):
        shapes.append((len(input_ids), int(mask.sum())))
        return forward(input_ids, mask, *args, **kwargs)

    base.forward = watch
    learner = RecordLearner(base, TEAM, replace(LEARN, micro_batch_tokens=200), Dpo(), seed=0)
    for pair in pairs:
        pair.reference = (0.0, 0.0)
    learner.step(pairs, 0)
    assert sum(rows for rows, _ in shapes) == 60 and len(shapes) > 5
    # Tokens that are computed: padding and each row's last token are not.
    assert all(rows % 2 == 0 and (rows == 2 or tokens <= 200) for rows, tokens in shapes), shapes


def test_only_adapters_with_pairs_move_and_all_else_is_bit_identical():
    base, pairs = make_base(), [pair for pair in make_pairs() if pair.agent == "ann"]
    before = {name: weights(base, name) for name in TEAM.adapters}
    _, metrics = gradients(pairs, Dpo(), base=base)
    assert not same(before["ann"], weights(base, "ann")) and metrics["grad_norm/ann"] > 0
    assert same(before["bob"], weights(base, "bob")) and same(before["cat"], weights(base, "cat"))


def test_a_pair_that_is_not_finite_teaches_nothing_and_is_counted():
    pairs = make_pairs()
    learner = RecordLearner(make_base(), TEAM, LEARN, Dpo(), seed=0)
    learner.refer(pairs)
    kept, _ = gradients(pairs, Dpo())
    pairs[1].reference = (float("nan"), 0.0)
    seen, metrics = gradients(pairs, Dpo())
    assert metrics["nonfinite_terms"] == 1 and all(torch.isfinite(g).all() for g in seen["bob"])
    assert not close(seen["bob"], kept["bob"]) and close(seen["ann"], kept["ann"])


# --------------------------------------------------------------------------------------------------------- references


@pytest.mark.parametrize("reference", ["base", "initial"])
def test_references_are_taken_before_the_first_step(reference, monkeypatch):
    monkeypatch.setattr("mafrt.runners.offline.dpo._AT_ONCE", 4)
    base, pairs = make_base(), make_pairs()
    learner = RecordLearner(base, TEAM, LEARN, Dpo(0.1, reference), seed=0)
    learner.refer(pairs)
    with torch.no_grad():
        for pair in pairs:
            adapter = None if reference == "base" else pair.agent
            want = [table_logprobs(base, turn, adapter).sum().item() for turn in pair.turns]
            assert pair.reference == pytest.approx(want, abs=1e-4)
            assert all(turn.ref_logprobs is None for turn in pair.turns)


def test_an_unknown_reference_is_refused():
    with pytest.raises(ConfigError, match="reference is 'bse'; choose one of base, initial"):
        Dpo(reference="bse")


# ------------------------------------------------------------------------------------------------------------ the loop


def likes(count=24):
    """ann likes digits better than letters, bob the other way round."""
    tokenizer, records = tiny_tokenizer(), []
    for index in range(count):
        agent = ("ann", "bob")[index % 2]
        digit, letter = "0123456789"[index % 10], "abcdefghij"[index // 2 % 10]
        answers = (digit * 3, letter * 2) if agent == "ann" else (letter * 2, digit * 3)
        prompt = tokenizer.encode("ABCDEFGH"[index % 8])
        turns = tuple(turn_of(agent, prompt, [*tokenizer.encode(text), 1], "eos", text) for text in answers)
        records.append(Record(turns, str(index)))
    return records


@pytest.mark.slow
def test_preferences_are_learnt_each_agent_its_own(tmp_path):
    runner = offline(tmp_path / "run", records=likes(), rule=Dpo(0.5), epochs=6, held_out=likes(40)[24:])
    silent = weights(runner.base, "cat")
    summary = runner.run()
    for name in ("ann", "bob"):
        assert summary.before[f"eval/loss/{name}"] == pytest.approx(math.log(2), abs=1e-4)
        assert summary.after[f"eval/loss/{name}"] < 0.2
        assert summary.after[f"eval/accuracy/{name}"] == 1 and summary.after[f"eval/margin/{name}"] > 1
    first, last = lines(tmp_path / "run")[0], lines(tmp_path / "run")[-1]
    assert last["loss/ann"] < first["loss/ann"] and last["margin/bob"] > first["margin/bob"]
    assert {"accuracy/ann", "chosen_reward/ann", "rejected_reward/ann", "grad_norm/ann"} <= last.keys()
    assert same(silent, weights(runner.base, "cat"))


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["base", "initial"])
def test_a_run_that_is_stopped_goes_on_exactly(tmp_path, reference):
    check_resume(tmp_path, records=likes(), rule=Dpo(0.5, reference), held_out=likes(4))


@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_reference(tmp_path):
    run = tmp_path / "run"
    offline(run, records=likes(), rule=Dpo(0.5), epochs=1).run()
    with pytest.raises(CheckpointError, match=r"other reference \(base, here initial\)"):
        offline(run, run, records=likes(), rule=Dpo(0.5, "initial"), epochs=2)
    with pytest.raises(CheckpointError, match=r"other rule \(dpo, here sft\)"):
        offline(run, run, epochs=2)


# ---------------------------------------------------------------------------------------------------- the command line


def written(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


PAIR = {"agent": "actor", "prompt": "1+1", "chosen": "\\boxed{2}", "rejected": "\\boxed{3}"}


@pytest.mark.parametrize(
    ("record", "argv", "says"),
    [
        (None, [], "There is nothing to learn from; name files by --records_path, or runs by --episodes_path"),
        (PAIR, ["--beta", "0"], "beta is 0.0; choose a value above 0"),
        (PAIR, ["--min_gap", "1"], "--min_gap has no effect without --episodes_path"),
        (PAIR, ["--batch_size", "0"], "batch_size is 0"),
        (PAIR, ["--reference", "bse"], "choose one of base, initial"),
        (PAIR, ["--episodes_path", "nowhere"], "nowhere holds no episodes.jsonl"),
        (PAIR, ["--ppo_epoch", "2"], "There is no flag '--ppo_epoch'"),
        ({**PAIR, "agent": "actr"}, [], "a.jsonl, line 1: There is no agent 'actr'; did you mean 'actor'?"),
        ({"agent": "actor", "prompt": "p", "response": "r"}, [], "a.jsonl, line 1: lacks the field 'chosen'"),
    ],
)
def test_bad_input_is_one_sentence_before_any_model_is_loaded(capsys, tmp_path, monkeypatch, record, argv, says):
    monkeypatch.chdir(tmp_path)
    words = ["--profile_path", "profiles/quickstart_math.json", *argv]
    if record is not None:
        words += ["--records_path", written(tmp_path / "a.jsonl", record)]
    assert train_dpo.main(words) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1 and says in shown.err
    assert "Loading" not in shown.out and not (tmp_path / "runs").exists()


def test_without_a_team_file_those_who_are_named_make_up_the_team(tmp_path):
    path = written(tmp_path / "a.jsonl", PAIR, {**PAIR, "agent": "critic"})
    words = ["--records_path", path, "--eval_records_path", path]
    settings = train_dpo.COMMAND.read(words)
    assert offline_command.read(settings, train_dpo.prepare(settings)).team.names == ("actor", "critic")
    other = written(tmp_path / "b.jsonl", {**PAIR, "agent": "critik"})
    settings = train_dpo.COMMAND.read([*words, "--eval_records_path", other])
    with pytest.raises(DataError, match="no agent 'critik'; did you mean 'critic'"):
        offline_command.read(settings, train_dpo.prepare(settings))


def test_what_a_load_path_means(tmp_path, capsys):
    """A run of the same command goes on, cut short or not; the adapters of any other are initial weights."""

    def start(command, path):
        return offline_command._start(command, resolve(path))

    runner = offline(tmp_path / "dpo", records=likes(), rule=Dpo(), epochs=1)
    runner.args = train_dpo.COMMAND.read(["--records_path", "x", "--lora_rank", "4"]).values
    runner.run()
    loaded, stored, _ = start(train_dpo.COMMAND, tmp_path / "dpo")
    assert loaded.resumes and loaded.step == 3 and stored["records_path"] == ["x"]
    loaded, stored, _ = start(train_sft.COMMAND, tmp_path / "dpo")
    assert not loaded.resumes and set(loaded.adapters) == {"ann", "bob", "cat"}
    assert stored["lora_rank"] == 4 and "records_path" not in stored
    assert "of another kind of run" in capsys.readouterr().out
    loaded, stored, _ = start(train_sft.COMMAND, tmp_path / "dpo" / "adapters")
    assert not loaded.resumes and not stored
    # An SFT run that was killed before its first checkpoint goes on in its folder, from where it started.
    cut = tmp_path / "cut"
    cut.mkdir()
    load_record(tmp_path / "dpo").save(cut)
    write_args(cut / "args.yaml", train_sft.COMMAND.read(["--records_path", "y"]).values)
    (cut / "origin.json").write_text(json.dumps({"load_path": str(resolve(tmp_path / "dpo").path)}))
    loaded, stored, _ = start(train_sft.COMMAND, cut)
    assert loaded.resumes and loaded.run == cut and loaded.step == 0 and loaded.adapters
    assert stored["records_path"] == ["y"]
    (cut / "origin.json").unlink()
    assert start(train_sft.COMMAND, cut)[0].run == cut
    with pytest.raises(ConfigError, match="no adapters to load"):
        start(train_dpo.COMMAND, cut)


@pytest.mark.slow
@pytest.mark.ci
def test_sft_then_play_then_dpo_on_what_was_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    record = {"agent": "actor", "prompt": "1+1", "response": "\\boxed{2}"}
    team = ["--profile_path", "profiles/quickstart_math.json"]
    words = [*team, "--records_path", written(tmp_path / "sft.jsonl", record), "--run_dir", "sft"]
    assert train_sft.main(words) == 0
    short = ["--iterations", "1", "--n_rollout_threads", "32", "--n_samples", "16", "--max_new_tokens", "32"]
    play = [*team, *short, "--eval_episodes", "0", "--temperature", "1.5"]
    assert train_math.main([*play, "--load_path", "sft", "--run_dir", "play"]) == 0
    capsys.readouterr()
    assert train_dpo.main(["--episodes_path", "play", "--load_path", "play", "--run_dir", "dpo"]) == 0
    said = capsys.readouterr().out
    assert "play: 64 turns of 32 episodes" in said and "came out otherwise" not in said
    assert "Learning from records (reasoner " in said and ", actor " in said
    assert train_dpo.main(["--load_path", "dpo", "--epochs", "2"]) == 0
    steps = [line["iteration"] for line in lines(tmp_path / "dpo")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) % 2 == 0
    assert train_sft.main([*team, "--episodes_path", "play", "--load_path", "dpo/adapters", "--run_dir", "best"]) == 0
    assert resolve(tmp_path / "best" / "adapters").adapters.keys() == {"reasoner", "actor"}
