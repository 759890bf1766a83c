"""The shared base as its own team's judge: no second model in memory, no network.

It judges without adapter, or with one of its own. Replies are asked for in the text form, greedily, so that equal
weights give equal verdicts; all cases of a call go through the engine in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt.coach.base import Case, Coach
from mafrt.coach.judge_prompt import JudgeQuestion, make_ask
from mafrt.coach.parse_reply import UnreadableError, read_reply
from mafrt.coach.rubric import Rubric
from mafrt.core.errors import ConfigError
from mafrt.core.types import Request, SamplingParams, Unscored, Verdict
from mafrt.environment.thought_forms import template_thoughts
from mafrt.environment.tool_calls import visible
from mafrt.rollout.prompts import encode_prompt

if TYPE_CHECKING:
    from mafrt.engines import Engine
    from mafrt.models.shared_base import SharedBase

JUDGE = "coach.judge"
"""Name of the judge's own adapter on the base; not one that a team file would take."""


class LocalCoach(Coach):
    """Asks the base itself.

    Args:
        rubric: the criteria.
        adapter: folder of an adapter of its own, None for the bare base.
        max_tokens: of a reply.
    """

    bounded = True

    def __init__(self, rubric: Rubric, adapter: str | None, max_tokens: int) -> None:
        self.rubric, self.adapter, self.max_tokens = rubric, adapter, max_tokens
        if adapter is not None and not (Path(adapter).expanduser() / "adapter_config.json").is_file():
            raise ConfigError(f"coach_adapter {adapter} holds no adapter_config.json; give a folder in PEFT's layout.")
        self.name = f"local{'' if adapter is None else f' with {adapter}'}, rubric {rubric.name} {rubric.version}"
        self._calls = 0
        self._engine: Engine | None = None

    def load(self, base: SharedBase) -> None:
        """Raises CheckpointError for an adapter that does not fit the base."""
        if self.adapter is not None and JUDGE not in base.adapters:
            base.load_adapter(JUDGE, Path(self.adapter).expanduser())

    def bind(self, base: SharedBase, engine: Engine) -> None:
        self._base, self._engine = base, engine
        self._window = base.context_window
        self._opened = template_thoughts(base.tokenizer).opened

    def judge(self, cases: Sequence[Case]) -> list[Verdict]:
        asks = [make_ask(self.rubric, case, structured=False) for case in cases]
        verdicts = self._answers(asks)
        again = [place for place, verdict in enumerate(verdicts) if isinstance(verdict, UnreadableError)]
        second = self._answers([asks[place].again(str(verdicts[place])) for place in again])
        for place, verdict in zip(again, second, strict=True):
            verdicts[place] = verdict
        return [
            Unscored(f"no verdict in two replies: {verdict}") if isinstance(verdict, UnreadableError) else verdict
            for verdict in verdicts
        ]

    def counts(self) -> dict[str, float]:
        return {"calls": float(self._calls)}

    def restore(self, counts: Any) -> None:
        self._calls = int(counts.get("calls", 0))

    def _answers(self, asks: Sequence[JudgeQuestion]) -> list[Verdict | UnreadableError]:
        assert self._engine is not None, "bind() comes first"
        adapter = None if self.adapter is None else JUDGE
        sampling = SamplingParams(max_new_tokens=self.max_tokens, temperature=0.0)
        verdicts: list[Verdict | UnreadableError] = []
        requests: list[Request] = []
        for ask in asks:
            ids = encode_prompt(self._base.tokenizer, ask.system, ask.user)
            if len(ids) + 1 > self._window:
                # Not a matter of how it is asked, so asking again would not help.
                verdicts.append(Unscored(f"the question has {len(ids)} tokens, more than the base's {self._window}"))
            else:
                verdicts.append(UnreadableError(len(requests)))  # its place among the requests, until it is answered
                requests.append(Request(ids, adapter, sampling, seed=0))
        self._calls += len(requests)
        replies = self._engine.generate(requests) if requests else []
        for place, waiting in enumerate(verdicts):
            if isinstance(waiting, UnreadableError):
                reply = replies[waiting.args[0]]
                verdicts[place] = self._read(reply.text, asks[place], cut=reply.stop == "length")
        return verdicts

    def _read(self, text: str, ask: JudgeQuestion, *, cut: bool) -> Verdict | UnreadableError:
        try:
            reply = visible(text, opened=True) if self._opened else text
            return read_reply(reply, cut=cut, quoted=ask.quoted, analysis=ask.analysis)
        except UnreadableError as error:
            return error
