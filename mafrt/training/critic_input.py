"""What a central critic reads: everything said so far, and who speaks next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mafrt.core.types import Episode


def central_prompts(episodes: Sequence[Episode], tokenizer: Any, context_window: int) -> dict[int, list[int]]:
    """For every turn, the prompt of a critic that sees the whole team's transcript (MAPPO; Yu 2022, 2103.01955).

    It holds what the first speaker saw, each earlier turn as `AGENT: TEXT` (whatever the speaker itself was shown of
    them), and the speaker's name. A transcript that leaves no room for the turn loses its beginning.

    Returns:
        `id(turn)` -> token ids. The turns must stay alive as long as the dict is used.
    """
    prompts: dict[int, list[int]] = {}
    for episode in episodes:
        if not episode.turns:
            continue
        said = tokenizer.decode(episode.turns[0].prompt_ids, skip_special_tokens=True).rstrip()
        for turn in episode.turns:
            ids = tokenizer.encode(f"{said}\n{turn.agent}:", add_special_tokens=False)
            room = max(context_window - len(turn.action_ids), 1)
            prompts[id(turn)] = list(ids[-room:])
            said += f"\n{turn.agent}: {turn.text}"
    return prompts
