"""An episode as a line of `episodes.jsonl`."""

from __future__ import annotations

from typing import Any

from mafrt.core.types import Episode, Scored


def episode_record(episode: Episode, *, tokens: bool = False) -> dict[str, Any]:
    """An episode as `episodes.jsonl` holds it: turns, rewards and verdicts; token ids only if asked for."""
    turns = []
    for turn in episode.turns:
        record: dict[str, Any] = {
            "agent": turn.agent,
            "turn": turn.turn,
            "env_step": turn.env_step,
            "text": turn.text,
            "stop": turn.stop,
            "tokens": len(turn.action_ids),
            "prompt_tokens": len(turn.prompt_ids),
            "adapter_version": turn.adapter_version,
            "reward": turn.reward,
        }
        if tokens:
            record |= {"prompt_ids": turn.prompt_ids, "action_ids": turn.action_ids}
        if turn.evidence is not None:
            given = vars(turn.evidence)
            record["evidence"] = {name: given[name] for name in given if given[name] not in (None, {})}
            if turn.evidence.rules is not None:
                record["evidence"]["rules"] = vars(turn.evidence.rules)
        if turn.coach is not None:
            scored = isinstance(turn.coach, Scored)
            record["coach"] = vars(turn.coach) if scored else {"unscored": turn.coach.why}  # type: ignore[union-attr]
        if turn.advantages:
            record["advantage"] = sum(turn.advantages) / len(turn.advantages)
        turns.append(record)
    record = {"id": episode.id, "group": episode.group, "outcome": episode.outcome, "turns": turns}
    if episode.branches:
        # Alternatives of a tree were not played on, so they stand apart from the turns.
        others = [branch for branch in episode.branches if not branch.info.get("carried")]
        record["alternatives"] = [
            {**alternative, "outcome": branch.outcome}
            for branch in others
            for alternative in episode_record(branch, tokens=tokens)["turns"]
        ]
    return {**record, "info": episode.info}
