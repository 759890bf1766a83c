"""How a problem is solved in words, and the ways in which a careless solver goes wrong.

Plans, written steps, programs and boxed answers are the vocabulary of all team formats. The solvers
can do the arithmetic: whatever they write out is right. Their mistakes are choices, made at the rates
in `Carelessness`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from bench.teaching_base.problems import Problem, Steps, results


@dataclass(frozen=True)
class Carelessness:
    """How often a demonstrator takes the wrong choice; every field is a probability."""

    wrong_operation: float = 0.30
    """A plan, a solution or a program uses an operation other than the right one, or drops a step."""
    skip_step: float = 0.55
    """An answer is boxed without the step being written."""
    guess_right: float = 0.12
    """A number that was jumped to is right."""
    ignore_plan: float = 0.10
    """The Actor solves the problem its own way (right or wrong, evenly) instead of the plan's."""
    no_check: float = 0.55
    """The Verifier gives a verdict without a check."""
    blind_approve: float = 0.85
    """A verdict without a check approves."""
    wrong_program: float = 0.25
    """The Code Executor's program departs from the plan."""
    no_print: float = 0.10
    """The program computes and prints nothing."""
    copy_result: float = 0.55
    """The concluding Verifier boxes the program's output without checking it."""

    def scaled(self, share: float) -> Carelessness:
        """Only `share` of every mistake; 0.0 is a demonstrator without fault."""
        return replace(
            self,
            wrong_operation=self.wrong_operation * share,
            skip_step=self.skip_step * share,
            ignore_plan=self.ignore_plan * share,
            no_check=self.no_check * share,
            wrong_program=self.wrong_program * share,
            no_print=self.no_print * share,
            copy_result=self.copy_result * share,
        )


RATES = Carelessness()


def plan_text(start: int, steps: Steps) -> str:
    """`Add 7 and 5.`, `Subtract 5 from 12, then multiply by 3.`"""
    (operation, number), *rest = steps
    first = {
        "+": f"Add {start} and {number}",
        "-": f"Subtract {number} from {start}",
        "*": f"Multiply {start} by {number}",
        "/": f"Divide {start} by {number}",
    }[operation]
    words = {"+": "add", "-": "subtract", "*": "multiply by", "/": "divide by"}
    return first + "".join(f", then {words[operation]} {number}" for operation, number in rest) + "."


def step_text(start: int, steps: Steps) -> str:
    """`7 + 5 = 12.` with one sentence a step."""
    values = results(start, steps)
    assert values is not None
    lefts = [start, *values]
    return " ".join(
        f"{left} {operation} {number} = {value}."
        for left, (operation, number), value in zip(lefts, steps, values, strict=False)
    )


def program_text(start: int, steps: Steps, printed: bool = True) -> str:
    """A Python program for the steps; whole-number division, as all results are whole."""
    expression = str(start)
    for index, (operation, number) in enumerate(steps):
        expression = f"({expression})" if index else expression
        expression = f"{expression} {'//' if operation == '/' else operation} {number}"
    return f"```python\n{f'print({expression})' if printed else f'x = {expression}'}\n```"


def wrong_steps(rng: random.Random, problem: Problem) -> Steps:
    """Steps that a careless reader of the problem takes: another operation, or the last step left out."""
    options: list[Steps] = [problem.steps[:-1]] if len(problem.steps) > 1 else []
    for index, (operation, number) in enumerate(problem.steps):
        for other in "+-*/":
            steps = (*problem.steps[:index], (other, number), *problem.steps[index + 1 :])
            values = results(problem.start, steps) if other != operation else None
            if values is not None and values[-1] != problem.answer:
                options.append(steps)
    # A product or quotient can have no other operation within the tables; a sum always does.
    return rng.choice(options) if options else (("+", problem.steps[0][1]),)


def choose_steps(rng: random.Random, problem: Problem, rates: Carelessness = RATES) -> Steps:
    return wrong_steps(rng, problem) if rng.random() < rates.wrong_operation else problem.steps


def guess(rng: random.Random, start: int, steps: Steps) -> int:
    """The wrong number of a demonstrator that skips the written step."""
    values = results(start, steps)
    assert values is not None
    value = values[-1]
    if rng.random() < RATES.guess_right:
        return value
    wrong = {
        start,
        *(number for _, number in steps),
        value + 1,
        value - 1,
        value + 2,
        value - 2,
        value + 10,
        value - 10,
    }
    return rng.choice(sorted(number for number in wrong if number >= 0 and number != value))


def answer_text(rng: random.Random, start: int, steps: Steps, rates: Carelessness = RATES) -> tuple[str, int]:
    """An answer in the Actor's and the Solver's format, and the number that it boxes."""
    if rng.random() < rates.skip_step:
        value = guess(rng, start, steps)
        return f"\\boxed{{{value}}}", value
    values = results(start, steps)
    assert values is not None
    return f"{step_text(start, steps)} \\boxed{{{values[-1]}}}", values[-1]


def actor_steps(rng: random.Random, problem: Problem, plan: Steps, rates: Carelessness = RATES) -> Steps:
    if rng.random() >= rates.ignore_plan:
        return plan
    return wrong_steps(rng, problem) if rng.random() < 0.5 else problem.steps
