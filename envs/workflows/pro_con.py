"""`pro_con`: two sides argue about a claim, and a jury, rules or a coach decide which of them wins.

For a claim the sides are PRO and CON, and a juror's answer is `\\boxed{PRO}` or `\\boxed{CON}`. For a question each
side has the answer that its last speaker gives, and the side whose answer the jury gives has won. Winning is paid to
the debaters, being right to the jury: Irving 2018 (1805.00899), Khan 2024 (2402.06782).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import zip_longest

from mafrt.config.schema import unknown
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.core.types import Evidence, Observation, Scored
from mafrt.environment.python_tool import Ran
from mafrt.envs.math.process_rewards import steps_of
from mafrt.envs.workflows.simultaneous import majority
from mafrt.envs.workflows.state import Key, TaskState, TurnRules, Workflow, written

PRO, CON = "PRO", "CON"
SIDE_LINES = tuple(f"You argue {side}." for side in (PRO, CON))
VERDICTS = ("jury", "rules", "coach")
SIDES = ("by_task", "fixed", "swapped")
ENOUGH = 3
"""Pieces of evidence in a turn beyond which more earn nothing."""
_SIDE = re.compile(r"\\boxed\s*\{\s*(?:\\text\s*\{)?\s*(PRO|CON)\b", re.IGNORECASE)
_QUOTE = re.compile(r'["\u201c]([^"\u201c\u201d]{1,400})["\u201d]')
_WORD = re.compile(r"\w+")
MOST_TEXT = 20_000
"""Characters of a turn in which evidence is looked for, from its end."""
LEAST_QUOTE = 3
"""Words of a quotation that counts."""
MOST_QUOTED = 0.5
"""Share of the problem's words that a quotation may have: a copy of the whole problem is no evidence."""


class ProCon(Workflow):
    """Debaters speak in turn, PRO first, for `horizon` rounds; then the jury answers at once.

    The jury is the agents with `with_answer`, if two agents or more lack it; otherwise all but the first two. Without
    a jury (`verdict="rules"` or `"coach"`, or a team of two) every agent debates. Every other debater is on the first
    one's side. `sides` says which side that is: PRO (`fixed`), CON (`swapped`), or one of both by the text of the
    problem (`by_task`), so that an agent learns both. Speakers read PRO and CON and never names.

    `jury`: the majority's verdict; it is graded, and the grade is the outcome. `rules`: the side with the better
    evidence (`points_of`) wins; there is no outcome. `coach`: neither side wins; its scores are the only reward.

    Paid in the last step: 1 to the debaters of the side that has won, 0 to the others, 0.5 to all without a winner.

    Measures: `pro_won`, `first_won` (the side of the team's first debater; over many tasks .5 each if sides and seats
    are fair; 0.5 without a winner), `decided` (whether there is a winner), `evidence` (mean points of a turn) and
    `consistent` (share of the turns that do not take the other side or leave the speaker's own answer).
    """

    profile = "profiles/pro_con.json"

    def __init__(
        self, team: Team, horizon: int, judge_lines: bool, verdict: str | None = None, sides: str = "by_task"
    ) -> None:
        super().__init__(team, horizon, judge_lines)
        debaters = tuple(name for name in self.names if name not in self.answering)
        if len(debaters) < 2:
            debaters = self.names[:2]
        jury = tuple(name for name in self.names if name not in debaters)
        self.verdict = verdict or ("jury" if jury else "rules")
        if self.verdict not in VERDICTS:
            raise ConfigError(unknown("verdict", self.verdict, VERDICTS))
        if sides not in SIDES:
            raise ConfigError(unknown("setting of sides", sides, SIDES))
        if len(self.names) < 2 or (self.verdict == "jury" and not jury):
            raise ConfigError(
                f"workflow 'pro_con' needs two debaters{' and a jury' if self.verdict == 'jury' else ''}, found "
                f"{', '.join(self.names)}; take a larger team, such as profiles/pro_con.json"
            )
        self.debaters, self.jury = (debaters, jury) if self.verdict == "jury" else (self.names, ())
        self.sides = sides
        self.answering = self.jury
        self.graded = bool(self.jury)
        self.max_steps = horizon * len(self.debaters) + bool(self.jury)

    def sides_of(self, problem: str) -> dict[str, str]:
        """Debater -> PRO or CON, in speaking order."""
        # By the problem and not by chance, so that an episode that is played again has the same sides.
        swapped = zlib.crc32(problem.encode()) % 2 == 1 if self.sides == "by_task" else self.sides == "swapped"
        first, second = self.debaters[::2], self.debaters[1::2]
        pros, cons = (second, first) if swapped else (first, second)
        # In turn, so that each argument can be answered by the other side.
        order = [name for pair in zip_longest(pros, cons) for name in pair if name is not None]
        return {name: PRO if name in pros else CON for name in order}

    def observe(self, state: TaskState) -> dict[str, Observation]:
        if state.over:
            return {}
        sides = self.sides_of(state.problem)
        transcript = [(sides[name], text) for name, text in state.said]
        if state.round >= self.horizon:
            return {name: written(state.problem, transcript, (PRO, CON), headings=SIDE_LINES) for name in self.jury}
        name = list(sides)[state.position]
        note = f"You argue {sides[name]}."
        return {name: written(state.problem, transcript, (PRO, CON), note, SIDE_LINES)}

    def transition(self, state: TaskState, actions: Mapping[str, str]) -> TaskState:
        if state.round >= self.horizon:
            votes = tuple((name, actions[name]) for name in self.jury)
            return replace(state, said=(*state.said, *votes), round=state.round + 1)
        [(name, text)] = actions.items()
        position = (state.position + 1) % len(self.debaters)
        return replace(state, said=(*state.said, (name, text)), position=position, round=state.round + (position == 0))

    def answers(self, state: TaskState) -> dict[str, str] | None:
        if state.round < self.horizon + bool(self.jury):
            return None
        return {name: text for name, text in state.said if name in self.jury}

    def decide(self, answers: Mapping[str, str], key: Key) -> dict[str, str]:
        if not answers:
            return {}
        first = majority(answers, lambda text: stance(text, key))
        return {first: answers[first]}

    def judged(self, state: TaskState, score: float) -> TaskState:
        return replace(state, over=True)

    def payments(self, state: TaskState, key: Key) -> dict[str, float] | None:
        if self.verdict == "coach":
            return {}
        won = self.winner(state, key)
        # A draw pays both a half, so that the sum stays the same and one side's gain is the other's loss.
        return {name: 0.5 if won is None else float(side == won) for name, side in self.sides_of(state.problem).items()}

    def winner(self, state: TaskState, key: Key) -> str | None:
        """The side that has won a debate that is over; None: neither."""
        sides = self.sides_of(state.problem)
        if self.verdict != "jury":
            points = dict.fromkeys((PRO, CON), 0.0)
            for name, text in state.said:
                points[sides[name]] += points_of(text, state.problem) * self._kept(state, name, text, key)
            # A side with more debaters has more turns.
            pro, con = (points[side] / sum(taken == side for taken in sides.values()) for side in (PRO, CON))
            return None if pro == con else PRO if pro > con else CON
        decisive = self.decide(self.answers(state) or {}, key)
        given = next((stance(text, key) for text in decisive.values()), None)
        if given is None or given in (PRO, CON):
            return given
        last = {sides[name]: stance(text, key) for name, text in state.said if name in sides}
        fits = [side for side, answer in last.items() if answer == given]
        return fits[0] if len(fits) == 1 else None

    def _kept(self, state: TaskState, name: str, text: str, key: Key) -> bool:
        """Whether a debater's turn keeps its side, and the answer that it first gave."""
        side, given = self.sides_of(state.problem)[name], stance(text, key)
        if given is None or given in (PRO, CON):
            return given in (None, side)
        # A debater that changes its answer gets nothing for its evidence, or it could argue for whatever is likely to
        # win.
        first = next(a for n, t in state.said if n == name and (a := stance(t, key)) is not None)
        return given == first

    def measures(self, state: TaskState, key: Key) -> dict[str, float]:
        sides = self.sides_of(state.problem)
        turns = [(name, text) for name, text in state.said if name in sides]
        numbers = {
            "evidence": sum(points_of(text, state.problem) for _, text in turns) / len(turns),
            "consistent": sum(self._kept(state, name, text, key) for name, text in turns) / len(turns),
        }
        if self.verdict != "coach":
            won = self.winner(state, key)
            numbers["decided"] = float(won is not None)
            numbers["pro_won"] = 0.5 if won is None else float(won == PRO)
            numbers["first_won"] = 0.5 if won is None else float(won == sides[self.debaters[0]])
        return numbers

    def evidence(self, before: TaskState, after: TaskState, ran: Ran | None, rules: TurnRules) -> dict[str, Evidence]:
        shown: dict[str, Evidence] = {}
        for name, text in after.said[len(before.said) :]:
            points = points_of(text, after.problem)
            argued = Scored(10.0 * points, f"Evidence: {points * ENOUGH:.0f} of {ENOUGH} points.")
            shown[name] = Evidence(rules=rules.answer(text) if name in self.jury else argued)
        return shown


def stance(text: str, key: Key) -> str | None:
    """PRO or CON if a text boxes one of them, else the answer that it gives; None if it gives none."""
    # The last one counts, since a text may weigh both sides before it decides.
    boxed = _SIDE.findall(text)
    return boxed[-1].upper() if boxed else key(text)


def points_of(text: str, problem: str) -> float:
    """Evidence of a turn, in [0, 1]: its pieces, at most 3, less its inventions, by 3.

    A piece is a calculation that holds, that starts from the problem's numbers and does not stand in the problem, or a
    quotation of three words or more that stands in the problem and is at most half of it. A calculation that does
    not hold and a quotation that is not found are inventions. Whether it has to do with the side is not read.
    """
    good: set[tuple[object, ...]] = set()
    # Only the end is read: an endless text would otherwise take longer to score than to sample.
    invented, text = 0, text[-MOST_TEXT:]
    for step in steps_of(text, problem):
        if not step.holds:
            invented += 1
        elif step.starts and not step.idle and not step.repeats:
            good.add(step.numbers)
    words = _WORD.findall(problem.lower())
    running = f" {' '.join(words)} "
    for quoted in _QUOTE.findall(text):
        parts = _WORD.findall(quoted.lower())
        if len(parts) < LEAST_QUOTE:
            continue
        # Compared word by word, so that spaces and commas make no invention.
        if f" {' '.join(parts)} " not in running:
            invented += 1
        # A quotation of nearly the whole problem is no evidence for one side.
        elif len(parts) <= MOST_QUOTED * len(words):
            good.add(tuple(parts))
    return float(Fraction(max(min(len(good), ENOUGH) - invented, 0), ENOUGH))
