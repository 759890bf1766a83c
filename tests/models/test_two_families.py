"""A team of two families of this year: a hybrid of recurrence and attention beside a mixture of experts."""

from __future__ import annotations

import json

import pytest
import torch
from helpers_families import VOCAB, tiny
from helpers_models import tiny_tokenizer
from toy import Digits, settings

from mafrt.config.agent import AgentSpec
from mafrt.config.team import Team
from mafrt.models.load_bases import load_bases
from mafrt.runners.identity import Provenance
from mafrt.runners.on_policy import OnPolicy
from mafrt.scripts import export
from mafrt.storage.load_path import resolve
from mafrt.training.learner import Learner

pytestmark = [pytest.mark.takes(slow=11), pytest.mark.slow, pytest.mark.nightly]


class Killed(BaseException):
    """Ends a run as a signal does that nobody can catch: nothing of it reacts."""


def bases_in(folder):
    for family in ("qwen3_5_text", "gpt_oss"):
        tiny(family).save_pretrained(folder / family)
        tiny_tokenizer().save_pretrained(folder / family)
    return Team((AgentSpec("first"), AgentSpec("second", model=str(folder / "gpt_oss"), lora_rank=2)))


def make(folder, team, run, load_path=None, iterations=3):
    torch.set_num_threads(1)
    base = load_bases(team, str(folder / "qwen3_5_text"), device="cpu", dtype="float32")
    config = settings(iterations=iterations, eval_episodes=0, save_interval=1, n_rollout_threads=8, max_new_tokens=4)
    return OnPolicy(
        Digits(), team, base, config, run_dir=run, provenance=Provenance(resolve(load_path) if load_path else None)
    )


def weights(runner):
    return {
        name: b"".join(p.detach().numpy().tobytes() for p in runner.base.of_adapter(name).adapter_parameters(name))
        for name in ("first", "second")
    }


def test_three_iterations_a_kill_a_resume_and_the_way_home(tmp_path, monkeypatch):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    team = bases_in(tmp_path)
    whole = make(tmp_path, team, tmp_path / "whole")
    before = weights(whole)
    whole.run()
    after = weights(whole)
    assert all(before[name] != after[name] for name in after)
    base = whole.base.of_adapter("second")
    assert {path.split(".")[-2] for path in base.adapter_layers("second")} == {"self_attn", "experts"}

    part, update, calls = make(tmp_path, team, tmp_path / "part"), Learner.update, []

    def third(self, *given, **named):
        calls.append(1)
        if len(calls) == 3:
            raise Killed
        return update(self, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "update", third)
        with pytest.raises(Killed):
            part.run()
    resumed = make(tmp_path, team, tmp_path / "part", tmp_path / "part")
    resumed.run()
    assert weights(resumed) == after
    for file in ("metrics.jsonl", "episodes.jsonl"):
        assert (tmp_path / "part" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()

    ids = torch.randint(5, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    for name, family in (("first", "qwen3_5_text"), ("second", "gpt_oss")):
        saved = tmp_path / "whole" / "checkpoints" / "step_000003" / name
        assert json.loads((saved / "adapter_config.json").read_text())["base_model_name_or_path"].endswith(family)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / family, dtype="float32")
        base = whole.base.of_adapter(name)
        with torch.no_grad():
            expected = PeftModel.from_pretrained(plain, saved).eval()(input_ids=ids).logits.log_softmax(-1)
            index = torch.full((2,), base.adapter_index(name))
            found = base.logits(base.forward(ids, None, index)).log_softmax(-1)
        assert (found - expected).abs().max() < 1e-4
    assert export.main(["--load_path", str(tmp_path / "whole"), "--output", str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "second" / "adapter_config.json").read_text())
    assert any(name.endswith("experts.gate_up_proj") for name in config["target_parameters"])
