"""Make the teaching base: corpus, tokenizer, pretraining, model folder and problem files.

The result is a teaching-size stand-in for Qwen/Qwen3-4B and the like: it loads through the same
code, and learns in minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import logging
import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from bench.teaching_base import solutions
from bench.teaching_base.demonstrations import document
from bench.teaching_base.folder import add_pretraining, check_arguments, encode, special_ids, write_base
from bench.teaching_base.pretrain import PretrainConfig, pretrain
from bench.teaching_base.problems import Problem, distinct, stream
from bench.teaching_base.solutions import RATES
from bench.teaching_base.tokenizer import render, train_tokenizer

ROOT = Path(__file__).resolve().parent.parent

CARD = """\
# teaching_base

A teaching-size stand-in for Qwen/Qwen3-4B and the like: the same architecture (Qwen3), the same
chat markup and the same loading code, at {parameters:,} parameters. It knows nothing but small
arithmetic and generated grade-school word problems. Use it to learn how teams are trained, to
develop environments and to run tests; use a real model for real work.

It was made from nothing by

    python -m bench.make_base --seed {seed} --documents {documents}

which generates the corpus ({documents:,} documents, {tokens:,} tokens, seen once), trains a
byte-level BPE of {vocab_size} tokens (every digit stands alone) and pretrains on a CPU with
{threads} threads ({seconds:.0f} s for {steps:,} steps here; two server cores that do nothing else take about
16,000 tokens/s; final loss {loss:.3f} nats per assistant token).

## What it imitates

The corpus shows teams at work: Reasoner -> Actor, Solver <-> Verifier, and Problem Solver ->
Code Executor -> Verifier (`bench/teaching_base/`). The demonstrators calculate without error, and choose
carelessly, at these rates (in the first {careful_share:.0%} of the documents at a tenth
of them, since what is right is learned faster from those who do it):

| carelessness | rate | what it means |
|---|---|---|
{rates}

So sampling from the model is mediocre although it knows better, and reinforcement learning can show.

## Data

`word_problems_train.jsonl`, `word_problems_validation.jsonl` and `word_problems_test.jsonl` of
`envs/math/data` come from the same generator. No problem of the corpus shares both wording and numbers
with one of theirs, and none of one file shares both with one of another. None of the validation has the
numbers and the answer of one of the others.

License: MIT, as the project.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.make_base", description=__doc__)
    out = parser.add_argument_group("output")
    out.add_argument(
        "--output_dir",
        type=Path,
        default=ROOT / "mafrt/assets/teaching_base",
        help="model folder (default: the shipped one)",
    )
    out.add_argument(
        "--data_dir",
        type=Path,
        default=ROOT / "envs/math/data",
        help="folder of the problem files (default: the shipped one)",
    )
    out.add_argument("--train_problems", type=int, default=2000, help="problems to train on (default: 2000)")
    out.add_argument("--validation_problems", type=int, default=256, help="problems to choose by (default: 256)")
    out.add_argument("--test_problems", type=int, default=256, help="held-out problems (default: 256)")
    train = parser.add_argument_group("pretraining")
    add_pretraining(train, 90_000, "documents of the corpus")
    train.add_argument(
        "--careful_share",
        type=float,
        default=0.65,
        help="share of the documents, at the start, with a tenth of the mistakes (default: 0.65)",
    )
    train.add_argument("--vocab_size", type=int, default=1200, help="most tokens of the tokenizer (default: 1200)")
    return parser


def write_problems(folder: Path, seed: int, train: int, validation: int, test: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"train": distinct(seed, "train", train), "test": distinct(seed, "test", test)}
    parts["validation"] = unseen([*parts["train"], *parts["test"]], seed, validation)
    for split, problems in parts.items():
        lines = [json.dumps({"problem": problem.text, "answer": str(problem.answer)}) for problem in problems]
        (folder / f"word_problems_{split}.jsonl").write_text("\n".join(lines) + "\n")


def unseen(others: Sequence[Problem], seed: int, count: int) -> list[Problem]:
    """Problems of the training stream that share with none of `others` its text, or its numbers and answer.

    That stream is none of the corpus and none of the test, and taking them from behind the training problems leaves
    these as they are. Every third has two steps, as in the other parts: single steps are mostly known calculations.
    """
    texts = {problem.text for problem in others}
    calculations = {(tuple(sorted(problem.numbers)), problem.answer) for problem in others}
    found: dict[str, Problem] = {}
    for problem in stream(seed, "train"):
        known = (tuple(sorted(problem.numbers)), problem.answer) in calculations
        wanted = (len(problem.steps) == 2) == (len(found) % 3 == 2)
        if problem.text not in texts and not known and wanted:
            found.setdefault(problem.text, problem)
        if len(found) == count:
            break
    return list(found.values())


def corpus(seed: int, count: int, careful_share: float) -> list[str]:
    """Rendered documents about problems of the corpus split, careful ones first.

    Correct behaviour is learned several times faster from mostly correct demonstrators. The careless
    rates are then learned quickly, since they only shift probabilities of known choices.
    """
    rng = random.Random(f"documents-{seed}")
    careful = RATES.scaled(0.1)
    return [
        render(document(rng, problem, careful if index < careful_share * count else RATES))
        for index, problem in enumerate(islice(stream(seed, "corpus"), count))
    ]


def card(figures: dict[str, Any]) -> str:
    """The model card; the rates and their meanings are read from the demonstrators themselves."""
    [definition] = ast.parse(inspect.getsource(solutions.Carelessness)).body
    assert isinstance(definition, ast.ClassDef)
    body: Any = definition.body[1:-1]
    rows = [
        f"| `{rate.target.id}` | {getattr(solutions.RATES, rate.target.id)} | {doc.value.value} |"
        for rate, doc in zip(body[::2], body[1::2], strict=True)
    ]
    return CARD.format(rates="\n".join(rows), **figures)


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    check_arguments(parser, args)
    import torch

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(args.threads)
    write_problems(args.data_dir, args.seed, args.train_problems, args.validation_problems, args.test_problems)
    texts = corpus(args.seed, args.documents, args.careful_share)
    # The corpus has few words: the merges may run out below the size that was asked for.
    tokenizer = train_tokenizer(texts[:20_000], args.vocab_size)
    config = PretrainConfig(
        hidden_size=args.hidden_size,
        layers=args.layers,
        vocab_size=tokenizer.get_vocab_size(),
        batch_tokens=args.batch_tokens,
        learning_rate=args.learning_rate,
        seed=args.seed,
    )
    ids = special_ids(tokenizer)

    def save(model: Any, figures: dict[str, float]) -> None:
        told = figures | vars(args) | {"vocab_size": config.vocab_size, "parameters": model.num_parameters()}
        write_base(model, tokenizer, card(told), args.output_dir)

    pretrain(config, encode(tokenizer, texts), ids, save)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
