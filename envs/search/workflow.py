"""`search`, after Dr. MAS: the Verifier routes to the Search agent or to the Answer agent, turn by turn."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.core.types import Evidence, Observation
from mafrt.environment.python_tool import Ran
from mafrt.environment.tool_calls import BadCall, visible
from mafrt.envs.search.process_rewards import SearchRules
from mafrt.envs.workflows.solver_verifier import verdict_of
from mafrt.envs.workflows.state import TOOL, Key, Lines, TaskState, TurnRules, Workflow, view, written

VERIFY, SEARCH, ANSWER, DONE = range(4)
"""Values of `TaskState.position`: the agent that speaks next, in team order."""
LONGEST_QUERY = 300
_VERIFIED = re.compile(r"<verify>\s*(yes|no)\s*</verify>", re.IGNORECASE)
# Not over another opening tag: a text of them alone would be read again from each.
_QUERY = re.compile(r"<search>((?:(?!<search>).)*?)</search>", re.DOTALL | re.IGNORECASE)


def sufficient(text: str) -> bool | None:
    """Whether the Verifier finds that the known information suffices; None if its text does not say.

    `<verify>yes</verify>` or, as the shipped base writes it, `Verdict: approve`. The last one counts.
    """
    verdicts = _VERIFIED.findall(text)
    if verdicts:
        return bool(verdicts[-1].lower() == "yes")
    verdict = verdict_of(text)
    return None if verdict is None else verdict == "approve"


def query_of(text: str) -> str | BadCall:
    """The query of a Search agent's text: the last `<search>` tag, else the whole text without thoughts."""
    tagged = _QUERY.findall(text)
    query = " ".join((tagged[-1] if tagged else visible(text)).split())[:LONGEST_QUERY]
    return query if re.search(r"\w", query) else BadCall("Nothing was searched for: the query is empty.")


class SearchWorkflow(Workflow):
    """Verifier, Search agent and Answer agent, in the team's order; `horizon` turns.

    In each turn the Verifier decides whether the known information suffices. If so, the Answer agent speaks and the
    episode ends; otherwise the Search agent writes a query, and the passages found for it become known. The last turn
    is the Answer agent's alone. (In Dr. MAS it may be spent on a search, and the episode then has no answer.) A text
    without a decision leads to a search. Unless `sees` says otherwise, agents see the queries and their passages:

        Problem: How many pens does box 34 hold?
        search: Box 34 pens
        tool: Box 34 holds 57 pens.
    """

    uses_tools = True
    tool = "search"
    profile = "profiles/search.json"

    def __init__(self, team: Team, horizon: int, judge_lines: bool, sees: str | None = None) -> None:
        super().__init__(team, horizon, judge_lines)
        if len(self.names) != 3 or self.answering != self.names[-1:]:
            raise ConfigError(
                "workflow 'search' is played by three agents (one decides, one searches, one answers and alone has "
                f"with_answer), found {', '.join(self.names)}; take profiles/search.json"
            )
        if horizon < 2:
            raise ConfigError(f"horizon is {horizon}; workflow 'search' needs at least 2: a search, and the answer")
        named = {agent.name: agent.sees or sees for agent in team.agents}
        self.views = {agent: self._known if name is None else view(name) for agent, name in named.items()}
        self.bounded = all(view.__module__.startswith("mafrt.envs.") for view in self.views.values())
        self.max_steps = 2 * (horizon - 1) + 1

    def _known(self, transcript: Lines, agent: str, names: tuple[str, ...]) -> Lines:
        """The queries and their passages, without the Verifier's decisions."""
        return [line for line in transcript if line[0] != names[VERIFY]]

    def observe(self, state: TaskState) -> dict[str, Observation]:
        if state.over or state.position == DONE:
            return {}
        name = self.names[state.position]
        return {name: written(state.problem, self.views[name](state.said, name, self.names), self.names)}

    def transition(self, state: TaskState, actions: Mapping[str, str]) -> TaskState:
        name = self.names[state.position]
        after = replace(state, said=(*state.said, (name, actions[name])))
        if state.position == VERIFY:
            return replace(after, position=ANSWER if sufficient(actions[name]) else SEARCH)
        if state.position == ANSWER:
            return replace(after, position=DONE)
        query = query_of(actions[name])
        return self.answered(after, query.why) if isinstance(query, BadCall) else replace(after, pending=query)

    def answered(self, state: TaskState, output: str) -> TaskState:
        """The passages are known: the next turn begins, or the last one."""
        done = state.round + 1
        last = done + 1 >= self.horizon
        transcript = (*state.said, (TOOL, output))
        return replace(state, said=transcript, pending=None, round=done, position=ANSWER if last else VERIFY)

    def measures(self, state: TaskState, key: Key) -> dict[str, float]:
        """`searches`: number of searches; `undecided`: share of the Verifier's texts without a decision."""
        texts = [text for name, text in state.said if name == self.names[VERIFY]]
        undecided = sum(sufficient(text) is None for text in texts) / len(texts) if texts else 0.0
        searches = sum(name == TOOL for name, _ in state.said)
        return {"searches": float(searches), "undecided": undecided}

    def evidence(self, before: TaskState, after: TaskState, ran: Ran | None, rules: TurnRules) -> dict[str, Evidence]:
        (name, text), *answered = after.said[len(before.said) :]
        assert isinstance(rules, SearchRules)
        if name == self.names[ANSWER]:
            return {name: Evidence(rules=rules.answer(text))}
        known = "\n".join(passages for role, passages in before.said if role == TOOL)
        if name == self.names[VERIFY]:
            return {name: Evidence(rules=rules.decision(sufficient(text), known))}
        output = answered[0][1] if answered else ""
        return {name: Evidence(output, rules.search(output, known))}
