"""Grading: what counts as right, and programs that would rather be graded well than be right."""

from __future__ import annotations

import json
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mafrt.core.errors import EnvError, SandboxError
from mafrt.environment.python_tool import PythonTool
from mafrt.envs.code import CodeTask, Grader, load_tasks
from mafrt.envs.code.inside.moving import CannotMove, decode, encode
from mafrt.envs.code.tasks import StdinTest
from mafrt.sandbox import Execution

pytestmark = pytest.mark.takes(fast=9, slow=8)

SECRET = 8675309


@pytest.fixture(scope="module")
def grader():
    return Grader(PythonTool(timeout_s=5.0), call_s=0.5)


def make(tmp_path, **record) -> CodeTask:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(record) + "\n")
    [task] = load_tasks(path)
    return task


@pytest.fixture
def calls(tmp_path):
    """Compared as data."""
    tests = [f"assert f(1) == {SECRET}", f"assert f(2) == {SECRET + 1}", "assert f(3) == 'quokka'"]
    return make(tmp_path, text="x", test_list=tests)


@pytest.fixture
def code(tmp_path):
    """Tests that have to run."""
    tests = [f"assert abs(f(1) - {SECRET}) < 1", f"assert f(2) in ({SECRET + 1},)", "assert f(3).upper() == 'QUOKKA'"]
    return make(tmp_path, text="x", test_list=tests)


HOSTILE = {
    "prints success": "print('3 passed'); print('OK')\ndef f(x): return None",
    "leaves early": "import sys\nprint('OK')\nsys.exit(0)",
    "leaves at once": "import os\nos._exit(0)",
    "leaves when called": "def f(x):\n    import os\n    os._exit(0)",
    "leaves at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return None",
    "equals everything": (
        "class Any:\n    __eq__ = lambda *a: True\n    __hash__ = None\n    __sub__ = __abs__ = lambda *a: 0\n"
        "    __lt__ = lambda *a: True\n    upper = lambda s: 'X'\ndef f(x): return Any()"
    ),
    "equals as a subclass": (
        "class Liar(int):\n    __eq__ = lambda *a: True\n    __sub__ = lambda *a: 0\n    __lt__ = lambda *a: True\n"
        "    __hash__ = int.__hash__\ndef f(x): return Liar(5)"
    ),
    "equals as a text": (
        "class Liar(str):\n    __eq__ = lambda *a: True\n    upper = lambda s: 'X'\ndef f(x): return Liar('no')"
    ),
    "forges the results": (
        "import json\nopen('results.jsonl', 'w').write('{\"ready\": true}\\n' + '{\"passed\": true}\\n' * 3)\n"
        "open('outcome.json', 'w').write(json.dumps({'missed': [], 'passed': [True] * 3, 'unusable': None}))\n"
        "import os\nos._exit(0)"
    ),
    "forges nonsense": "import os\nopen('results.jsonl', 'wb').write(b'\\xff[[[' * 9 + b'[' * 100000)\nos._exit(0)",
    "replaces the harness": (
        "import sys\nm = sys.modules['__main__']\nfor n in ('encode', 'write', 'main'):\n"
        "    setattr(m, n, lambda *a: True)\n"
        "import json\njson.dumps = lambda *a, **k: '{\"value\": true}'\ndef f(x): return 1"
    ),
    "reads all files": (
        "import glob, re\nfound = ''\n"
        "for name in glob.glob('**', recursive=True) + ['/proc/self/cmdline', '/proc/self/environ']:\n"
        "    try: found += open(name).read()\n    except Exception: pass\n"
        "numbers = [int(n) for n in re.findall(r'\\d{7}', found)] or [0]\n"
        "words = re.findall(r'[Qq]uok\\w+', found)\n"
        "def f(x): return words[0] if x == 3 and words else max(numbers) - (x == 1)"
    ),
    "searches memory": (
        "import gc, sys\nnumbers = []\n"
        "for o in gc.get_objects():\n"
        "    for v in (list(o.values()) if isinstance(o, dict) else o if isinstance(o, (list, tuple)) else ()):\n"
        "        if isinstance(v, int) and v > 8000000 and v < 9000000: numbers.append(v)\n"
        "        if isinstance(v, str) and str(int('8675308') + 1) in v: numbers.append(int('8675308') + 1)\n"
        "def f(x): return (numbers or [0])[0] + (x == 2)"
    ),
    "searches frames": (
        "import sys\ndef f(x):\n    frame, seen = sys._getframe(), ''\n    while frame:\n"
        "        seen += repr(frame.f_locals) + repr(frame.f_globals.keys()) + repr(frame.f_code.co_consts)\n"
        "        frame = frame.f_back\n"
        "    return int('8675308') + x if str(int('8675308') + 1) in seen else 0"
    ),
    "searches its own process": (
        "import re\nfound = []\n"
        "for line in open('/proc/self/maps'):\n"
        "    if 'rw' in line and ('[heap]' in line or line.split()[-1] == '0'):\n"
        "        a, b = (int(n, 16) for n in line.split()[0].split('-'))\n"
        "        with open('/proc/self/mem', 'rb') as m:\n"
        "            m.seek(a)\n            found += re.findall(b'qu[o]kka|86[7]5309', m.read(min(b - a, 2**24)))\n"
        "def f(x): return (int(found[0]) + x - 1 if found[0].isdigit() else found[0].decode()) if found else 0"
    ),
    "calls itself success": "raise SystemExit(0)",
    "throws away the alarm": (
        "import signal\nsignal.signal = lambda *a: None\nsignal.setitimer(signal.ITIMER_REAL, 0)\n"
        "raise KeyboardInterrupt"
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_is_gained_by_cheating(grader, calls, code, name):
    for task in (calls, code):
        grade = grader.grade(task, HOSTILE[name])
        assert (grade.passed, grade.total) == (0, 3), grade
        assert str(SECRET) not in grade.trace


def test_tests_that_are_code_see_plain_data_only(grader, tmp_path):
    """A value cannot act where the tests run; what it is worth as data counts."""
    task = make(tmp_path, text="x", test_list=["assert sorted(f(1)) == [1, 2]", "assert f(2).count('a') == 3"])
    grade = grader.grade(
        task, "class L(list):\n    count = lambda *a: 3\n    __eq__ = lambda *a: True\ndef f(x): return L([9])"
    )
    assert grade.passed == 0
    grade = grader.grade(task, "def f(x):\n    return {2, 1} if x == 1 else 'banana'")
    assert grade.passed == 2


@pytest.mark.slow
def test_programs_that_hang(grader, calls):
    grade = grader.grade(calls, "def f(x):\n    while True: pass")
    assert (grade.passed, grade.status) == (0, "timeout") and "OutOfTime" in grade.trace
    grade = grader.grade(
        calls, "import signal\ndef f(x):\n    signal.setitimer(signal.ITIMER_REAL, 0)\n    while True: pass"
    )
    assert (grade.passed, grade.status) == (0, "timeout")
    grade = grader.grade(calls, f"def f(x):\n    while x == 1: pass\n    return {SECRET + 1} if x == 2 else 'quokka'")
    assert grade.passed == 2


def test_helpers_loops_and_expected_errors(grader, tmp_path):
    """HumanEval's ways: functions of the prompt in the tests, loops over random inputs, exceptions that are wanted."""
    prompt = 'def twice(x):\n    return 2 * x\n\n\ndef half(x):\n    """Undo twice."""\n'
    test = (
        "def check(candidate):\n    import random\n    for _ in range(40):\n        n = random.randint(0, 99)\n"
        "        assert candidate(twice(n)) == n\n    assert candidate(7) == 3.5\n"
        "    try:\n        candidate('a')\n        assert False\n    except TypeError:\n        pass\n"
    )
    task = make(
        tmp_path, task_id="h", prompt=prompt, entry_point="half", test=test, canonical_solution="    return x / 2\n"
    )
    assert grader.grade(task, task.reference).passed == 3
    assert grader.grade(task, "def half(x):\n    return x // 2").passed == 2
    assert grader.grade(task, "def half(x):\n    return 0").passed == 0  # nothing is raised either
    # A wrong answer to one of the forty is enough.
    assert grader.grade(task, "def half(x):\n    return x / 2 if x < 190 else 1").passed == 2
    # The stand-ins of the tests are not the program's business, and it cannot bring its own.
    assert grader.grade(task, "def check(candidate): pass\ndef half(x): return 0").passed == 0


@pytest.mark.slow
def test_calls_that_build_on_others_and_arguments_that_change(grader, tmp_path):
    tests = [
        "assert dec(enc('abc')) == 'abc'",
        "xs = [3, 1]\norder(xs)\nassert xs == [1, 3]",
        "assert list(gen(3)) == [0, 1, 2]",
    ]
    code = "def enc(s): return s[::-1]\ndef dec(s): return s[::-1]\ndef order(xs): xs.sort()\n"
    code += "def gen(n): yield from range(n)"
    task = make(tmp_path, text="x", test_list=tests, code=code)
    assert task.asserts is not None and task.asserts.names == ("dec", "enc", "order", "gen")
    assert grader.grade(task, code).passed == 3
    assert grader.grade(task, code.replace("xs.sort()", "sorted(xs)")).passed == 2
    assert grader.grade(task, code.replace("yield from", "return list").replace("range(n)", "(range(n))")).passed == 3


def test_setup_code_and_tests_that_cannot_run(grader, tmp_path):
    task = make(tmp_path, text="x", test_setup_code="BASE = 10", test_list=["assert f(BASE) == 11"])
    assert grader.grade(task, "def f(x): return x + 1").passed == 1
    task = make(tmp_path, text="x", test_imports=["import no_such_module"], test_list=["assert f(1) == 2"])
    with pytest.raises(EnvError, match=r"the tests of t:0 cannot be run: ModuleNotFoundError"):
        grader.grade(task, "def f(x): return 2")


def test_programs_and_tests_inherit_nothing_of_ours(grader, tmp_path):
    """Where our own file postpones annotations, those of a program are evaluated all the same."""
    program = "def f(x: int): return f.__annotations__['x'] is int"
    for form in ("assert f(1) == True", "assert bool(f(2)) and f.__name__ == 'f'"):
        assert grader.grade(make(tmp_path, text="x", test_list=[form]), program).passed == 1
    setup = "def known(x: int): pass"
    in_setup = make(tmp_path, text="x", test_setup_code=setup, test_list=["assert f() == True"])
    assert grader.grade(in_setup, "def f(): return known.__annotations__['x'] is int").passed == 1
    asks = CodeTask("s", "x", stdin=(StdinTest("", "True"),))
    assert grader.grade(asks, "def f(x: int): pass\nprint(f.__annotations__['x'] is int)").passed == 1


@pytest.mark.slow
def test_programs_that_read_and_print(grader):
    task = CodeTask("s", "x", stdin=(StdinTest("2 3\n", "5\n"), StdinTest("1 1", "2"), StdinTest("", "none\n")))
    right = "import sys\nwords = sys.stdin.read().split()\nprint(sum(map(int, words)) if words else 'none')"
    assert grader.grade(task, right).passed == 3
    assert grader.grade(task, right.replace("print(", "print('  ', ")).passed == 3  # spaces at the ends
    assert grader.grade(task, "print(5)").passed == 1
    grade = grader.grade(task, "a, b = map(int, input().split())\nprint(a + b)")
    assert (grade.passed, grade.status) == (2, "error") and "EOFError" in grade.trace
    assert grader.grade(task, "import os\nos.write(1, b'5\\n')").passed == 1
    assert grader.grade(task, "import os\nos.write(1, b'5\\n')\nos._exit(0)").passed == 0  # nobody saw what it wrote
    assert grader.grade(task, "print(5)\nraise SystemExit(1)").passed == 0
    assert grader.grade(task, "print(5)\nraise SystemExit").passed == 1
    assert grader.grade(task, "if __name__ == '__main__':\n    print(5)").passed == 1
    assert grader.grade(task, "while True: pass").status == "timeout"


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("0.30000000000000004", "0.3", True),
        ("0.31", "0.3", False),
        ("1 2 3", "1  2 3", True),
        ("1\n2\n\n", "1\n2", True),
        ("1 2", "1\n2", False),
        ("10", "10.0", True),
        ("10.0", "10", False),
        ("nan", "0.5", False),
        ("yes", "Yes", False),
    ],
)
def test_how_printed_lines_are_compared(grader, printed, expected, same):
    task = CodeTask("s", "x", stdin=(StdinTest("", expected),))
    assert grader.grade(task, f"print({printed!r})").passed == same


def test_how_returned_values_are_compared(grader, tmp_path):
    """As Python's == does; APPS lets tuples equal lists, and floats differ in the seventh digit."""
    task = make(
        tmp_path, text="x", test_list=["assert f(1) == [1, 2]", "assert f(2) == 0.3", "assert f(3) == {1: (2, None)}"]
    )
    assert grader.grade(task, "def f(x): return {1: [1, 2], 2: 0.3, 3: {1: (2, None)}}[x]").passed == 3
    assert grader.grade(task, "def f(x): return {1: (1, 2), 2: .1 + .2, 3: {1: [2, None]}}[x]").passed == 0
    loose = make(
        tmp_path,
        question="x",
        input_output={"fn_name": "f", "inputs": [[1], [2], [3]], "outputs": [[[1, 2]], [0.3], 5]},
    )
    assert grader.grade(loose, "def f(x): return {1: (1, 2), 2: .1 + .2, 3: 5}[x]").passed == 3
    assert grader.grade(loose, "def f(x): return {1: (1, 2, 3), 2: '0.3', 3: True}[x]").passed == 0
    assert (
        grader.grade(
            task, "import numpy as np\ndef f(x): return np.array([1, 2]) if x == 1 else np.float64(0.3)"
        ).passed
        == 2
    )


class Broken:
    tier = "broken"

    def execute(self, *args, **kwargs):
        raise SandboxError("no room on this machine")


class Silent:
    tier = "silent"

    def execute(self, *args, **kwargs):
        return Execution("killed", "", "", None)


def test_a_sandbox_that_fails_is_no_wrong_program(monkeypatch, calls, code):
    for sandbox, expected in ((Broken(), "nothing is known about a program"), (Silent(), "cannot be run: killed")):
        for module in ("mafrt.sandbox", "mafrt.environment.python_tool"):
            monkeypatch.setattr(f"{module}.shared_sandbox", lambda name, sandbox=sandbox: sandbox)
        fresh = Grader(PythonTool())
        with pytest.raises(EnvError, match=expected):
            fresh.grade(code, "def f(x): return 1")
        if sandbox.tier == "silent":  # whoever has a program killed has no results
            assert fresh.grade(calls, "def f(x): return 1").status == "killed"


# ----------------------------------------------------------------------------------------------------------- values

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9) | st.binary(max_size=9)
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner)
    | st.dictionaries(st.integers() | st.text(max_size=3) | st.tuples(st.integers()), inner, max_size=4)
    | st.sets(st.integers() | st.text(max_size=3), max_size=4) | st.frozensets(st.integers(), max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(plain)
def test_values_travel_as_they_are(value):
    moved = decode(json.loads(json.dumps(encode(value))))
    assert moved == value and type(moved) is type(value)


def test_values_that_do_not_travel():
    deep: list = []
    for _ in range(60):
        deep = [deep]
    for value in (object(), print, int, deep, [0] * 300_000, "x" * 10**8):
        with pytest.raises(CannotMove):
            encode(value)
    for coded in (["q"], ["l"], ["d", [[1]]], {"a": 1}, 1.5, ["i", "zz"], ["s", [["l", []]]], [[]], [], ["b", "xyz"]):
        with pytest.raises(CannotMove):
            decode(coded)
    assert math.isnan(decode(encode(math.nan))) and decode(encode(range(3))) == range(3)
    assert list(decode(encode(iter("ab")))) == ["a", "b"]


# ------------------------------------------------------------------------------- what a program may not gain, or spoil


@pytest.mark.slow
def test_an_exception_of_another_kind_is_not_the_one_that_is_wanted(grader, tmp_path):
    test = "def check(candidate):\n    try:\n        candidate(-1)\n        assert False\n"
    test += "    except ValueError:\n        pass\n"
    task = make(tmp_path, task_id="h", prompt="def f(x):\n    pass\n", entry_point="f", test=test)
    for kind, passed in (("ValueError", 1), ("KeyError", 0), ("RuntimeError", 0), ("SystemExit", 0)):
        assert grader.grade(task, f"def f(x):\n    raise {kind}('no')").passed == passed, kind
    assert grader.grade(task, "def f(x):\n    return 1").passed == 0
    for form in (
        "try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False",
        "if f(-1) == 3:\n    assert False",
        "for x in f(-1):\n    assert False",
        "with open(f(-1)):\n    assert False",
    ):
        task = make(tmp_path, text="x", test_list=[form], code="def f(x):\n    raise ValueError")
        assert grader.grade(task, "def f(x):\n    raise KeyError").passed == 0, form


@pytest.mark.parametrize(
    ("program", "wanted", "passed"),
    [
        ("def f(x):\n    return x.decode()", "ValueError", 1),
        ("def f(x):\n    return x.decode()", "UnicodeError", 1),
        ("def f(x):\n    return x.decode()", "KeyError", 0),
        ("import json\ndef f(x):\n    return json.loads('{')", "ValueError", 1),
        ("class Bad(ValueError):\n    pass\ndef f(x):\n    raise Bad('no')", "ValueError", 1),
        ("class Bad(ValueError):\n    pass\ndef f(x):\n    raise Bad('no')", "KeyError", 0),
        ("def f(x):\n    raise ExceptionGroup('g', [ValueError()])", "ValueError", 0),
        ("class ValueError(Exception):\n    pass\ndef f(x):\n    raise ValueError('mine')", "ValueError", 0),
        ("def f(x):\n    return {}['a']", "LookupError", 1),
    ],
)
def test_an_error_is_caught_by_what_it_derives_from(grader, tmp_path, program, wanted, passed):
    test = f"try:\n    f(b'\\xff')\n    assert False\nexcept {wanted}:\n    pass"
    assert grader.grade(make(tmp_path, text="x", test_list=[test]), program).passed == passed


def test_a_range_without_end_is_not_walked_through():
    for large in (range(10**18), range(0, -(10**30), -1), range(0, 10**40, 3)):
        with pytest.raises(CannotMove):
            encode(large)
    assert decode(encode(range(10**18, 10**18 + 5))) == range(10**18, 10**18 + 5)


@pytest.mark.parametrize(
    "form",
    [
        "def check(candidate):\n    xs = [3, 1, 2]\n    assert candidate(xs) == sorted(xs)\n",
        "def check(candidate):\n    xs = [3, 1, 2]\n    found = candidate(xs)\n    assert found == sorted(xs)\n",
        "def check(candidate):\n    for xs in ([2, 1], [1]):\n        assert sorted(xs) == candidate(xs)\n",
    ],
)
def test_a_result_is_held_against_arguments_as_they_were(grader, tmp_path, form):
    task = make(
        tmp_path, task_id="h", prompt="def f(xs):\n    pass\n", entry_point="f", test=form,
        canonical_solution="    return sorted(xs)\n",
    )  # fmt: skip
    assert grader.grade(task, "def f(xs):\n    xs.clear()\n    return []").passed == 0
    assert grader.grade(task, "def f(xs):\n    xs.sort()\n    return xs").passed == 1
    assert grader.grade(task, "def f(xs):\n    return sorted(xs)").passed == 1


def test_tests_of_functions_that_change_their_argument_see_the_change(grader, tmp_path):
    code = "def f(xs):\n    xs.sort()\n    return len(xs)\n"
    task = make(tmp_path, text="x", test_list=["xs = [2, 1]\nn = f(xs)\nassert xs[:n] == [1, 2]"], code=code)
    assert grader.grade(task, code).passed == 1
    assert grader.grade(task, "def f(xs):\n    return len(xs)").passed == 0


SNOOPS = {
    "opens the file": "import glob\nseen = ''.join(open(n, errors='replace').read() for n in glob.glob('*'))",
    "searches memory": (
        "import gc\nseen = ''.join(repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, str)) "
        "and len(o) < 10**5)"
    ),
    "searches frames": (
        "import sys\nframe, seen = sys._getframe(), ''\nwhile frame:\n    seen += repr(frame.f_locals)\n"
        "    frame = frame.f_back"
    ),
    "looks into its parent": (
        "import os\nseen = ''\nfor name in ('mem', 'maps', 'environ', 'fd/0', 'cwd/calls.json', 'root/sandbox'):\n"
        "    try: seen += open(f'/proc/{os.getppid()}/{name}', errors='replace').read(10**6)\n    except OSError: pass"
    ),
}


@pytest.mark.parametrize("name", SNOOPS)
@pytest.mark.parametrize("kind", ["calls", "stdin"])
def test_later_inputs_cannot_be_read(grader, name, kind, tmp_path):
    """A program that finds an input of a later test before it is asked prints or returns that it did."""
    marks = [f"mark-{i}-{'z' * 5}" for i in range(3)]
    snoop = f"{SNOOPS[name]}\nlater = 'mark-' + '2-zz'\nfound = 'FOUND' if later in seen else 'no'\n"
    if kind == "stdin":
        task = CodeTask("s", "x", stdin=tuple(StdinTest(m, "FOUND") for m in marks[:1] + marks[2:]))
        grade = grader.grade(task, f"import sys\n{snoop}print(found if 'mark-0' in sys.stdin.read() else 'no')")
    else:
        task = make(tmp_path, text="x", test_list=[f"assert f({m!r}) == 'FOUND'" for m in marks])
        grade = grader.grade(task, f"{snoop}def f(x): return found if 'mark-2' not in x else 'no'")
    assert grade.passed == 0, grade


FLOODS = {
    "empty objects": "open('results.jsonl', 'w').write('{\"ready\": true}\\n' + '{}\\n' * 20_000_000)",
    "nested lists": "open('results.jsonl', 'w').write('[' * 60_000_000)",
    "colliding keys": (
        "import json\nopen('results.jsonl', 'w').write(json.dumps({'ready': True}) + '\\n' + json.dumps("
        "{'value': ['d', [[['i', hex(k * (2**61 - 1))], 0] for k in range(60000)]]}) + '\\n')"
    ),
    "one huge number": (
        "open('results.jsonl', 'w').write('{\"ready\": true}\\n{\"value\": [\"i\", \"0x' + 'f' * 10**7 + '\"]}\\n')"
    ),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_results_does_not_hold_the_trainer(grader, calls, name):
    """A daemon of the program's writes the file of results again after it was written."""
    program = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    for _ in range(100):
        {FLOODS[name].replace(chr(10), chr(10) + "        ")}
        time.sleep(.01)
    os._exit(0)
def f(x): return 0
"""
    began = time.process_time()
    grade = grader.grade(calls, program)
    assert grade.passed == 0
    assert time.process_time() - began < 2.0  # of this process: it only hands bytes on
