"""Whatever a program leaves behind, its agent goes on or has made an error; the sandbox is never blamed."""

from __future__ import annotations

import json

import pytest

from mafrt.core.errors import EnvError
from mafrt.core.text import readable
from mafrt.envs.dsbench.workspace import Bench
from mafrt.envs.tools import make_toolbox
from mafrt.sandbox import Workspace, shared_sandbox
from mafrt.sandbox.judging import Undecided, judge
from mafrt.sandbox.zygote_sandbox import unfit

pytestmark = pytest.mark.takes(fast=8)

MESSES = {
    "a file becomes a folder": "import os; os.remove('a.txt'); os.mkdir('a.txt'); open('a.txt/x', 'w').write('1')",
    "a file becomes an empty folder": "import os; os.remove('a.txt'); os.mkdir('a.txt')",
    "a folder becomes a file": "import shutil; shutil.rmtree('d'); open('d', 'w').write('1')",
    "a folder becomes a link": "import os, shutil; shutil.rmtree('d'); os.symlink('/', 'd')",
    "line breaks": "open('a\\nb', 'w').write('1'); open('c\\rd', 'w').write('2')",
    "surrogates": "import os\nfor i in range(60): os.makedirs(b'd%d' % i + b'\\xff' * 100)",
    "570 bytes": "import os; n = '/'.join(['x' * 190] * 3); os.makedirs(n); open(n + '/f', 'w').write('1')",
    "sixty folders": "import os\nfor i in range(60): os.mkdir(f'd{i}'); open(f'd{i}/f', 'w').write('1')",
    "sixty levels": "import os\nfor i in range(60): os.mkdir('n'); os.chdir('n')\nopen('f', 'w').write('1')",
    "1,500 levels": "import os\nfor i in range(1500): os.mkdir('n'); os.chdir('n')\nopen('f', 'w').write('1')",
    "long names, deep": "import os\nfor i in range(14): os.mkdir(b'\\xff' * 250); os.chdir(b'\\xff' * 250)\n"
    "for i in range(700): open(b'%04d' % i + b'\\xff' * 240, 'w').write('1')",
    "a name that is a suffix": "open('a.' + 'x' * 250, 'w').write('1'); open('model' + 'x' * 240, 'w').write('1')",
    "names of ours": "for n in ('judge', '.answer.json', 'json.py', 'numpy.py'): open(n, 'w').write('0/0')",
    "nothing may be entered": "import os; os.chmod('.', 0)",
    "no folder": "import os, shutil; shutil.rmtree(os.getcwd(), ignore_errors=True)",
    "60 MiB of commas": "f = open('a.csv', 'w')\nfor i in range(60): f.write(',' * 2**20)",
    "60 MiB of quotes": "f = open('model.csv', 'w')\nfor i in range(60): f.write('\"' * 2**20)",
    "15 MiB of NUL in a table": "open('X_train.csv', 'w').write('id,y\\n' + '\\0' * 15 * 2**20)",
    "60 MiB of commas said": "import sys\nfor i in range(60): sys.stdout.write(',' * 2**20)",
    "60 MiB of returns said": "import sys\nfor i in range(60): sys.stderr.write('\\r' * 2**20)",
    "combining marks said": "import sys\nfor i in range(30): sys.stdout.write('\\u0301' * 2**20)",
    "links in a circle": "import os\nos.mkdir('c')\nfor i in range(500): os.symlink('../c', f'c/{i}')",
    "two thousand hard links": "import os; open('h', 'w').write('1')\nfor i in range(2000): os.link('h', f'h{i}')",
    "a table of a terabyte": "open('X_test.csv', 'w').truncate(2**40)",
    "pipes": "import os\nfor i in range(50): os.mkfifo(f'p{i}.csv')",
    "9 MiB of line breaks": "\n" * (9 * 2**20) + "print(1)",
    "9 MiB of program": "#" + "x" * (9 * 2**20),
    "surrogates in the program": "print('\ud800')",
    "NUL in the program": "print(1)\x00",
    "brackets": "x = " + "(" * 100_000,
}
NEXT = "import os; print(len(os.listdir('.')))"
FILES = {"a.txt": b"1", "d/f": b"2"}


@pytest.fixture(scope="module")
def sandbox():
    return shared_sandbox("bwrap")


@pytest.mark.parametrize("name", MESSES)
def test_the_next_program_runs(sandbox, name):
    place = Workspace(sandbox)
    place.files.update(FILES)
    place.run(MESSES[name])
    assert place.run(NEXT).status == "ok" and place.run(NEXT).status == "ok"


@pytest.mark.cases(10)
@pytest.mark.parametrize("name", MESSES)
def test_the_python_tool_goes_on(name):
    toolbox = make_toolbox(["python", "files"])
    toolbox.files = FILES
    for code in (MESSES[name], NEXT):
        call = {"name": "python", "arguments": {"code": code}}
        [made] = toolbox.run(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
    assert made.answer.strip().isdigit()


@pytest.mark.cases(10)
@pytest.mark.parametrize("name", MESSES)
def test_a_bench_looks_at_it_and_goes_on(name):
    bench = Bench()
    _, after = bench.run(MESSES[name], FILES)
    bench.look({name: data for name, data in after.items() if FILES.get(name) != data})
    assert bench.run(NEXT, after)[0].status == "ok"


@pytest.mark.parametrize(
    ("made", "words"),  # made in the test: half a gigabyte that every process would hold
    [
        (lambda: {"a": b"", "a/b": b""}, "both a file and a folder"),
        (lambda: {"x/y": b"", "x": b"", "x/y/z": b""}, "both"),
        (lambda: {f"{n}": b"" for n in range(5000)}, "5000 files"),
        (lambda: {f"{n}/f": b"" for n in range(2100)}, "2100 folders"),
        (lambda: {"a": b"x" * (257 * 2**20)}, "256 MiB"),
        (lambda: {f"{n}": b"x" * (65 * 2**20) for n in range(4)}, "256 MiB"),
        (
            lambda: {f"{n}" + "x" * 250: b"" for n in range(4000 - 1)} | {"y/" * 15 + f"{n}": b"" for n in range(97)},
            "more than",
        ),
    ],
)
def test_files_that_no_workdir_holds_are_an_error_of_the_program(sandbox, made, words):
    done = sandbox.execute("print(1)", made())
    assert done.status == "error" and words in done.stderr and unfit("", FILES) is None


def test_a_result_that_breaks_its_reader_is_held_against_it(sandbox):
    ours = {"reader.py": b"def read(): return {'n': int(open('n').read())}\ndef none(): return undefined"}
    assert judge(sandbox, ours, ("reader", "read", ()), {"n": b"7"}) == {"n": 7}
    for made in (b"x", b"", b"\xff", b"9" * 5000):
        with pytest.raises(Undecided, match="failed"):
            judge(sandbox, ours, ("reader", "read", ()), {"n": made})
    # A module that cannot even be imported is ours to mend.
    with pytest.raises(EnvError):
        judge(sandbox, {"reader.py": b"import nothing_of_that_name"}, ("reader", "read", ()), {"n": b"7"})


def test_a_table_of_too_many_cells_is_not_read():
    seen = Bench().look({"submission.csv": (b"id," + b"," * 40_000 + b"\n") * 600})
    assert "cells" in seen["submission.csv"].why


def test_a_carriage_return_writes_over_nothing():
    assert readable(b"10%\r20%\r\nerror: none\rfine\n") == "10%\n20%\nerror: none\nfine\n"
