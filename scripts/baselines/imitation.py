"""Baselines from solved training tasks: imitation of the episodes that solved theirs, and the best demonstrations.

Demonstrations are solved turns shown before every prompt, found by as many episodes as training played.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.types import Episode
from mafrt.runners.evaluation import SOLVED
from mafrt.runners.offline.dataset import RecordPasses
from mafrt.runners.offline.replay import RecordedTurn

if TYPE_CHECKING:
    from torch import Tensor

    from mafrt.models.several_bases import Bases
    from mafrt.runners.loop import Progress
    from mafrt.runners.offline.dataset import Record


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


SAMPLES = 8
"""episodes of a training task, as many as one group of a training run"""
BATCH = 64
RATES = (1 / 3, 1.0, 3.0)
"""tried, as factors of `--baseline_lr`"""
PASSES = 4
"""most passes over the records; after each one the adapters are scored"""


def solved_turns(episodes: Sequence[Episode], at_least: float) -> list[Record]:
    """The turns of episodes that score at least `at_least`, equal ones (agent, prompt, answer) once."""
    from mafrt.runners.offline.sft import examples_of

    turns = [
        RecordedTurn(turn, "", episode.score, episode.id)
        for episode in episodes
        for turn in episode.turns
        if turn.action_ids
    ]
    return examples_of(turns, at_least)


def imitate(
    records: Sequence[Record], team: Team, base: Bases, lr: float, seed: int, score: Callable[[], float]
) -> tuple[float, int]:
    """Imitate the records at several rates, with several passes, and leave the best weights.

    Args:
        records: what is imitated.
        team: its adapters, which are on `base`, learn; each rate begins with their weights.
        base: the base.
        lr: the middle one of the rates.
        seed: of the order of the records.
        score: of the team as it is, on tasks that are not held out; the highest one chooses.

    Returns:
        The rate and the number of passes that were chosen; 0 passes where the start itself is best.
    """
    from mafrt.runners.offline.runner import Offline
    from mafrt.runners.offline.sft import Sft

    def weights() -> dict[str, dict[str, Tensor]]:
        return {name: base.adapter_state(name) for name in team.adapters}

    def restore(kept: dict[str, dict[str, Tensor]]) -> None:
        for name, state in kept.items():
            base.load_adapter_state(name, state)

    start = weights()
    best, chosen, most = start, (lr, 0), score()
    for factor in RATES:
        restore(start)
        config = TrainConfig.of(lr=factor * lr, seed=seed, save_interval=0)
        runner = Offline(RecordPasses(records, epochs=PASSES, batch_size=BATCH), Sft(), team, base.main, config)

        def look(done: Progress, rate: float = factor * lr) -> None:
            nonlocal best, chosen, most
            if done.iteration * PASSES % done.iterations == 0 and (found := score()) > most:
                best, most = weights(), found
                chosen = rate, done.iteration * PASSES // done.iterations

        if runner.run(look).stopped_by is not None:
            raise KeyboardInterrupt
    restore(best)
    return chosen
