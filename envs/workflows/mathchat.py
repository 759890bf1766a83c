"""`mathchat`, after multiagent-coaching: Problem Solver, Code Executor with a sandbox, Verifier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mafrt.config.schema import check_number
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.core.types import Evidence, Message, Observation
from mafrt.environment.python_tool import Ran
from mafrt.environment.tool_calls import BadCall, find_code, tool_message
from mafrt.envs.workflows.chain import Chain
from mafrt.envs.workflows.state import TOOL, TaskState, TurnRules, written


class MathChat(Chain):
    """The Problem Solver plans, the Code Executor writes programs that are run, the Verifier answers.

    The output of a Code Executor's program, or its error, is returned as the chat template's tool
    message, and it speaks again: to correct the program, or to report the result. It has `tool_turns` turns; one
    without a program is its last. The others see its programs and their output in the transcript:

        Problem: Mia has 3 pens. She buys 4 more. How many pens does she have now?
        problem_solver: Add 3 and 4.
        code_executor: ```python
        print(3 + 4)
        ```
        tool: 7
        code_executor: The result is 7.
    """

    uses_tools = True
    plans = False
    profile = "profiles/mathchat.json"

    def __init__(
        self, team: Team, horizon: int, judge_lines: bool, sees: str | None = None, tool_turns: int = 2
    ) -> None:
        super().__init__(team, horizon, judge_lines, sees)
        if len(self.names) != 3 or self.names[-1] not in self.answering:
            raise ConfigError(
                "workflow 'mathchat' is played by three agents (one plans, one writes programs, one answers and has "
                f"with_answer), found {', '.join(self.names)}; take profiles/mathchat.json"
            )
        check_number("tool_turns", tool_turns, least=1, whole=True)
        self.planner, self.executor, _ = self.names
        self.tool_turns = tool_turns
        self.max_steps = horizon * (tool_turns + 2)

    def observe(self, state: TaskState) -> dict[str, Observation]:
        if state.over or not state.turns:
            return super().observe(state)
        # The agent's own words and the tool's answers form a conversation; the question comes before them.
        # Two entries a turn: the agent's words, and the tool's answer.
        begun = len(state.said) - 2 * state.turns
        chat: list[Message] = [
            {
                "role": "user",
                "content": written(state.problem, self.seen(state.said[:begun], self.executor), self.names),
            }
        ]
        for role, text in state.said[begun:]:
            chat.append(tool_message(text) if role == TOOL else {"role": "assistant", "content": text})
        return {self.executor: chat}

    def transition(self, state: TaskState, actions: Mapping[str, str]) -> TaskState:
        after = super().transition(state, actions)
        if self.names[state.position] != self.executor:
            return after
        called = find_code(actions[self.executor])
        # Words without a program are its report, which ends its part.
        if called is None:
            return replace(after, turns=0)
        waiting = replace(after, position=state.position, turns=state.turns + 1)
        return self.answered(waiting, called.why) if isinstance(called, BadCall) else replace(waiting, pending=called)

    def answered(self, state: TaskState, output: str) -> TaskState:
        """The tool has answered: the Code Executor goes on, or has had its turns."""
        # After the last turn the next agent speaks, so that an executor in a loop ends nothing but its own part.
        done = state.turns >= self.tool_turns
        return replace(
            state,
            said=(*state.said, (TOOL, output)),
            pending=None,
            position=state.position + done,
            turns=0 if done else state.turns,
        )

    def evidence(self, before: TaskState, after: TaskState, ran: Ran | None, rules: TurnRules) -> dict[str, Evidence]:
        (name, text), *answered = after.said[len(before.said) :]
        if name != self.executor:
            return super().evidence(before, after, ran, rules)
        output = answered[0][1] if answered and answered[0][0] == TOOL else None
        if output is None:
            printed = before.said[-1][1] if before.turns else None
            return {name: Evidence(rules=rules.report(text, printed))}
        if ran is None:
            return {name: Evidence(output, rules.bad_call(output), {"status": "no call"})}
        by_agent = {name: Evidence(output, rules.program(ran), {"status": ran.status})}
        plan = next(words for role, words in reversed(before.said) if role == self.planner)
        # A plan that the rules could judge by itself is not judged by the program that followed it.
        if rules.plan(plan) is None:
            by_agent[self.planner] = Evidence(rules=rules.followed(rules.prints_right(ran), "the program"))
        return by_agent
