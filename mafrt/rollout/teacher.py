"""The teacher of on-policy distillation: log-probabilities of the students' tokens, from the learner's mixed batches.

The teacher's adapters are further adapters on the shared base, which never learn and are handed to no engine. They are
loaded from their folder when a run starts or goes on, and are in no checkpoint.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mafrt.config.agent import LoraSpec
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError, PromptTooLongError
from mafrt.core.types import Episode, Turn
from mafrt.rollout.prompts import encode_prompt, with_note
from mafrt.storage.load_path import resolve
from mafrt.training.several import AnyLearner

if TYPE_CHECKING:
    from mafrt.models.several_bases import Bases

_SUFFIX = "@teacher"
"""Ends the name of a teacher's adapter; no adapter of a team may be called so."""


class Teacher:
    """The adapters and the prompt of a teacher.

    Args:
        base: of the students; gets the teacher's adapters.
        team: the students.
        prompt: text behind each observation, with names of the episode's facts in braces; None: the students' prompts.
        path: a run or a folder of adapters; None: the base without adapter.
        themselves: the students are their own teachers, whatever `path`.

    Raises:
        CheckpointError: `path` holds no adapter for one of the team's, or one of another base.
    """

    def __init__(self, base: Bases, team: Team, prompt: str | None, path: str | None, *, themselves: bool) -> None:
        self.base, self.team, self.prompt = base, team, prompt
        self.adapters: dict[str, str] | None = None
        """agent -> the teacher's adapter; None: the one that it spoke with"""
        if themselves:
            return
        source = None if path is None else resolve(path)
        for adapter in team.adapters:
            name = f"{adapter}{_SUFFIX}"
            if source is not None:
                base.load_adapter(name, source.adapter(adapter))
            elif name not in base.adapters:
                base.add_adapter(name, LoraSpec(rank=1), seed=0)  # a new adapter changes nothing
        self.adapters = {agent.name: f"{agent.adapter}{_SUFFIX}" for agent in team.agents}

    @torch.no_grad()
    def fill(self, episodes: Sequence[Episode], learner: AnyLearner, adapter_of: Mapping[str, str]) -> None:
        """Fill `teacher_logprobs` of every turn.

        Args:
            episodes: played with `adapter_of`.
            learner: computes them.
            adapter_of: agent -> the adapter that it spoke with.

        Raises:
            ConfigError: the prompt names a fact that an episode does not have.
            PromptTooLongError: it does not fit into the base's window.
        """
        turns = [turn for episode in episodes for turn in episode.turns]
        asked = [self._asked(turn, episode) for episode in episodes for turn in episode.turns]
        values = learner.logprobs(asked, adapter_of if self.adapters is None else self.adapters)
        for turn, logprobs in zip(turns, values, strict=True):
            turn.teacher_logprobs = logprobs

    def _asked(self, turn: Turn, episode: Episode) -> Turn:
        """The turn after the teacher's prompt."""
        if self.prompt is None or turn.observation is None or not turn.action_ids:
            return turn
        spec, place = self.team.agent(turn.agent), self.base.of_agent(turn.agent)
        seen = with_note(turn.observation, filled(self.prompt, episode.info))
        prompt = encode_prompt(place.tokenizer, spec.prompt, seen, spec.prompt_at, turn.own_turns)
        if len(prompt) + len(turn.action_ids) > place.context_window:
            raise PromptTooLongError(
                f"the teacher's prompt of agent {turn.agent!r} has {len(prompt)} tokens, and with its answer of "
                f"{len(turn.action_ids)} more than the window of {place.context_window}; shorten teacher_prompt."
            )
        return replace(turn, prompt_ids=prompt, observation=seen)


def filled(prompt: str, facts: Mapping[str, Any]) -> str:
    """`prompt` with each `{name}` replaced by the fact of that name. Raises ConfigError for one that is not there."""
    parts = []
    for text, name, _, _ in string.Formatter().parse(prompt):
        parts.append(text)
        if name is None:
            continue
        if name not in facts:
            known = ", ".join(sorted(map(str, facts))) or "none"
            raise ConfigError(
                f"teacher_prompt names {{{name}}}, and the episode has no such fact (it has {known}); name one of "
                "these, or give a text without braces."
            )
        parts.append(str(facts[name]))
    return "".join(parts)
