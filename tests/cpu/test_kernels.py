"""The kernels in C, against torch in float64; also as they are compiled for processors without AVX-512."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers_kernels import without_avx512
from helpers_warm import start_python
from hypothesis import given, settings
from hypothesis import strategies as st

from mafrt.core.shipped import user_cache
from mafrt.cpu import library as library_module
from mafrt.cpu import panels
from mafrt.cpu.decode import DecodeKernels, FarKeys, Heads, NearKeys, decode_kernels
from mafrt.cpu.library import SWITCH, library
from mafrt.cpu.panels import Panels

pytestmark = [pytest.mark.takes(fast=20), pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")]
DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
"""allowed error, of the largest entry"""


def close(found, exact, dtype):
    error = (found.double() - exact).abs().max() / exact.abs().max()
    assert error <= ROUNDING[dtype], f"{error:.1e}"


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


@pytest.fixture(params=["as for this processor", "AVX2"])
def kernels_of(request):
    """Number format -> the kernels of a decode step."""
    if request.param == "AVX2":
        return lambda dtype: DecodeKernels(without_avx512(), dtype)
    return lambda dtype: decode_kernels(dtype, "cpu")


def test_a_machine_with_a_compiler_has_the_kernels():
    assert library() is not None
    assert decode_kernels(torch.float64, "cpu") is None and decode_kernels(torch.float32, "cuda") is None


@pytest.fixture
def two_sources(monkeypatch, tmp_path):
    """Two files that compile in no time. The real ones are compiled without threads by `without_avx512`."""
    folder = tmp_path / "source"
    folder.mkdir()
    loop = "#pragma omp parallel for\nfor (long i = 0; i < n; i++) x[i] = 1;"
    (folder / "attend.c").write_text(f"void attend_f32(long n, float *x) {{\n{loop}\n}}\n")
    (folder / "rows.c").write_text("int learn_attention(void) { return 7; }\n")
    monkeypatch.setattr(library_module, "SOURCE", folder)


def fresh_library(monkeypatch, tmp_path):
    """As a new process with an empty cache would load it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return library_module.library.__wrapped__()


def test_processes_that_start_together_compile_once(monkeypatch, tmp_path, two_sources):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler, calls = tmp_path / "cc", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *attend.c*) echo >>{calls}; sleep 0.3;; esac\nexec cc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    loaded = f"""from pathlib import Path
from mafrt.cpu import library
library.SOURCE = Path({str(library_module.SOURCE)!r})
raise SystemExit(library.library.__wrapped__().learn_attention())"""
    processes = [start_python("-c", loaded) for _ in range(3)]
    assert [process.wait(300) for process in processes] == [7, 7, 7]
    assert len(calls.read_text().splitlines()) == 1


def test_the_switch_leaves_them_out(monkeypatch, tmp_path):
    monkeypatch.setenv(SWITCH, "torch")
    assert fresh_library(monkeypatch, tmp_path) is None
    assert not (tmp_path / "mafrt").exists()


def test_a_compiler_without_the_library_of_threads(monkeypatch, tmp_path, two_sources):
    """It links what does not load, as clang does where libomp is missing."""
    compiler = tmp_path / "cc"
    spoil = 'case " $* " in *" -fopenmp "*) for out; do :; done; echo none > "$out"; exit;; esac\nexec cc "$@"\n'
    compiler.write_text(f"#!/bin/sh\n{spoil}")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    made = fresh_library(monkeypatch, tmp_path)
    assert hasattr(made, "attend_f32") and made.learn_attention() == 7


def test_they_are_compiled_once_and_kept(monkeypatch, tmp_path, two_sources):
    assert fresh_library(monkeypatch, tmp_path) is not None
    (made,) = (tmp_path / "mafrt" / "kernels").iterdir()
    stamp = made.stat().st_mtime_ns
    assert fresh_library(monkeypatch, tmp_path) is not None
    assert made.stat().st_mtime_ns == stamp


def shaken(path, what):
    """A library after an accident or an attack, and whether its folder was touched too."""
    whole = path.read_bytes()
    if what in ("cut", "empty", "a byte flipped", "grown"):
        path.unlink()  # this process has it open
        path.write_bytes(
            {
                "cut": whole[: len(whole) // 3],
                "empty": b"",
                "a byte flipped": whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:],
                "grown": whole + b"x",
            }[what]
        )
    elif what == "others may write":
        path.chmod(0o777)
    elif what == "a group may write":
        path.chmod(0o770)
    elif what == "a link":
        path.rename(path.with_suffix(".else"))
        path.symlink_to(path.with_suffix(".else"))
    elif what == "a folder":
        path.unlink()
        path.mkdir()
    elif what == "of another user":
        os.chown(path, 12345, 12345)
    elif what == "a pipe":
        path.unlink()
        os.mkfifo(path)
    elif what == "a terabyte":
        path.unlink()
        path.touch(mode=0o700)
        os.truncate(path, 2**40)


@pytest.mark.parametrize(
    "what",
    ["cut", "empty", "a byte flipped", "grown", "others may write", "a group may write", "a link", "a folder", "a pipe",
     "a terabyte", "of another user"],
)  # fmt: skip
def test_a_library_that_is_not_whole_or_not_ours_is_made_again(monkeypatch, tmp_path, what):
    if what == "of another user" and os.getuid() != 0:
        pytest.skip("only root gives files away")
    monkeypatch.setattr(library_module, "_build", lambda command, out: shutil.copy(known, out))
    known = tmp_path / "known.so"
    known.write_bytes(next(own_cache().glob("*.so")).read_bytes())
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    path = Path(library_module._compiled("cc", folder)._name)
    assert library_module._is_whole(path)
    shaken(path, what)
    assert not library_module._is_whole(path)
    again = Path(library_module._compiled("cc", folder)._name)
    assert again == path and library_module._is_whole(path) and path.read_bytes().startswith(known.read_bytes())


@pytest.mark.parametrize("junk", [b"", b"no library", b"\x7fELF" + b"x" * 5000, b"#!/bin/sh\n", b"!<arch>\n"])
def test_a_sealed_library_that_does_not_load_is_made_again_once(monkeypatch, tmp_path, caplog, junk):
    made = []
    known = tmp_path / "known.so"
    known.write_bytes(next(own_cache().glob("*.so")).read_bytes())
    monkeypatch.setattr(library_module, "_build", lambda command, out: made.append(shutil.copy(known, out)))
    path = (
        tmp_path / "cache" / "mafrt" / "kernels" / f"{library_module._fingerprint(library_module.find_compiler())}.so"
    )
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_bytes(junk + hashlib.sha256(junk).digest())
    path.chmod(0o700)
    assert library_module._is_whole(path)
    for _ in range(2):
        assert hasattr(fresh_library(monkeypatch, tmp_path / "cache"), "attend_f32")
    assert len(made) == 1 and len(caplog.records) == 1 and [path] == list(path.parent.iterdir())


def test_what_a_killed_compilation_left_is_removed(monkeypatch, tmp_path):
    known = tmp_path / "known.so"
    known.write_bytes(next(own_cache().glob("*.so")).read_bytes())
    monkeypatch.setattr(library_module, "_build", lambda command, out: shutil.copy(known, out))
    folder = tmp_path / "cache"
    (tmp_path / "elsewhere").mkdir()
    for name in ("tmpold", "tmpnew", "mine"):
        (folder / name).mkdir(parents=True)
        (folder / name / "kernels.o").touch()
    folder.chmod(0o700)
    (folder / "tmplink").symlink_to(tmp_path / "elsewhere")
    (folder / "tmpfile").touch()
    for name in ("tmpold", "mine", "tmpfile"):
        os.utime(folder / name, (0, 0))
    os.utime(tmp_path / "elsewhere", (0, 0))
    made = Path(library_module._compiled("cc", folder)._name)
    assert sorted(path.name for path in folder.iterdir()) == sorted([made.name, "mine", "tmpfile", "tmplink", "tmpnew"])
    assert (tmp_path / "elsewhere").is_dir()


def own_cache():
    assert library() is not None
    return user_cache() / "kernels"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o703, 0o720])
def test_a_folder_that_others_may_write_to_is_left_alone(monkeypatch, tmp_path, caplog, mode):
    known = tmp_path / "known.so"
    known.write_bytes(next(own_cache().glob("*.so")).read_bytes())
    monkeypatch.setattr(library_module, "_build", lambda command, out: shutil.copy(known, out))
    folder = tmp_path / "mafrt" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert fresh_library(monkeypatch, tmp_path) is not None
    assert "chmod 700" in caplog.text and not list(folder.iterdir())


@pytest.mark.parametrize(("mode", "private"), [(0o777, True), (0o707, True), (0o1777, False), (0o775, False)])
def test_a_folder_that_others_may_exchange_is_left_alone(monkeypatch, tmp_path, caplog, mode, private):
    known = tmp_path / "known.so"
    known.write_bytes(next(own_cache().glob("*.so")).read_bytes())
    monkeypatch.setattr(library_module, "_build", lambda command, out: shutil.copy(known, out))
    folder = tmp_path / "open" / "mafrt" / "kernels"
    folder.mkdir(parents=True, mode=0o700)
    (tmp_path / "open").chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert fresh_library(monkeypatch, tmp_path / "open") is not None
    assert ("chmod 700" in caplog.text) == private and bool(list(folder.iterdir())) != private


PARENTS = [
    ("another user's", 12345, 0, 0o755, True),
    ("another user's, sticky", 12345, 0, 0o1777, True),
    ("root's", 0, 0, 0o755, False),
    ("a group's", "own", 12345, 0o775, True),
    ("a group's, sticky", "own", 12345, 0o1775, False),
    ("root's, a group's", 0, 12345, 0o770, True),
    ("root's, root's group", 0, 0, 0o775, False),
    ("a group that may only read", "own", 12345, 0o755, False),
    ("everyone's", "own", 0, 0o757, True),
    ("everyone's, sticky", 0, 0, 0o1777, False),
]


@pytest.mark.parametrize(("name", "owner", "group", "mode", "taken"), PARENTS, ids=[each[0] for each in PARENTS])
def test_who_may_exchange_a_folder_of_the_cache(tmp_path, monkeypatch, name, owner, group, mode, taken):
    owner = os.getuid() if owner == "own" else owner
    about = SimpleNamespace(st_uid=owner, st_gid=group, st_mode=stat.S_IFDIR | mode)
    monkeypatch.setattr(Path, "stat", lambda self: about)
    assert library_module._is_open(tmp_path) == taken


def test_a_folder_with_an_access_control_list_is_not_its_owners_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(library_module, "_is_private", lambda group: True)
    tmp_path.chmod(0o770)
    assert not library_module._is_open(tmp_path)
    # A user of number 12345 may read and write.
    entries = ((1, 7, -1), (2, 7, 12345), (4, 7, -1), (16, 7, -1), (32, 0, -1))
    packed = b"\2\0\0\0" + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(tmp_path, "system.posix_acl_access", packed)
    except OSError as error:
        pytest.skip(f"this file system has no access control lists ({error})")
    assert library_module._is_open(tmp_path)


@pytest.mark.parametrize(
    ("group", "members", "private"), [("me", [], True), ("me", ["her"], False), ("staff", [], False)]
)
def test_the_group_of_one_user_is_no_other_user(monkeypatch, group, members, private):
    monkeypatch.setattr("pwd.getpwuid", lambda uid: SimpleNamespace(pw_name="me", pw_gid=4321))
    monkeypatch.setattr("grp.getgrgid", lambda gid: SimpleNamespace(gr_name=group, gr_mem=members))
    assert library_module._is_private(4321) == private and not library_module._is_private(4322)


@pytest.mark.parametrize("what", ["a file", "a file for the folder", "a full folder for the library", "no home"])
def test_without_a_cache_they_are_made_for_this_process(monkeypatch, tmp_path, caplog, what):
    known = tmp_path / "known.so"
    known.write_bytes(next(own_cache().glob("*.so")).read_bytes())
    monkeypatch.setattr(library_module, "_build", lambda command, out: shutil.copy(known, out))
    if what == "a file":
        (tmp_path / "mafrt").write_text("")
    elif what == "a file for the folder":
        (tmp_path / "mafrt").mkdir()
        (tmp_path / "mafrt" / "kernels").write_text("")
    elif what == "a full folder for the library":
        compiler = library_module.find_compiler()
        (tmp_path / "mafrt" / "kernels" / f"{library_module._fingerprint(compiler)}.so" / "x").mkdir(parents=True)
    else:
        monkeypatch.setattr(Path, "home", classmethod(lambda cls: (_ for _ in ()).throw(RuntimeError("no home"))))
    with caplog.at_level(logging.WARNING):
        made = fresh_library(monkeypatch, "relative" if what == "no home" else tmp_path)
    assert made is not None and "XDG_CACHE_HOME" in caplog.text and len(caplog.records) == 1


def test_one_who_holds_the_lock_and_stands_still_is_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setattr(library_module, "COMPILE_S", 0.2)
    monkeypatch.setattr(library_module, "_fingerprint", lambda compiler: "name")
    monkeypatch.setattr(library_module, "_build", lambda command, out: shutil.copy(known, out))
    known = next(own_cache().glob("*.so"))
    (tmp_path / "mafrt" / "kernels").mkdir(parents=True, mode=0o700)
    handle = os.open(tmp_path / "mafrt" / "kernels", os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert fresh_library(monkeypatch, tmp_path) is not None
    finally:
        os.close(handle)


def test_the_cache_is_this_users_alone_whatever_the_umask(monkeypatch, tmp_path, two_sources, caplog):
    before = os.umask(0)
    try:
        assert fresh_library(monkeypatch, tmp_path) is not None
    finally:
        os.umask(before)
    assert not caplog.records and (tmp_path / "mafrt").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("free", [0, 2**40])
def test_a_compiler_that_finds_the_disk_full_has_another_place(monkeypatch, tmp_path, two_sources, caplog, free):
    compiler = tmp_path / "cc"
    full = 'echo "a.o: No space left on device" >&2; exit 1'
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *{tmp_path}/mafrt*) {full};; esac\nexec cc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(library_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    made = fresh_library(monkeypatch, tmp_path)
    assert (made is None) == bool(free) and len(caplog.records) == 1 and "No space left" in caplog.text


def test_a_relative_cache_is_passed_over(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for relative in ("cache", "./cache", "../cache", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert user_cache() == Path.home() / ".cache" / "mafrt"


def test_a_compiler_without_openmp_is_enough(monkeypatch, tmp_path, two_sources):
    plain = tmp_path / "plain_cc"
    plain.write_text('#!/bin/sh\ncase "$*" in *-fopenmp*) exit 1;; esac\nexec cc "$@"\n')
    plain.chmod(0o755)
    monkeypatch.setenv("CC", str(plain))
    made = fresh_library(monkeypatch, tmp_path)
    assert made is not None and hasattr(made, "attend_f32") and made.learn_attention() == 7


@pytest.mark.parametrize("fault", ["no compiler", "a compiler that fails"])
def test_without_them_there_is_one_sentence_and_torch_computes(monkeypatch, tmp_path, caplog, fault):
    caplog.set_level(logging.INFO)
    if fault == "no compiler":
        monkeypatch.setattr(library_module.shutil, "which", lambda name: None)
    else:
        monkeypatch.setattr(library_module.shutil, "which", lambda name: "/bin/false")
    found = fresh_library(monkeypatch, tmp_path)
    assert (found is None) == (len(caplog.records) == 1)
    assert found is None


@settings(max_examples=40, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 7, 8, 9, 33, 250]),
    size=st.sampled_from([2, 16, 30, 64, 130]),
    width=st.sampled_from([1, 16, 47, 48, 49, 97, 200]),
    dtype=st.sampled_from(DTYPES),
    parts=st.tuples(st.booleans(), st.booleans()),
)
def test_a_product_in_panels_equals_the_plain_one(rows, size, width, dtype, parts):
    weight, whole = random(width, size, dtype=dtype), random(rows, size + 3, dtype=dtype)
    if not panels.serves(weight):
        pytest.skip("no product in panels here")
    x = whole[:, :size]  # rows with gaps between them
    bias = random(width, dtype=dtype) if parts[0] else None
    added = random(rows, width, dtype=dtype) if parts[1] else None
    exact = x.double() @ weight.double().t()
    exact = exact + sum(t.double() for t in (bias, added) if t is not None)
    close(Panels.of(weight).product(x, bias, added), exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_product_depends_neither_on_the_others_nor_on_the_threads(dtype):
    weight, x = random(100, 64, dtype=dtype), random(41, 64, dtype=dtype)
    if not panels.serves(weight):
        pytest.skip("no product in panels here")
    packed, before = Panels.of(weight), torch.get_num_threads()
    whole = packed.product(x)
    assert torch.equal(torch.cat([packed.product(row) for row in x.split(1)]), whole)
    assert torch.equal(packed.product(x.t().contiguous().t()), whole)
    try:
        torch.set_num_threads(2)
        assert torch.equal(packed.product(x), whole)
    finally:
        torch.set_num_threads(before)


def test_nan_stays_in_its_row():
    weight, x = random(50, 32), random(9, 32)
    if not panels.serves(weight):
        pytest.skip("no product in panels here")
    x[4, 3] = torch.nan
    bad = Panels.of(weight).product(x).isnan()
    assert bad[4].all() and int(bad.any(1).sum()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 16, 40, 576])
def test_norm_and_activation(kernels_of, dtype, width):
    kernels = kernels_of(dtype)
    x, factors = random(7, width, dtype=dtype), random(width)
    exact = torch.nn.functional.rms_norm(x.double(), (width,), factors.double(), 1e-5)
    close(kernels.rms_norm(x, factors, 1e-5), exact, dtype)
    both = 4 * random(7, 2 * width, dtype=dtype)
    gate, up = both.double().chunk(2, 1)
    close(kernels.silu_product(both), torch.nn.functional.silu(gate) * up, dtype)
    x[2, 1] = both[2, 1] = torch.nan
    assert kernels.rms_norm(x, factors, 1e-5).isnan().any(1).tolist() == [row == 2 for row in range(7)]
    assert kernels.silu_product(both).isnan().sum() == 1


def test_activation_far_from_zero(kernels_of):
    gate = torch.tensor([[-1e4, -100.0, -88.0, -20.0, 0.0, 20.0, 88.0, 100.0, 1e4, torch.inf]])
    found = kernels_of(torch.float32).silu_product(torch.cat((gate, torch.ones_like(gate)), 1))
    torch.testing.assert_close(found, torch.nn.functional.silu(gate), rtol=1e-6, atol=1e-33)


def attended(qkv, angles, norms, shape, far, own, window):
    """One step, row by row in float64; appends to `own`, a list of (key, value) `[kv heads, D]` for each row."""
    heads, both = shape.heads, shape.heads + shape.kv_heads
    qkv = qkv.double().view(len(qkv), -1, shape.dim)
    qk, v = qkv[:, :both], qkv[:, both:]
    if norms is not None:
        qk = torch.nn.functional.rms_norm(qk, (shape.dim,), None, shape.eps) * norms.double()
    cos, sin = (t.double().unsqueeze(1) for t in angles)
    qk = qk * cos + qk.roll(shape.dim // 2, -1) * sin
    out = []
    for row, (prompt, mine) in enumerate(zip(far.owner.tolist(), own, strict=True)):
        mine.append((qk[row, heads:].to(far.values.dtype).double(), v[row]))
        length = int(far.lengths[prompt])
        keys = far.keys[prompt].double().transpose(1, 2)[:, :length]
        keys = torch.cat((keys, torch.stack([k for k, _ in mine], 1)), 1)
        values = torch.cat((far.values[prompt, :, :length].double(), torch.stack([w for _, w in mine], 1)), 1)
        if window is not None:
            keys, values = keys[:, -window:], values[:, -window:]
        group = heads // shape.kv_heads
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = torch.einsum("hd,hkd->hk", qk[row, :heads], keys) * shape.scale
        if shape.cap is not None:
            scores = shape.cap * (scores / shape.cap).tanh()
        out.append(torch.einsum("hk,hkd->hd", scores.softmax(1), values).flatten())
    return torch.stack(out)


@pytest.mark.cases(12)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads, kv_heads, dim, cap, window, normed",
    [
        (9, 3, 64, None, None, False),
        (4, 2, 32, None, None, True),
        (8, 8, 20, 5.0, None, False),
        (14, 2, 16, None, 20, True),
        (11, 1, 48, 2.0, 3, False),
        (5, 1, 8, None, 37, False),
    ],
)
def test_attention_to_prompts_and_own_tokens(kernels_of, dtype, heads, kv_heads, dim, cap, window, normed):
    kernels, shape = kernels_of(dtype), Heads(heads, kv_heads, dim, dim**-0.5, cap, 1e-6)
    lengths, owner = torch.tensor([1, 17, 300, 40]), torch.tensor([0, 1, 1, 2, 2, 3])
    rows, longest, room = len(owner), int(lengths.max()), -(-int(lengths.max()) // 16) * 16
    keys = torch.zeros(len(lengths), kv_heads, dim, room, dtype=dtype)
    keys[..., :longest] = random(len(lengths), kv_heads, dim, longest, dtype=dtype)
    far = FarKeys(keys, random(len(lengths), kv_heads, longest, dim, dtype=dtype), lengths, owner)
    norms = random(heads + kv_heads, dim) if normed else None
    near, own = NearKeys(rows, shape, dtype), [[] for _ in range(rows)]
    for step in range(40):  # beyond the first capacity
        if step == 25:
            kept = torch.tensor([0, 2, 3, 5])
            near.keep(kept)
            own, owner = [own[row] for row in kept], owner[kept]
            far = far._replace(owner=owner)
        qkv = random(len(owner), (heads + 2 * kv_heads) * dim, dtype=dtype, seed=step)
        angle = random(len(owner), dim, seed=step)
        angles = angle.cos().to(dtype), angle.sin().to(dtype)
        found = kernels.attend(qkv, angles, norms, shape, far, near, window)
        close(found, attended(qkv, angles, norms, shape, far, own, window), dtype)
    assert near.used == 40 and near.keys.shape[2] == 64


def test_attention_is_the_same_with_two_threads():
    kernels, shape = decode_kernels(torch.float32, "cpu"), Heads(6, 2, 16, 0.25, None, 1e-6)
    far = FarKeys(random(2, 2, 16, 16), random(2, 2, 9, 16), torch.tensor([9, 4]), torch.tensor([0, 0, 1]))
    qkv, angles, before, found = random(3, 160), (random(3, 16), random(3, 16)), torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            near = NearKeys(3, shape, torch.float32)
            found.append(kernels.attend(qkv, angles, None, shape, far, near, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
