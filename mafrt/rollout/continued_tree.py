"""Alternatives of every turn, each played to the end of the episode by the team as it is (C3).

The history up to a turn is frozen. The speaker says `samples` alternatives; each is tried on a fork of the environment
and the episode is played on from there, by the same adapters and with the same seeds, so that two alternatives differ
by the turn and by its consequences. The return R_i of an alternative is everything that the team is paid from that turn
on, and the outcome; where agents are opponents, what the speaker is paid. Credit compares the alternatives of one turn,
A_i = R_i - mean of the others' R, so environments that pay at the end only can be served. The episode itself goes on
with the first alternative, which is a fair sample of the policy: no alternative is preferred.

A tree over T turns costs about T / 2 further episodes for each of the `samples` alternatives.

Source: C3 (2603.06859). Deviation: continuations share their random numbers, which leaves their expectation as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mafrt.core.types import Turn
from mafrt.rollout.player import PlayStats
from mafrt.rollout.replay import play_on
from mafrt.rollout.tree_player import Alternative, Tree, TreePlayer, no_score


@dataclass(eq=False, repr=False, kw_only=True)
class ContinuedTreePlayer(TreePlayer):
    """Plays trees whose alternatives are continued to the end; see the module."""

    def _try(self, speakers: Sequence[tuple[Tree, str]], trials: Sequence[list[Alternative]], stats: PlayStats) -> None:
        every = [trial for some in trials for trial in some]
        for (tree, _), some in zip(speakers, trials, strict=True):
            for trial in some:
                # Copies: late rewards must not reach the turns of the episode itself.
                trial.fork.episode.turns = [replace(turn) for turn in tree.item.episode.turns]
                trial.fork.last_turn = {turn.agent: turn for turn in trial.fork.episode.turns}
        results = self._step_envs([trial.fork for trial in every], {trial.fork.key: trial.answers for trial in every})
        lost = {trial.fork.key for trial in every if not self._stepped(trial, results[trial.fork.key])}
        going = [t.fork for t in every if t.fork.key not in lost and "ended" not in t.fork.episode.info]
        lost |= play_on(self.sampling_as(self.sampling), going, stats)
        stats.tree_errors += len(lost)
        for (tree, agent), some in zip(speakers, trials, strict=True):
            some[:] = [trial for trial in some if trial.fork.key not in lost]
            position = len(tree.item.episode.turns) + list(tree.item.observations).index(agent)
            for trial in some:
                _reduce(trial, tree.item.episode.turns, position, agent_alone=trial.fork.env.opponents)

    def _best(self, trials: Sequence[list[Alternative]], stats: PlayStats) -> list[int]:
        """Always the first: another choice would make the states that follow unlike those of the policy."""
        episodes = [trial.fork.episode for some in trials for trial in some]
        if self.judge is not None and episodes:
            self.judge([(episode, turn) for episode in episodes for turn in episode.turns])
        for some in trials:
            for trial in some:
                trial.fork.episode.info["carried"] = trial.number == 0
            stats.tree_unscored += no_score([trial.fork.episode for trial in some])
            stats.tree_turns += 1
        return [0] * len(trials)


def _reduce(trial: Alternative, earlier: Sequence[Turn], position: int, agent_alone: bool) -> None:
    """Make a continued episode one of a single turn, which carries all that was paid from it on.

    `agent_alone`: only what its own agent was paid.
    """
    fork = trial.fork
    turns = fork.episode.turns
    turn = turns[position]

    def counts(other: Turn) -> bool:
        return not agent_alone or other.agent == turn.agent

    before = sum(old.reward for old in earlier if old.reward is not None and counts(old))
    paid = [new.reward for new in turns if new.reward is not None and counts(new)]
    fresh = any(new.reward is not None and counts(new) for new in turns[len(earlier) :])
    late = any(new.reward != old.reward and counts(new) for new, old in zip(turns, earlier, strict=False))
    turn.reward = sum(paid) - before if fresh or late else None
    turn.turn, fork.episode.turns = position, [turn]
    fork.episode.info["continued"] = len(turns) - position - 1
    fork.env.close()
