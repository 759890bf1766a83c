"""State of a coding episode. Pure: next speaker and observation follow from the state alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mafrt.core.types import Message, Observation
from mafrt.environment.tool_calls import BadCall, find_code, tool_message
from mafrt.envs.workflows.state import written

TOOL = "tool"
NOTHING = "Nothing was run: put the whole program into one ```python block."


@dataclass(frozen=True)
class CodeState:
    """Everything an episode has come to; never changed, only replaced."""

    problem: str
    said: tuple[tuple[str, str], ...] = ()
    """(role, text) in speaking order; the tool's lines are among them."""
    reviewing: bool = False
    """Whether the Tester speaks next."""
    turns: int = 0
    """Turns that the Coder has had in a row: it goes on after a program that failed."""
    reviews: int = 0
    """Times the Tester found something."""
    program: str | None = None
    """The latest program."""
    pending: str | None = None
    """Pending execution before the next turn: the latest program, or the Tester's checks."""
    over: bool = False


@dataclass(frozen=True)
class Flow:
    """Coder alone, or Coder and Tester."""

    coder: str
    tester: str | None
    turns: int
    """Turns of the Coder in a row while its program fails."""
    reviews: int
    """Times the Tester may send a program back."""

    @property
    def max_steps(self) -> int:
        """Most steps that an episode can take."""
        return self.turns if self.tester is None else self.turns * (self.reviews + 1) + self.reviews

    def observations(self, state: CodeState) -> dict[str, Observation]:
        """Observation of the next speaker: problem and transcript, with its own failed attempts as a conversation."""
        if state.over:
            return {}
        if state.reviewing:
            assert self.tester is not None
            return {self.tester: self._written(state, len(state.said))}
        begun = len(state.said) - 2 * state.turns
        if not state.turns:
            return {self.coder: self._written(state, begun)}
        chat: list[Message] = [{"role": "user", "content": self._written(state, begun)}]
        for role, text in state.said[begun:]:
            chat.append(tool_message(text) if role == TOOL else {"role": "assistant", "content": text})
        return {self.coder: chat}

    def advance(self, state: CodeState, actions: dict[str, str]) -> CodeState:
        """The state after an agent spoke: its program is pending, or its turn is over."""
        [(name, text)] = actions.items()
        call = find_code(text)
        spoken = replace(state, said=(*state.said, (name, text)))
        if isinstance(call, str):
            return replace(spoken, pending=call, program=state.program if state.reviewing else call)
        if state.reviewing:
            return replace(spoken, over=True)  # no checks: the Tester has nothing against it
        return self.failed(spoken, why_not(text))

    def ran(self, state: CodeState, output: str) -> CodeState:
        """State after the pending execution succeeded."""
        if state.reviewing:
            return replace(state, said=(*state.said, (TOOL, output)), pending=None, over=True)
        return self._handed_on(replace(state, pending=None))

    def failed(self, state: CodeState, output: str) -> CodeState:
        """State after the pending execution failed or had nothing to run; `output` gives the reason."""
        after = replace(state, said=(*state.said, (TOOL, output)), pending=None)
        if state.reviewing:
            return replace(after, reviewing=False, turns=0, reviews=state.reviews + 1)
        after = replace(after, turns=state.turns + 1)
        return after if after.turns < self.turns else self._handed_on(after)

    def _written(self, state: CodeState, until: int) -> str:
        names = [name for name in (self.coder, self.tester) if name is not None]
        return written(state.problem, state.said[:until], names)

    def _handed_on(self, state: CodeState) -> CodeState:
        """The Coder's turns are over: the Tester's begins, if there is one and a program for it."""
        review = self.tester is not None and state.reviews < self.reviews and state.program is not None
        return replace(state, reviewing=review, over=not review, turns=0)


def why_not(text: str) -> str:
    """Why a text has no program, for the agent."""
    call = find_code(text)
    return call.why if isinstance(call, BadCall) else NOTHING
