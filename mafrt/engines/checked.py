"""A user's engine, whose answers are looked at: their form always, their weights once after every update.

The check before the first turn (`logprob_check`) cannot see an engine that takes the first weights and no later ones,
or none below a version that it has seen: a run on it would train to its end and teach nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

from mafrt.config.resolve import user_line
from mafrt.core.errors import MafrtError, ModelError
from mafrt.core.text import counted, error_line
from mafrt.core.types import Completion, Request, Stop
from mafrt.engines import Engine
from mafrt.engines.logprob_check import mean_gap, nats_apart, trainer_logprobs

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase


class CheckedEngine:
    """`engine` with its answers checked; all else it has is its own.

    Args:
        engine: the user's.
        base: samples must come from its present weights.
        name: as the user gave it, for errors.
    """

    def __init__(self, engine: Engine, base: SharedBase, name: str) -> None:
        self.engine, self.base, self.name = engine, base, name
        self.compares = False
        """whether log-probabilities are compared: not before `self_check`, which says more of what is wrong"""
        self._compared: dict[str, int] = {}
        """adapter -> its version when an answer of it was last compared"""

    def __getattr__(self, name: str) -> Any:
        if name == "engine":  # not set yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.engine, name)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """The engine's answers.

        Raises:
            ModelError: it failed, an answer is none, or its log-probabilities are not those of the present weights.
        """
        try:
            answers = list(self.engine.generate(requests))
        except MafrtError:
            raise
        except Exception as error:
            raise ModelError(
                f"engine {self.name}: generate() raised {type(error).__name__}: {error_line(error)}{user_line(error)}"
            ) from error
        if len(answers) != len(requests):
            raise ModelError(
                f"engine {self.name} gave {counted(len(answers), 'answers')} to {counted(len(requests), 'requests')}; "
                "expected one each, in their order."
            )
        for request, answer in zip(requests, answers, strict=True):
            if fault := _fault(answer, request, self.base.config.vocab_size):
                raise ModelError(f"engine {self.name} gave an answer {fault}.")
        if self.compares:
            self._compare(requests, answers)
        return answers

    def _compare(self, requests: Sequence[Request], answers: Sequence[Completion]) -> None:
        """The shortest answer of each adapter that has moved since its last comparison, by the trainer's own pass."""
        shortest: dict[str, tuple[Request, Completion]] = {}
        for request, answer in zip(requests, answers, strict=True):
            name = request.adapter
            if name is None or not answer.ids or self._compared.get(name) == self.base.versions[name]:
                continue
            if name not in shortest or len(answer.ids) < len(shortest[name][1].ids):
                shortest[name] = request, answer
        for name, (request, answer) in shortest.items():
            expected = trainer_logprobs(self.base, list(request.prompt_ids), answer, name, request.sampling)
            gap, bound = mean_gap(answer, expected), nats_apart(self.base)
            if not gap <= bound:
                raise ModelError(
                    f"engine {self.name}, adapter {name!r}: the log-probabilities of an answer differ from the "
                    f"trainer's by {gap:.3g} nats a token on average, expected at most {bound}: an update did not "
                    "arrive, or other weights spoke; sample with the weights that the base holds now, or --engine "
                    "local."
                )
            self._compared[name] = self.base.versions[name]


def _fault(answer: Any, request: Request, vocabulary: int) -> str:
    """What is wrong with the form of an answer; empty if nothing is."""
    if not isinstance(answer, Completion):
        return f"of type {type(answer).__name__}; expected a mafrt.Completion"
    ids, logprobs = answer.ids, answer.logprobs
    if len(ids) != len(logprobs):
        return f"of {counted(len(ids), 'tokens')} with {len(logprobs)} log-probabilities; expected one each"
    if len(ids) > request.sampling.max_new_tokens:
        return f"of {len(ids)} tokens where at most {request.sampling.max_new_tokens} were asked for"
    if not all(type(token) is int and 0 <= token < vocabulary for token in ids):
        return f"with a token that is no id below {vocabulary}"
    if not all(isinstance(number, float) and math.isfinite(number) and number <= 1e-4 for number in logprobs):
        return "with a log-probability that is no finite number of at most 0"
    if answer.stop not in get_args(Stop):
        return f"that ended with {answer.stop!r}; expected one of {', '.join(map(repr, get_args(Stop)))}"
    return ""
