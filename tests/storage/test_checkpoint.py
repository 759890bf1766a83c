"""Checkpoints under everything that happens to files: kills, full disks, flipped bytes, foreign folders."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from mafrt.core import atomic_files
from mafrt.core.errors import CheckpointError, ConfigError
from mafrt.storage import checkpoint, load_path


def adapter(content: bytes = b"weights"):
    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(content)

    return write


def parts(content: bytes = b"weights") -> dict[str, checkpoint.Writer]:
    return {
        "solver": adapter(content),
        "verifier": adapter(content[::-1]),
        "critic.pth": lambda path: path.write_bytes(content * 2),
        "state/run.json": lambda path: atomic_files.save_json(path, {"drawn": len(content)}),
    }


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def flip(path: Path, at: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# ----------------------------------------------------------------------------------------------- writing and reading


def test_what_is_saved_is_what_latest_finds(tmp_path):
    saved = checkpoint.save(tmp_path, 3, parts(), meta={"team": ("a", "b")}, sandbox_tier="bwrap")
    found = checkpoint.latest(tmp_path)
    assert found.path == saved == tmp_path / "step_000003"
    assert (found.step, found.sandbox_tier, found.meta) == (3, "bwrap", {"team": ["a", "b"]})
    assert set(found.versions) == {"python", "mafrt", "torch", "transformers", "peft"}
    assert found.versions["python"] == sys.version.split()[0]
    assert sorted(found.files) == [
        "critic.pth",
        "solver/adapter_config.json",
        "solver/adapter_model.safetensors",
        "state/run.json",
        "verifier/adapter_config.json",
        "verifier/adapter_model.safetensors",
    ]
    # sha256(b"{}"), from `printf '{}' | sha256sum`
    digest = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert found.files["solver/adapter_config.json"] == digest
    assert names(tmp_path) == ["step_000003"]


def test_a_step_that_is_there_is_kept_if_equal_and_replaced_if_not(tmp_path):
    path = checkpoint.save(tmp_path, 1, parts())
    before = (path / "critic.pth").stat().st_ino
    checkpoint.save(tmp_path, 1, parts())
    assert (path / "critic.pth").stat().st_ino == before
    checkpoint.save(tmp_path, 1, parts(b"others"))
    assert (path / "critic.pth").read_bytes() == b"othersothers"
    flip(path / "critic.pth")
    checkpoint.save(tmp_path, 1, parts(b"others"))
    assert (path / "critic.pth").read_bytes() == b"othersothers"
    checkpoint.save(tmp_path, 1, parts(b"others"), meta={"changed": True})
    assert checkpoint.latest(tmp_path).meta == {"changed": True}
    assert names(tmp_path) == ["step_000001"]


@pytest.mark.parametrize("bad", ["../solver", "/solver", "a//b", "a\\b", "", ".", "c:x", "manifest.json"])
def test_parts_stay_inside_the_checkpoint(tmp_path, bad):
    with pytest.raises(ConfigError, match="relative path"):
        checkpoint.save(tmp_path, 1, {bad: adapter()})
    assert names(tmp_path) == []


def test_an_adapter_cannot_take_the_place_of_the_state(tmp_path):
    with pytest.raises(ConfigError, match="'state' is reserved"):
        checkpoint.save(tmp_path, 1, {"state": adapter(), **parts()})


def test_a_writer_that_fails_leaves_nothing_behind(tmp_path):
    def broken(error: type[BaseException]):
        def write(path: Path) -> None:
            path.write_bytes(b"half")
            raise error

        return write

    checkpoint.save(tmp_path, 1, parts())
    for error in (ZeroDivisionError, KeyboardInterrupt):
        with pytest.raises(error):
            checkpoint.save(tmp_path, 2, {**parts(), "state/x": broken(error)})
    with pytest.raises(CheckpointError, match="wrote nothing"):
        checkpoint.save(tmp_path, 2, {**parts(), "state/x": lambda path: None})
    with pytest.raises(CheckpointError, match="neither a file nor a folder"):
        checkpoint.save(tmp_path, 2, {**parts(), "link": lambda path: path.symlink_to("/etc/passwd")})
    with pytest.raises(ValueError, match="JSON compliant"):
        checkpoint.save(tmp_path, 2, parts(), meta={"loss": float("nan")})
    assert names(tmp_path) == ["step_000001"]


def test_thinning(tmp_path):
    for step in range(1, 11):
        checkpoint.save(tmp_path, step, parts(str(step).encode()), keep_last=2, keep_every=4)
    assert names(tmp_path) == ["step_000004", "step_000008", "step_000009", "step_000010"]
    with pytest.raises(ConfigError, match="keep_last is 0"):
        checkpoint.thin(tmp_path, keep_last=0)


def test_thinning_never_removes_the_newest_intact_one(tmp_path):
    for step in range(1, 6):
        checkpoint.save(tmp_path, step, parts(str(step).encode()), keep_last=9)
    for step in (3, 4, 5):
        flip(tmp_path / f"step_00000{step}" / "critic.pth")
    removed = checkpoint.thin(tmp_path, keep_last=1)
    assert [path.name for path in removed] == ["step_000004", "step_000003", "step_000001"]
    assert checkpoint.latest(tmp_path).step == 2


def test_everything_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """What a power cut would show, and a kill cannot: each file and folder is synced, and in which order."""
    done: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        done.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def recorded_rename(source, target) -> None:
        done.append(("rename", str(target)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_rename)
    root = tmp_path / "run" / "checkpoints"
    checkpoint.save(root, 1, parts())
    named = done.index(("rename", str(root / "step_000001")))
    before = [path for what, path in done[:named] if what == "sync"]
    temporary = root / "step_000001.tmp"
    folders = [temporary / name for name in ("", "solver", "verifier", "state")]
    files = [temporary / name for name in checkpoint.latest(root).files]
    assert set(map(str, [*files, *folders])) <= set(before)
    manifest = before.index(str(temporary / ".manifest.json.tmp"))
    assert all(before.index(str(file)) < manifest for file in files)
    assert all(str(folder) in before[manifest:] for folder in folders)
    assert ("sync", str(root)) in done[named:]
    assert str(root.parent) in before


def test_later_steps_are_set_aside(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, parts(str(step).encode()), keep_last=9)
    checkpoint.set_aside_after(tmp_path, 1)
    assert names(tmp_path) == ["step_000001", "step_000002.aside", "step_000003.aside"]
    checkpoint.save(tmp_path, 2, parts(b"again"), keep_last=9)
    (tmp_path / "step_000002").rename(tmp_path / "step_000002.old")
    checkpoint.set_aside_after(tmp_path, 1)
    assert names(tmp_path) == ["step_000001", "step_000002.aside", "step_000003.aside"]
    assert (tmp_path / "step_000002.aside" / "critic.pth").read_bytes() == b"againagain"
    assert checkpoint.latest(tmp_path).step == 1
    # A removal that was cut short lies in the way of the next one.
    (tmp_path / "step_000002.aside.gone.tmp" / "half").mkdir(parents=True)
    checkpoint.save(tmp_path, 3, parts(), keep_last=9).rename(tmp_path / "step_000002")
    (tmp_path / "step_000002.aside.gone.tmp" / "half").mkdir(parents=True)
    checkpoint.set_aside_after(tmp_path, 1)
    assert names(tmp_path) == ["step_000001", "step_000002.aside", "step_000003.aside"]


# ------------------------------------------------------------------------------------------------------------ damage


@pytest.mark.slow
def test_every_flipped_bit_is_noticed(tmp_path):
    path = checkpoint.save(tmp_path, 1, parts())
    rng = random.Random(0)
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    assert len(files) == 7
    for file in files:
        whole = file.read_bytes()
        places = range(len(whole)) if file.name == "manifest.json" else rng.sample(range(len(whole)), 2)
        for at in places:
            data = bytearray(whole)
            data[at] ^= 1 << rng.randrange(8)
            if file.name == "manifest.json" and _same_json(data, whole):
                continue  # white space: the content is intact
            file.write_bytes(data)
            with pytest.raises(CheckpointError):
                checkpoint.verify(path)
        file.write_bytes(whole[:-1] if file.name != "manifest.json" else whole[:-2])
        with pytest.raises(CheckpointError):
            checkpoint.verify(path)
        file.write_bytes(whole)
    assert checkpoint.verify(path).step == 1


def _same_json(one: bytes, other: bytes) -> bool:
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False


def test_a_damaged_checkpoint_falls_back_loudly(tmp_path, caplog):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, parts(str(step).encode()), keep_last=9)
    flip(tmp_path / "step_000003" / "solver" / "adapter_model.safetensors")
    (tmp_path / "step_000002" / "critic.pth").unlink()
    with caplog.at_level(logging.ERROR):
        found = checkpoint.latest(tmp_path)
    assert found.step == 1
    assert len(found.skipped) == 2 and "adapter_model.safetensors is damaged" in found.skipped[0]
    assert "critic.pth is missing" in found.skipped[1]
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert load_path.resolve(tmp_path).checkpoint == found
    flip(tmp_path / "step_000001" / "critic.pth")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact"):
        checkpoint.latest(tmp_path)


def test_a_renamed_checkpoint_is_refused(tmp_path):
    checkpoint.save(tmp_path, 1, parts()).rename(tmp_path / "step_000009")
    with pytest.raises(CheckpointError, match="was written as step 1"):
        checkpoint.verify(tmp_path / "step_000009")
    (tmp_path / "step_000009").rename(tmp_path / "best")
    assert load_path.resolve(tmp_path / "best").step == 1


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "solver/../../secret", "solver//x", "."])
def test_a_manifest_cannot_lead_out_of_its_folder(tmp_path, name):
    path = checkpoint.save(tmp_path, 1, parts())
    (tmp_path / "secret").write_text("{}")
    forge(path, lambda manifest: manifest["files"].update({name: {"sha256": "0", "size": 2}}))
    with pytest.raises(CheckpointError, match="leads out of the checkpoint"):
        checkpoint.verify(path)


def test_symbolic_links_are_refused(tmp_path):
    path = checkpoint.save(tmp_path, 1, parts())
    shutil.move(path / "critic.pth", tmp_path / "elsewhere")
    (path / "critic.pth").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="symbolic link"):
        checkpoint.verify(path)
    (path / "critic.pth").unlink()
    shutil.move(tmp_path / "elsewhere", path / "critic.pth")
    shutil.move(path / "solver", tmp_path / "solver")
    (path / "solver").symlink_to(tmp_path / "solver")
    with pytest.raises(CheckpointError, match="symbolic link"):
        checkpoint.verify(path)


@pytest.mark.parametrize("entry", [None, "x", 3, [], {}, {"sha256": 1}, {"size": 1}])
def test_a_malformed_manifest_is_refused_in_one_sentence(tmp_path, entry):
    path = checkpoint.save(tmp_path, 1, parts())
    forge(path, lambda manifest: manifest["files"].update({"critic.pth": entry}))
    with pytest.raises(CheckpointError, match=r"gives no hash and size for 'critic\.pth'"):
        checkpoint.verify(path)
    whole = (path / "manifest.json").read_bytes()
    for key in ("format", "format_version", "step", "files", "versions", "meta"):
        forge(path, lambda manifest: manifest.update({key: [entry]}))  # noqa: B023 (called at once)
        with pytest.raises(CheckpointError):
            checkpoint.verify(path)
        (path / "manifest.json").write_bytes(whole)
    (path / "manifest.json").write_text(json.dumps(entry))
    with pytest.raises(CheckpointError, match="not the manifest of a mafrt checkpoint"):
        checkpoint.verify(path)


def test_files_that_the_manifest_does_not_name_are_not_loaded(tmp_path, caplog):
    path = checkpoint.save(tmp_path, 1, {"state/run.json": parts()["state/run.json"]})
    adapter()(path / "intruder")
    (path / "critic.pth").write_bytes(b"intruder")
    found = load_path.resolve(path)
    assert found.adapters == {} and found.critic is None
    assert "not part of the checkpoint" in caplog.text


def forge(path: Path, change) -> None:
    """Change a manifest as somebody would who can compute its hash too."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    change(manifest)
    manifest["manifest_sha256"] = checkpoint._manifest_hash(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


# -------------------------------------------------------------------------------------------------------- disk full


def full_plain(path: Path) -> None:
    path.write_bytes(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")


def full_device(path: Path) -> None:
    path.write_bytes(b"half")
    with open("/dev/full", "wb") as file:
        file.write(b"x" * 100_000)


def full_torch(path: Path) -> None:
    import torch

    path.write_bytes(b"half")
    with open("/dev/full", "wb", buffering=0) as file:
        torch.save({"weights": torch.zeros(100_000)}, file)


@pytest.mark.parametrize("writer", [full_plain, full_device, full_torch])
def test_a_full_disk_is_one_sentence_and_costs_nothing(tmp_path, writer):
    checkpoint.save(tmp_path, 1, parts())
    with pytest.raises(
        CheckpointError, match=r"cannot write state/big of .*step_000002: .*earlier checkpoints are unt"
    ):
        checkpoint.save(tmp_path, 2, {**parts(), "state/big": writer})
    assert names(tmp_path) == ["step_000001"]
    assert checkpoint.latest(tmp_path).step == 1


SMALL_DISK = """
    import sys, torch
    from pathlib import Path
    from safetensors.torch import save_file
    from mafrt.storage import checkpoint
    from mafrt.core import atomic_files
    from mafrt.core.errors import CheckpointError

    root = Path(sys.argv[1])
    weights = {"w": torch.randn(60_000)}  # 240 kB, on a disk of 1 MiB
    writers = {
        "tensors": lambda p: atomic_files.save_tensors(p, weights),
        "safetensors": lambda p: save_file(weights, p),
        "torch": lambda p: torch.save(weights, p),
    }
    for name, write in writers.items():
        checkpoint.save(root, 1, {"a": write}, keep_last=1)
        try:
            checkpoint.save(root, 2, {x: write for x in "abcdefgh"}, keep_last=1)
        except CheckpointError as error:
            assert "earlier checkpoints are untouched" in str(error), error
        else:
            raise SystemExit(f"{name}: the disk was not full")
        assert [p.name for p in root.iterdir()] == ["step_000001"], name
        assert checkpoint.latest(root).step == 1
        checkpoint.save(root, 3, {"a": write}, keep_last=1)  # there is room again
        checkpoint._remove(root / "step_000003")
    print("survived")
"""


@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path):
    mount = f"mount -t tmpfs -o size=1m none {tmp_path} && exec {sys.executable} - {tmp_path}"
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*unshare, f"mount -t tmpfs none {tmp_path}"]).returncode:
        pytest.skip("no user namespaces to mount a small disk in")
    done = subprocess.run(
        [*unshare, mount], input=textwrap.dedent(SMALL_DISK), capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "survived\n", done.stderr


# -------------------------------------------------------------------------------------------------------------- kills

SAVER = """
    import os, random, signal, shutil, sys, time
    from pathlib import Path
    from mafrt.storage import checkpoint
    from mafrt.core import atomic_files

    def writers(step, salt):
        content = f"{step} {salt} ".encode() * 4000
        def folder(path):
            path.mkdir()
            (path / "adapter_config.json").write_bytes(content[:100])
            (path / "adapter_model.safetensors").write_bytes(content)
        return {"solver": folder, "critic.pth": lambda p: p.write_bytes(content),
                "state/run.json": lambda p: atomic_files.save_json(p, {"step": step})}

    def put(root, step, salt, **kw):
        checkpoint.save(root, step, writers(step, salt), meta={"salt": salt}, **kw)

    def check(root):
        '''What bears a final name is whole, and all files of the newest come from the same save.'''
        for path in root.glob("step_??????"):
            checkpoint.verify(path)
        found = checkpoint.latest(root)
        assert not found.skipped, found.skipped
        expected = f"{found.step} {found.meta['salt']} ".encode() * 4000
        assert (found.path / "critic.pth").read_bytes() == expected
        assert (found.path / "solver/adapter_model.safetensors").read_bytes() == expected
        return found
"""

EVERY_STEP = (
    SAVER
    + """
    base, work = Path(sys.argv[1]) / "base", Path(sys.argv[1]) / "work"
    CHANGES = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"}

    def scenario_next(root): put(root, 3, "b", keep_last=2)
    def scenario_again(root): put(root, 2, "b", keep_last=2)
    def scenario_rewind(root):
        checkpoint.set_aside_after(root, 1)
        put(root, 2, "b", keep_last=2)

    put(base, 1, "a"); put(base, 2, "a")
    checkpoint.versions()  # imports what it needs before files are counted
    for scenario in (scenario_next, scenario_again, scenario_rewind):
        at = 0
        while True:
            at += 1
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(base, work)
            child = os.fork()
            if child == 0:
                seen = 0
                def die(event, args):
                    global seen
                    if event in CHANGES:
                        seen += 1
                        if seen == at:
                            os.kill(os.getpid(), signal.SIGKILL)
                sys.addaudithook(die)
                scenario(work)
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            found = check(work)
            if scenario is scenario_rewind:
                assert found.step in (1, 2)
            else:
                assert found.step >= 2
            scenario(work)  # what a resumed run does next
            assert check(work).meta["salt"] == "b"
            left = [p.name for p in work.iterdir() if p.name.endswith((".tmp", ".old"))]
            assert not left, left
            if status == 0:
                break
            assert os.WTERMSIG(status) == signal.SIGKILL
        print(scenario.__name__, at)
"""
)


@pytest.mark.slow
def test_killed_before_every_single_change_of_the_disk(tmp_path):
    with in_memory(tmp_path) as folder:
        done = run_child(EVERY_STEP, folder)
    counts = dict(line.split() for line in done.splitlines())
    assert set(counts) == {"scenario_next", "scenario_again", "scenario_rewind"}
    assert all(int(count) > 20 for count in counts.values()), counts


RANDOM_KILLS = (
    SAVER
    + """
    root, rounds, rng = Path(sys.argv[1]) / "run", int(sys.argv[2]), random.Random(7)
    put(root, 1, "w")  # imports what saving needs, so that the next one takes as long as any later one
    began = time.perf_counter()
    put(root, 1, "x")
    longest_s = 6 * (time.perf_counter() - began)
    known, saves = 1, 0
    for _ in range(rounds):
        heard, told = os.pipe()
        child = os.fork()
        if child == 0:
            while True:  # goes on from the newest; every third step is saved twice
                step = known + 1
                for salt in ("x", "y") if step % 3 == 0 else ("x",):
                    put(root, step, salt, keep_last=2)
                    os.write(told, f"{step}\\n".encode())
                known = step
        time.sleep(rng.uniform(0, longest_s))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)
        acknowledged = [int(line) for line in os.read(heard, 1 << 16).split()]
        os.close(heard)
        saves += len(acknowledged)
        found = check(root)
        assert found.step >= max([known, *acknowledged]), (found.step, known, acknowledged)
        known = found.step
        assert len(list(root.glob("*"))) <= 6
    print(known, saves)
"""
)


@pytest.mark.slow
@pytest.mark.ci
def test_killed_at_any_instant(tmp_path):
    with in_memory(tmp_path) as folder:
        steps, saves = map(int, run_child(RANDOM_KILLS, folder, "60").split())
    assert saves > 10 and steps > 10  # most rounds got somewhere before they were killed


@pytest.mark.nightly
@pytest.mark.ci
@pytest.mark.slow
def test_killed_at_any_instant_on_a_disk(tmp_path):
    steps, saves = map(int, run_child(RANDOM_KILLS, tmp_path, "150").split())
    assert saves > 10 and steps > 10


def in_memory(tmp_path: Path) -> tempfile.TemporaryDirectory:
    """A folder in memory where that is possible: fsync costs nothing there, and a kill does the same."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path)


def run_child(code: str, *args: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_checkpoints_need_no_torch():
    code = (
        "import sys, mafrt.core.signals\nfrom mafrt.storage import checkpoint, metrics, report, run_dir\n"
        "print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "transformers", "yaml"} & set(loaded)
