"""Play a recorded episode again up to one of its steps, and go on from there.

An environment is a function of its seed and the actions, so an episode can be taken up at any step: the recorded turns
are said again, and later ones are sampled. `play_on` does the latter, for any episodes in the middle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mafrt.core.errors import EnvError
from mafrt.core.types import Episode, Start
from mafrt.environment.base import Env
from mafrt.environment.session import session_of
from mafrt.rollout.player import Answers, Player, PlayStats, Rollout, RunningEpisode


def resumed(player: Player, env: Env, episode: Episode, step: int, key: str, seed: int | None = None) -> RunningEpisode:
    """The episode right before its environment's step `step`, in a fresh sibling of `env`.

    Args:
        player: played the episode.
        env: spawns the sibling.
        episode: has its `start`.
        step: 0 is the first.
        key: id of the live item.
        seed: of what is sampled from here on; None: the episode's own, so that equal prompts get equal answers.

    Raises:
        EnvError: the environment raised, or went another way than before.
    """
    start = episode.start
    assert start is not None
    session = session_of(env).spawn()
    observations, info = session.reset(
        seed=start.reset_seed, options=None if start.task is None else {"task": start.task}
    )
    begun = Start(key, start.group, start.reset_seed, start.seed if seed is None else seed, start.task)
    live = RunningEpisode(
        0, session, begun, Episode(key, episode.group, info=dict(info), start=begun), dict(observations)
    )
    for number in range(step):
        spoken = [turn for turn in episode.turns if turn.env_step == number]
        if {turn.agent for turn in spoken} != set(live.observations):
            raise EnvError(f"{session.class_name} went another way when it was played again; draw from self.rng only")
        for turn in spoken:
            again = replace(turn, reward=None, evidence=None, coach=None)
            live.episode.turns.append(again)
            live.last_turn[turn.agent] = again
        session.sampled(
            {t.agent: player.sampled(t.agent, t.prompt_ids, t.action_ids, t.logprobs, t.stop) for t in spoken}
        )
        result = session.step({turn.agent: player.visible_text(turn.agent, turn.text) for turn in spoken})
        live.take(result)
        live.observations = dict(result.observations)
    return live


def play_on(
    player: Player, going: Sequence[RunningEpisode], stats: PlayStats, answers: Mapping[str, Answers] | None = None
) -> set[str]:
    """Play episodes to their ends with single turns; keys of those that are lost. `stats` gets the tokens.

    The episodes are changed in place. `answers` of the first step are given, by key; None: they are sampled.
    """
    rollout = Rollout(lambda _slot, _done: None, len(going), [])
    live = list(going)
    if answers is not None:
        results, live = player._step_envs(going, answers), []
        for item in going:
            player._step(item, answers[item.key], results[item.key], live, rollout)
    while live:
        live = player._advance(live, rollout)
    stats.tokens += rollout.stats.tokens
    stats.prompt_tokens += rollout.stats.prompt_tokens
    return {item.key for item in going} - {episode.id for episode in rollout.done}


def paid(episode: Episode, reward_weight: float, outcome_weight: float, agent: str | None = None) -> float:
    """The team's pay by the environment: all rewards, with `agent` those of this agent, and the outcome."""
    rewards = sum(t.reward for t in episode.turns if t.reward is not None and agent in (None, t.agent))
    return reward_weight * rewards + outcome_weight * (episode.outcome or 0.0)
