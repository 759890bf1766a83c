"""CCPO: the team's return plus a share of the agent's own contribution, the return that is lost without the agent.

    r_i = R + contribution_weight * (R - R without i)
    A_i = (r_i - mean) / (std + eps)        over the samples of the problem, for each agent

R is the episode's sum of rewards, the outcome counted once. R without i comes from the episode played again with agent
i silent (`mafrt.rollout.left_out`), one replay for each agent of each episode. All turns of an agent in an episode
share its A_i. Where a contribution is unknown or not finite, the mean of those known in the group stands for it; where
none is known, r_i is R. With the KL penalty in the reward R holds those of all turns, so that an episode of which one
is unknown leaves the loss whole (`drop_incomplete` says why).

Source: 2603.21563 and its code (`_compute_counterfactual_role_rewards`). There the bonus is half the difference of
rewards of -1 and 1, that is the difference of 0 and 1, and its weight .2 stands beside a return twice as large: .1
here. Deviations: every agent has a contribution, the last speaker too, whom the authors give R alone. R without i is
that of the same episode. The authors' default takes the mean over the problem's samples, and an event in place of the
difference: r_i is then a function of R and of a constant of the group, and with outcomes of 0 and 1 the division by
the deviation leaves exactly the advantages of R alone.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from mafrt.algorithms.base import Trajectories, structural
from mafrt.algorithms.group_relative import GroupRelative, GroupStats, drop_incomplete, relative
from mafrt.algorithms.rewards import CreditContext, Row
from mafrt.algorithms.stats import mean, total
from mafrt.config.schema import NotNegative


@dataclass(frozen=True)
class Ccpo(GroupRelative):
    """An agent's share in the team's return, by the same episode played again without the agent."""

    outcome_to: Literal["last", "end", "each", "all"] = "last"
    group: Literal["problem", "agent", "turn"] = structural("agent")
    reduce: Literal["mean", "sum"] = structural("sum")
    contribution_weight: NotNegative = 0.1
    """weight of an agent's contribution beside the team's return; 0 switches the replays off"""

    paper: ClassVar[str] = "CCPO (2603.21563)"
    metrics: ClassVar[Mapping[str, tuple[str, str]]] = {
        "left_out/AGENT": ("mean return of the team in the same episodes with the agent silent", "reward"),
        "left_out_lost": ("replays without an agent that the environment lost", "episodes"),
        "contribution/AGENT": ("mean return less the mean return without the agent", "reward"),
    }
    needs_several_agents: ClassVar[bool] = True

    @property
    def needs_contribution(self) -> bool:
        return self.contribution_weight > 0

    def credit(self, trajectories: Trajectories, context: CreditContext) -> dict[str, float]:
        drop_incomplete(trajectories)
        groups: dict[Hashable, list[tuple[list[Row], float, float, float | None]]] = {}
        agents: dict[str, list[float]] = {}
        for rows in trajectories:
            known = [row for row in rows if row.dropped is None]
            whole, kl = total(row.reward for row in known), total(row.reward - row.bare for row in known)
            for agent in sorted({row.turn.agent for row in known}):
                of_agent = [row for row in known if row.turn.agent == agent]
                contribution = of_agent[0].turn.contribution
                if contribution is not None and not math.isfinite(contribution):
                    contribution = None
                if contribution is not None:
                    agents.setdefault(agent, []).append(contribution)
                groups.setdefault((of_agent[0].group, agent), []).append((of_agent, whole, kl, contribution))
        group_stats = GroupStats()
        for members in groups.values():
            told = [contribution for *_, contribution in members if contribution is not None]
            usual = mean(told) if told else 0.0
            shares = [usual if contribution is None else contribution for *_, contribution in members]
            rewards = [whole + self.contribution_weight * c for (_, whole, *_), c in zip(members, shares, strict=True)]
            group_stats.add(rewards, (members[0][0][0].turn.agent,))
            bare = [reward - kl for reward, (_, _, kl, _) in zip(rewards, members, strict=True)]
            advantages = relative(
                rewards,
                scale=self.scale,
                baseline=self.baseline,
                eps=self.eps,
                bare=bare,
                size=max(abs(row.reward) for of_agent, *_ in members for row in of_agent),
            )
            for (of_agent, *_), reward, advantage in zip(members, rewards, advantages, strict=True):
                for row in of_agent:
                    tokens = len(row.turn.action_ids)
                    row.fill([advantage] * tokens, [reward] * tokens, mean(rewards))
        paid = {f"contribution/{agent}": mean(numbers) for agent, numbers in sorted(agents.items())}
        return group_stats.metrics() | paid
