"""The coach in a run: what is learnt, left out, shown, paused, resumed, and what a judge that is gamed does."""

from __future__ import annotations

import json
import logging
import os
import signal
import string
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers_coach import KEY, Judge, Say, verdict
from helpers_models import tiny_base
from toy import Digits, settings

from mafrt.coach import Case, Coach
from mafrt.coach.own_coach import verdicts_of
from mafrt.config.team import Team
from mafrt.core.errors import BudgetSpentError, CoachDownError, CoachInterruptedError, ConfigError, DataError, EnvError
from mafrt.core.types import Evidence, Scored, StepResult, Unscored
from mafrt.environment.base import Env
from mafrt.environment.session import Session
from mafrt.runners.identity import Provenance
from mafrt.runners.judge import check_rules
from mafrt.runners.offline.replay import read_episodes
from mafrt.runners.on_policy import OnPolicy
from mafrt.scripts import train as train_script
from mafrt.storage.load_path import resolve

pytestmark = pytest.mark.takes(slow=15)


class Judged(Digits):
    """Digits, with a verifier that says of every turn how many digits it has; the outcome is right or wrong."""

    def step(self, actions):
        [(name, text)] = actions.items()
        share = sum(c in string.digits for c in text) / max(len(text), 1)
        result = super().step(actions)
        evidence = Evidence(f"{len(text)} characters", Scored(10 * share, f"{share:.0%} digits"), {"length": len(text)})
        result.info["evidence"] = {name: evidence}
        return result


class Binary(Digits):
    """Right if more than a quarter of what both say is digits, else wrong."""

    def step(self, actions):
        result = super().step(actions)
        if "outcome" in result.info:
            result.info["outcome"] = float(result.info["outcome"] > 0.25)
        return result

    def reset(self, seed=None, options=None):
        observations, info = super().reset(seed, options)
        return observations, {**info, "answer": "digits-are-the-answer"}


class Told(Coach):
    """Does what a function of the case says; remembers what it was asked."""

    name = "told"

    def __init__(self, say) -> None:
        self.say, self.asked = say, []

    def judge(self, cases):
        self.asked.append(list(cases))
        return [self.say(case) for case in cases]


def make(env=None, coach=None, run_dir=None, load=None, **changes) -> OnPolicy:
    torch.set_num_threads(1)
    env = env or Digits()
    named = {"coach": coach} if isinstance(coach, str) else {}
    coach = None if named else coach
    changes = {"eval_episodes": 0, **named, **changes}
    return OnPolicy(
        env,
        Team.of(env.agents),
        tiny_base(),
        settings(**changes),
        run_dir=run_dir,
        provenance=Provenance(resolve(load) if load else None),
        coach=coach,
    )


def lines(run: Path, name: str = "metrics") -> list[dict]:
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]


def weights(runner: OnPolicy) -> list[torch.Tensor]:
    names = runner.team.adapters
    head = getattr(runner.updater.critic, "head", None)
    critic = [] if head is None else list(head.parameters())
    return [p.detach().clone() for n in names for p in runner.base.adapter_parameters(n)] + [
        p.detach().clone() for p in critic
    ]


# ------------------------------------------------------------------------------------------------------------- rules


@pytest.mark.slow
def test_rules_teach_each_agent_its_own_part(tmp_path):
    run = tmp_path / "run"
    make(Judged(), run_dir=run, coach="rules", iterations=14, n_rollout_threads=32, lr=5e-2, outcome_weight=0.0).run()
    found = lines(run)
    for name in ("first", "second"):
        assert (
            found[-1][f"coach_score/{name}"] > found[0][f"coach_score/{name}"] + 0.5
        )  # .66 to 1.5 in two seeds; without learning -.5 to .2
    assert found[0]["coach_unscored_share"] == found[0]["turns_unjudged"] == found[0]["coach_skipped_updates"] == 0
    assert "coach_correlation/first" in found[0] and "seconds_coach" in lines(run, "timings")[0]
    turn = lines(run, "episodes")[0]["turns"][0]
    share = sum(c in string.digits for c in turn["text"]) / max(len(turn["text"]), 1)
    assert turn["coach"]["score"] == pytest.approx(10 * share)
    assert turn["evidence"]["tool_output"] == f"{len(turn['text'])} characters"
    assert turn["evidence"]["rules"] == turn["coach"] and turn["evidence"]["facts"] == {"length": len(turn["text"])}
    assert read_episodes(run, None)
    assert json.loads((run / "coach.json").read_text()) == {"coach": "rules", "counts": {}}


def test_a_record_whose_evidence_is_no_evidence_is_refused(tmp_path):
    run = tmp_path / "run"
    make(Judged(), run_dir=run, coach="rules", iterations=1).run()
    path = run / "episodes.jsonl"
    text = path.read_text().replace('"rules": {"score"', '"rules": {"mark"', 1)
    path.write_text(text)
    with pytest.raises(DataError, match="'evidence' is not as a run writes it"):
        read_episodes(run, None)


def test_an_environment_without_rules_is_refused_before_anything_is_played():
    with pytest.raises(ConfigError, match="Digits gives none"):
        make(coach="rules")
    check_rules(Judged())


class NoJudge(Coach):
    """Lacks what a coach is for."""


@pytest.mark.parametrize(
    ("coach", "said"),
    [
        (NoJudge(), r"the coach .*test_coach_runs.py, line \d+\) lacks judge\(self, cases\)"),
        (NoJudge, "the coach is a type, which is not a mafrt.Coach"),
        (SimpleNamespace(judge=list), "is a SimpleNamespace, which"),
        (len, "is a builtin_function_or_method, which"),
    ],
)
def test_an_object_that_cannot_judge_is_refused_at_the_start(coach, said):
    with pytest.raises(ConfigError, match=said):
        make(Judged(), coach=coach)


def test_the_math_environment_has_rules_for_every_turn():
    from mafrt.envs.math import MathEnv

    env = MathEnv()
    check_rules(env)
    scores = {}
    for answer in ("right", "wrong"):
        observations, info = env.reset(seed=3, options={"task": 0})
        number = info["answer"] if answer == "right" else "-1"
        for text in ("That is hard.", f"So it is \\boxed{{{number}}}"):
            result = env.step({next(iter(observations)): text})
            observations = result.observations
            found = result.info["evidence"].items()
            scores |= {(answer, name): evidence.rules.score for name, evidence in found if evidence.rules}
    assert scores["right", "actor"] > scores["wrong", "actor"]
    assert scores["right", "reasoner"] > scores["wrong", "reasoner"]
    assert env.rubric == "chain"


def test_an_answer_can_be_scored_by_the_plan_that_it_carries_out():
    from mafrt.envs.math import MathEnv, Task

    tasks = [Task("t", "Max has 12 cards. 5 are lost. How many are left?", "7")]
    right, wrong, empty = "Subtract 5 from 12.", "Add 5 to 12.", "Think."

    def score(by: str, plan: str, answer: str) -> float:
        env = MathEnv(tasks=tasks, score_answers_by=by)
        env.reset(seed=1)
        env.step({"reasoner": plan})
        return env.step({"actor": answer}).info["evidence"]["actor"].rules.score

    carried, slip, stated, own = (
        "5+12=17 \\boxed{17}",
        "5+12=18 \\boxed{18}",
        "\\boxed{17}",
        "12-5=7 \\boxed{7}",
    )
    by_result = [score("result", wrong, text) for text in (carried, slip, stated, own)]
    by_plan = [score("plan", wrong, text) for text in (carried, slip, stated, own)]
    assert (by_result, by_plan) == ([2.0, 0.0, 0.0, 10.0], [10.0, 0.0, 0.0, 10.0])
    # The result of a wrong plan is worth nothing where the plan was another, or says nothing.
    assert score("plan", right, carried) == score("plan", empty, carried) == 2.0
    with pytest.raises(ConfigError, match="score_answers_by 'plans'; did you mean 'plan'"):
        MathEnv(tasks=tasks, score_answers_by="plans")
    judges = Team.load(Path(__file__).resolve().parents[2] / "profiles/solver_verifier.json")
    for workflow, team in (
        ("debate", {"team": Team.of(("a", "b"))}),
        ("single", {}),
        ("solver_verifier", {"team": judges}),
    ):
        with pytest.raises(ConfigError, match=f"no agent of workflow '{workflow}' plans for one that answers"):
            MathEnv(tasks=tasks, score_answers_by="plan", workflow=workflow, **team)


# --------------------------------------------------------------------------------------------------------- left out


def test_an_unscored_turn_is_out_of_the_loss_and_nothing_takes_its_place(tmp_path):
    scores = iter([Unscored("no reply")] + [Scored(5.0)] * 10_000)
    runner = make(coach=Told(lambda case: next(scores)), run_dir=tmp_path / "run", iterations=1)
    kept = []
    learn = runner.updater.value
    runner.updater.value = lambda episodes, *rest: (kept.extend(episodes), learn(episodes, *rest))[1]
    runner.run()
    turns = [turn for episode in kept for turn in episode.turns]
    assert turns[0].coach == Unscored("no reply") and turns[0].advantages is None and turns[0].returns is None
    assert all(turn.advantages for turn in turns[1:])
    [found] = lines(tmp_path / "run")
    assert found["turns_unjudged"] == 1 and found["coach_unscored_share"] == 1 / 32
    assert lines(tmp_path / "run", "episodes")[0]["turns"][0]["coach"] == {"unscored": "no reply"}


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_too_many_unscored_turns_skip_the_update_and_are_counted(tmp_path, algorithm, caplog):
    def say(case: Case):
        return Unscored("the judge is ill") if case.agent == "first" else Scored(8.0)

    runner = make(coach=Told(say), run_dir=tmp_path / "run", iterations=2, algorithm=algorithm, n_samples=4)
    before = weights(runner)
    with caplog.at_level(logging.WARNING):
        runner.run()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(runner), strict=True))
    for line in lines(tmp_path / "run"):
        assert line["coach_skipped_updates"] == 1 and line["coach_unscored_share"] == 0.5
    assert "50% of the turns are without a score (the first because the judge is ill)" in caplog.text
    # As many as the user allows are no reason to. A trajectory with an unjudged turn has no known total, so that a rule
    # on trajectories is asked for the turns' own pay.
    own = {"turn_credit": "own"} if algorithm == "grpo" else {}
    runner = make(coach=Told(say), iterations=1, algorithm=algorithm, n_samples=4, coach_max_unscored=0.5, **own)
    before = weights(runner)
    runner.run()
    assert not all(torch.equal(a, b) for a, b in zip(before, weights(runner), strict=True))


@pytest.mark.parametrize("score", [11.0, -1.0, float("nan"), float("inf"), True, None])
def test_ones_own_coach_cannot_give_what_is_no_score(score, tmp_path):
    runner = make(coach=Told(lambda case: Scored(score)), run_dir=tmp_path / "run", iterations=1)
    runner.run()
    [found] = lines(tmp_path / "run")
    assert found["coach_unscored_share"] == 1.0 and found["coach_skipped_updates"] == 1


def test_ones_own_coach_is_told_what_it_does_wrong(tmp_path):
    summary = make(coach=Told(lambda case: {"score": 7.0}), run_dir=tmp_path / "a", iterations=1).run()
    assert "a verdict is Scored" in summary.stopped_by and summary.paused
    short = Told(lambda case: Scored(1.0))
    short.judge = lambda cases: [Scored(1.0)]
    summary = make(coach=short, run_dir=tmp_path / "b", iterations=1).run()
    assert "gave 1 verdicts on 32 cases" in summary.stopped_by


def test_verdicts_decide_which_groups_dynamic_sampling_replaces(tmp_path):
    coach = Told(lambda case: Scored(5.0))
    extra = {"algorithm": "grpo", "n_samples": 4, "dynamic_sampling_rounds": 2, "outcome_weight": 0.0}
    make(coach=coach, run_dir=tmp_path / "flat", iterations=1, **extra).run()
    assert lines(tmp_path / "flat")[0]["groups_replaced"] == 8  # all of 4 groups, twice: all scores are the same
    assert len(coach.asked) == 3
    spread = Told(lambda case: Scored(sum(map(ord, case.said)) % 11))
    make(coach=spread, run_dir=tmp_path / "spread", iterations=1, **extra).run()
    assert lines(tmp_path / "spread")[0]["groups_replaced"] == 0


def test_spans_are_paid_where_they_stand():
    def say(case: Case):
        assert case.spans
        return Scored(10.0, "", ((case.said[0], 10.0),)) if case.said else Unscored("nothing was said")

    runner = make(coach=Told(say), iterations=1, level="token", outcome_weight=0.0, gamma=0.0, gae_lambda=0.0)
    kept = []
    learn = runner.updater.value
    runner.updater.value = lambda episodes, *rest: (kept.extend(episodes), learn(episodes, *rest))[1]
    runner.run()
    turn = next(t for e in kept for t in e.turns if len(t.action_ids) > 2 and t.text)
    assert turn.returns[0] == pytest.approx(1.0) and turn.returns[-1] == pytest.approx(0.0)


# -------------------------------------------------------------------------------------------------------------- pause


class Dies(Told):
    """Judges some batches, then raises."""

    def __init__(self, after: int, error: Exception) -> None:
        super().__init__(lambda case: Scored(float(sum(map(ord, case.said)) % 11)))
        self.left, self.error = after, error

    def judge(self, cases):
        if self.left == 0:
            raise self.error
        self.left -= 1
        return super().judge(cases)


@pytest.fixture(scope="module")
def uncut(tmp_path_factory):
    """A run whose coach never dies."""
    run = tmp_path_factory.mktemp("uncut") / "run"
    make(coach=Dies(99, CoachDownError("never")), run_dir=run, iterations=3).run()
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "paused"),
    [(CoachDownError("it does not accept the key"), True), (BudgetSpentError("$5 are spent"), False)],
)
def test_a_coach_that_cannot_go_on_leaves_a_checkpoint_and_the_run_goes_on_exactly(tmp_path, uncut, error, paused):
    summary = make(coach=Dies(1, error), run_dir=tmp_path / "cut", iterations=3).run()
    assert (summary.iterations, summary.paused, summary.stopped_by) == (1, paused, str(error))
    assert resolve(tmp_path / "cut").step == 1  # save_interval is 2
    again = make(coach=Dies(99, error), run_dir=tmp_path / "cut", load=tmp_path / "cut", iterations=3).run()
    assert again.stopped_by is None and not again.paused
    for name in ("metrics", "episodes"):
        assert lines(tmp_path / "cut", name) == lines(uncut, name)


def test_a_signal_while_the_judge_thinks_stops_the_run_cleanly(tmp_path):
    class Slow(Told):
        def judge(self, cases):
            if len(self.asked) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                assert self.interrupted()
                raise CoachInterruptedError("stop")
            return super().judge(cases)

    summary = make(coach=Slow(lambda case: Scored(5.0)), run_dir=tmp_path / "run", iterations=9).run()
    assert summary.stopped_by == "SIGTERM" and summary.iterations == 2 and not summary.paused
    assert resolve(tmp_path / "run").step == 2


class Counting(Told):
    """Counts calls, as a judge that costs money does."""

    def __init__(self) -> None:
        super().__init__(lambda case: Scored(5.0))
        self.calls = 0.0

    def judge(self, cases):
        self.calls += len(cases)
        return super().judge(cases)

    def counts(self):
        return {"calls": self.calls, "cost": self.calls / 100}

    def restore(self, counts):
        self.calls = counts["calls"]


def test_what_judging_took_is_counted_over_the_whole_run(tmp_path):
    run = tmp_path / "run"
    make(coach=Counting(), run_dir=run, iterations=2).run()
    coach = Counting()
    make(coach=coach, run_dir=run, load=run, iterations=3).run()
    assert coach.calls == 3 * 32
    assert json.loads((run / "coach.json").read_text())["counts"] == {"calls": 96, "cost": 0.96}
    for line in lines(run, "timings"):
        assert line["coach_calls"] == 32 and line["coach_cost"] == pytest.approx(0.32)


# ----------------------------------------------------------------------------------------------------------- feedback


@pytest.mark.slow
@pytest.mark.ci
def test_the_reason_is_shown_to_whoever_acts_next_and_all_episodes_are_judged_at_once(tmp_path):
    coach = Told(lambda case: Scored(4.0, f"reason for {case.agent}") if case.said else Unscored("nothing said"))
    runner = make(Binary(), coach=coach, run_dir=tmp_path / "run", iterations=1, coach_feedback=True)
    kept = []
    learn = runner.updater.value
    runner.updater.value = lambda episodes, *rest: (kept.extend(episodes), learn(episodes, *rest))[1]
    runner.run()
    # All first turns in one call; then all second ones, and the first ones once more that have no score yet.
    during, after = coach.asked
    silent = [case for case in during if not case.said]
    assert len(during) == 16 and {case.agent for case in during} == {"first"}
    assert [case for case in after if case.agent == "first"] == silent and len(after) == 16 + len(silent)
    for episode in kept:
        prompt = runner.base.tokenizer.decode(episode.turns[1].prompt_ids)
        assert ("Coach on first: 4/10. reason for first" in prompt) == bool(episode.turns[0].text)
    # The judge's words are read by agents, so the judge must not know the answer.
    assert all(case.truth is None for asked in coach.asked for case in asked)
    plain = Told(lambda case: Scored(4.0))
    make(Binary(), coach=plain, iterations=1).run()
    assert {case.truth for case in plain.asked[0]} == {"digits-are-the-answer"} and len(plain.asked[0]) == 32


def test_evaluations_are_played_as_the_team_will_be_used(tmp_path):
    coach = Told(lambda case: Scored(4.0))
    extra = {"coach_feedback": True, "eval_episodes": 4, "eval_samples": 1}
    make(coach=coach, run_dir=tmp_path / "run", iterations=1, **extra).run()
    assert sum(len(asked) for asked in coach.asked) == 32


def test_a_note_joins_the_users_words_or_follows_the_tools(tmp_path):
    from mafrt.rollout.prompts import with_note

    user = {"role": "user", "content": "task"}
    assert with_note("task", "note") == "task\n\nnote"
    assert with_note([user], "note") == [{"role": "user", "content": "task\n\nnote"}] and user["content"] == "task"
    tool = {"role": "tool", "content": "7"}
    assert with_note([user, tool], "note") == [user, tool, {"role": "user", "content": "note"}]


# -------------------------------------------------------------------------------------------------------- gamed judge


def flatterer(case: Case) -> Scored:
    """A judge with a fixed wrong bias: the fewer digits, the better."""
    wrong = sum(c not in string.digits for c in case.said) / max(len(case.said), 1)
    return Scored(10 * wrong, "How eloquent.")


@pytest.fixture(scope="module")
def gamed(tmp_path_factory):
    """The same run with the flatterer, with and without the veto."""
    found = {}
    for veto in (False, True):
        run = tmp_path_factory.mktemp("gamed") / "run"
        extra = {"n_rollout_threads": 64, "lr": 3e-2, "process_weight": 3.0, "outcome_to": "all", "iterations": 8}
        make(Binary(), coach=Told(flatterer), run_dir=run, outcome_veto=veto, **extra).run()
        found[veto] = lines(run)
    return found


@pytest.mark.slow
@pytest.mark.ci
def test_a_judge_that_is_gamed_sets_off_the_alarm(gamed):
    assert gamed[False][-1]["coach_alarm"] == 1
    assert gamed[False][0]["coach_correlation/second"] < -0.2
    assert gamed[False][-1]["coach_rejected_score"] > 5


@pytest.mark.slow
@pytest.mark.ci
def test_the_veto_stops_it(gamed):
    def late(veto: bool) -> float:
        return sum(line["score"] for line in gamed[veto][-4:]) / 4

    start = gamed[False][0]["score"]  # .08: a random model says few digits
    assert late(False) < start  # it was paid for against the verifier, and the team followed the money
    assert late(True) > start + 0.1


# --------------------------------------------------------------------------------------- the scripts, and a real SDK


def command(tmp_path: Path, *more: str) -> list[str]:
    (tmp_path / "digits_env.py").write_text(
        "import string\nfrom mafrt import Env, StepResult\n\n\nclass Digits(Env):\n"
        "    agents = ('one',)\n\n"
        "    def reset(self, seed=None, options=None):\n        return {'one': 'Say digits.'}, {}\n\n"
        "    def step(self, actions):\n        said = actions['one']\n"
        "        share = sum(c in string.digits for c in said) / max(len(said), 1)\n"
        "        return StepResult({}, {}, True, False, {'outcome': share})\n"
    )
    small = ["--iterations", "2", "--n_rollout_threads", "4", "--max_new_tokens", "4", "--eval_episodes", "0"]
    return ["--env", "digits_env:Digits", *small, *more]


@pytest.mark.slow
@pytest.mark.ci
def test_the_commands_exit_codes_files_and_words(tmp_path, monkeypatch, capsys):
    pytest.importorskip("openai")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    refusal = Say(status=401, error={"error": {"message": f"Incorrect API key provided: {KEY}"}})
    good = [True]
    # The verdict is the case's own: calls arrive in any order.
    with Judge(lambda seen, _: verdict(zlib.crc32(seen.whole.encode()) % 11) if good[0] else refusal) as judge:
        coach = ["--coach", "openai:judge-1", "--coach_base_url", judge.url(), "--coach_cache", "cache.sqlite"]
        assert train_script.main(command(tmp_path, *coach, "--run_dir", "good")) == 0
        calls = len(judge.seen)
        assert calls == json.loads(Path("good/coach.json").read_text())["counts"]["calls"] > 0
        # A repeat takes every verdict from the cache, and comes out the same.
        assert train_script.main(command(tmp_path, *coach, "--run_dir", "again")) == 0
        assert len(judge.seen) == calls
        assert Path("again/metrics.jsonl").read_bytes() == Path("good/metrics.jsonl").read_bytes()
        # A dead coach: exit code 3, a checkpoint, how to go on, and the key nowhere.
        good[0] = False
        capsys.readouterr()
        assert train_script.main(command(tmp_path, *coach, "--seed", "2", "--run_dir", "dead")) == 3
        said = capsys.readouterr().out
        assert "Turns are judged by: openai:judge-1, rubric general" in said
        assert "Paused after iteration 0: the coach openai:judge-1 refuses: it does not accept the key" in said
        assert "--load_path dead" in said
        good[0] = True
        assert train_script.main(["--config", "dead/args.yaml", "--load_path", "dead"]) == 0
        # The budget: a clean stop.
        limits = [*coach, "--coach_max_calls", "1", "--seed", "3", "--run_dir", "dear"]
        assert train_script.main(command(tmp_path, *limits)) == 0
        said += capsys.readouterr().out
        assert "Stopped after iteration 0: the 1 calls that coach_max_calls allows are made" in said
    for path in Path().rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path
    assert KEY not in said


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--coach", "openai:m"], "OPENAI_API_KEY"),
        (["--coach", "rules"], "Digits gives none"),
        (["--coach", "rulez"], "did you mean 'rules'"),
        (["--coach", "local", "--coach_rubric", "bad.md"], "placeholder"),
    ],
)
def test_what_cannot_judge_is_refused_before_a_model_is_loaded(tmp_path, monkeypatch, capsys, more, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (tmp_path / "bad.md").write_text("{{said}} {{what}}")
    assert train_script.main(command(tmp_path, *more)) == 2
    found = capsys.readouterr()
    assert says in found.err and found.err.count("\n") == 1 and "Loading" not in found.out


def test_the_base_as_judge_that_only_babbles_teaches_nothing(tmp_path):
    """A random model writes no verdict: every turn is unscored, every update skipped, and the run says so."""
    runner = make(run_dir=tmp_path / "run", iterations=1, coach="local", coach_max_tokens=4, n_rollout_threads=2)
    before = weights(runner)
    runner.run()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(runner), strict=True))
    [found] = lines(tmp_path / "run")
    assert found["coach_unscored_share"] == 1 and found["coach_skipped_updates"] == 1


def test_the_environments_contract_knows_evidence():
    class Wrong(Env):
        agents = ("a",)
        evidence: object = None

        def reset(self, seed=None, options=None):
            return {"a": "go"}, {}

        def step(self, actions):
            return StepResult({}, {}, True, False, {"outcome": 1.0, "evidence": self.evidence})

    bad = [
        7,
        {"a": 7},
        {"b": Evidence()},
        {"a": Evidence(tool_output=7)},
        {"a": Evidence(facts=7)},
        {"a": Evidence(rules=Scored(11))},
        {"a": Evidence(rules=Scored(5, "", (("x", float("nan")),)))},
        {"a": Evidence(rules=Unscored("x"))},
    ]
    for found in bad:
        bare = Wrong()
        bare.evidence = found
        env = Session(bare)
        env.reset(seed=0)
        with pytest.raises(EnvError, match=r"evidence|rules|tool_output|facts"):
            env.step({"a": "x"})


def test_a_coach_that_edits_its_cases_edits_no_turn():
    case = Case("a", "said", evidence=Evidence(facts={"files": ["x.csv"]}))

    class Editing(Coach):
        tries = 0

        def judge(self, cases):
            self.tries += 1
            assert all(each.evidence.facts["files"] == ["x.csv"] for each in cases)
            for each in cases:
                each.evidence.facts["files"].clear()
            if self.tries == 1:
                raise ValueError("once")
            return [Scored(5.0) for _ in cases]

    assert verdicts_of(Editing(), [case, case], 10.0) == [Scored(5.0)] * 2
    assert case.evidence.facts == {"files": ["x.csv"]}
