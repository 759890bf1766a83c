"""Input of a central critic: the transcript so far and the next speaker's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mafrt.core.transcript import quoted, speakers
from mafrt.core.types import Episode
from mafrt.models.outside_text import encode_outside


def central_prompts(
    episodes: Sequence[Episode], tokenizer: Any, context_window: int, tokenizers: Mapping[str, Any] | None = None
) -> list[list[list[int]]]:
    """For every turn, the prompt of a critic that sees the whole team's transcript (MAPPO; Yu 2022, 2103.01955).

    It holds the first speaker's prompt, each earlier turn as `AGENT: TEXT` (hidden ones included), and the
    speaker's name. A transcript that leaves no room for the turn is truncated on the left.

    Args:
        tokenizer: of the base that reads the prompts.
        tokenizers: agent -> the tokenizer of its own prompts, where it is another.

    Returns:
        Token ids, `[episode][turn]`.
    """
    prompts: list[list[list[int]]] = []
    for episode in episodes:
        prompts.append([])
        if not episode.turns:
            continue
        first = episode.turns[0]
        own = (tokenizers or {}).get(first.agent, tokenizer)
        names = speakers({turn.agent for turn in episode.turns})
        said = own.decode(first.prompt_ids, skip_special_tokens=True).rstrip()
        for turn in episode.turns:
            ids = encode_outside(tokenizer, f"{said}\n{turn.agent}:")
            room = max(context_window - len(turn.action_ids), 1)
            prompts[-1].append(list(ids[-room:]))
            said += f"\n{turn.agent}: {quoted(turn.text, names)}"
    return prompts
