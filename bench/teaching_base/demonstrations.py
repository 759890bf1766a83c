"""Careless demonstrators: how teams answer word problems in the corpus of the teaching base.

The demonstrators can do the arithmetic. Their mistakes are choices, made at stated rates
(`bench.teaching_base.solutions.Carelessness`): a wrong operation, a jump to a number instead of a written
step, a verdict without a check, a wrong program. A model that imitates them knows which choice is
right (it is the likelier one, and the wording tells it), but samples the wrong one just as often as
they took it. That is the headroom that reinforcement learning has.

Each `*_document` function shows one turn of one agent as the chat messages that this agent would
see and write; assistant messages are the ones to imitate. `rates` is the carelessness of that turn;
earlier turns of the other agents always use `RATES`, so that an agent sees every kind of mistake of
its team.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from bench.teaching_base.problems import Problem, Steps, apply, results
from bench.teaching_base.solutions import (
    RATES,
    Carelessness,
    actor_steps,
    answer_text,
    choose_steps,
    plan_text,
    program_text,
    step_text,
    wrong_steps,
)

Message = dict[str, str]
Document = list[Message]

# The wording of the shipped profiles (profiles/*.json); a test keeps the two equal.
PROMPTS = {
    "reasoner": "You are the Reasoner. Plan which steps to take.",
    "actor": "You are the Actor. Solve it and box the answer.",
    "solver": "You are the Solver. Propose a boxed answer.",
    "verifier": "You are the Verifier. Check it, then approve or reject.",
    "problem_solver": "You are the Problem Solver. Plan what to compute.",
    "code_executor": "You are the Code Executor. Write a short Python program.",
    "concluder": "You are the Verifier. Conclude with the boxed answer.",
}
TITLES = {
    "reasoner": "Reasoner",
    "actor": "Actor",
    "solver": "Solver",
    "verifier": "Verifier",
    "problem_solver": "Problem Solver",
    "code_executor": "Code Executor",
    "concluder": "Verifier",
}
TASKS = {
    "reasoner": ("Say which steps solve the problem.", "Think about the problem and give a plan.", "Do not compute."),
    "actor": ("Follow the plan.", "Give the final answer in \\boxed{}.", "Compute the result."),
    "solver": ("Solve the problem.", "Give your answer in \\boxed{}.", "Revise it when it is rejected."),
    "verifier": ("Check the solution.", "End with Verdict: approve or Verdict: reject.", "Say why."),
    "problem_solver": ("Tell the Code Executor what to compute.", "Give a plan.", "Do not write code."),
    "code_executor": ("Write Python that prints the result.", "Put the code in a ```python block.", "Be short."),
    "concluder": ("Look at the result and conclude.", "Give the final answer in \\boxed{}.", "Check the program."),
}
SIZES = ("two", "three", "four", "five", "six", "seven", "eight")
# Other teams of a chain: any title, any number of speakers, and prompts of several sentences.
SPEAKERS = (
    "planner",
    "solver",
    "checker",
    "finisher",
    "parser",
    "strategist",
    "calculator",
    "critic",
    "writer",
    "helper",
)
DUTIES = (
    "Say which steps lead to the answer.",
    "Do not calculate.",
    "Carry out the steps one by one and show each calculation.",
    "Check the result against the problem and correct every mistake.",
    "Name what is given and what is asked.",
    "Choose a method for each part of the problem.",
    "Put the results together into one short solution.",
    "Be brief.",
)
FINALS = ("End with the final answer in \\boxed{}.", "Give the final answer in \\boxed{}.")
JUDGE = "\njudge: The answer is incorrect."


def system(rng: random.Random, role: str) -> Document:
    """The role prompt: mostly the shipped one, else a paraphrase, a longer one or none."""
    draw = rng.random()
    if draw < 0.75:
        return [{"role": "system", "content": PROMPTS[role]}]
    if draw < 0.80:
        return []
    tasks = rng.sample(TASKS[role], rng.randint(1, 3)) + rng.sample(DUTIES, rng.choice((0, 0, 1)))
    return [{"role": "system", "content": " ".join((_opening(rng, TITLES[role]), *tasks))}]


def _opening(rng: random.Random, title: str) -> str:
    """The first sentence of a role prompt that is not a shipped one."""
    sentences = (
        "You are the {}.",
        "Your role is {}.",
        "You act as the {} of the team.",
        "You are the {} in a team of {} that solves a math problem.",
    )
    return rng.choice(sentences).format(title, rng.choice(SIZES))


def turn(rng: random.Random, role: str, observation: str, text: str) -> Document:
    return [
        *system(rng, role),
        {"role": "user", "content": observation},
        {"role": "assistant", "content": text},
    ]


def _earlier_round(rng: random.Random, problem: Problem) -> str:
    """A failed round of the Reasoner and the Actor, as later rounds see it."""
    for _ in range(20):
        plan = choose_steps(rng, problem)
        text, value = answer_text(rng, problem.start, actor_steps(rng, problem, plan))
        if value != problem.answer:
            break
    else:
        return ""
    return f"\nreasoner: {plan_text(problem.start, plan)}\nactor: {text}{JUDGE}"


def reasoner_document(rng: random.Random, problem: Problem, rates: Carelessness = RATES) -> Document:
    past = _earlier_round(rng, problem) if rng.random() < 0.15 else ""
    plan = choose_steps(rng, problem, rates)
    return turn(rng, "reasoner", f"Problem: {problem.text}{past}", plan_text(problem.start, plan))


def actor_document(rng: random.Random, problem: Problem, rates: Carelessness = RATES) -> Document:
    past = _earlier_round(rng, problem) if rng.random() < 0.15 else ""
    plan = choose_steps(rng, problem)
    observation = f"Problem: {problem.text}{past}\nreasoner: {plan_text(problem.start, plan)}"
    text, _ = answer_text(rng, problem.start, actor_steps(rng, problem, plan, rates), rates)
    return turn(rng, "actor", observation, text)


def check_text(rng: random.Random, problem: Problem, value: int, rates: Carelessness = RATES) -> str:
    """A Verifier's reply to a proposed `value`; a check solves the problem again."""
    if rng.random() < rates.no_check:
        return "Verdict: approve" if rng.random() < rates.blind_approve else "Verdict: reject"
    steps = choose_steps(rng, problem, rates.scaled(1 / 3))
    values = results(problem.start, steps)
    assert values is not None
    if values[-1] == value:
        return f"Check: {step_text(problem.start, steps)} Verdict: approve"
    return f"Check: {step_text(problem.start, steps)} Not {value}. Verdict: reject"


def _proposal(rng: random.Random, problem: Problem, rates: Carelessness = RATES) -> tuple[str, int]:
    return answer_text(rng, problem.start, choose_steps(rng, problem, rates), rates)


def _rejected(rng: random.Random, problem: Problem) -> str:
    for _ in range(20):
        text, value = _proposal(rng, problem)
        verdict = check_text(rng, problem, value)
        if verdict.endswith("reject"):
            return f"\nsolver: {text}\nverifier: {verdict}"
    return ""


def solver_document(rng: random.Random, problem: Problem, rates: Carelessness = RATES) -> Document:
    past = _rejected(rng, problem) if rng.random() < 0.4 else ""
    return turn(rng, "solver", f"Problem: {problem.text}{past}", _proposal(rng, problem, rates)[0])


def verifier_document(rng: random.Random, problem: Problem, rates: Carelessness = RATES) -> Document:
    past = _rejected(rng, problem) if rng.random() < 0.3 else ""
    text, value = _proposal(rng, problem)
    observation = f"Problem: {problem.text}{past}\nsolver: {text}"
    return turn(rng, "verifier", observation, check_text(rng, problem, value, rates))


def problem_solver_document(rng: random.Random, problem: Problem, rates: Carelessness = RATES) -> Document:
    plan = choose_steps(rng, problem, rates)
    return turn(rng, "problem_solver", f"Problem: {problem.text}", plan_text(problem.start, plan))


def _executed(
    rng: random.Random, problem: Problem, plan: Steps, rates: Carelessness = RATES
) -> tuple[str, str, str, int | None]:
    """Program, printed output, the closing sentence, and the number in it."""
    steps = wrong_steps(rng, problem) if rng.random() < rates.wrong_program else plan
    printed = rng.random() >= rates.no_print
    values = results(problem.start, steps)
    assert values is not None
    program = program_text(problem.start, steps, printed)
    if not printed:
        return program, "", "The program printed nothing.", None
    return program, str(values[-1]), f"The result is {values[-1]}.", values[-1]


def code_executor_document(rng: random.Random, problem: Problem, rates: Carelessness = RATES) -> Document:
    plan = choose_steps(rng, problem)
    program, output, closing, _ = _executed(rng, problem, plan, rates)
    observation = f"Problem: {problem.text}\nproblem_solver: {plan_text(problem.start, plan)}"
    return [
        *turn(rng, "code_executor", observation, program),
        {"role": "tool", "content": output},
        {"role": "assistant", "content": closing},
    ]


def concluder_document(rng: random.Random, problem: Problem, rates: Carelessness = RATES) -> Document:
    """The Verifier of the program workflow, which gives the team's answer."""
    plan = choose_steps(rng, problem)
    program, output, closing, value = _executed(rng, problem, plan)
    said = f"{program}\ntool: {output}\ncode_executor: {closing}" if rng.random() < 0.6 else closing
    observation = f"Problem: {problem.text}\nproblem_solver: {plan_text(problem.start, plan)}\ncode_executor: {said}"
    if value is not None and rng.random() < rates.copy_result:
        return turn(rng, "concluder", observation, f"\\boxed{{{value}}}")
    careful = rates.scaled(1 / 3)
    steps = choose_steps(rng, problem, careful)
    return turn(rng, "concluder", observation, answer_text(rng, problem.start, steps, careful)[0])


def team_document(rng: random.Random, problem: Problem, rates: Carelessness = RATES) -> Document:
    """A turn in a chain of other agents: a prompt that asks for a boxed answer gets one, others a plan."""
    *before, speaker = rng.sample(SPEAKERS, rng.randint(1, 4))
    plan = choose_steps(rng, problem)
    said = ""
    for position, name in enumerate(before):
        planned = rng.random() < (0.8 if position == 0 else 0.2)
        text = plan_text(problem.start, plan) if planned else answer_text(rng, problem.start, plan)[0]
        said += f"\n{name}: {text}"
    sentences = [_opening(rng, speaker.title()), *rng.sample(DUTIES, rng.randint(0, 2))]
    own = actor_steps(rng, problem, plan, rates) if before else choose_steps(rng, problem, rates)
    if answers := rng.random() < 0.6:
        sentences.append(rng.choice(FINALS))
    text = answer_text(rng, problem.start, own, rates)[0] if answers else plan_text(problem.start, own)
    return [
        {"role": "system", "content": " ".join(sentences)},
        {"role": "user", "content": f"Problem: {problem.text}{said}"},
        {"role": "assistant", "content": text},
    ]


def drill_document(rng: random.Random, problem: Problem, rates: Carelessness = RATES) -> Document:
    """Plain arithmetic, mostly within the tables of the problems; `problem` and `rates` are not used.

    The user names the tasks, so that everything the assistant writes follows from the prompt.
    """
    tasks: list[tuple[int, Steps]] = []
    while len(tasks) < 6:
        operation = rng.choice("++--*/")
        if operation in "*/":
            left, right = rng.randint(1, 9), rng.randint(2, 9)
            left = left * right if operation == "/" else left
        elif rng.random() < 0.8:
            left, right = rng.randint(0, 30), rng.randint(0, 20)
        else:
            left, right = rng.randint(0, 81), rng.randint(0, 30)
        if apply(operation, left, right) is not None:
            tasks.append((left, ((operation, right),)))
    asked = ", ".join(f"{left} {operation} {right}" for left, ((operation, right),) in tasks)
    return [
        {"role": "user", "content": f"Practice: {asked}"},
        {"role": "assistant", "content": " ".join(step_text(*task) for task in tasks)},
    ]


SHARES: tuple[tuple[Callable[[random.Random, Problem, Carelessness], Document], float], ...] = (
    (reasoner_document, 0.18),
    (actor_document, 0.20),
    (solver_document, 0.10),
    (verifier_document, 0.10),
    (problem_solver_document, 0.06),
    (code_executor_document, 0.08),
    (concluder_document, 0.08),
    (team_document, 0.08),
    (drill_document, 0.12),
)


def document(rng: random.Random, problem: Problem, rates: Carelessness = RATES) -> Document:
    """One document of the corpus about `problem`, in a format drawn by its share."""
    makers, weights = zip(*SHARES, strict=True)
    made: Document = rng.choices(makers, weights)[0](rng, problem, rates)
    return made
