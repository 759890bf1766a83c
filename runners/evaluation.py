"""Evaluate a team: every task a few times by sampling, and once greedily.

avg@k is the mean score of k sampled episodes per task; pass@k is the share of tasks that at least one of the k
solves (score >= 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mafrt.core import records
from mafrt.core.distributed import ALONE, Processes, packed_error, unpacked_error
from mafrt.core.errors import EnvError, MafrtError
from mafrt.core.progress import stage
from mafrt.core.seeding import seed_of
from mafrt.core.types import Episode
from mafrt.environment.base import Env
from mafrt.rollout.player import Player, PlayStats, Start, measures_of

SOLVED = 1.0
"""score from which a task counts as solved"""


@dataclass(frozen=True)
class EvaluationPlan:
    """The episodes of an evaluation."""

    tasks: int
    """number of tasks: the first ones, or of as many seeds where the environment has no numbered tasks"""
    samples: int
    """k, sampled episodes per task; 0 leaves them out"""
    greedy: bool
    """whether to play each task once with temperature 0 as well"""
    seed: int
    """tasks of an environment without numbered tasks, and all samples, follow from it"""
    temperature: float | None = None
    """of the sampled episodes; None: as the player samples"""

    def passes(self) -> dict[str, int]:
        """Episodes per task of the `sampled` and the `greedy` pass, those that are asked for."""
        return {kind: count for kind, count in (("sampled", self.samples), ("greedy", int(self.greedy))) if count}

    def starts(self, env: Env, kind: str, processes: Processes) -> list[Start]:
        """The episodes of one pass that fall to this process."""
        numbered = env.num_tasks is not None
        count = self.tasks if env.num_tasks is None else min(self.tasks, env.num_tasks)
        return [
            Start(
                id=f"{kind}-{task:06d}-{sample:03d}",
                group=f"{task:06d}",
                # Without the kind of pass: sampled and greedy answers are to the same problem.
                # The same in every evaluation of a run, so that two of them can be compared task by task.
                reset_seed=seed_of(self.seed, "task", task),
                seed=seed_of(self.seed, kind, task, sample),
                task=task if numbered else None,
            )
            for task in processes.share(range(count))
            for sample in range(self.passes()[kind])
        ]


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation."""

    scores: Mapping[str, tuple[float, ...]]
    """per task, the scores of its sampled episodes; tasks that lost all episodes are absent"""
    greedy_scores: Mapping[str, float]
    """per task, the score of its greedy episode; empty if there was no greedy pass"""
    samples: int
    """k: episodes asked for per task"""
    lost: int
    """episodes that the environment lost"""
    measures: Mapping[str, float] = field(default_factory=dict)
    """name -> mean of a further measure of the environment (`info["measures"]`) over the sampled episodes that
    have it; over the greedy ones if nothing was sampled"""
    episodes: Sequence[Episode] = ()
    """the episodes that `keep` asked for, by id"""

    @property
    def avg(self) -> float | None:
        """avg@k, or None if nothing was sampled."""
        return _mean([_mean(scores) for scores in self.scores.values()])

    @property
    def passed(self) -> float | None:
        """pass@k, or None if nothing was sampled."""
        return _mean([float(max(scores) >= SOLVED) for scores in self.scores.values()])

    @property
    def greedy(self) -> float | None:
        """Mean score of the greedy episodes, or None if there were none."""
        return _mean(list(self.greedy_scores.values()))

    def metrics(self) -> dict[str, float]:
        """The numbers by name: `eval/avg@K`, `eval/pass@K`, `eval/greedy`, `eval/measure/NAME`."""
        named = {
            f"eval/avg@{self.samples}": self.avg,
            f"eval/pass@{self.samples}": self.passed,
            "eval/greedy": self.greedy,
            **{f"eval/measure/{name}": value for name, value in sorted(self.measures.items())},
        }
        return {name: value for name, value in named.items() if value is not None}


def evaluate(
    env: Env,
    player: Player,
    plan: EvaluationPlan,
    *,
    slots: int = 64,
    interrupted: Callable[[], bool] = lambda: False,
    processes: Processes = ALONE,
    keep: Callable[[str], bool] = lambda _: False,
) -> Evaluation | None:
    """Play the episodes of `plan` in `env`.

    Args:
        player: plays the sampled episodes as it is, and the greedy ones with temperature 0.
        plan: number of tasks, samples, greedy pass, and seed.
        slots: environments side by side.
        processes: share the tasks; all return the same result, and `interrupted()` in one ends it for all.
        keep: group -> whether its episodes are returned.

    Returns:
        The evaluation, or None if `interrupted()` became true.

    Raises:
        EnvError: every episode was lost.
    """
    result = _ProcessResult()
    try:
        for kind in plan.passes():
            temperature = 0.0 if kind == "greedy" else plan.temperature
            starts = plan.starts(env, kind, processes)
            result.add(*_play_pass(env, player, starts, kind, temperature, slots, interrupted), keep)
            result.cut = interrupted()
            if result.cut:
                break
    except MafrtError as error:
        # The other processes wait in gather(), so an error has to travel through it.
        if processes.size == 1:
            raise
        result.error = packed_error(error)
    return _merged([_ProcessResult(**fields) for fields in processes.gather(vars(result))], plan.samples)


def _play_pass(
    env: Env,
    player: Player,
    queue: Sequence[Start],
    kind: str,
    temperature: float | None,
    slots: int,
    interrupted: Callable[[], bool],
) -> tuple[list[Episode], PlayStats]:
    """Play the `sampled` or the `greedy` episodes."""
    sampling = player.sampling
    if temperature is not None:
        sampling = {name: replace(how, temperature=temperature) for name, how in sampling.items()}
    # No more copies than episodes: an environment may be a process or a server's session.
    envs = [env.spawn() for _ in range(min(slots, len(queue)))]
    with stage(f"evaluating ({kind})", len(queue)) as advance:
        next_start = _one_after_the_other(queue, len(envs), advance)
        return player.sampling_as(sampling).play(envs, next_start, interrupted)


def _merged(results: Sequence[_ProcessResult], samples: int) -> Evaluation | None:
    """The evaluation of all processes together; None if one was interrupted. Raises the first process' error."""
    for result in results:
        if result.error is not None:
            raise unpacked_error(result.error)
    # The mean of half the tasks would be compared with means of all.
    if any(result.cut for result in results):
        return None
    scored = sorted((item for result in results for item in result.scored), key=lambda item: item[0])
    lost = sum(result.lost for result in results)
    if not scored and lost:
        last = next(result.last for result in results if result.last is not None)
        raise EnvError(f"All {lost} evaluation episodes were lost; the last one because: {last}")
    scores: dict[str, tuple[float, ...]] = {}
    greedy_scores: dict[str, float] = {}
    for name, group, worth, _ in scored:
        if name.startswith("greedy"):
            greedy_scores[group] = worth
        else:
            scores[group] = (*scores.get(group, ()), worth)
    # Measures of one pass only, or greedy answers would weigh as a further sample.
    first = "sampled" if scores else "greedy"
    measures = measures_of([measured for name, _, _, measured in scored if name.startswith(first)])
    episodes = [records.unpack_episode(record) for result in results for record in result.kept]
    episodes.sort(key=lambda episode: episode.id)
    return Evaluation(scores, greedy_scores, samples, lost, measures, episodes)


@dataclass
class _ProcessResult:
    """Episodes of one process."""

    scored: list[tuple[str, str, float, dict[str, float]]] = field(default_factory=list)
    """(id, group, score, measures) of each episode"""
    kept: list[dict[str, Any]] = field(default_factory=list)
    """packed episodes"""
    lost: int = 0
    last: str | None = None
    """why the last episode was lost"""
    cut: bool = False
    error: dict[str, str] | None = None

    def add(self, episodes: Sequence[Episode], stats: PlayStats, keep: Callable[[str], bool]) -> None:
        """Count one pass."""
        self.scored += [(e.id, e.group, e.score, e.info.get("measures", {})) for e in episodes]
        self.kept += [records.pack_episode(episode) for episode in episodes if keep(episode.group)]
        self.lost += stats.env_errors
        self.last = self.last if stats.last_error is None else str(stats.last_error)


def _one_after_the_other(
    queue: Sequence[Start], slots: int, advance: Callable[[int], None]
) -> Callable[[int, Episode | None], Start | None]:
    """Starts for free slots until the queue is empty; a slot that asks again has finished an episode."""
    waiting, asked = iter(queue), 0

    def next_start(_slot: int, _finished: Episode | None) -> Start | None:
        nonlocal asked
        # The first request of every slot follows no finished episode, so it does not count as progress.
        asked += 1
        if asked > slots:
            advance(1)
        return next(waiting, None)

    return next_start


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
