"""Is the answer right? Extraction, the quick path, math-verify in its process, and what hostile answers can do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mafrt.core.errors import EnvError, MissingExtraError
from mafrt.envs.math import extract_answer, verify, verify_many, verify_stats
from mafrt.envs.math.answers import boxed, comparable, plain_number, quick_verdict, tidy
from mafrt.envs.math.notation import latex
from mafrt.envs.math.number_words import in_digits
from mafrt.envs.math.verifier import MAX_ANSWER_CHARS, Verifier

pytestmark = pytest.mark.takes(fast=6, slow=17)


@pytest.fixture
def fresh():
    """A verifier whose worker is still to be started, in what the test makes of the environment."""
    with_own_worker = Verifier()
    yield with_own_worker
    with_own_worker.close()


@pytest.fixture(scope="module")
def worker():
    """One for all verifiers of this file: it takes as long to start as most tests. A test may kill it."""
    with closing(Verifier()) as first:
        yield first.worker


@pytest.fixture
def verifier(worker, monkeypatch):
    """Nothing is counted or remembered yet."""
    found = Verifier()
    for name in ("restarts", "ensure", "read"):
        monkeypatch.setattr(worker, name, getattr(worker, name))  # as they are now, again after the test
    worker.restarts = 0
    found.worker = worker
    return found


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("a \\boxed{5} b \\boxed{\\frac{1}{2}} c", "\\frac{1}{2}"),
        ("\\boxed{\\boxed{5}}", "5"),
        # Cut off at the token limit, or empty: the earlier box was taken back, and is no answer.
        ("\\boxed{5} then \\boxed{6", None),
        ("\\boxed{5} hence \\boxed{\\frac{1}{2}", None),
        ("\\boxed{5}. The answer is \\boxed", None),
        ("\\boxed{5} \\boxed{}", None),
        ("\\boxed{5} \\boxed{6\\}", None),
        ("\\fbox{5} \\fbox{6", None),
        ("\\boxed{5", None),
        ("#### 5\n####", None),
        ("#### 5\n####  \nDone.", None),
        # Without braces, as in MATH: to the end of the formula, or of its part of a sentence.
        ("so $\\boxed 2$.", "2"),
        ("so $\\boxed2$ ways", "2"),
        ("so $\\boxed\\frac12$", "\\frac12"),
        ("so $$\\boxed -3$$", "-3"),
        ("\\[\\boxed 12\\]", "12"),
        ("(\\boxed 12)", "12"),
        ("it is \\boxed 8, since", "8"),
        ("it is \\boxed 8 because", "8"),
        ("it costs \\$5 or \\boxed 8 and", "8"),
        ("\\boxed{7} or \\boxed 8.", "8"),
        ("\\fbox{$2$}", "$2$"),
        ("\\boxed{\\fbox{5}}", "5"),
        ("\\fboxsep=1pt \\boxed{4}", "4"),
        ("\\boxed{8} \\framebox{7}", "7"),
        ("\\framebox[2cm][c]{7}", "7"),
        ("\\boxed{8} \\framebox{7", None),
        ("\\fcolorbox{red}{white}{7}", "7"),
        ("\\Aboxed{x=7}", "x=7"),
        ("\\boxed{7} \\makebox{8} \\mbox{9} \\colorbox{red}{6}", "7"),
        ("\\boxed {x}", "x"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\begin{pmatrix}6\\\\{3}\\end{pmatrix}}", "\\begin{pmatrix}6\\\\{3}\\end{pmatrix}"),
        ("}{ \\boxed{} #### 7", None),  # an empty box is the last word
        ("The total.\n#### 1,234\n", "1,234"),
        ("#### 3 \\boxed{4}", "4"),
        ("#### 3\n#### 4", "4"),
        ("It is 7.", None),
        ("", None),
    ],
)
def test_extraction(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [("3 + 4 = 7.", "7"), ("from 1,234.5 on", "1,234.5"), ("half: 1/2", "1/2"), ("it is -3", "-3"), ("none", None)],
)
def test_the_last_number_only_where_asked_for(text, answer):
    assert extract_answer(text) is None
    assert extract_answer(text, last_number=True) == answer


def test_extraction_takes_one_pass():
    # Looking from every box for its end would take minutes here.
    assert boxed("\\boxed{" * 100_000) == ""
    assert boxed("$\\boxed " + "1 " * 200_000) is not None
    assert boxed("\\boxed{7}" + "{" * 200_000) == "7"


@settings(deadline=None)  # the machine may be busy
@given(st.text(alphabet="ab{}\\ $.,1", max_size=40))
def test_extraction_never_fails(text):
    answer = extract_answer(text, last_number=True)
    if answer is not None:
        tidy(answer)


@settings(deadline=None)  # the machine may be busy
@given(st.integers(-(10**15), 10**15))
def test_integers_however_written(number):
    for form in (f"{number}", f"{number:,}", f"{number}.", f"{number}.0", f"${number}$", f" {number} "):
        assert quick_verdict(tidy(form), str(number)) is True
    assert quick_verdict(str(number + 1), str(number)) is False


@settings(deadline=None)  # the machine may be busy
@given(st.decimals(-1000, 1000, places=4))
def test_decimals_by_value(number):
    assert plain_number(f"{number}") == Fraction(number)
    assert quick_verdict(f"{number}00", f"{number}") is True
    assert quick_verdict(f"{number}", str(number + 1)) is False


def test_what_string_work_cannot_tell_is_left_to_math_verify():
    for given_, reference in [("0.3333333", "0.3333334"), ("x", "5"), ("50\\%", "50"), ("1,2", "12"), ("", "5")]:
        assert quick_verdict(given_, reference) is None
    assert plain_number(".") is None and plain_number("-") is None and plain_number("1,23") is None


def test_plain_numbers_need_no_worker(fresh):
    assert fresh.verify_many([("\\boxed{7}", "7"), ("\\boxed{8}", "7"), ("seven", "7"), ("#### 7.0", "7")]) == [
        True,
        False,
        False,
        True,
    ]
    assert fresh.worker.process is None
    assert fresh.stats.quick == 3 and fresh.stats.no_answer == 1


TABLE = [
    # given, reference, right
    ("\\frac12", "1/2", True),
    ("\\dfrac{3}{4}", "0.75", True),
    ("\\frac{1}{3}", "0.333333", True),
    ("\\frac13", "0.33", False),
    ("3\\frac12", "3.5", True),
    ("20", "20\\text{ days}", True),
    ("20\\text{ days}", "20", True),
    ("7\\text{ cm}^2", "7", True),
    ("\\$18", "18", True),
    ("$18", "18", True),
    ("18\\%", "18", False),
    ("0.18", "18\\%", True),
    ("19\\%", "18", False),
    ("90^{\\circ}", "90", True),
    ("\\begin{pmatrix}6\\\\3\\end{pmatrix}", "\\begin{bmatrix}6\\\\ 3\\end{bmatrix}", True),
    ("\\begin{pmatrix}6\\\\4\\end{pmatrix}", "\\begin{pmatrix}6\\\\3\\end{pmatrix}", False),
    ("\\{1,2\\}", "\\{2,1\\}", True),
    ("\\{1,3\\}", "\\{2,1\\}", False),
    ("1,2", "2,1", True),
    ("(1,2)", "(2,1)", False),
    ("(1,2]", "(1,2)", False),
    ("[1,\\infty)", "[1, \\infty)", True),
    ("\\pm 3", "3,-3", True),
    ("x=5", "5", True),
    ("5", "x=5", True),
    ("y=2x+1", "y=1+2x", True),
    ("3>x", "x<3", True),
    ("x^2+2x+1", "(x+1)^2", True),
    ("x^2+1", "(x+1)^2", False),
    ("\\sqrt{12}", "2\\sqrt{3}", True),
    ("\\frac{\\sqrt2}{2}", "\\frac{1}{\\sqrt2}", True),
    ("2+3i", "3i+2", True),
    ("-\\infty", "\\infty", False),
    ("12{,}345", "12345", True),
    ("1\\,234", "1234", True),
    ("−3", "-3", True),
    ("\\text{East}", "\\text{east}", True),
    ("east", "\\text{east}", True),
    ("\\textbf{(A)}", "\\text{(A)}", True),
    ("A", "\\text{(A)}", True),
    ("(B)", "\\text{(A)}", False),
    ("nylevE", "\\text{Evelyn}", False),
    ("\\text{no solution}", "\\text{No solution}", True),
    ("\\frac{1}{0}", "5", False),
    ("\\frac{", "5", False),
    ("7", "\\boxed{7}", True),
    ("7", "$7$", True),
]


@pytest.mark.slow
def test_a_table_of_answers():
    verdicts = verify_many([(f"So the answer is $\\boxed{{{given_}}}$.", reference) for given_, reference, _ in TABLE])
    wrong = [(row, verdict) for row, verdict in zip(TABLE, verdicts, strict=True) if verdict is not row[2]]
    assert wrong == []
    assert verify("so \\boxed{\\frac12}", "0.5") is True


def test_numbers_in_words_are_read_where_they_have_one_meaning():
    for text, digits in (
        ("nine hundred and ninety-nine thousand, five", "nine hundred and ninety-nine thousand, five"),
        ("one hundred and five thousand three hundred", "105300"),
        ("forty-five hundredths", "\\frac{9}{20}"),
        ("two and a half million", "2500000"),
        ("half a dozen", "6"),
        ("Twelve Per Cent", "12\\%"),
        ("\\text{six apples}", "6 apples"),
        ("two hundred and five thousandths", "two hundred and five thousandths"),
        ("twenty fifth", "twenty fifth"),
        ("one of five", "one of five"),
        ("ten to one", "ten to one"),
        ("no", "no"),
        ("a", "a"),
        ("half-life", "half-life"),
        ("seven seven", "seven seven"),
    ):
        assert in_digits(text) == digits


GRADED = Path(__file__).parents[1] / "data" / "graded_answers.jsonl"


@pytest.mark.slow
def test_answers_of_public_threads_and_their_kin():
    """Pairs that graders got wrong, right and wrong ones, and others of their kinds; judged as one batch."""
    rows = [json.loads(line) for line in GRADED.read_text(encoding="utf-8").splitlines()]
    assert len(rows) >= 400 and 150 <= sum(row["right"] for row in rows) <= len(rows) - 150
    verdicts = verify_many([(f"So it is $\\boxed{{{row['given']}}}$.", row["reference"]) for row in rows])
    assert [row for row, verdict in zip(rows, verdicts, strict=True) if verdict is not row["right"]] == []


@pytest.mark.parametrize(
    ("problem", "given_", "right"),
    [
        ("What percent of 40 is 10?", "25\\%", True),
        ("What percent of 40 is 10?", "$25\\%$", True),
        ("By what percentage did it fall?", "25%", True),
        ("Express it as a percentage.", "25\\%", True),
        ("Round to the nearest whole percent.", "25\\%", True),
        ("What percent of 40 is 10?", "26\\%", False),
        ("What percent of 40 is 10?", "0.25", False),
        ("20 percent of what number is 5?", "25\\%", False),
        ("If 30% are red, how many are blue?", "25\\%", False),
        ("", "25\\%", False),
    ],
)
def test_a_percentage_meets_a_plain_number_only_where_the_problem_asks_for_one(problem, given_, right):
    from mafrt.envs.math.env import MathEnv
    from mafrt.envs.math.tasks import Task

    assert verify(f"\\boxed{{{given_}}}", "25", problem=problem) is right
    if problem:
        env = MathEnv(tasks=[Task(id="a", problem=problem, answer="25")])
        env.choose(0)
        assert env.grade([f"\\boxed{{{given_}}}"]) == [float(right)]


def test_an_answer_that_is_nothing_meets_nothing(verifier):
    pairs = [("\\boxed{$$}", "$$"), ("\\boxed{.}", "."), ("\\boxed{ }", ""), ("####", "")]
    assert verifier.verify_many(pairs) == [False] * len(pairs)
    assert verifier.stats.no_answer == len(pairs)


def test_a_math_verify_that_cannot_be_wrapped_is_an_error(tmp_path, fresh, monkeypatch):
    """Its comparison of numbers is replaced; a version without it would pay all small numbers."""
    package = tmp_path / "math_verify"
    package.mkdir()
    (package / "__init__.py").write_text("LatexExtractionConfig = parse = verify = None\n")
    (package / "grader.py").write_text("")
    (package / "errors.py").write_text("class TimeoutException(Exception): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingExtraError, match="sympy_numeric_eq"):
        fresh.verify_many([("\\boxed{x}", "y+1")])


def test_verdicts_are_remembered(verifier):
    for _ in range(3):
        assert verifier.verify_many([("\\boxed{\\frac{2}{4}}", "1/2")] * 2) == [True, True]
    assert (verifier.stats.parsed, verifier.stats.cached) == (1, 5)
    small = Verifier(cache_size=2)
    small._ask = lambda given_, reference: False  # type: ignore[method-assign]
    small.verify_many([(f"\\boxed{{x^{n}}}", "y") for n in range(5)])
    assert len(small._cache) == 2


HOSTILE = [
    "__import__('os').system('touch {mark}')",
    "\\text{{__import__('os').system('touch {mark}')}}",
    "\\mathrm{{exec(\"open('{mark}','w')\")}}",
    "1 + __import__('subprocess').call(['touch','{mark}'])",
    "().__class__.__base__.__subclasses__()",
    "\\operatorname{{eval}}(open('{mark}','w'))",
    'f\'{{open("{mark}","w")}}\'',
    "$__import__('os').system('touch {mark}')$",
]


def test_nothing_in_an_answer_is_executed(tmp_path, verifier):
    mark = tmp_path / "executed"
    for pattern in HOSTILE:
        code = pattern.format(mark=mark)
        # As the answer, and as the reference: a data file may be hostile too.
        assert (
            verifier.verify_many([(f"\\boxed{{{code}}}", "5"), ("\\boxed{x+1}", code), (f"#### {code}", "x")])
            == [False] * 3
        )
    assert not mark.exists()
    assert verifier.verify_many([("\\boxed{\\frac{1}{2}}", "0.5")]) == [True]


def test_the_worker_refuses_what_maths_does_not_need(tmp_path):
    """Behind the parser: the audit hook, tried directly."""
    mark = tmp_path / "executed"
    program = f"""
import os, subprocess, socket, sys
from mafrt.core.bounded_worker import refuse
sys.addaudithook(refuse)
tries = [
    lambda: os.system("touch {mark}"),
    lambda: subprocess.run(["touch", "{mark}"]),
    lambda: open("{mark}", "w"),
    lambda: open("{mark}", "ab"),
    lambda: os.open("{mark}", os.O_CREAT | os.O_WRONLY),
    lambda: socket.socket(),
    lambda: os.fork(),
    lambda: os.kill(os.getppid(), 0),
    lambda: os.execv("/bin/true", ["true"]),
]
refused = 0
for attempt in tries:
    try:
        attempt()
    except PermissionError:
        refused += 1
open("/dev/null").close()  # reading stays possible: sympy imports parts of itself when needed
sys.exit(0 if refused == len(tries) else f"only {{refused}} of {{len(tries)}} refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not mark.exists()


def test_the_worker_has_no_keys_and_limits(fresh, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    fresh.verify_many([("\\boxed{x}", "y")])
    pid = fresh.worker.process.pid
    assert b"sk-secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    limits = {line[:25].strip(): line[26:].split()[0] for line in lines}
    assert int(limits["Max address space"]) == 2048 * 2**20
    assert int(limits["Max file size"]) == 0 and int(limits["Max core file size"]) == 0
    assert int(limits["Max cpu time"]) < 600


def test_a_long_answer_is_not_parsed(fresh):
    assert fresh.verify_many([(f"\\boxed{{{'x' * (MAX_ANSWER_CHARS + 1)}}}", "x")]) == [False]
    assert fresh.stats.too_long == 1 and fresh.worker.process is None


LONG = (
    "1,",
    "{",
    "1_2",
    "(0,1]",
    "~",
    "x=",
    "\\text{a}",
    "9",
    "x<",
    "\\frac1",
    "a and ",
    "1 base 2 ",
    "\\{",
    "5\\%,",
    "one-",
    "(A) ",
    "1^{",
    "\\ne ",
)


@pytest.mark.parametrize("piece", LONG)
def test_a_long_reference_costs_nothing(fresh, piece):
    reference = piece * (200_000 // len(piece))
    started = time.process_time()
    texts = ("\\boxed{3}", "\\boxed{1_2}", "\\boxed{(0,1]}", f"\\boxed{{{piece * 20}}}")
    pairs = [(text, form) for text in texts for form in (reference, f"\\boxed{{{reference}}}")]
    assert not any(fresh.verify_many(pairs))
    assert time.process_time() - started < 2


@pytest.mark.parametrize("blank", ["~", "\u202f", "~ ", "✓ ", "\\checkmark ", " "])
@pytest.mark.parametrize("reference", ["(1, 2]", "\\{1, 2\\}", "x = 3", "50\\%"])
def test_blanks_of_every_kind_cost_nothing(blank, reference):
    answer = blank * (MAX_ANSWER_CHARS // len(blank))
    started = time.process_time()
    for side in (answer, f"x < 1{answer}", f"{answer}1 < x < 2"):
        plain = latex(side)
        assert "  " not in plain and not quick_verdict(plain, reference)
        comparable(plain, reference)
    assert time.process_time() - started < 1


@pytest.mark.slow
@pytest.mark.ci
def test_expensive_answers_time_out_are_counted_and_do_no_harm(verifier):
    assert verifier.verify_many([("\\boxed{9^{9^{9^{9}}}}", "x+1"), ("\\boxed{\\frac12}", "0.5")]) == [False, True]
    assert verifier.stats.timeouts == 1 and verifier.stats.restarts == 0


@pytest.mark.slow
def test_a_busy_machine_makes_no_right_answer_wrong(verifier):
    """Time is the worker's processor time: stopped for longer than it is allowed, it still gets to its verdict."""
    verifier.verify_many([("\\boxed{x}", "y+1")])
    pid = verifier.worker.process.pid
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(3.0, os.kill, (pid, signal.SIGCONT)).start()
    assert verifier.verify_many([("\\boxed{\\sqrt{12}}", "2\\sqrt{3}")]) == [True]
    assert verifier.stats.timeouts == 0 and verifier.worker.process.pid == pid


def test_a_computation_that_holds_the_signal_up_ends_by_the_limit(verifier):
    verifier.verify_many([("\\boxed{x}", "y+1")])
    # As the kernel does it: the answer gets no second worker.
    threading.Timer(0.3, os.kill, (verifier.worker.process.pid, signal.SIGXCPU)).start()
    assert verifier.verify_many([("\\boxed{9^{9^{9^{9}}}}", "x+3")]) == [False]
    assert (verifier.stats.timeouts, verifier.stats.crashes, verifier.stats.restarts) == (1, 0, 1)


@pytest.mark.slow
def test_a_question_that_was_broken_off_does_not_shift_the_replies(verifier, monkeypatch):
    verifier.verify_many([("\\boxed{x}", "y+1")])
    read = verifier.worker.read

    def interrupted(deadline_s):
        raise KeyboardInterrupt

    monkeypatch.setattr(verifier.worker, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        verifier.verify_many([("\\boxed{\\frac12}", "0.5")])
    monkeypatch.setattr(verifier.worker, "read", read)
    assert verifier.verify_many([("\\boxed{\\frac12}", "0.7"), ("\\boxed{\\frac12}", "0.5")]) == [False, True]


@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced(verifier):
    verifier.verify_many([("\\boxed{x}", "y+1")])
    verifier.deadline_s = 0.3
    os.kill(verifier.worker.process.pid, signal.SIGSTOP)  # as in a computation that no signal interrupts
    assert verifier.verify_many([("\\boxed{x}", "y+2")]) == [False]
    assert (verifier.stats.timeouts, verifier.stats.restarts) == (1, 1)
    verifier.deadline_s = 60.0
    assert verifier.verify_many([("\\boxed{\\sqrt{12}}", "2\\sqrt{3}")]) == [True]


def test_a_worker_that_was_killed_is_replaced_and_the_answer_not_blamed(verifier):
    verifier.verify_many([("\\boxed{x}", "y+1")])
    os.kill(verifier.worker.process.pid, signal.SIGKILL)
    assert verifier.verify_many([("\\boxed{\\frac12}", "0.5")]) == [True]
    assert (verifier.stats.restarts, verifier.stats.crashes) == (1, 0)


@pytest.mark.slow
@pytest.mark.ci
def test_a_worker_killed_in_the_middle_of_an_answer(verifier):
    verifier.verify_many([("\\boxed{x}", "y+1")])
    pid = verifier.worker.process.pid
    killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    killer.start()
    # Takes math-verify two seconds; asked a second time of a second worker, it is still not right.
    assert verifier.verify_many([("\\boxed{9^{9^{9^{9}}}}", "x+2"), ("\\boxed{\\frac12}", "0.5")]) == [False, True]
    assert verifier.stats.restarts == 1 and verifier.stats.crashes == 0
    assert verifier.worker.process.pid != pid


@pytest.mark.slow
def test_an_answer_that_kills_every_worker_is_counted(verifier):
    ask, ensure = verifier.worker.read, verifier.worker.ensure

    def held():
        ensure()
        os.kill(verifier.worker.process.pid, signal.SIGSTOP)  # or it may have answered before it dies

    def deadly(deadline_s):
        if deadline_s == verifier.deadline_s:
            verifier.worker.process.kill()
        return ask(deadline_s)

    verifier.worker.ensure, verifier.worker.read = held, deadly
    assert verifier.verify_many([("\\boxed{x}", "y+1")]) == [False]
    assert (verifier.stats.crashes, verifier.stats.restarts) == (1, 2)


def test_a_worker_that_cannot_start_is_an_error_and_no_verdict(fresh, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EnvError, match="did not come up"):
        fresh.verify_many([("\\boxed{x}", "y+1")])
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(EnvError, match="cannot be started"):
        fresh.verify_many([("\\boxed{x}", "y+1")])


@pytest.mark.slow
def test_threads_share_one_worker(verifier):
    rows = [(f"\\boxed{{\\frac{{{n}}}{{2}}}}", f"{n / 2}") for n in range(1, 30, 2)]
    results: dict[int, list[bool]] = {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: verifier.verify_many(rows)})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [True] * len(rows) for i in range(4)}
    assert verifier.stats.restarts == 0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_gets_its_own_worker(verifier):
    verifier.verify_many([("\\boxed{x}", "y+1")])
    child = os.fork()
    if child == 0:
        right = verifier.verify_many([("\\boxed{\\frac{3}{2}}", "1.5")]) == [True]
        verifier.close()
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert verifier.verify_many([("\\boxed{\\frac{5}{2}}", "2.5")]) == [True]
    assert verifier.stats.restarts == 0


@pytest.mark.slow
@pytest.mark.ci
def test_the_worker_ends_with_the_program_however_it_ends():
    program = (
        "import os, sys, time; from mafrt.envs.math import verify; from mafrt.envs.math import verifier as v\n"
        "verify('\\\\boxed{x}', 'y+1'); print(v._SHARED.worker.process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9) if sys.argv[1] == 'killed' else None"
    )
    for how in ("leaves", "killed"):
        done = subprocess.run([sys.executable, "-c", program, how], capture_output=True, text=True)
        pid = int(done.stdout)
        for _ in range(100):
            stat = Path(f"/proc/{pid}/stat")
            if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"the worker outlived a program that {how}")


def test_the_shared_verifier_counts():
    before = verify_stats()
    verify("\\boxed{7}", "7")
    after = verify_stats()
    assert after["asked"] == before["asked"] + 1 and after["quick"] == before["quick"] + 1


@pytest.mark.parametrize(
    ("given", "reference", "same"),
    [
        ("3=4", "4", False),
        ("0=4", "4", False),
        ("3 = 4 = 4", "4", False),
        ("3==4", "4", False),
        ("2+1=4", "4", False),
        ("3 \\equiv 4", "4", False),
        ("3 \\to 4", "4", False),
        ("3 := 4", "4", False),
        ("x=4", "4", True),
        ("x_1 = 4", "4", True),
        ("f(2) = 4", "4", True),
        ("\\frac{8}{2} = 4", "4", True),
        ("a=b=4", "4", False),
        ("4", "x=4", True),
        ("y=2x+1", "y=1+2x", True),
        ("3\\%", "3", False),
        ("3%", "3", False),
        ("3 \\text{ percent}", "3", False),
        ("50\\%", "0.5", True),
        ("50\\%", "\\frac{1}{2}", True),
        ("50\\%", "50\\%", True),
        ("50", "50\\%", True),
        ("\\{1,2\\}", "(1,2)", False),
        ("(1,2)", "\\{1,2\\}", False),
        ("\\left\\{1,2\\right\\}", "(1,2)", False),
        ("\\{2,1\\}", "\\{1,2\\}", True),
        ("(2,1)", "(1,2)", False),
        ("1,2", "2,1,1", False),
        ("1,2,1", "1,2", False),
        ("1,1,2", "1,2", False),
        ("2,1", "1,2", True),
        ("\\{1,2,2\\}", "\\{1,2\\}", True),
        ("(1,2)", "(1,2,2)", False),
        ("1000", "1,000", True),
        ("(1,2]", "(1,2]", True),
        ("\\frac{1}{2}, 3", "3, 0.5", True),
        ("x \\in \\{1,2\\}", "\\{1,2\\}", True),
        # Exact numbers that agree in more digits than are compared at first.
        ("\\sqrt{10^{40}+1}", "10^{20}", False),
        ("10^{20}", "\\sqrt{10^{40}+1}", False),
        ("\\sqrt[3]{10^{60}+1}", "10^{20}", False),
        ("\\sqrt{\\sqrt{10^{80}+1}}", "10^{20}", False),
        ("\\sqrt{10^{400}+1}", "10^{200}", False),
        ("\\sqrt{2}+10^{-45}", "\\sqrt{2}", False),
        ("1-e^{-400}", "1", False),
        ("\\cos(10^{-30})", "1", False),
        ("\\ln(10^{50}+1)", "50\\ln 10", False),
        ("2^{100}+\\sqrt{2^{200}+1}", "2^{101}", False),
        ("(10^{41}+1)x", "10^{41}x", False),
        ("\\{\\sqrt{10^{40}+1}, 2\\}", "\\{10^{20}, 2\\}", False),
        ("\\sqrt{10^{40}}", "10^{20}", True),
        ("\\sqrt{3+2\\sqrt{2}}", "1+\\sqrt{2}", True),
        ("\\cos\\frac{\\pi}{5}", "\\frac{1+\\sqrt{5}}{4}", True),
        ("\\ln 8", "3\\ln 2", True),
        ("\\sqrt{2}x", "\\frac{2x}{\\sqrt2}", True),
    ],
)
def test_what_math_verify_lets_pass(given, reference, same):
    assert verify(f"\\boxed{{{given}}}", reference) is same


def test_numbers_of_any_length_cost_points_and_no_episode():
    from mafrt.envs.math import process_rewards

    huge = "9" * 5000
    commas = ",".join(["999"] * 2000)
    chain = "Multiply 999999999999 by 999999999999" + ", then multiply by 999999999999" * 500 + "."

    def right(text):
        return verify(text, "7")

    for text in (
        f"\\boxed{{{huge}}}",
        f"= {huge}",
        chain,
        f"\\boxed{{{commas}}}",
        f"3 + 4 = {huge}",
        f"{huge} + 1 = 8",
    ):
        rules = process_rewards.MathRules(right)
        for found in (rules.plan(text), rules.answer(text), rules.report(text, text)):
            assert found is None or found.score < 7, (text[:40], found)
        assert verify(text, "7") is False


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("12 - 5 = 7. \\boxed{7}", 10),
        ("7 * 1 = 7. \\boxed{7}", 5),
        ("1 * 7 = 7. \\boxed{7}", 5),
        ("7 + 0 = 7. \\boxed{7}", 5),
        ("7 / 1 = 7. \\boxed{7}", 5),
        ("8 - 1 = 7. \\boxed{7}", 5),
        ("3 + 4 = 7. 7 * 1 = 7. \\boxed{7}", 5),
        ("= 1 = 2 = 3 = 4 = 5 = 6 = 7 \\boxed{7}", 5),
        ("2 * 12 = 24. 24 - 17 = 7. \\boxed{7}", 10),
    ],
)
def test_work_starts_from_the_problem_and_changes_something(text, score):
    from mafrt.envs.math import process_rewards

    problem = "Mia has 12 pens and gives 5 away. How many are left?"
    assert process_rewards.MathRules(lambda t: verify(t, "7"), problem).answer(text).score == score


def test_a_list_of_guesses_is_no_plan():
    from mafrt.envs.math import process_rewards

    def right(text):
        return verify(text, "7")

    assert process_rewards.MathRules(right).plan("= 1 = 2 = 3 = 4 = 5 = 6 = 7").score == 1
    assert process_rewards.MathRules(right).plan("12 - 5 = 7").score == 10
