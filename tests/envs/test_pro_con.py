"""The workflow `pro_con`: sides, seats, verdicts, payments, measures, and evidence that has to be true."""

from __future__ import annotations

import pytest

from mafrt.config.agent import AgentSpec
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.environment.session import Session
from mafrt.envs.math import MathEnv, Task
from mafrt.envs.math.tasks import load_tasks
from mafrt.envs.workflows.pro_con import points_of

CLAIM = Task("c", "12 + 7 = 20.", "CON")
QUESTION = Task("q", "What is 12 + 7?", "19")


def env_of(task, names="abj", jury="j", **options):
    team = Team(tuple(AgentSpec(name, with_answer=name in jury) for name in names))
    return Session(MathEnv(tasks=[task], team=team, workflow="pro_con", **options))


def play(env, says):
    """All observations in order, and the last step. `says(agent, observation)` is the agent's text."""
    seen, (observations, _) = [], env.reset(seed=1, options={"task": 0})
    while observations:
        seen += observations.items()
        result = env.step({name: says(name, str(text)) for name, text in observations.items()})
        observations = result.observations
    assert result.terminated
    return seen, result


def test_the_sides_speak_in_turn_and_the_jury_reads_sides_and_no_names():
    env = env_of(CLAIM, sides="fixed", horizon=2)
    seen, result = play(env, lambda name, text: f"so says {name} \\boxed{{CON}}" if name == "j" else "12 + 7 = 19")
    assert [name for name, _ in seen] == ["a", "b", "a", "b", "j"] and env.max_steps == 5
    assert seen[0][1] == "Problem: 12 + 7 = 20.\nYou argue PRO."
    assert seen[1][1] == "Problem: 12 + 7 = 20.\nYou argue CON.\nPRO: 12 + 7 = 19"
    assert seen[4][1].splitlines() == ["Problem: 12 + 7 = 20.", *["PRO: 12 + 7 = 19", "CON: 12 + 7 = 19"] * 2]
    assert result.rewards == {"a": 0.0, "b": 1.0} and result.info["outcome"] == 1.0
    assert result.info["measures"]["pro_won"] == 0.0 and result.info["measures"]["first_won"] == 0.0


def test_swapped_sides_and_sides_by_task():
    verdict = lambda name, text: "\\boxed{CON}" if name == "j" else "well"  # noqa: E731
    seen, result = play(env_of(CLAIM, sides="swapped"), verdict)
    assert [name for name, _ in seen] == ["b", "a", "j"] and result.rewards == {"a": 1.0, "b": 0.0}
    assert result.info["measures"]["first_won"] == 1.0
    first = set()
    for number in range(12):
        seen, _ = play(env_of(Task("x", f"{number} + 1 = {number}.", "CON")), verdict)
        assert seen == play(env_of(Task("x", f"{number} + 1 = {number}.", "CON")), verdict)[0]
        first.add(seen[0][0])
    assert first == {"a", "b"}


@pytest.mark.slow
def test_four_debaters_and_three_jurors_whose_majority_decides():
    env = env_of(CLAIM, "abcdxyz", "xyz", sides="fixed")
    votes = {"x": "\\boxed{PRO}", "y": "I see. \\boxed{ \\text{con} }", "z": "\\boxed{CON}"}
    seen, result = play(env, lambda name, text: votes.get(name, "hm"))
    assert [name for name, _ in seen] == list("abcdxyz")
    assert result.rewards == {"a": 0.0, "b": 1.0, "c": 0.0, "d": 1.0} and result.info["correct"].keys() == {"y"}


@pytest.mark.parametrize(
    ("jury", "rewards", "outcome"),
    [("\\boxed{19}", {"a": 0.0, "b": 1.0}, 1.0), ("\\boxed{18}", {"a": 1.0, "b": 0.0}, 0.0), ("?", None, 0.0)],
)
def test_of_a_question_the_side_wins_whose_answer_the_jury_gives(jury, rewards, outcome):
    says = {"a": "\\boxed{18}", "b": "12 + 7 = 19, \\boxed{19}", "j": jury}
    _, result = play(env_of(QUESTION, sides="fixed"), lambda name, text: says[name])
    assert result.rewards == (rewards or {"a": 0.5, "b": 0.5}) and result.info["outcome"] == outcome
    assert result.info["measures"]["decided"] == float(rewards is not None)
    says |= {"a": "\\boxed{19}"}
    _, result = play(env_of(QUESTION, sides="fixed"), lambda name, text: says[name])
    assert result.rewards == {"a": 0.5, "b": 0.5}, "both sides have the answer that the jury gives"


def test_rules_pay_evidence_and_a_turn_that_takes_the_other_side_has_none():
    says = {"a": "12 + 7 = 19", "b": "No."}
    env = env_of(CLAIM, "ab", "b", sides="fixed")
    _, result = play(env, lambda name, text: says[name])
    assert "outcome" not in result.info and result.rewards == {"a": 1.0, "b": 0.0}
    measures = result.info["measures"]
    assert measures["evidence"] == pytest.approx(1 / 6) and measures["consistent"] == 1.0
    says["a"] += " so \\boxed{CON}"
    _, result = play(env, lambda name, text: says[name])
    assert result.rewards == {"a": 0.5, "b": 0.5} and result.info["measures"]["consistent"] == 0.5


def test_a_coach_alone_pays_nothing_by_itself():
    _, result = play(env_of(CLAIM, verdict="coach"), lambda name, text: "\\boxed{PRO}")
    assert result.rewards == {} and "outcome" not in result.info and "pro_won" not in result.info["measures"]


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("", 0),
        ("It is obviously right, because I say so.", 0),
        ("12 + 7 = 20. The claim says 12 + 7 = 20.", 0),
        ("12 + 7 = 19.", 1),
        ("12 + 7 = 19. 12 + 7 = 19. 12 + 7 = 19.", 1),
        ("12 + 7 = 19, and 20 - 7 = 13, and 20 - 12 = 8, and 19 + 1 = 20", 3),
        ("12 * 1 = 12, 7 + 0 = 7", 0),
        ("3 + 4 = 7", 0),
        ("5 + 6 = 11", 0),
        ("12 + 7 = 19. 12 + 8 = 21", 0),
        ('It "was brought by Bo" on Monday.', 1),
        ('It says "Ann has twelve cups" there.', 0),
        ('"twelve cups" are too short a quotation', 0),
        ('12 + 7 = 19 and "Ann sold all of it"', 0),
    ],
)
def test_evidence_is_found_and_inventions_cost(text, points):
    problem = "12 + 7 = 20. The cake was brought by Bo and the plates by Ann on the same day of the week"
    assert points_of(text, problem) == pytest.approx(points / 3)
    assert points_of(f'"{problem}"', problem) == 0.0, "a copy of the problem is no evidence"


def test_the_rules_of_the_coach_score_evidence():
    env = env_of(CLAIM, sides="fixed")
    env.reset(seed=1)
    scored = env.step({"a": "12 + 7 = 19"}).info["evidence"]["a"].rules
    assert scored.score == pytest.approx(10 / 3) and "1 of 3" in scored.reason


@pytest.mark.parametrize(
    ("names", "jury", "options", "words"),
    [
        ("a", "a", {}, "needs two debaters, found a"),
        ("ab", "b", {"verdict": "jury"}, "two debaters and a jury, found a, b"),
        ("abj", "j", {"verdict": "jurry"}, "no verdict 'jurry'.*jury"),
        ("abj", "j", {"sides": "swap"}, "no setting of sides 'swap'.*swapped"),
        ("abj", "j", {"judge": True}, "'pro_con' has no setting judge"),
    ],
)
def test_what_does_not_fit_is_refused(names, jury, options, words):
    with pytest.raises(ConfigError, match=words) as caught:
        env_of(CLAIM, names, jury, **options)
    assert "\n" not in str(caught.value)


def test_claims_are_drawn_and_the_shipped_profile_debates_them():
    claims = load_tasks("arithmetic:train:claims=1:count=200")
    assert {task.answer for task in claims} == {"PRO", "CON"}
    assert 70 < sum(task.answer == "PRO" for task in claims) < 130
    for task in claims:
        left, right = task.problem.rstrip(".").split(" = ")
        a, sign, b = left.split()
        value = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) / int(b)}[sign]
        assert (value == int(right)) == (task.answer == "PRO")
    plain = load_tasks("arithmetic:train:count=200")
    assert [t.problem.split("?")[0].split("is ")[1] for t in plain] == [t.problem.split(" = ")[0] for t in claims]
    env = Session(MathEnv(tasks=claims[:1], team=Team.load("profiles/pro_con.json"), workflow="pro_con"))
    _, result = play(env, lambda name, text: f"\\boxed{{{claims[0].answer}}}")
    assert result.info["outcome"] == 1.0
