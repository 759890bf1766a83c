"""Supervised fine-tuning and the loop over records: the gradient, who moves, exact resume, and PPO afterwards."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toy
from helpers_models import tiny_base, tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from mafrt.algorithms.preference_losses import sft_loss
from mafrt.config.agent import AgentSpec, LoraSpec
from mafrt.config.team import Team
from mafrt.config.train_config import LearnConfig, TrainConfig
from mafrt.core.atomic_files import load_tensors
from mafrt.core.errors import CheckpointError, ConfigError, DataError
from mafrt.runners.identity import Provenance
from mafrt.runners.offline.dataset import Record, RecordPasses, read_answers, turn_of
from mafrt.runners.offline.runner import ADAPTERS, Offline
from mafrt.runners.offline.sft import RecordLearner, Sft
from mafrt.scripts import collect, train, train_math, train_sft
from mafrt.storage.load_path import resolve

pytestmark = pytest.mark.takes(slow=11)

TEAM = Team.of(["ann", "bob", "cat"])
LEARN = LearnConfig(lr=1e-2, max_grad_norm=1e9)
SHAPE = {"lora_rank": 4, "lora_alpha": 8.0}
WORDS = {"ann": "12345678", "bob": "abcdefgh"}


def make_base(team=TEAM):
    """Adapters that are not zero, so that all of them matter."""
    torch.set_num_threads(1)
    base = tiny_base()
    for index, name in enumerate(team.adapters):
        base.add_adapter(name, LoraSpec(rank=4, alpha=8.0), seed=5)
        torch.manual_seed(index)
        with torch.no_grad():
            for parameter in base.adapter_parameters(name):
                parameter.add_(0.05 * torch.randn_like(parameter))
        base.bump(name)
    return base


def make_records(count=9, answers=1, seed=0, agents=("ann", "bob")):
    """Random tokens; every third record is the first agent's. The answers of a record share their prompt."""
    generator = torch.Generator().manual_seed(seed)
    records = []
    for index in range(count):
        lengths = [int(torch.randint(3, 15, (1,), generator=generator)) for _ in range(1 + answers)]
        prompt, *actions = (torch.randint(5, 90, (n,), generator=generator).tolist() for n in lengths)
        agent = agents[index % 3 != 0]
        records.append(
            Record(tuple(turn_of(agent, prompt, action, "eos", "") for action in actions), f"record {index}")
        )
    return records


def learnable(count=24):
    """Answers that their prompt tells: ann continues a digit, bob a letter."""
    tokenizer, records = tiny_tokenizer(), []
    for index in range(count):
        agent = ("ann", "bob")[index % 2]
        word = WORDS[agent]
        at = index // 2 % (len(word) - 1)
        prompt, action = tokenizer.encode(word[at]), [*tokenizer.encode(word[at + 1]), 1]
        records.append(Record((turn_of(agent, prompt, action, "eos", ""),), str(index)))
    return records


def weights(base, name):
    return [p.detach().clone() for p in base.adapter_parameters(name)]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def close(a, b):
    return all(torch.allclose(x, y, rtol=1e-4, atol=1e-6) for x, y in zip(a, b, strict=True))


def gradients(records, rule, learn=LEARN, base=None):
    """What the optimizers see in one step, by adapter, and the metrics."""
    base = base or make_base()
    learner = RecordLearner(base, TEAM, learn, rule, seed=3)
    if any(record.reference is None for record in records):
        learner.refer(records)
    seen = {}
    for name in TEAM.adapters:

        def step(name=name, original=learner.learner.optimizers[name].step):
            seen[name] = [p.grad.clone() for p in base.adapter_parameters(name)]
            return original()

        learner.learner.optimizers[name].step = step
    metrics = learner.step(records, 0)
    return seen, metrics


def table_logprobs(base, turn, adapter):
    """Independent of the learner: one row, no padding, the whole log-softmax table."""
    ids = torch.tensor([turn.prompt_ids + turn.action_ids])
    hidden = base.forward(ids, None, torch.tensor([base.adapter_index(adapter)]))
    table = base.logits(hidden)[0].log_softmax(-1)
    at = len(turn.prompt_ids) - 1
    return table[at : at + len(turn.action_ids)].gather(1, torch.tensor(turn.action_ids)[:, None])[:, 0]


# ------------------------------------------------------------------------------------------------------------ the loss


def test_the_loss_by_hand():
    # Probabilities 1/2, 1/4, 1/8: -(ln 1/2 + ln 1/4 + ln 1/8) = 6 ln 2; over three tokens 2 ln 2.
    logprobs = torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64).log().requires_grad_()
    loss, stats = sft_loss(logprobs, denominator=3)
    assert loss.item() == pytest.approx(2 * math.log(2)) and stats["count"] == 3
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx([-1 / 3] * 3)
    assert sft_loss(logprobs, denominator=6)[0].item() == pytest.approx(math.log(2))


def test_what_is_not_finite_is_masked_and_counted_and_stays_in_the_denominator():
    logprobs = torch.tensor([-1.0, float("-inf"), float("nan"), -2.0], requires_grad=True)
    loss, stats = sft_loss(logprobs, denominator=4)
    assert loss.item() == 0.75 and (stats["count"], stats["nonfinite"]) == (2, 2)
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == [-0.25, 0, 0, -0.25]
    with pytest.raises(ValueError, match="denominator is 0"):
        sft_loss(logprobs, denominator=0)


def test_it_is_the_cross_entropy_of_torch():
    logits, targets = torch.randn(7, 11), torch.randint(11, (7,))
    logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    want = torch.nn.functional.cross_entropy(logits, targets)
    torch.testing.assert_close(sft_loss(logprobs, denominator=7)[0], want)


# -------------------------------------------------------------------------------------------------------- the gradient


@pytest.mark.slow
def test_the_gradient_is_that_of_the_formula_answer_by_answer():
    records, base = make_records(), make_base()
    seen, metrics = gradients(records, Sft())
    for name in ("ann", "bob"):
        mine = [record.turns[0] for record in records if record.agent == name]
        loss = -torch.cat([table_logprobs(base, turn, name) for turn in mine]).mean()
        assert close(seen[name], torch.autograd.grad(loss, base.adapter_parameters(name)))
        assert metrics[f"loss/{name}"] == pytest.approx(loss.item(), rel=1e-5)
        norm = torch.cat([g.flatten() for g in seen[name]]).norm().item()
        assert metrics[f"grad_norm/{name}"] == pytest.approx(norm, rel=1e-5)
    assert "cat" not in seen and "loss/cat" not in metrics


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(order=st.permutations(range(9)), tokens=st.sampled_from([1, 40, 100, 100_000]))
def test_neither_micro_batches_nor_padding_nor_order_nor_the_others_change_it(order, tokens):
    records = make_records()
    whole, _ = gradients(records, Sft())
    found, _ = gradients([records[i] for i in order], Sft(), replace(LEARN, micro_batch_tokens=tokens))
    alone, _ = gradients([records[i] for i in order if records[i].agent == "bob"], Sft())
    assert all(close(whole[name], found[name]) for name in whole) and close(whole["bob"], alone["bob"])
    assert len({len(record.turns[0].action_ids) for record in records}) > 3  # there is padding


def test_only_adapters_with_records_move_and_all_else_is_bit_identical():
    base = make_base()
    before = {name: weights(base, name) for name in TEAM.adapters}
    frozen = [p.detach().clone() for p in base.model.parameters() if not p.requires_grad]
    RecordLearner(base, TEAM, LEARN, Sft(), seed=3).step(make_records(agents=("bob", "bob")), 0)
    assert not same(before["bob"], weights(base, "bob"))
    assert same(before["ann"], weights(base, "ann")) and same(before["cat"], weights(base, "cat"))
    assert same(frozen, [p for p in base.model.parameters() if not p.requires_grad])


def test_out_of_memory_halves_the_micro_batch_and_gives_the_same_gradient_and_metrics():
    records = make_records()
    whole, want = gradients(records, Sft())
    base = make_base()
    forward = base.forward

    def small(input_ids, *args, **kwargs):
        if input_ids.numel() > 140:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return forward(input_ids, *args, **kwargs)

    base.forward = small
    found, got = gradients(records, Sft(), replace(LEARN, micro_batch_tokens=512), base)
    assert all(close(whole[name], found[name]) for name in whole) and got == pytest.approx(want, rel=1e-4)


def test_agents_that_share_an_adapter_share_its_mean():
    team = Team((AgentSpec("ann", adapter="both"), AgentSpec("bob", adapter="both", lr=3e-3)))
    base, records = make_base(team), make_records()
    learner = RecordLearner(base, team, LEARN, Sft(), seed=3)
    assert learner.learner.optimizers["both"].param_groups[0]["lr"] == 3e-3
    metrics = learner.step(records, 0)
    with torch.no_grad():
        base = make_base(team)
        want = -torch.cat([table_logprobs(base, record.turns[0], "both") for record in records]).mean()
    assert metrics["loss/both"] == pytest.approx(want.item(), rel=1e-5)


# ------------------------------------------------------------------------------------------------------------ the loop


def offline(run=None, load=None, records=None, rule=None, team=TEAM, epochs=6, batch_size=5, held_out=(), **changes):
    torch.set_num_threads(1)
    config = TrainConfig.of(**{"lr": 1e-2, "save_interval": 4, **SHAPE, **changes})
    return Offline(
        RecordPasses(learnable() if records is None else records, epochs, batch_size, held_out),
        rule or Sft(),
        team,
        tiny_base(),
        config,
        run_dir=run,
        provenance=Provenance(resolve(load) if load else None),
    )


def lines(run, name="metrics"):
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_it_learns_and_the_files_are_there(tmp_path):
    runner = offline(tmp_path / "run", epochs=25, lr=2e-2, held_out=learnable(14))
    silent = weights(runner.base, "cat")
    summary = runner.run()
    # 12 records each in batches of 4: three steps an epoch.
    assert summary.iterations == 75 and summary.stopped_by is None
    for name in ("ann", "bob"):
        assert summary.after[f"eval/loss/{name}"] < 0.5 * summary.before[f"eval/loss/{name}"]
    found = lines(tmp_path / "run")
    assert [line["iteration"] for line in found] == list(range(1, 76))
    assert {"loss/ann", "grad_norm/bob", "skipped_updates", "nonfinite_terms"} <= found[0].keys()
    assert found[0]["trained/bob"] == 1 and found[0]["trained/cat"] == 0 and "loss/cat" not in found[0]
    assert [(e["when"], e["iteration"]) for e in lines(tmp_path / "run", "evaluations")] == [
        ("before", 0),
        ("after", 75),
    ]
    assert same(silent, weights(runner.base, "cat"))
    assert resolve(tmp_path / "run" / ADAPTERS).adapters.keys() == {"ann", "bob", "cat"}


def test_adapters_with_fewer_records_finish_earlier_and_learn_the_same_alone():
    records = learnable()
    few = [record for record in records if record.agent == "ann"][:5] + [r for r in records if r.agent == "bob"]
    both = offline(records=few, epochs=2)
    both.run()
    assert both.steps == {"ann": 2, "bob": 6} and both.iterations == 6
    seen = [record.where for i in range(6) for record in both.batch(i) if record.agent == "ann"]
    assert sorted(seen) == sorted(2 * [record.where for record in few if record.agent == "ann"])
    alone = offline(records=few, epochs=2, freeze=("bob",))
    alone.run()
    assert all(
        torch.allclose(x, y, atol=1e-6) for x, y in zip(*(weights(r.base, "ann") for r in (both, alone)), strict=True)
    )


def contents(run):
    newest = resolve(run).path
    tensors = load_tensors(newest / "state" / "optimizers.pt")
    state = json.loads((newest / "state" / "run.json").read_text())
    files = {n: (newest / n / "adapter_model.safetensors").read_bytes() for n in TEAM.adapters}
    logs = {name: (run / f"{name}.jsonl").read_bytes() for name in ("metrics", "evaluations")}
    return repr(tensors), state, files, logs


def check_resume(tmp_path, **settings):
    """A run that SIGTERM stops, and that goes on, equals one that was left alone."""
    offline(tmp_path / "whole", **settings).run()
    cut = offline(tmp_path / "cut", **settings)
    summary = cut.run(lambda p: os.kill(os.getpid(), signal.SIGTERM) if p.iteration == 7 else None)
    assert summary.stopped_by == "SIGTERM" and summary.iterations == 7 and not (tmp_path / "cut" / ADAPTERS).exists()
    again = offline(tmp_path / "cut", tmp_path / "cut", **settings).run()
    assert again.iterations == 18 and again.before == summary.before
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_exactly(tmp_path):
    check_resume(tmp_path, held_out=learnable(4))


@pytest.mark.slow
def test_a_run_may_go_on_longer_but_not_with_other_records(tmp_path):
    run = tmp_path / "run"
    offline(run, epochs=1).run()
    assert offline(run, run, epochs=2).run().iterations == 6
    for change in ({"records": learnable()[:-1]}, {"batch_size": 4}, {"seed": 2}, {"held_out": learnable(2)}):
        with pytest.raises(CheckpointError, match="was written with other"):
            offline(run, run, epochs=3, **change)


@pytest.mark.slow
def test_sft_then_ppo_then_sft_on_the_same_adapters(tmp_path):
    team = Team.of(["first", "second"])
    renamed = {"ann": "first", "bob": "second"}
    records = [Record((replace(r.turns[0], agent=renamed[r.agent]),), r.where) for r in learnable()]
    sft = offline(tmp_path / "sft", records=records, team=team)
    sft.run()
    ppo = toy.make(tmp_path / "ppo", tmp_path / "sft" / ADAPTERS, iterations=2)
    for name in team.adapters:
        assert same(weights(sft.base, name), weights(ppo.base, name))
    assert ppo.run().iterations == 2
    for name in team.adapters:
        assert not same(weights(sft.base, name), weights(ppo.base, name))
    with pytest.raises(CheckpointError, match="another kind of run"):
        offline(tmp_path / "no", tmp_path / "ppo", records=records, team=team)
    start = tmp_path / "start"
    start.mkdir()
    for name, folder in resolve(tmp_path / "ppo").adapters.items():
        (start / name).symlink_to(folder)
    more = offline(tmp_path / "more", start, records=records, team=team)
    assert all(same(weights(more.base, name), weights(ppo.base, name)) for name in team.adapters)
    assert more.iteration == 0


def test_what_cannot_be_learnt_from_is_refused():
    with pytest.raises(DataError, match="no record to learn from; give records"):
        offline(records=[])
    with pytest.raises(DataError, match=r"no record to learn from \(24 are of frozen agents\)"):
        offline(freeze=("all",))
    with pytest.raises(ConfigError, match="no frozen agent 'bop'; did you mean 'bob'"):
        offline(freeze=("bop",))
    with pytest.raises(ConfigError, match="batch_size is 0"):
        offline(batch_size=0)
    with pytest.raises(ConfigError, match="no agent 'ann'"):
        offline(team=Team.of(["x", "bob"]))


CHAT = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize("record", [
    {"prompt": "1+1", "response": "2"},
    {"messages": CHAT[:1], "response": "2"},
    {"messages": CHAT, "score": 1.0, "iteration": 3},
    {"prompt": CHAT[:1], "completion": CHAT[1:]},
    {"prompt": "1+1", "completion": "2"},
    {"run": "r", "episode": 0, "turn": 0, "prompt": CHAT[:1], "answer": "2", "reward": None, "paid": 1.0},
])  # fmt: skip
def test_the_layouts_of_trl_and_of_collect_are_read(tmp_path, record):
    """`mafrt collect` writes chats as TRL trains on them; `train_sft` reads its own program's files."""
    (tmp_path / "r.jsonl").write_text(json.dumps({"agent": "a", **record}) + "\n")
    [[answer]] = read_answers([tmp_path / "r.jsonl"], ("response",), Team.of(("a", "b")))
    assert answer.text == "2" and answer.seen in ("1+1", CHAT[:1])


@pytest.mark.parametrize("record", [
    {"prompt": "1+1", "chosen": "2", "rejected": "3"},
    {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [{"role": "assistant", "content": "3"}]},
    {"chosen": CHAT, "rejected": [CHAT[0], {"role": "assistant", "content": "3"}]},
])  # fmt: skip
def test_the_pairs_of_trl_are_read(tmp_path, record):
    (tmp_path / "r.jsonl").write_text(json.dumps(record) + "\n")
    [[chosen, rejected]] = read_answers([tmp_path / "r.jsonl"], ("chosen", "rejected"), Team.of(("a",)))
    assert (chosen.text, rejected.text) == ("2", "3") and chosen.seen in ("1+1", CHAT[:1])


@pytest.mark.parametrize("record, words", [
    ({"messages": CHAT[:1]}, "response"),
    ({"messages": [{"role": "assistant", "content": "2"}]}, "messages"),
    ({"prompt": CHAT[:1], "completion": CHAT}, "response"),
    ({"chosen": CHAT}, "expected either"),
])  # fmt: skip
def test_a_chat_that_holds_no_answer_is_refused(tmp_path, record, words):
    (tmp_path / "r.jsonl").write_text(json.dumps({"agent": "a", **record}) + "\n")
    with pytest.raises(DataError, match=words):
        read_answers([tmp_path / "r.jsonl"], ("response",), Team.of(("a",)))


@pytest.mark.slow
@pytest.mark.ci
def test_a_runs_own_files_are_learnt_from_without_naming_its_team(tmp_path, monkeypatch, capsys):
    """Role prompts stand in the prompts of a run, so its recorded team is the one that its episodes belong to."""
    monkeypatch.chdir(tmp_path)
    short = ["--iterations", "1", "--n_rollout_threads", "4", "--max_new_tokens", "8", "--eval_episodes", "0"]
    assert train_math.main([*short, "--algorithm", "reinforce_pp", "--run_dir", "run"]) == 0
    # A rule without a critic saves none.
    assert not list(Path("run").rglob("critic.pth"))
    assert train_sft.main(["--episodes_path", "run", "--min_return", "0", "--run_dir", "one"]) == 0
    assert train_sft.main(["--episodes_path", "run/episodes.jsonl", "--min_return", "0", "--run_dir", "two"]) == 0
    assert capsys.readouterr().out.count("8 turns of 4 episodes") == 2
    assert train_sft.main(["--episodes_path", "run", "--min_return", "2", "--run_dir", "none"]) == 2
    assert "lower --min_return" in capsys.readouterr().err and not Path("none").exists()
    assert collect.main(["run", "--output", "good.jsonl", "--min_score", "0"]) == 0
    assert train_sft.main(["--records_path", "good.jsonl", "--run_dir", "three"]) == 0
    # The adapters of a run are where any command may start.
    assert train.command_of(Path("three/adapters")) is None
    assert train.command_of(Path("run/checkpoints")) == train.command_of(Path("run")) == "train_math"


@pytest.mark.slow
@pytest.mark.ci
def test_a_checkpoint_is_gone_on_from_by_the_command_that_was_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tasks = [{"problem": f"{n}+1", "answer": str(n + 1)} for n in range(3)]
    Path("t.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    Path("my.py").write_text("def score(text, record):\n    return float(record['answer'] in text)\n")
    words = ["--dataset_path", "t.jsonl", "--reward", "my.py:score", "--n_rollout_threads", "2", "--iterations", "2"]
    words += ["--max_new_tokens", "4", "--eval_episodes", "0", "--save_interval", "1", "--run_dir", "run"]
    assert train.main(words) == 0
    for number, load_path in enumerate((["--load_path", "run/checkpoints/step_000001"], ["--load-path=run"])):
        assert train.main([*load_path, "--run_dir", f"branch{number}", "--iterations", "3"]) == 0
        assert Path(f"branch{number}/checkpoints/step_000003").is_dir()
