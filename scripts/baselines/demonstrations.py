"""The best demonstrations: solved turns shown before every prompt, found by as many episodes as training played."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from mafrt.core.types import Episode
from mafrt.runners.evaluation import SOLVED

Demonstration = tuple[int, ...]
"""token ids of a turn's prompt and answer"""
Shown = Mapping[str, tuple[Demonstration, ...]]
"""adapter -> what is shown before its prompts"""

MOST = 8
"""demonstrations of an adapter"""


def search(
    play: Callable[[Shown, int], Sequence[Episode]],
    score: Callable[[Shown], float],
    adapters: Mapping[str, str],
    episodes: int,
    cost: int,
    seed: int,
) -> tuple[Shown, int]:
    """GEPA's loop (Agrawal 2025, 2507.19457) with one parent, and solved turns where it has a large model write.

    A child differs from the best candidate in the demonstrations of one adapter. It is scored where it beats the best
    one on a batch of training tasks.

    Args:
        play: the training tasks of a number with a candidate.
        score: of a candidate on validation tasks; the highest one chooses.
        adapters: agent -> adapter.
        episodes: most episodes, those of `score` included.
        cost: episodes of one call of `score`.
        seed: of the search.

    Returns:
        The best candidate, which is empty where nothing is better than that, and the number of candidates.
    """
    rng = random.Random(seed)
    pool: dict[str, dict[Demonstration, None]] = {name: {} for name in dict.fromkeys(adapters.values())}
    best: Shown = {}
    most, tried, batch, spent = score(best), 0, 0, cost
    while True:
        before = play(best, batch)
        collect(before, adapters, pool)
        filled = [name for name, found in pool.items() if found]
        spent += len(before)
        if filled:
            child = changed(best, rng.choice(filled), pool, rng)
            after = play(child, batch)
            collect(after, adapters, pool)
            spent, tried = spent + len(after), tried + 1
            if mean(after) > mean(before):
                spent += cost
                if (found := score(child)) > most:
                    best, most = child, found
        batch += 1
        # The most that another round can take.
        if not before or spent + 2 * len(before) + cost > episodes:
            return best, tried


def changed(parent: Shown, adapter: str, pool: Mapping[str, Mapping[Demonstration, None]], rng: random.Random) -> Shown:
    """A child: demonstrations of `adapter` drawn anew, or one of them added, exchanged or left out."""
    shown, known = list(parent.get(adapter, ())), list(pool[adapter])
    new = rng.choice(known)
    what = rng.choice(("draw", "add", "exchange", "leave out"))
    if what == "draw" or not shown:
        shown = rng.sample(known, min(len(known), rng.randint(1, MOST)))
    elif what == "add":
        shown = [*shown, new][-MOST:]
    elif what == "exchange":
        shown[rng.randrange(len(shown))] = new
    else:
        shown.pop(rng.randrange(len(shown)))
    return {**parent, adapter: tuple(shown)}


def collect(
    episodes: Sequence[Episode], adapters: Mapping[str, str], pool: Mapping[str, dict[Demonstration, None]]
) -> None:
    """Add the turns of solved episodes to the pool."""
    for episode in episodes:
        for turn in episode.turns if episode.score >= SOLVED else ():
            # An answer that was cut has no end, so that the next prompt would be read as part of it.
            if turn.stop == "eos":
                pool[adapters[turn.agent]][*turn.prompt_ids, *turn.action_ids] = None


def mean(episodes: Sequence[Episode]) -> float:
    return sum(episode.score for episode in episodes) / max(len(episodes), 1)
