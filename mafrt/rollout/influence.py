"""Influence of a turn on the next one: how much less likely the next turn is once this one is left out of its prompt.

    influence(t) = mean over the tokens of turn u of log p(token | prompt of u) - log p(token | prompt of u without t)

u is the first turn of a later step whose observation shows the text of t. A turn that no later turn shows has no
influence that could be measured: None. A positive number says that the next speaker used the turn, about 0 that it
would have said the same anyway.

Source: Dr. MAMR (2511.02303), causal influence. Deviation: the paper suppresses the attention to the turn; here its
text is taken out of the observation and the prompt is encoded again, which works with every model and engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mafrt.config.team import Team
from mafrt.core.transcript import quoted, speakers
from mafrt.core.types import Episode, Observation, Turn
from mafrt.environment.tool_calls import visible
from mafrt.rollout.prompts import encode_prompt

Logprobs = Callable[[Sequence[Turn]], Sequence[Sequence[float]]]
"""Turns -> log-probabilities of their action tokens after their prompts."""


def fill_influence(episodes: Sequence[Episode], team: Team, tokenizers: Mapping[str, Any], logprobs: Logprobs) -> None:
    """Fill `influence` of every turn that a later turn shows.

    Args:
        episodes: played with `team`; turns have their observations.
        team: its role prompts begin the prompts.
        tokenizers: by agent.
        logprobs: of the adapters that sampled the episodes.
    """
    shown: list[Turn] = []
    after: list[Turn] = []
    without: list[Turn] = []
    for episode in episodes:
        for turn in episode.turns:
            turn.influence = None
            following = _next_without(turn, episode.turns, team.names)
            if following is None:
                continue
            follower, observation = following
            spec = team.agent(follower.agent)
            seen = follower.observation
            assert seen is not None
            past = [own_turn for own_turn in follower.own_turns if observation[own_turn[0]] == seen[own_turn[0]]]
            prompt = encode_prompt(tokenizers[follower.agent], spec.prompt, observation, spec.prompt_at, past)
            shown.append(turn)
            after.append(follower)
            without.append(replace(follower, prompt_ids=prompt, observation=observation))
    if not shown:
        return
    numbers = logprobs([*after, *without])
    for turn, full, less in zip(shown, numbers, numbers[len(after) :], strict=False):
        turn.influence = sum(a - b for a, b in zip(full, less, strict=True)) / len(full)


def _next_without(turn: Turn, turns: Sequence[Turn], names: Sequence[str]) -> tuple[Turn, Observation] | None:
    """The first turn of a later step that shows `turn`, and its observation without it; None if there is none."""
    texts_said = [text for text in (turn.text.strip(), visible(turn.text).strip()) if text]
    # A transcript quotes a turn that holds a speaker's line.
    texts = [*texts_said, *(quoted(text, speakers(names)) for text in texts_said)]
    for later in turns:
        if later.env_step <= turn.env_step or later.observation is None or not later.action_ids:
            continue
        for text in texts:
            less = _without(later.observation, text)
            if less is not None:
                return later, less
    return None


def _without(observation: Observation, text: str) -> Observation | None:
    """The observation with the last occurrence of `text` taken out; None if it does not show it."""
    if isinstance(observation, str):
        before, match, behind = observation.rpartition(text)
        return before + behind if match else None
    for number in range(len(observation) - 1, -1, -1):
        before, match, behind = observation[number]["content"].rpartition(text)
        if match:
            changed = {**observation[number], "content": before + behind}
            return [*observation[:number], changed, *observation[number + 1 :]]
    return None
