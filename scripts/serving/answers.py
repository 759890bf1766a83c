"""The chat API's side of a trained team: a model per agent, and `team` for the whole workflow."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mafrt.core.errors import ConfigError, MafrtError, MissingExtraError
from mafrt.core.seeding import seed_of
from mafrt.core.text import shortened
from mafrt.core.types import Completion
from mafrt.environment.chat_api.protocol import ApiError, ChatCall, ChatReply, before_stop, tokens_of
from mafrt.environment.chat_api.server import OnText
from mafrt.environment.tool_calls import visible
from mafrt.envs.tools.strict_calls import held_to_strict
from mafrt.scripts.serving.trained_team import TrainedTeam
from mafrt.scripts.serving.workflow import play_problem

if TYPE_CHECKING:
    from mafrt.envs.math import MathEnv


TEAM = "team"
"""Name of the model that plays the workflow."""
_EPISODES = 32
"""Workflows that are played side by side."""


class TeamAnswers:
    """Answers calls once `ready` was called; before, with status 503."""

    learns = False

    def __init__(self) -> None:
        self.team: TrainedTeam | None = None
        self.env: MathEnv | None = None
        self._pool = ThreadPoolExecutor(_EPISODES)
        self._calls = itertools.count()

    def ready(self, team: TrainedTeam, env: MathEnv | None) -> None:
        self.env, self.team = env, team

    def models(self, key: str) -> list[str]:
        self._refuse(key)
        if self.team is None:
            return []
        workflow = [TEAM] if self.env is not None and TEAM not in self.team.team.names else []
        return [*self.team.team.names, *workflow]

    def begin(self, key: str, call: ChatCall, on_text: OnText) -> Future[ChatReply]:
        team = self._team(key, call)
        number = next(self._calls) if call.seed is None else call.number
        seed = seed_of(call.seed or 0, "call", number)
        if call.model not in team.team.names:
            _refuse_for_team(call)
            return self._pool.submit(self._workflow, call, seed)
        if (call.temperature is not None and call.temperature > 2) or (
            call.top_p is not None and not 0 < call.top_p <= 1
        ):
            raise ApiError(400, "'temperature' must be at most 2 and 'top_p' in (0, 1]")
        local = bool(call.schema or call.forced) and getattr(team.queue.engine, "joins", False)
        if call.schema and not local:
            raise ApiError(400, "a JSON schema is not supported by this engine; serve the team with --engine local")
        if call.forced and local:
            call = replace(call, schema=call.forced)
        request = team.request(
            call.model,
            call.messages,
            seed,
            max_new_tokens=call.max_tokens,
            temperature=call.temperature,
            top_p=call.top_p,
            stop=call.stop or None,
            schema=call.schema or None,
        )
        answer: Future[ChatReply] = Future()
        prompt_tokens = len(request.prompt_ids)
        # Calls of tools are read from the whole text.
        pieces = None
        if call.stream and not call.tool_names:
            ends = team.base.of_agent(call.model).eos_ids
            pieces = TextPieces(team.voices[call.model].tokenizer, call.stop, on_text, ends)
        job = team.queue.submit(request, pieces)
        decode = team.voices[call.model].tokenizer.decode if call.logprobs else None
        pass_on = partial(_pass_on, answer=answer, prompt_tokens=prompt_tokens, call=call, decode=decode, team=team)
        # The arguments of strict tools are checked outside the engine's thread.
        job.add_done_callback(partial(self._pool.submit, pass_on) if call.strict and not call.schema else pass_on)
        answer.add_done_callback(lambda done: job.leave() if done.cancelled() else None)
        return answer

    def count(self, key: str, call: ChatCall) -> int:
        team = self._team(key, call)
        if call.model not in team.team.names:
            raise ApiError(400, f"the tokens of {TEAM!r}, which plays a workflow, are not counted; name an agent")
        return len(team.request(call.model, call.messages, 0).prompt_ids)

    def reward(self, key: str, body: Any) -> None:
        raise ApiError(404, "a served team is not trained, so it takes no rewards")

    def _workflow(self, call: ChatCall, seed: int) -> ChatReply:
        assert self.team is not None and self.env is not None
        problem = call.messages[-1]["content"]
        if not problem.strip():
            raise ApiError(400, "the last message, which is the problem, is empty")
        episode = play_problem(self.team, self.env, problem, seed, call.max_tokens)
        if episode is None:
            raise ApiError(400, "the prompt is too long for the context window", "context_length_exceeded")
        last = episode.turns[-1]
        tokens = sum(len(turn.action_ids) for turn in episode.turns)
        prompts = sum(len(turn.prompt_ids) for turn in episode.turns)
        return ChatReply(visible(last.text), last.stop == "length", prompts, tokens)

    def _team(self, key: str, call: ChatCall) -> TrainedTeam:
        """The team, which knows the call's model. Raises ApiError."""
        names = self.models(key)
        if self.team is None:
            raise ApiError(503, "the team is being loaded; try again in a moment")
        if call.model not in names:
            asked = shortened(call.model)
            raise ApiError(404, f"there is no model {asked!r}; there are {', '.join(names)}", "model_not_found")
        return self.team

    @staticmethod
    def _refuse(key: str) -> None:
        if key:
            raise ApiError(404, "there are no episodes here; the address ends in /v1")


def _refuse_for_team(call: ChatCall) -> None:
    """Refuse settings of one agent's call, which a whole workflow does not have."""
    given = {
        "logprobs": call.logprobs,
        "tools": bool(call.tool_names),
        "response_format": bool(call.schema),
        "stop": call.stop,
        "temperature": call.temperature is not None,
        "top_p": call.top_p is not None,
    }
    if wrong := [name for name, value in given.items() if value]:
        raise ApiError(
            400, f"{', '.join(map(repr, wrong))} cannot be given for {TEAM!r}, which plays a workflow; name an agent"
        )


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _pass_on(
    done: Future[Completion],
    answer: Future[ChatReply],
    prompt_tokens: int,
    call: ChatCall,
    decode: Callable[[list[int]], str] | None,
    team: TrainedTeam,
) -> None:
    """Turn the engine's completion, or its error, into the reply; a call that was abandoned takes none."""
    if done.cancelled() or not answer.set_running_or_notify_cancel():
        return
    if (error := done.exception()) is not None:
        wrong = isinstance(error, (ConfigError, MissingExtraError))  # with the request: nothing was sampled
        answer.set_exception(ApiError(400, str(error)) if wrong else error)
        return
    made = done.result()
    text, stopped = before_stop(made.text, call.stop)
    if call.schema and made.stop == "eos" and not _is_json(text):
        answer.set_exception(ApiError(400, "the JSON schema is too large for its grammar, which ended the answer"))
        return
    team.remember(call.model, call.messages, text, made.ids)
    tokens = () if decode is None else tokens_of(text, made.ids, made.logprobs, decode)
    reply = ChatReply(text, made.stop == "length" and not stopped, prompt_tokens, len(made.ids), tokens, stopped)
    try:
        answer.set_result(reply if call.schema else held_to_strict(call, reply))
    except MafrtError as error:
        answer.set_exception(error)


_HALF = "\ufffd"
"""Stands for the bytes of a character that is not whole yet."""


class TextPieces:
    """Called with the tokens so far; hands on the text that is new and certain.

    Args:
        tokenizer: decodes the tokens.
        stops: texts at which the answer ends; they are no part of it.
        said: takes the pieces.
        ends: end tokens, which are no part of the answer.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str], on_text: Callable[[str], None], ends: Collection[int] = ()
    ) -> None:
        self._tokenizer, self._stops, self._said, self._ends = tokenizer, stops, on_text, ends
        self._held = max((len(stop) for stop in stops), default=1) - 1
        """characters at the end that may be the beginning of a stop text"""
        self._done = 0
        """characters handed on"""

    def __call__(self, ids: Sequence[int]) -> None:
        answer_ids = ids[:-1] if len(ids) and ids[-1] in self._ends else ids
        text = self._tokenizer.decode(answer_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text = before_stop(text, self._stops)[0].rstrip(_HALF)
        certain = text[: len(text) - self._held]
        if len(certain) > self._done:
            self._said(certain[self._done :])
            self._done = len(certain)
