"""The teaching base and what it is made of: problems, demonstrators, tokenizer, shipped files."""

from __future__ import annotations

import itertools
import json
import operator
import random
import re
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from helpers_warm import run_command

from bench.teaching_base.demonstrations import (
    PROMPTS,
    actor_document,
    code_executor_document,
    document,
    reasoner_document,
    verifier_document,
)
from bench.teaching_base.problems import distinct, draw, stream
from bench.teaching_base.solutions import RATES, choose_steps, plan_text, step_text
from bench.teaching_base.tokenizer import render

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "mafrt/assets/teaching_base"
DATA = ROOT / "envs/math/data"
SAMPLE = 3000
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def records(split: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / f"word_problems_{split}.jsonl").read_text().splitlines()]


def problems(count: int, seed: int = 3) -> list:
    return list(itertools.islice(stream(seed, "corpus"), count))


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(BASE)


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(BASE).float().eval()


def test_the_generator_is_deterministic():
    assert distinct(5, "train", 50) == distinct(5, "train", 50)
    assert distinct(5, "train", 50) != distinct(6, "train", 50)


def test_answers_agree_with_python():
    rng = random.Random(0)
    for _ in range(SAMPLE):
        problem = draw(rng)
        value = Fraction(problem.start)
        for operation, number in problem.steps:
            value = OPERATIONS[operation](value, number)
        assert value == problem.answer
        assert problem.answer >= 0 and "{" not in problem.text
        # Every number that is needed is in the text, and the text has no others.
        assert sorted(map(int, re.findall(r"\d+", problem.text))) == sorted(problem.numbers)


def test_a_hand_worked_problem():
    # 12 and 4: "gives 4 to" takes away, so 12 - 4 = 8; 8 in 2 equal piles is 8 / 2 = 4.
    assert plan_text(12, (("-", 4), ("/", 2))) == "Subtract 4 from 12, then divide by 2."
    assert step_text(12, (("-", 4), ("/", 2))) == "12 - 4 = 8. 8 / 2 = 4."


@pytest.mark.slow
def test_splits_share_no_wording_with_the_same_numbers():
    seen = {
        split: {(p.frame, p.numbers) for p in itertools.islice(stream(1, split), SAMPLE)}
        for split in ("corpus", "train", "test")
    }
    for one, other in itertools.combinations(seen.values(), 2):
        assert not one & other


@pytest.mark.slow
@pytest.mark.ci
def test_shipped_problems_are_those_of_the_generator():
    assert len(records("train")) == 2000 and len(records("test")) == 256
    assert not {r["problem"] for r in records("train")} & {r["problem"] for r in records("test")}
    for split in ("train", "test"):
        made = [{"problem": p.text, "answer": str(p.answer)} for p in distinct(0, split, len(records(split)))]
        assert made == records(split)


def test_profiles_use_the_wording_of_the_corpus():
    for name, renamed in (("quickstart_math", {}), ("solver_verifier", {}), ("mathchat", {"verifier": "concluder"})):
        for agent in json.loads((ROOT / f"profiles/{name}.json").read_text()):
            assert agent["prompt"] == PROMPTS[renamed.get(agent["role"], agent["role"])]
            assert isinstance(agent["with_answer"], bool)


def written(document: list[dict]) -> str:
    return next(message["content"] for message in document if message["role"] == "assistant")


@pytest.mark.slow
def test_demonstrators_are_careless_at_the_stated_rates():
    # Four standard errors of a rate near .5 over 3000 draws are .037.
    rng = random.Random(0)
    drawn = problems(SAMPLE)
    wrong = sum(choose_steps(rng, p) != p.steps for p in drawn) / SAMPLE
    assert wrong == pytest.approx(RATES.wrong_operation, abs=0.037)
    plans = [(written(reasoner_document(rng, p)), plan_text(p.start, p.steps)) for p in drawn]
    assert sum(a != b for a, b in plans) / SAMPLE == pytest.approx(RATES.wrong_operation, abs=0.037)
    skipped = sum("=" not in written(actor_document(rng, p)) for p in drawn) / SAMPLE
    assert skipped == pytest.approx(RATES.skip_step, abs=0.037)
    unchecked = sum("Check" not in written(verifier_document(rng, p)) for p in drawn) / SAMPLE
    assert unchecked == pytest.approx(RATES.no_check, abs=0.037)
    silent = sum("print" not in written(code_executor_document(rng, p)) for p in drawn) / SAMPLE
    assert silent == pytest.approx(RATES.no_print, abs=0.037)


def test_written_arithmetic_of_the_demonstrators_is_exact():
    rng = random.Random(1)
    for problem in problems(SAMPLE):
        for message in document(rng, problem):
            if message["role"] == "assistant":
                for left, sign, right, value in re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", message["content"]):
                    assert OPERATIONS[sign](Fraction(left), int(right)) == int(value)


def test_the_tokenizer_round_trips_any_text(tokenizer):
    for text in (
        "Mia has 7 apples.",
        "  leading,\ttabs\n\n and trailing  ",
        r"Let $x^2 + \frac{1}{2}\sqrt{\pi} \le \boxed{3.14}$.",
        "naïve Ελλάδα 漢字 🙂 العربية ½ ٣",
        "def f(x_1):\n    return x_1 ** 2  # squared\n",
        "a.\\boxed{b} _ \\boxed",
    ):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_every_digit_is_a_token_of_its_own(tokenizer):
    for piece in tokenizer.get_vocab():
        assert not any(c.isdigit() for c in piece) or len(piece) == 1
    # "Add ", 1, 2, " and ", 5, "."
    assert len(tokenizer.encode("Add 12 and 5.", add_special_tokens=False)) == 6


def test_special_tokens(tokenizer):
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert len(tokenizer.encode("<|im_start|><|im_end|><|endoftext|>", add_special_tokens=False)) == 3


def test_the_chat_template_renders_exactly(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "print(1)"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nprint(1)<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == expected == render(messages)
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert prompt == render(messages[:2]) + "<|im_start|>assistant\n"
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    assert tokenizer.apply_chat_template([call], tokenize=False) == (
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n'
    )


def test_the_corpus_is_rendered_as_the_template_renders_it(tokenizer):
    rng = random.Random(2)
    for problem in problems(100):
        messages = document(rng, problem)
        assert render(messages) == tokenizer.apply_chat_template(messages, tokenize=False)


def test_the_shipped_model_is_small_and_loads(model, tokenizer):
    assert sum(path.stat().st_size for path in BASE.iterdir()) <= 6 * 2**20
    assert model.config.model_type == "qwen3" and model.config.max_position_embeddings == 2048
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert "stand-in" in (BASE / "README.md").read_text()


@pytest.mark.slow
def test_written_steps_are_right(model, tokenizer):
    """Greedy results of steps that an Actor has begun to write, for problems held out."""
    import torch

    texts, answers = [], []
    for problem in distinct(0, "test", 200):
        if len(problem.steps) == 1:
            plan, step = plan_text(problem.start, problem.steps), step_text(problem.start, problem.steps)
            messages = [
                {"role": "system", "content": PROMPTS["actor"]},
                {"role": "user", "content": f"Problem: {problem.text}\nreasoner: {plan}"},
            ]
            texts.append(render(messages) + "<|im_start|>assistant\n" + step.split("= ")[0] + "= ")
            answers.append(f"{problem.answer}. ")
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    batch = {key: batch[key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        out = model.generate(**batch, max_new_tokens=4, do_sample=False)
    said = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :])
    right = sum(text.startswith(answer) for text, answer in zip(said, answers, strict=True))
    assert right / len(answers) >= 0.97


def test_a_faultless_demonstrator_makes_no_mistake():
    rng = random.Random(4)
    for problem in problems(300):
        assert written(reasoner_document(rng, problem, RATES.scaled(0.0))) == plan_text(problem.start, problem.steps)


def test_muon_gives_every_direction_the_same_pace():
    import torch

    from bench.teaching_base.muon import orthogonalize

    torch.manual_seed(0)
    # Singular values over two orders of magnitude; five iterations bring them to within [.7, 1.2] (see the source).
    for rows, columns in ((24, 8), (8, 24)):
        left, _ = torch.linalg.qr(torch.randn(2, rows, 8))
        right, _ = torch.linalg.qr(torch.randn(2, columns, 8))
        matrices = left @ torch.diag(torch.logspace(0, 2, 8)) @ right.mT
        values = torch.linalg.svdvals(orthogonalize(matrices))
        assert values.min() > 0.6 and values.max() < 1.25


@pytest.mark.slow
@pytest.mark.ci
def test_make_base_makes_a_loadable_folder(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    command = [sys.executable, "-m", "bench.make_base", "--documents", "300", "--threads", "1"]
    command += ["--output_dir", tmp_path / "base", "--data_dir", tmp_path / "data", "--hidden_size", "32"]
    command += ["--train_problems", "5", "--test_problems", "5", "--layers", "1", "--vocab_size", "400"]
    done = run_command(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert loaded.config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path / "base"))
    assert (tmp_path / "data/word_problems_train.jsonl").read_text().count("\n") == 5
