"""Make the games base: a tiny model that has seen legal random play of the games, and nothing better.

It knows the moves and not the game: what a legal answer looks like and which answers a position allows. Held-out
instances were never part of its corpus.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from bench.teaching_base.folder import add_pretraining, check_arguments, encode, special_ids, write_base
from bench.teaching_base.pretrain import PretrainConfig, pretrain
from bench.teaching_base.tokenizer import GAME_PIECES, render, train_tokenizer
from mafrt.core.shipped import SHIPPED_BASES
from mafrt.environment.registry import make_env
from mafrt.envs.games.base import Game, Player
from mafrt.envs.games.legal_play import legal_play

VOCABULARY = 600
"""most tokens; words run out before"""
OBEYING: dict[str, Player] = {"planner": "random", "mover": "optimal"}
"""the mover repeats random routes: it hears the planner, and neither of them looks for the goal"""


@dataclass(frozen=True)
class Part:
    """Turns of one game in the corpus."""

    game: str
    share: float
    """of the documents"""
    agents: tuple[str, ...] = ()
    """whose turns are kept; none named: those of all"""
    kwargs: Mapping[str, Any] = field(default_factory=lambda: {"brief": True})
    players: Player | Mapping[str, Player] = "random"


PARTS = (
    Part("plan_path", 0.16, ("planner",)),
    Part("plan_path", 0.03, ("mover",)),
    Part("plan_path", 0.03, ("mover",), players=OBEYING),
    Part("sokoban", 0.25, ("planner",)),
    Part("sokoban", 0.03, ("mover",)),
    Part("sokoban", 0.03, ("mover",), players=OBEYING),
    Part("sudoku", 0.12),
    Part("sudoku", 0.08, kwargs={"brief": True, "empty": 5}),
    Part("tic_tac_toe", 0.19),
    Part("referential", 0.01, kwargs={"brief": True, "things": 3, "offered": 3}),
    Part("referential", 0.01),
    Part("haggle", 0.06, kwargs={}),
)

CARD = """\
# games_base

A tiny base ({parameters:,} parameters, the Qwen3 architecture) that has seen *legal random play* of the games in
`mafrt.envs.games` and nothing better. It answers with legal moves and plays at chance, so what a team plays better
than chance it has learnt. It knows no other text.

It was made from nothing by

    python -m bench.make_games_base --seed {seed} --documents {documents}

which plays random games on the training split, trains a byte-level BPE of {vocab_size} tokens (cells of grids and
steps of routes are one token each) and pretrains on a CPU ({tokens:,} tokens, seen once, {seconds:.0f} s with
{threads} threads for {steps:,} steps; final loss {loss:.3f} nats per token of an answer, most of which is the
randomness of the play). In half of the games of `plan_path` and `sokoban` the mover repeats what the planner said, in
the other half it says a random route of its own.

License: MIT, as the project.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.make_games_base", description=__doc__)
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=SHIPPED_BASES["games-base"],
        help="model folder (default: the shipped one)",
    )
    add_pretraining(parser, 300_000, "turns of random play")
    return parser


def turns(part: Part, seed: int) -> Iterator[str]:
    """Rendered turns of random play, without end."""
    game = make_env(part.game, **part.kwargs).unwrapped
    assert isinstance(game, Game)
    for record in legal_play(game, sys.maxsize, seed, part.players):
        if not part.agents or record["agent"] in part.agents:
            messages = (("user", record["prompt"]), ("assistant", record["response"]))
            yield render({"role": role, "content": text} for role, text in messages)


def corpus(seed: int, count: int) -> list[str]:
    """About `count` rendered turns, the games mixed."""
    texts = [
        text
        for number, part in enumerate(PARTS)
        for text in islice(turns(part, 1000 * seed + number), round(part.share * count))
    ]
    random.Random(seed).shuffle(texts)
    return texts


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    check_arguments(parser, args)
    import torch

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(args.threads)
    texts = corpus(args.seed, args.documents)
    tokenizer = train_tokenizer(texts[:20_000], VOCABULARY, GAME_PIECES)
    config = PretrainConfig(
        hidden_size=args.hidden_size,
        layers=args.layers,
        vocab_size=tokenizer.get_vocab_size(),
        batch_tokens=args.batch_tokens,
        learning_rate=args.learning_rate,
        prompt_share=0.3,
        seed=args.seed,
    )

    def save(model: Any, figures: dict[str, float]) -> None:
        told = figures | vars(args) | {"vocab_size": config.vocab_size, "parameters": model.num_parameters()}
        write_base(model, tokenizer, CARD.format(**told), args.output_dir)

    pretrain(config, encode(tokenizer, texts), special_ids(tokenizer), save)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
