"""The C kernels, compiled by the machine's own compiler when they are first needed, and kept in the user's cache.

A wheel could hold one processor's instructions only, and building it would need a compiler on every machine; here each
machine compiles for itself, once, in 10 to 20 seconds. Without a compiler, or where its library does not load, all is
computed by torch: slower, with the same results up to rounding.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import grp
import hashlib
import logging
import os
import platform
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt.core.atomic_files import fsync
from mafrt.core.errors import ConfigError
from mafrt.core.shipped import user_cache
from mafrt.core.threads import cores

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

SWITCH = "MAFRT_KERNELS"
"""Environment variable; `torch` leaves the kernels out, `c` asks for them where a run was recorded without."""
SOURCE = Path(__file__).with_name("source")
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-ffp-contract=fast", "-fPIC", "-shared")
"""No flag lets the compiler change the order of sums, so that equal inputs give equal bits wherever it is compiled for
the same processor."""
NARROW_FLAGS = ("-fno-gcse", "-fno-gcse-after-reload")
"""Where the 16 numbers of a vector are several of the processor's, two passes of GCC over what that becomes took two
thirds of the time to compile, 81 s of a core instead of 32 (AMD EPYC without AVX-512), and made no kernel faster."""
THREADS_FLAG = "-fopenmp"
"""The library of threads has torch's name, so that the loader gives both the same one."""
COMPILE_S = 600
LARGEST, ROOM = 1 << 26, 1 << 20
"""bytes of a library, and free ones below which a compiler's failure is the disk's"""


@cache
def library() -> ctypes.CDLL | None:
    """The loaded kernels; None where there are none, with the reason in the log."""
    if os.environ.get(SWITCH, "") == "torch" or not tried():
        return None
    compiler = find_compiler()
    if compiler is None:
        log.info("no C compiler was found, so products and decoding are torch's: slower, with the same results")
        return None
    import torch  # noqa: F401  # its library of threads has to be there first

    try:
        return _loaded(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        printed = getattr(error, "stderr", None) or b""
        why = printed.decode("utf-8", "replace").strip().rpartition("\n")[2] or error
        log.warning("the C kernels could not be compiled (%s), so products and decoding are torch's", why)
        return None


def functions_of(arguments: Mapping[str, Sequence[Any]]) -> dict[str, Any] | None:
    """Functions of the library that return nothing, by name, with the types of their arguments; None without them."""
    lib = library()
    if lib is None or not all(hasattr(lib, name) for name in arguments):
        return None
    functions = {name: getattr(lib, name) for name in arguments}
    for name, function in functions.items():
        function.argtypes, function.restype = list(arguments[name]), None
    return functions


def tried() -> bool:
    """Whether the kernels have been run on such a system. On a Mac torch has Apple's own library of products."""
    return sys.platform == "linux"


def name() -> str:
    """The kernels of this machine's CPU, for the record of a run: `c` or `torch`."""
    return "torch" if library() is None else "c"


def expected() -> bool:
    """Whether a run on this CPU is going to have the kernels, as far as that can be told without compiling them."""
    return os.environ.get(SWITCH, "") != "torch" and tried() and find_compiler() is not None


@cache
def wide() -> bool:
    """Whether the processor has AVX-512.

    Without it the kernels multiply float32 numbers no faster than torch does, and an update of the sudoku team took 1.6
    times as long with them (AMD EPYC without AVX-512). In decoding they are ahead all the same: 808 tokens/s where
    torch has 526 (`mafrt bench rollout --adapters 4 --rows 4`). In bfloat16, which such a processor has to emulate,
    they are faster in both.
    """
    return any(line.startswith("flags") and " avx512f" in line for line in _processor())


def pays(dtype: torch.dtype) -> bool:
    """Whether a base in this number format learns by the kernels, too; `MAFRT_KERNELS=c` asks for them anyway."""
    return str(dtype) == "torch.bfloat16" or wide() or os.environ.get(SWITCH) == "c"


def use_torch() -> bool:
    """Leave the kernels out, here and in processes started from here; False: too late, they are loaded."""
    if library.cache_info().currsize and library() is not None:
        return False
    os.environ[SWITCH] = "torch"
    return True


def find_compiler() -> str | None:
    """The machine's C compiler."""
    return shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")


def _loaded(compiler: str) -> ctypes.CDLL:
    """The library in the user's cache, made if it is not there whole; without a safe cache, made for this process.

    Raises:
        OSError: nothing can be written anywhere, or the library does not load.
        subprocess.SubprocessError: the compiler fails or takes too long.
    """
    try:
        folder = user_cache() / "kernels"
        # One by one, since `parents` gives the folders above what the umask allows, which may be everyone.
        for place in (folder.parent, folder):
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
        if _is_ours(folder) and not any(_is_open(parent) for parent in folder.resolve().parents):
            return _compiled(compiler, folder)
        why = f"{folder}, or a folder above it, is not one that this user alone may write to"
    except (OSError, ConfigError) as error:
        why = str(error)
    log.warning(
        "the C kernels are compiled for this process only: %s; give the cache to this user (chown, chmod 700), or name "
        "another place in XDG_CACHE_HOME", why,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as private:
        return _compiled(compiler, Path(private))


def _is_ours(path: Path) -> bool:
    """Whether a file or folder belongs to this user, and no other user may write to it."""
    about = path.stat()
    return about.st_uid == os.getuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_open(folder: Path) -> bool:
    """Whether another user may put another folder in the place of one in it: its owner, its group, or anyone."""
    about = folder.stat()
    if about.st_uid not in (0, os.getuid()):
        return True
    # With an access control list the bits of the group are those of everyone whom it names.
    alone = _is_private(about.st_gid) and not _has_list(folder)
    shared = about.st_mode & stat.S_IWOTH or (about.st_mode & stat.S_IWGRP and not alone)
    return bool(shared) and not about.st_mode & stat.S_ISVTX


def _has_list(folder: Path) -> bool:
    """Whether a folder has an access control list; a Mac keeps none among these attributes."""
    try:
        return hasattr(os, "listxattr") and "system.posix_acl_access" in os.listxattr(folder)
    except OSError:  # a file system without them
        return False


def _is_private(group: int) -> bool:
    """Whether a group is that of root, or of this user alone, as many systems make one for each user."""
    try:
        members, about = grp.getgrgid(group), pwd.getpwuid(os.getuid())
    except KeyError:
        return group == 0
    return group == 0 or (group == about.pw_gid and members.gr_name == about.pw_name and not members.gr_mem)


def _is_whole(path: Path) -> bool:
    """Whether a library is this user's and ends with the hash of all before it; a cut one ends the process (SIGBUS).

    The hash is no signature: who may write here as this user may run anything as this user.
    """
    try:
        if path.is_symlink() or not path.is_file() or not _is_ours(path):
            return False
        if path.stat().st_size > LARGEST:
            return False
        data = path.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return hashlib.sha256(data[:-size]).digest() == data[-size:]


def _compiled(compiler: str, folder: Path) -> ctypes.CDLL:
    """The library in a folder, made if it is not there whole, or does not load. Errors as of `_loaded`.

    Of processes that start together one compiles and the others wait for it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle)
        return _made(compiler, folder)
    finally:
        os.close(handle)


def _lock(handle: int) -> None:
    """Wait for the lock of a folder, but not for one who stands still, nor where there are no locks: each compiles."""
    until = time.monotonic() + COMPILE_S
    while time.monotonic() < until:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:
            return


def _made(compiler: str, folder: Path) -> ctypes.CDLL:
    target = folder / f"{_fingerprint(compiler)}.so"
    if _is_whole(target):
        try:
            return ctypes.CDLL(str(target))
        except OSError as error:
            log.warning("the C kernels are compiled again: %s", error)
    for left in folder.glob("tmp*"):  # of a compilation that was killed
        if not left.is_symlink() and left.is_dir() and time.time() - left.stat().st_mtime > 2 * COMPILE_S:
            shutil.rmtree(left, ignore_errors=True)
    flags = _flags()
    with tempfile.TemporaryDirectory(dir=folder) as made:
        out = Path(made) / "kernels.so"
        try:
            _build([compiler, *flags, THREADS_FLAG], out)
            ctypes.CDLL(str(out))
        except (subprocess.CalledProcessError, OSError):  # a compiler without OpenMP, or without its library
            out.unlink(missing_ok=True)
            try:
                _build([compiler, *flags], out)
            except subprocess.CalledProcessError:
                if shutil.disk_usage(folder).free < ROOM:  # another place may have it
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from None
                raise
        # The loader passes over what follows the parts that an ELF file names. Another file, since this one is loaded.
        whole, sealed = out.read_bytes(), Path(made) / "sealed.so"
        sealed.write_bytes(whole + hashlib.sha256(whole).digest())
        sealed.chmod(0o700)
        fsync(sealed)
        if target.is_dir() and not target.is_symlink():
            target.rmdir()
        # By one rename: another process either finds nothing or all of it.
        os.replace(sealed, target)
        fsync(folder)
    return ctypes.CDLL(str(target))


def _flags() -> tuple[str, ...]:
    return FLAGS if wide() else (*FLAGS, *NARROW_FLAGS)


def _build(command: list[str], out: Path) -> None:
    """Compile the sources side by side, and link them. Raises SubprocessError."""

    def run(*arguments: str) -> None:
        subprocess.run([*command, *arguments], capture_output=True, timeout=COMPILE_S, check=True)

    sources = sorted(SOURCE.glob("*.c"))
    objects = [str(out.with_name(f"{source.stem}.o")) for source in sources]
    with ThreadPoolExecutor(min(cores(), len(sources))) as pool:
        list(pool.map(lambda source, made: run("-c", str(source), "-o", made), sources, objects))
    run(*objects, "-lm", "-o", str(out))


def _fingerprint(compiler: str) -> str:
    """Of all that the compiled library depends on: sources, flags, compiler and processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=COMPILE_S, check=True).stdout
    digest = hashlib.sha256(version)
    for path in sorted(SOURCE.iterdir()):
        if path.suffix in (".c", ".h"):
            digest.update(path.name.encode() + path.read_bytes())
    digest.update(repr((_flags(), THREADS_FLAG, platform.machine(), _processor())).encode())
    return digest.hexdigest()[:24]


def _processor() -> list[str]:
    """Model and instructions of the first processor, as the kernel names them; empty where it says nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return [platform.processor()]
    return [line for line in lines if line.startswith(("model", "cpu family", "vendor_id", "flags", "Features"))]
