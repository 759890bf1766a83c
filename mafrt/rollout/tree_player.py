"""Play as a tree: several alternatives of every turn from one state, the best of which is carried on (AT-GRPO).

In each step of an environment, every agent that has to speak says `samples` alternatives to the same prompt. For one
agent after the other, each alternative is tried on a fork of the environment (`Env.fork`) and scored, and the best is
kept; those who act after it, in this step or in later ones, go on from the kept ones. Where agents speak at the same
time, an agent's alternatives are tried beside the kept ones of those before it and the first alternative of those
after it, since all of them were asked before any was heard.

A score is the turn's reward as credit will see it: the speaker's reward in that very step, the coach's
judgement if there is a coach, and the outcome if the step ended the episode. Later rewards cannot tell
alternatives apart and counts for none of them. Of equal scores the first is carried on; alternatives are drawn alike,
so that is a seeded pick at random. So it is where nothing can be scored (`no_score`).

Every alternative, carried on or not, becomes an episode of one turn (`Episode.branches`), of its tree's group: credit
and the update read those. The episode itself says how the team did.

Source: AT-GRPO (2510.11062), tree-structured sampling. Deviation: the paper's agents of one turn speak one after the
other; here the environment says who speaks when, and one that lets them speak in turn shows each the kept alternatives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mafrt.core.errors import EnvError
from mafrt.core.seeding import seed_of
from mafrt.core.types import Completion, Episode, Evidence, Request, StepResult, Turn
from mafrt.environment.base import Env
from mafrt.environment.checker import play
from mafrt.environment.workers import WorkerSession
from mafrt.rollout.player import Answers, Player, PlayStats, RunningEpisode

log = logging.getLogger(__name__)

Worth = Callable[[Sequence[Episode]], list[list[float | None]]]
"""Episodes -> per episode the reward of each turn as credit sees it; None if it is not known."""
Judge = Callable[[Sequence[tuple[Episode, Turn]]], Any]
"""Fills `coach` of turns just spoken."""


@dataclass
class Tree:
    """All alternatives of one environment's step, while the best of each agent are chosen."""

    item: RunningEpisode
    requests: dict[str, Request] = field(default_factory=dict)
    options: dict[str, list[Completion]] = field(default_factory=dict)
    """agent -> its alternatives"""
    kept: Answers = field(default_factory=dict)
    """agent -> the alternative that is carried on; the first one until it is chosen"""


@dataclass
class Alternative:
    """One alternative of one agent, tried on a fork of its tree's environment."""

    number: int
    fork: RunningEpisode
    answers: Answers


@dataclass(eq=False, repr=False, kw_only=True)
class TreePlayer(Player):
    """Plays trees; see the module."""

    samples: int
    """alternatives of each turn, 2 or more"""
    worth: Worth
    """scores alternatives"""
    judge: Judge | None = None
    """judges alternatives before they are scored; None without a coach"""

    def _answers(self, asked: Sequence[tuple[RunningEpisode, str, Request]], stats: PlayStats) -> dict[str, Answers]:
        """The alternative of each agent that is carried on, by key of the live item."""
        wide = [
            # The first alternative is the sample that plain play would draw.
            replace(request, seed=seed_of(request.seed, "alternative", number) if number else request.seed)
            for _, _, request in asked
            for number in range(self.samples)
        ]
        completions = iter(self._generate(wide, stats))
        trees: dict[str, Tree] = {}
        for item, agent, request in asked:
            tree = trees.setdefault(item.key, Tree(item))
            tree.requests[agent] = request
            tree.options[agent] = [next(completions) for _ in range(self.samples)]
            tree.kept[agent] = request, tree.options[agent][0]
        # All trees at once: first every tree's first speaker, then the second, so that blocking environments overlap.
        for place in range(max((len(tree.options) for tree in trees.values()), default=0)):
            speakers = [(tree, list(tree.options)[place]) for tree in trees.values() if place < len(tree.options)]
            trials = [self._fork(tree, agent, stats) for tree, agent in speakers]
            self._try(speakers, trials, stats)
            best = self._best(trials, stats)
            for (tree, agent), some, number in zip(speakers, trials, best, strict=True):
                tree.item.episode.branches += [trial.fork.episode for trial in some]
                tree.kept[agent] = tree.requests[agent], tree.options[agent][number]
        return {key: tree.kept for key, tree in trees.items()}

    def _fork(self, tree: Tree, agent: str, stats: PlayStats) -> list[Alternative]:
        """A trial of each alternative of one agent; those whose environment cannot be forked are lost."""
        item, trials = tree.item, []
        first = len(item.episode.turns) + list(tree.kept).index(agent)
        for number, completion in enumerate(tree.options[agent]):
            episode = Episode(
                id=f"{item.episode.id}/{first:03d}-{number:02d}",
                group=item.episode.group,
                info={**item.episode.info, "alternative": number},
            )
            try:
                env = item.env.fork()
            except EnvError:
                if not isinstance(item.env, WorkerSession):
                    raise  # it cannot be forked at all
                stats.tree_errors += 1
                continue
            # Late rewards land on copies of the earlier turns.
            earlier = {name: replace(turn) for name, turn in item.last_turn.items()}
            fork = replace(item, env=env, episode=episode, last_turn=earlier)
            trials.append(Alternative(number, fork, {**tree.kept, agent: (tree.requests[agent], completion)}))
        return trials

    def _try(self, speakers: Sequence[tuple[Tree, str]], trials: Sequence[list[Alternative]], stats: PlayStats) -> None:
        """Step all forks, and drop the trials whose environment raised: their worth is not known."""
        every = [trial for some in trials for trial in some]
        results = self._step_envs([trial.fork for trial in every], {trial.fork.key: trial.answers for trial in every})
        for (tree, agent), some in zip(speakers, trials, strict=True):
            position = len(tree.item.episode.turns) + list(tree.item.observations).index(agent)
            some[:] = [t for t in some if self._taken(t, agent, results[t.fork.key], position, stats)]

    def _taken(
        self, trial: Alternative, agent: str, result: StepResult | EnvError, position: int, stats: PlayStats
    ) -> bool:
        """Let a fork take its step; False if its environment raised."""
        fork = trial.fork
        sound = self._stepped(trial, result)
        stats.tree_errors += not sound
        [turn] = [turn for turn in fork.episode.turns if turn.agent == agent]
        # The turns of the others were needed to step the fork; a branch teaches its own alternative only.
        turn.turn, fork.episode.turns = position, [turn]
        fork.env.close()
        return sound

    def _stepped(self, trial: Alternative, result: StepResult | EnvError) -> bool:
        """Record a fork's answers and take its step; False if its environment raised."""
        try:
            trial.fork.advance(trial.answers, result, self.team.names)
        except EnvError as error:
            log.debug("an alternative is lost: %s", error)
            return False
        return True

    def _best(self, trials: Sequence[list[Alternative]], stats: PlayStats) -> list[int]:
        """Score the trials of each tree and keep them as branches; the number of each tree's best alternative."""
        episodes = [trial.fork.episode for some in trials for trial in some]
        if self.judge is not None and episodes:
            self.judge([(episode, turn) for episode in episodes for turn in episode.turns])
        scores = iter(self.worth(episodes))
        best = []
        for some in trials:
            # An unknown score is never better than a known one; where none is known, the first is as good as any.
            # The number is negative, so that of equal scores the first is carried on.
            known = [(score, -trial.number) for trial in some if (score := next(scores)[0]) is not None]
            number = -max(known)[1] if known else 0
            best.append(number)
            for trial in some:
                trial.fork.episode.info["carried"] = trial.number == number
            stats.tree_unscored += no_score([trial.fork.episode for trial in some])
            stats.tree_turns += 1
        return best


def no_score(branches: Sequence[Episode]) -> bool:
    """Whether nothing was found out about any alternative of a turn: no reward, no judgement, no outcome."""
    return not any(
        turn.reward is not None or turn.coach is not None or branch.outcome is not None
        for branch in branches
        for turn in branch.turns
    )


def to_learn(episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes that credit and the update read: the branches of trees, and other episodes themselves."""
    return [branch for episode in episodes for branch in (episode.branches or [episode])]


def show_advantages(episodes: Sequence[Episode]) -> None:
    """Give the turns of a tree's episode, from which nothing was learnt, the credit of their own alternatives."""
    for episode in episodes:
        for branch in episode.branches:
            if branch.info.get("carried"):
                turn = episode.turns[branch.turns[0].turn]
                learnt = branch.turns[0]
                turn.advantages, turn.returns, turn.paid = learnt.advantages, learnt.returns, learnt.paid


def scorable(env: Env, judged: Callable[[Evidence | None], bool], episodes: int = 16) -> set[str]:
    """Agents of `env` that can be scored in the step in which they speak, as far as scripted episodes show.

    An agent that never spoke in them counts as one.

    Args:
        judged: whether a coach would judge a turn with this evidence.
    """
    scored: set[str] = set()
    spoke: set[str] = set()
    for seed in range(episodes):
        for step in play(env.spawn(), seed=seed, action_seed=seed)[1:]:
            if isinstance(step, str):
                return set(env.agents)  # it does not even play; that will be reported where it can be
            actions, (_, rewards, *_), (outcome, evidence) = step
            spoke |= set(actions)
            scored |= {a for a in actions if outcome is not None or a in rewards or judged((evidence or {}).get(a))}
        if spoke >= set(env.agents) and scored >= spoke:
            break
    return scored | (set(env.agents) - spoke)
