"""One episode of an environment as text, played with scripted answers, and a check for missing rewards."""

from __future__ import annotations

import difflib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mafrt.core.text import brief, clean_text
from mafrt.core.types import Observation
from mafrt.environment.base import Env
from mafrt.environment.session import session_of

INFO_KEYS = ("task", "outcome", "evidence", "measures", "answer")
"""Keys of `info` that the library reads."""

ANSWERS = ("yes", "The answer is \\boxed{7}.", "3 + 4 = 7", "```python\nprint(3 + 4)\n```", "I disagree.")
MOST_STEPS = 64


@dataclass
class Sample:
    """One played episode."""

    lines: list[str] = field(default_factory=list)
    """the episode as text, a line for each observation, answer and result"""
    paid: bool = False
    """whether any reward or outcome was given, 0 included"""
    info_keys: set[str] = field(default_factory=set)
    """keys of all info dicts"""


def sample_episode(env: Env, seed: int = 0) -> Sample:
    """Play one episode with scripted answers. Raises EnvError, as the environment's own methods do."""
    session, script, sample = session_of(env), random.Random(seed), Sample()
    observations, info = session.reset(seed=seed)
    _record_step(sample, {}, info)
    for _ in range(env.max_steps or MOST_STEPS):
        actions = {agent: script.choice(ANSWERS) for agent in observations}
        for agent, observation in observations.items():
            sample.lines.append(f"{agent} sees:  {_one_line(observation)}")
            sample.lines.append(f"{agent} says:  {_one_line(actions[agent])}")
        result = session.step(actions)
        _record_step(sample, result.rewards, result.info)
        if result.terminated or result.truncated:
            break
        observations = dict(result.observations)
    return sample


def payment_problem(samples: list[Sample]) -> str | None:
    """The sentence for an environment that paid nothing in any of the episodes; None if one of them was paid."""
    if not samples or any(sample.paid for sample in samples):
        return None
    keys = sorted({key for sample in samples for key in sample.info_keys})
    others = [key for key in keys if key not in INFO_KEYS]
    near = next((key for key in others if difflib.get_close_matches(key, ["outcome"], cutoff=0.7)), None)
    hint = f" (info has the key {near!r}; did you mean 'outcome'?)" if near else ""
    return (
        f"none of {len(samples)} sample episodes gave a reward or an outcome{hint}, so without a coach there is "
        'nothing to learn; return rewards from step(), or info["outcome"] on the last step'
    )


def _record_step(sample: Sample, rewards: Mapping[str, float], info: Mapping[str, Any]) -> None:
    sample.info_keys |= {str(key) for key in info}
    outcome = info.get("outcome")
    sample.paid = sample.paid or bool(rewards) or outcome is not None
    for agent, reward in rewards.items():
        sample.lines.append(f"{agent} earns: {reward:g}")
    if outcome is not None:
        sample.lines.append(f"outcome:    {outcome:g}")
    for key in info:
        if key not in INFO_KEYS:
            sample.lines.append(f"info[{key!r}]: {brief(info[key])}")


def _one_line(text: Observation | str) -> str:
    words = text if isinstance(text, str) else " | ".join(f"{m['role']}: {m['content']}" for m in text)
    line = clean_text(words).replace("\n", " / ")
    return line if len(line) <= 160 else line[:157] + "..."
