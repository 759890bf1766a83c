"""Play as a tree: several alternatives of every turn from one state, the best of which is carried on (AT-GRPO).

In each step of an environment, every agent that has to speak says `samples` alternatives to the same prompt. For one
agent after the other, each alternative is tried on a fork of the environment (`Env.fork`) and scored, and the best is
kept; those who act after it, in this step or in later ones, go on from what was kept. Where agents speak at the same
time, an agent's alternatives are tried beside what was kept of those before it and the first alternative of those
after it, since all of them were asked before anybody was heard.

A score is the turn's reward as credit will see it: what the environment pays the speaker in that very step, the coach's
judgement if there is a coach, and the outcome if the step ended the episode. What is paid later cannot tell
alternatives apart and counts for none of them. Of equal scores the first is carried on; alternatives are drawn alike,
so that is a seeded pick at random. So it is where nothing can be scored (`no_score`).

Every alternative, carried on or not, becomes an episode of one turn (`Episode.branches`), of its tree's group: credit
and the update read those. The episode itself says how the team did.

Source: AT-GRPO (2510.11062), tree-structured sampling. Deviation: the paper's agents of one turn speak one after the
other; here the environment says who speaks when, and one that lets them speak in turn shows each what was kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mafrt.config.team import Team
from mafrt.core.errors import EnvError
from mafrt.core.seeding import seed_of
from mafrt.core.types import Completion, Episode, Evidence, Request, SamplingParams, StepResult, Turn
from mafrt.engines import Engine
from mafrt.environment.base import Env
from mafrt.environment.checker import play
from mafrt.rollout.player import Live, Player, PlayStats

Worth = Callable[[Sequence[Episode]], list[list[float | None]]]
"""Episodes -> per episode the reward of each turn as credit sees it; None if it is not known."""
Judge = Callable[[Sequence[tuple[Episode, Turn]]], Any]
"""Fills `coach` of turns just spoken."""
Said = dict[str, tuple[Request, Completion]]


class TreePlayer(Player):
    """Plays trees; see the module.

    Args:
        engine, tokenizer, team, sampling, context_window, reasoning: as for `Player`.
        samples: alternatives of each turn, 2 or more.
        worth: scores them.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        team: Team,
        sampling: Mapping[str, SamplingParams],
        context_window: int,
        reasoning: str = "auto",
        *,
        samples: int,
        worth: Worth,
    ) -> None:
        super().__init__(engine, tokenizer, team, sampling, context_window, reasoning)
        self.samples, self.worth = samples, worth
        self.judge: Judge | None = None
        """Judges alternatives before they are scored, where there is a coach."""

    def _answers(self, asked: Sequence[tuple[Live, str, Request]], stats: PlayStats) -> dict[int, Said]:
        """What is carried on of everybody's alternatives."""
        wide = [
            replace(request, seed=seed_of(request.seed, "alternative", number) if number else request.seed)
            for _, _, request in asked
            for number in range(self.samples)
        ]
        answers = iter(self._generate(wide, stats))
        options: dict[int, dict[str, list[Completion]]] = {}
        requests: dict[int, dict[str, Request]] = {}
        items: dict[int, Live] = {}
        for item, agent, request in asked:
            items[id(item)] = item
            requests.setdefault(id(item), {})[agent] = request
            options.setdefault(id(item), {})[agent] = [next(answers) for _ in range(self.samples)]
        said: dict[int, Said] = {
            key: {agent: (requests[key][agent], some[0]) for agent, some in of.items()} for key, of in options.items()
        }
        # All trees at once: first everybody's first speaker, then the second, so that what waits, waits together.
        for place in range(max(map(len, options.values()), default=0)):
            grown = [(items[key], list(of)[place]) for key, of in options.items() if place < len(of)]
            tried = {
                id(item): self._try(item, agent, said[id(item)], options[id(item)][agent]) for item, agent in grown
            }
            for (item, agent), number in zip(grown, self._best(grown, tried, stats), strict=True):
                request, _ = said[id(item)][agent]
                said[id(item)][agent] = request, options[id(item)][agent][number]
        return said

    def _try(self, item: Live, agent: str, said: Said, options: Sequence[Completion]) -> list[tuple[Live, Said]]:
        """A fork for each alternative of one agent, and what is said in it."""
        others = {name: replace(turn) for name, turn in item.last_turn.items()}  # what is paid late lands on copies
        tried = []
        for number, answer in enumerate(options):
            first = len(item.episode.turns) + list(said).index(agent)
            episode = Episode(
                id=f"{item.episode.id}/{first:03d}-{number:02d}",
                group=item.episode.group,
                info={**item.episode.info, "alternative": number},
            )
            fork = replace(item, env=item.env.fork(), episode=episode, last_turn=dict(others))
            tried.append((fork, {**said, agent: (said[agent][0], answer)}))
        return tried

    def _best(
        self, grown: Sequence[tuple[Live, str]], tried: Mapping[int, list[tuple[Live, Said]]], stats: PlayStats
    ) -> list[int]:
        """Step all forks, score their speakers' turns, keep them as branches; the number of each tree's best."""
        forks = [fork for some in tried.values() for fork, _ in some]
        results = self._step_envs(forks, {id(fork): said for some in tried.values() for fork, said in some})
        sound: dict[int, list[int]] = {}
        for item, agent in grown:
            position = len(item.episode.turns) + list(item.observations).index(agent)
            for number, (fork, said) in enumerate(tried[id(item)]):
                if self._taken(fork, agent, said, results[id(fork)], position, stats):
                    sound.setdefault(id(item), []).append(number)
        episodes = [tried[id(item)][n][0].episode for item, _ in grown for n in sound.get(id(item), ())]
        if self.judge is not None and episodes:
            self.judge([(episode, turn) for episode in episodes for turn in episode.turns])
        scores = iter(self.worth(episodes))
        best = []
        for item, _ in grown:
            # What is not known is never better than what is; where nothing is, the first is as good as any.
            ranked = [(next(scores)[0], -number) for number in sound.get(id(item), ())]
            known = [(score, number) for score, number in ranked if score is not None]
            number = -max(known)[1] if known else 0
            best.append(number)
            for n in sound.get(id(item), ()):
                episode = tried[id(item)][n][0].episode
                episode.info["carried"] = n == number
                item.episode.branches.append(episode)
            stats.tree_unscored += no_score([tried[id(item)][n][0].episode for n in sound.get(id(item), ())])
            stats.tree_turns += 1
        return best

    def _taken(
        self, fork: Live, agent: str, said: Said, result: StepResult | EnvError, position: int, stats: PlayStats
    ) -> bool:
        """Let a fork take its step; False if its environment raised, so that the alternative's worth is not known."""
        mine = PlayStats()
        self._step(fork, said, result, [], [], lambda *_: None, mine)
        stats.tree_errors += mine.env_errors
        [turn] = [turn for turn in fork.episode.turns if turn.agent == agent]
        turn.turn, fork.episode.turns = position, [turn]
        fork.env.close()
        return not mine.env_errors


def no_score(branches: Sequence[Episode]) -> bool:
    """Whether nothing was found out about any alternative of a turn: no reward, no judgement, no outcome."""
    return not any(
        turn.reward is not None or turn.coach is not None or branch.outcome is not None
        for branch in branches
        for turn in branch.turns
    )


def to_learn(episodes: Sequence[Episode]) -> list[Episode]:
    """What credit and the update read: the branches of trees, and other episodes themselves."""
    return [one for episode in episodes for one in (episode.branches or [episode])]


def show_advantages(episodes: Sequence[Episode]) -> None:
    """Give the turns of a tree's episode, which nobody learnt from, what their own alternatives were credited with."""
    for episode in episodes:
        for branch in episode.branches:
            if branch.info.get("carried"):
                turn = episode.turns[branch.turns[0].turn]
                turn.advantages, turn.returns = branch.turns[0].advantages, branch.turns[0].returns


def scorable(env: Env, judged: Callable[[Evidence | None], bool], episodes: int = 16) -> set[str]:
    """Agents of `env` that can be scored in the step in which they speak, as far as scripted episodes show.

    Whoever never spoke in them has shown nothing, and counts as one.

    Args:
        judged: whether a coach would judge a turn with this evidence.
    """
    found: set[str] = set()
    spoke: set[str] = set()
    for seed in range(episodes):
        for step in play(env.spawn(), seed=seed, action_seed=seed)[1:]:
            if isinstance(step, str):
                return set(env.agents)  # it does not even play; that will be reported where it can be
            actions, (_, rewards, *_), (outcome, evidence) = step
            spoke |= set(actions)
            found |= {a for a in actions if outcome is not None or a in rewards or judged((evidence or {}).get(a))}
        if spoke >= set(env.agents) and found >= spoke:
            break
    return found | (set(env.agents) - spoke)
