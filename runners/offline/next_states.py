"""Recorded transitions as examples for a world model: what an agent saw and said in, the next observation out.

    prompt: the agent's observation, its turn, and the question QUESTION        answer: the next observation

The speaker's adapter learns it, with the loss of SFT; the turn itself may have failed, since any transition is true.
The next observation is the speaker's own where it acts in the next step, else that of the first agent that does. The
last step of an episode has none. (MRLM's next-state prediction.)
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from mafrt.config.team import Team
from mafrt.core.errors import EnvError
from mafrt.core.types import Message, Observation
from mafrt.environment.base import Env
from mafrt.environment.thought_forms import template_thoughts
from mafrt.rollout.prompts import encode_prompt, messages_of
from mafrt.runners.offline.dataset import Record, closed, turn_of
from mafrt.runners.offline.replay import Episodes, observations_of

QUESTION = "What is seen next? Answer with the next observation only."
"""Asked after the turn; the same words predict with a trained model."""


def next_states(
    episodes: Episodes, team: Team, tokenizer: Any, env: Env, seed: int
) -> tuple[list[Record], Counter[str]]:
    """A record for every recorded turn that another step follows; equal ones once.

    Args:
        episodes: from `read_episodes`; they are played again in `env` to find their observations.
        team: its role prompts stand in the prompts.
        tokenizer: of the base.
        env: the environment of the run.
        seed: the run's seed.

    Returns:
        the records, and counts: `episodes`, `not_reproduced` (episodes that came out otherwise and are left out).
    """
    counts: Counter[str] = Counter(episodes=len(episodes))
    records: dict[tuple[Any, ...], Record] = {}
    for where, episode in episodes:
        try:
            seen = observations_of(episode, env, seed, template_thoughts(tokenizer).opened)
        except EnvError:
            seen = None
        if seen is None:
            counts["not_reproduced"] += 1
            continue
        turns = list(zip(episode["turns"], seen, strict=True))
        for turn, observation in turns:
            after = _following(turns, turn["env_step"])
            if not after:
                continue
            text = after.get(turn["agent"], next(iter(after.values())))
            agent = team.agent(turn["agent"])
            prompt = encode_prompt(tokenizer, agent.prompt, asked(observation, turn["text"]), agent.prompt_at)
            spoken = turn_of(turn["agent"], prompt, closed(tokenizer, text, "eos"), "eos", text)
            key = (spoken.agent, tuple(spoken.prompt_ids), tuple(spoken.action_ids))
            records.setdefault(key, Record((spoken,), where))
    return list(records.values()), counts


def asked(observation: Observation, text: str) -> list[Message]:
    """The chat that asks for the next observation: what was seen, the turn, and the question."""
    return [
        *messages_of("", observation),
        {"role": "assistant", "content": text},
        {"role": "user", "content": QUESTION},
    ]


def _following(turns: list[tuple[dict[str, Any], Observation]], step: int) -> dict[str, str]:
    """Agent -> its observation as text, of the first step after `step`; empty after the last."""
    later = [turn["env_step"] for turn, _ in turns if turn["env_step"] > step]
    if not later:
        return {}
    return {turn["agent"]: _text(seen) for turn, seen in turns if turn["env_step"] == min(later)}


def _text(observation: Observation) -> str:
    """A text as it is; of messages, the last one."""
    return observation if isinstance(observation, str) else str(observation[-1]["content"])
