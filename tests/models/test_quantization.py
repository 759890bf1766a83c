"""A base in 4 and 8 bits, and the optimizer in 8: what of bitsandbytes runs on a CPU. The rest needs a GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from helpers_models import tiny_model, tiny_tokenizer
from helpers_warm import run_command
from toy import Digits, make, settings

from mafrt.config.agent import LoraSpec
from mafrt.config.team import Team
from mafrt.core.errors import MissingExtraError, ModelError
from mafrt.models.shared_base import SharedBase
from mafrt.runners.on_policy import OnPolicy
from mafrt.training.optimizers import make_optimizer

pytestmark = pytest.mark.takes(slow=8)

ROOT = Path(__file__).parents[2]
HAVE = importlib.util.find_spec("bitsandbytes") is not None
needed = pytest.mark.skipif(not HAVE, reason="bitsandbytes is not installed: 4 and 8 bits are NOT tested here")


def loaded(bits) -> SharedBase:
    torch.set_num_threads(1)
    return SharedBase.load("teaching-base", device="cpu", bits=bits)


def logprobs(base: SharedBase, ids: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    states = base.forward(ids, None, index)[:, :-1]
    return base.token_logprobs(states.reshape(-1, states.shape[-1]), ids[:, 1:].reshape(-1))[0]


def saved(folder, model, **config):
    """A folder with a model, with changes to its config.json."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return str(folder)


@needed
@pytest.mark.parametrize("bits", [4, 8])
def test_a_config_of_quantised_weights_beside_ordinary_ones_is_refused_by_name(bits, tmp_path):
    told = {"quant_method": "bitsandbytes", f"load_in_{bits}bit": True}
    folder = saved(tmp_path, tiny_model("llama"), quantization_config=told)
    with pytest.raises(ModelError, match=r"layers\.0.*is not quantised; take the quantization_config out"):
        SharedBase.load(folder, device="cpu")


@needed
@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_that_were_saved_quantised_are_loaded_as_they_are(bits, tmp_path, monkeypatch):
    # As on a CPU with AVX512-BF16, where bitsandbytes packs 4-bit weights for inference, if it is let.
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    plain = saved(tmp_path / "plain", tiny_model("llama", width=64))
    folder = saved(tmp_path / "own", SharedBase.load(plain, device="cpu", bits=bits).model)
    ids = torch.tensor([[5, 6, 7]])
    bases = [SharedBase.load(folder, device="cpu", bits=own) for own in (None, bits)]
    packs = [getattr(part, "support_avx512bf16_for_cpu", False) for base in bases for part in base.model.modules()]
    assert not any(packs)
    assert torch.equal(*(base.forward(ids, None, torch.tensor([-1])) for base in bases))
    with pytest.raises(ModelError, match=f"quantised already .bitsandbytes.*load_in_{12 - bits}bit"):
        SharedBase.load(folder, device="cpu", bits=12 - bits)


@needed
@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_on_a_quantised_base_get_nearly_the_gradients_of_the_whole_one(bits):
    ids = torch.randint(5, 300, (3, 24), generator=torch.Generator().manual_seed(1))
    index, grads, size, prints = torch.tensor([0, 1, -1]), [], [], []
    for base in (loaded(None), loaded(bits)):
        for name in ("a", "b"):
            base.add_adapter(name, LoraSpec(rank=4, alpha=8.0), seed=1)
            generator = torch.Generator().manual_seed(2)
            with torch.no_grad():
                for _, b in base.adapter_layers(name).values():
                    b.copy_(0.02 * torch.randn(b.shape, generator=generator))
            base.bump(name)
        with torch.no_grad():
            logprobs(base, ids, index)  # after which bitsandbytes would pass no gradients back, if it were let
        logprobs(base, ids, index).sum().backward()
        grads.append(torch.cat([p.grad.flatten() for name in ("a", "b") for p in base.adapter_parameters(name)]))
        prints.append(base.fingerprint())
        size.append(sum(p.numel() * p.element_size() for n, p in base.model.named_parameters() if "lora" not in n))
        assert base.quantised is (len(grads) == 2)
    assert prints[0] == prints[1] and size[1] < 0.6 * size[0]
    assert torch.nn.functional.cosine_similarity(grads[0], grads[1], dim=0) > (0.9 if bits == 4 else 0.97)
    assert not torch.equal(grads[0], grads[1])


@needed
@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_a_team_learns_on_a_quantised_base_and_the_samplers_rounding_is_corrected_for(bits, tmp_path):
    wanted = settings(iterations=3, n_rollout_threads=8, max_new_tokens=4, eval_episodes=0, lora_rank=4)
    base = loaded(bits)
    before = [p.detach().clone() for p in base.model.parameters()]
    names = [name for name, _ in base.model.named_parameters()]
    runner = OnPolicy(Digits(), Team.of(Digits.agents), base, wanted, run_dir=tmp_path / "run")
    assert runner.engine.decoding == "expanded"
    runner.run()
    after = dict(base.model.named_parameters())
    for name, old in zip(names, before, strict=True):
        new = after.get(name, after.get(name.replace(".weight", ".base_layer.weight")))
        assert new is not None and torch.equal(new, old), name
    assert runner.base.versions["first"] > 0
    line = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert '"importance_weight_mean/first"' in line and '"engine_gap/first"' in line


@needed
@pytest.mark.slow
def test_the_8_bit_optimizer_steps_and_goes_on_exactly(tmp_path):
    changes = {"optimizer": "paged_adamw_8bit", "lora_rank": 128, "eval_episodes": 0}
    changes |= {"save_interval": 2, "keep_last": 9}
    whole = make(tmp_path / "whole", iterations=4, **changes)
    whole.run()
    state = next(iter(whole.updater.learner.optimizers["first"].state.values()))
    assert state["state1"].dtype == torch.uint8, "the moments are in 8 bits"
    again = make(tmp_path / "again", tmp_path / "whole" / "checkpoints" / "step_000002", iterations=4, **changes)
    again.run()
    for name in Digits.agents:
        pairs = zip(whole.base.adapter_parameters(name), again.base.adapter_parameters(name), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.skipif(HAVE, reason="bitsandbytes is installed here")
@pytest.mark.parametrize("words", [["--load_in_4bit"], ["--load_in_8bit"], ["--optimizer", "paged_adamw_8bit"]])
def test_without_bitsandbytes_one_sentence_says_what_to_install(words):
    done = run_command([sys.executable, str(ROOT / "scripts" / "train_math.py"), *words], cwd=ROOT)
    assert done.returncode == 2 and "pip install 'bitsandbytes" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.skipif(HAVE, reason="bitsandbytes is installed here")
def test_the_library_says_so_too():
    learn = settings(optimizer="paged_adamw_8bit").learn
    with pytest.raises(MissingExtraError, match="pip install 'bitsandbytes"):
        make_optimizer([torch.nn.Parameter(torch.ones(2))], learn)
    with pytest.raises(MissingExtraError, match="pip install 'bitsandbytes"):
        SharedBase.load("teaching-base", device="cpu", bits=4)
