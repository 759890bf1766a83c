"""The fetched base SmolLM2-135M-Instruct against transformers and PEFT, and an iteration of every family on it.

Runs where `mafrt get_base smollm2` has put it, as CI does first.
"""

from __future__ import annotations

import pytest
import torch

from mafrt.config.team import LoraSpec, Team
from mafrt.core.shipped import base_folder
from mafrt.core.types import Request, SamplingParams

FOLDER = base_folder("smollm2")
pytestmark = [
    pytest.mark.takes(slow=13),
    pytest.mark.slow,
    pytest.mark.ci,
    pytest.mark.skipif(not (FOLDER / "config.json").is_file(), reason="run mafrt get_base smollm2 first"),
]
QUESTIONS = [f"What is {a} {sign} {b}?" for a, b in ((2, 3), (17, 5), (40, 8), (9, 9)) for sign in "+-*"]
QUESTIONS += [f"Name a {thing}." for thing in ("bird", "river", "colour", "metal", "planet", "fruit", "city", "tool")]


@pytest.fixture(scope="module")
def base():
    from mafrt import SharedBase

    return SharedBase.load("smollm2")


@pytest.fixture(scope="module")
def theirs():
    """The same model in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype="float32").eval()


def prompt(tokenizer, question):
    words = tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False)
    return tokenizer.encode(words + "<|im_start|>assistant\n", add_special_tokens=False)


def test_tokenizer_and_chat_template(base):
    assert base.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False).endswith(
        "<|im_start|>user\nHi<|im_end|>\n"
    )
    assert base.eos_ids == {base.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert base.context_window == 8192 and base.config.vocab_size == 49152


def test_greedy_equals_transformers_on_20_prompts(base, theirs):
    from mafrt import LocalEngine

    prompts = [prompt(base.tokenizer, question) for question in QUESTIONS]
    assert len(prompts) == 20
    greedy = SamplingParams(max_new_tokens=8, temperature=0.0)
    ours = LocalEngine(base).generate([Request(ids, None, greedy, seed=0) for ids in prompts])
    expected: dict[tuple[int, ...], list[int]] = {}
    for length in {len(ids) for ids in prompts}:  # prompts of one length need no padding
        rows = torch.tensor([ids for ids in prompts if len(ids) == length])
        with torch.no_grad():
            out = theirs.generate(rows, attention_mask=torch.ones_like(rows), max_new_tokens=8, do_sample=False)
        for row in out.tolist():
            answer = row[length:]
            # An end token closes a completion here; a batch goes on with padding behind it.
            ends = [at for at, token in enumerate(answer) if token in base.eos_ids]
            expected[tuple(row[:length])] = answer[: ends[0] + 1] if ends else answer
    for ids, found in zip(prompts, ours, strict=True):
        assert found.ids == expected[tuple(ids)], base.tokenizer.decode(expected[tuple(ids)])


def test_an_adapter_gives_the_logits_of_peft(base, theirs, tmp_path):
    from peft import PeftModel

    if "solver" not in base.records:  # left by a first try that failed
        base.add_adapter("solver", LoraSpec(4, 8.0), seed=3)
    with torch.no_grad():
        for number, parameter in enumerate(base.adapter_parameters("solver")):
            if number % 2:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    base.bump("solver")
    base.save_adapter("solver", tmp_path / "solver")
    ids = torch.tensor([prompt(base.tokenizer, "What is 7 + 8?")])
    peft = PeftModel.from_pretrained(theirs, tmp_path / "solver")
    with torch.no_grad():
        logits = peft.eval()(input_ids=ids).logits
        ours = base.logits(base.forward(ids, None, torch.tensor([base.adapter_index("solver")])))
        bare = base.logits(base.forward(ids, None, torch.tensor([-1])))
    torch.testing.assert_close(ours, logits, atol=2e-4, rtol=1e-4)
    assert (logits - bare).abs().max() > 0.1


FAMILIES = ("at_grpo", "happo", "qmix")
"""Groups of a turn's samples with a coach, a critic, and a mixer; that every rule trains is `test_cli.py`."""


@pytest.mark.parametrize("algorithm", FAMILIES)
def test_an_iteration_of_each_family(base, algorithm):
    from mafrt import TrainConfig
    from mafrt.envs.math import MathEnv
    from mafrt.runners.on_policy import OnPolicy

    team = Team.of(("reasoner", "actor"))
    config = TrainConfig.of(
        algorithm=algorithm,
        iterations=1,
        n_rollout_threads=2,
        n_samples=1 if algorithm == "at_grpo" else 2,
        max_new_tokens=2,
        lora_rank=2,
        lora_targets=("layers.29.mlp.down_proj",),
        eval_episodes=0,
        ppo_epoch=1,
        **({"critic_epoch": 1} if algorithm in ("happo", "qmix") else {}),
        **({"tree_samples": 2, "coach": "rules"} if algorithm == "at_grpo" else {}),
    )
    found = []
    runner = OnPolicy(MathEnv(team=team), team, base, config)
    assert runner.run(lambda progress: found.append(progress.metrics)).iterations == 1
    assert found[0]["episodes"] >= 1 and found[0]["skipped_updates"] == found[0]["rollbacks"] == 0
