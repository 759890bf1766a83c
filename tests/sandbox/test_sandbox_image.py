"""What a snippet finds on the file system: declared packages, and neither this library nor data that holds answers."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_sandbox import ensure_bubblewrap, why_not

from mafrt.core.errors import SandboxError
from mafrt.sandbox import Sandbox, bwrap
from mafrt.sandbox import image as module
from mafrt.sandbox.image import Image, image
from mafrt.sandbox.zygote_sandbox import WarmSandbox

pytestmark = pytest.mark.takes(slow=10)

MARK = "HELD-OUT-ANSWER-0123456789"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that is shown as the system's, with a wheel of this library installed in it as pip would."""
    root = Path("/var/tmp") / f"mafrt-image-{os.getpid()}"
    for place in ("python3.11/site-packages", "python3.11/dist-packages", "python3/dist-packages"):
        for name in ("mafrt/envs/code/data/functions_test.jsonl", "mafrt/envs/dsbench/builtin_tables.py", "other.py"):
            path = root / "lib" / place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"# {MARK}\n")
    (root / "lib" / "R" / "library").mkdir(parents=True)
    (root / "lib" / "R" / "library" / "iris.rdb").write_text(MARK)
    (root / "lib" / "shown.txt").write_text("shown")
    patch = pytest.MonkeyPatch()
    patch.setattr(module, "SYSTEM", (*module.SYSTEM, str(root / "lib")))
    image.cache_clear()
    yield root / "lib"
    patch.undo()
    image.cache_clear()
    subprocess.run(["rm", "-rf", str(root)], check=True)


@pytest.fixture(scope="module", params=["bwrap", "degraded"])
def sandbox(request: pytest.FixtureRequest, installed: Path) -> Iterator[Sandbox]:
    if why := why_not(request.param):
        pytest.skip(why)
    ensure_bubblewrap()
    with WarmSandbox(request.param) as warm:
        yield warm


def run(sandbox: Sandbox, code: str, **options: object) -> str:
    done = sandbox.execute(textwrap.dedent(code), timeout_s=120, **options)  # type: ignore[arg-type]
    assert done.status == "ok", done
    return done.stdout


def test_the_library_and_its_answers_are_out_of_sight(sandbox: Sandbox, installed: Path) -> None:
    code = f"""
    import os, sys
    print(open({str(installed / "shown.txt")!r}).read())
    read = 0
    for folder, _, files in os.walk({str(installed)!r}):
        for name in files:
            try:
                print("FOUND" if {MARK!r} in open(os.path.join(folder, name)).read() else "fine")
            except OSError:
                print("refused")
    for name in ("mafrt", "mafrt.envs.code", "mafrt.envs.dsbench.builtin_tables", "torch", "transformers", "pytest"):
        try:
            __import__(name)
            print("IMPORTED", name)
        except ImportError as error:
            print(type(error).__name__)
    """
    said = run(sandbox, code)
    assert said.startswith("shown\n") and "FOUND" not in said and "IMPORTED" not in said


@pytest.mark.slow
@pytest.mark.ci
def test_no_file_of_ours_is_anywhere(sandbox: Sandbox) -> None:
    code = """
    import os
    names = {"functions_test.jsonl", "programs_test.jsonl", "word_problems_test.jsonl", "builtin_tables.py",
             "grading.py", "test_answer.csv", "ground_truth.py", "digits.csv.gz", "iris.csv"}
    for folder, folders, files in os.walk("/"):
        if folder == "/":
            folders[:] = [name for name in folders if name not in ("proc", "sys")]
        for name in names & set(files):
            path = os.path.join(folder, name)
            try:
                print("FOUND", path, len(open(path, "rb").read()))
            except OSError:
                pass
    print("looked")
    """
    if sandbox.tier.startswith("degraded"):
        code = code.replace('os.walk("/")', 'os.walk("/usr")')
    said = run(sandbox, code)
    assert "FOUND" not in said.replace(" 0\n", "") and said.endswith("looked\n")


def test_data_sets_of_packages_are_hidden_and_the_rest_works(sandbox: Sandbox) -> None:
    pytest.importorskip("sklearn")
    code = """
    import os
    import numpy, pandas, scipy.stats, sklearn.datasets as data
    for name in ("digits", "wine", "iris", "breast_cancer", "diabetes", "linnerud"):
        try:
            getattr(data, "load_" + name)()
            print("LOADED", name)
        except Exception as error:
            print(type(error).__name__)
    print(data.make_classification(20)[0].shape, scipy.stats.qmc.Sobol(2).random(2).shape)
    print(pandas.Timestamp("2024-03-31 01:30", tz="Europe/Berlin").utcoffset())
    """
    said = run(sandbox, code)
    assert "LOADED" not in said and "(20, 20) (2, 2)" in said and "1:00:00" in said


def test_nearest_neighbours_to_packaged_tables_are_not_to_be_had(sandbox: Sandbox) -> None:
    """Also not by reading the files oneself, or from the archives of caches."""
    pytest.importorskip("sklearn")
    code = """
    import gzip, os, sklearn
    root = os.path.join(os.path.dirname(sklearn.__file__), "datasets")
    for folder, _, files in os.walk(root):
        for name in files:
            path = os.path.join(folder, name)
            if name.endswith((".csv", ".gz", ".arff", ".npz", ".json")):
                try:
                    content = open(path, "rb").read()
                except OSError:
                    continue
                print("READ" if content else "empty", path)
    print("looked")
    """
    assert run(sandbox, code).endswith("looked\n") and "READ" not in run(sandbox, code)


def test_nothing_of_the_image_can_be_written(sandbox: Sandbox) -> None:
    code = """
    import os, sys, sklearn
    places = [*sys.path[1:], os.path.dirname(sklearn.__file__), os.path.dirname(sklearn.__file__) + "/datasets/data"]
    places += ["/packages", "/packages/numpy", "/inside", "/usr/lib/python3/dist-packages", sys.prefix]
    for place in places:
        try:
            open(place + "/x.py", "w").write("x")
            print("WRITTEN", place)
        except OSError:
            pass
    print("looked")
    """
    assert run(sandbox, code) == "looked\n"


def test_the_image_of_this_machine() -> None:
    found = image()
    names = dict(found.packages)
    assert {"numpy", "pandas", "sklearn"} <= names.keys() and not {"mafrt", "torch", "transformers"} & names.keys()
    assert any(name.startswith("sklearn/datasets/data") for name in found.hidden)
    assert not [path for path in found.folders if path in ("/", "/usr", "/usr/share", sys.prefix, "/root", "/home")]
    read, listed = found.readable()
    sklearn = names["sklearn"]
    assert sklearn in listed and f"{sklearn}/base.py" in read
    assert not any(path.startswith(f"{sklearn}/datasets/data") for path in read)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["mafrt", "MAFRT", " mafrt , no-such-package,"])
def test_the_library_cannot_be_declared(more: str) -> None:
    assert "mafrt" not in dict(image(more).packages)


@pytest.mark.slow
def test_further_packages_can_be_declared() -> None:
    assert "yaml" not in dict(image("").packages) and "yaml" in dict(image("PyYAML").packages)


def test_a_part_is_given_without_what_is_hidden(tmp_path: Path) -> None:
    for name in ("a/b/c.py", "a/data/x.csv", "a/z.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    a = str(tmp_path / "a")
    read, listed = Image((), (), (("a", a),), ("a/data",)).readable()
    assert (read, listed) == ([f"{a}/b", f"{a}/z.py"], [a])


@pytest.mark.slow
def test_a_virtual_environment_in_tmp(tmp_path: Path) -> None:
    """The snippet's own /tmp hides it, but packages have a place of their own in there."""
    ensure_bubblewrap()
    place = Path("/tmp") / f"mafrt-venv-{os.getpid()}"
    try:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
        [site] = place.glob("lib/python*/site-packages")
        (site / "all.pth").write_text("\n".join([p for p in sys.path if p.endswith("site-packages")]))
        (site / "mafrt").symlink_to(Path(module.__file__).parents[1], target_is_directory=True)
        code = (
            "from mafrt.sandbox import open_sandbox\nwith open_sandbox() as s:\n"
            "    print(s.execute('import decimal, zoneinfo, numpy\\nprint(numpy.arange(3).sum())'))"
        )
        done = subprocess.run([place / "bin/python", "-c", code], capture_output=True, text=True, check=False, cwd="/")
        assert "status='ok', stdout='3\\n'" in done.stdout, (done.stdout, done.stderr)
    finally:
        subprocess.run(["rm", "-rf", str(place)], check=True)


def test_python_itself_in_tmp_is_said(monkeypatch) -> None:
    monkeypatch.setattr(bwrap, "image", lambda: Image(("/usr/lib", "/tmp/python/lib"), (), (), ()))
    with pytest.raises(SandboxError, match="found Python itself in /tmp/python/lib"):
        bwrap.command(0, 0, bwrap.Options())
