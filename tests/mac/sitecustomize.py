"""Python as it is on a Mac, as far as a program can see it: what only Linux has is taken away.

Python imports this file at its start where the folder is on PYTHONPATH, so that processes that are started from there
are on a Mac too. The platform is another one for mafrt only: other libraries are built for the machine that is there.
Names, files, functions of the C library and programs are gone for all. `MAFRT_SYSTEM` chooses `darwin` or `win32`.
"""

import ctypes
import os
import platform
import resource
import select
import shutil
import signal
import socket
import sys
import time
import types

SYSTEM = os.environ["MAFRT_SYSTEM"]
HIDDEN = ("/proc", "/sys", "/dev/shm", "/etc/os-release", "/etc/ld.so.cache")
PROGRAMS = ("bwrap", "nvidia-smi", "apt-get", "ldconfig", "lscpu", "nproc", "setsid", "taskset", "unshare")
NAMES = {
    os: (
        *("pidfd_open", "sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate", "memfd_create"),
        *("eventfd", "splice", "copy_file_range", "setns", "unshare", "waitid", "getrandom", "pipe2", "O_PATH"),
        *("O_TMPFILE", "O_DIRECT", "O_LARGEFILE", "setresuid", "getresuid", "setresgid", "getresgid"),
        *("sched_setscheduler", "fdatasync"),
    ),
    signal: (
        "pidfd_send_signal",
        "SIGRTMIN",
        "SIGRTMAX",
        "SIGPWR",
        "SIGSTKFLT",
        "SIGPOLL",
        "sigtimedwait",
        "sigwaitinfo",
    ),
    select: ("epoll",),
    resource: ("prlimit", "RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_RTPRIO", "RLIMIT_RTTIME", "RLIMIT_SIGPENDING"),
    socket: ("SOCK_CLOEXEC", "SOCK_NONBLOCK", "AF_NETLINK", "TCP_KEEPIDLE", "SO_PEERCRED", "TCP_QUICKACK"),
    time: ("CLOCK_BOOTTIME", "CLOCK_TAI", "pthread_getcpuclockid"),
}
FUNCTIONS = (
    "prctl",
    "mallopt",
    "malloc_trim",
    "gnu_get_libc_version",
    "unshare",
    "setns",
    "capset",
    "umount2",
    "clone",
)


def hidden(path: object) -> bool:
    if not isinstance(path, (str, bytes, os.PathLike)):
        return False
    text = os.fsdecode(path)
    if not any(text == place or text.startswith(f"{place}/") for place in HIDDEN):
        return False
    frame = sys._getframe()
    while frame is not None and not str(frame.f_globals.get("__name__", "")).startswith("psutil"):
        frame = frame.f_back
    return frame is None  # psutil is the one that is built for Linux, and would be another on a Mac


def by_mafrt(depth: int = 2) -> bool:
    """Whether mafrt asks, itself or through the standard library."""
    return str(sys._getframe(depth).f_globals.get("__name__", "")).partition(".")[0] in ("mafrt", "__main__")


class Interpreter(types.ModuleType):
    """`sys`, with the platform by who asks for it."""

    @property
    def platform(self) -> str:
        return SYSTEM if by_mafrt() else "linux"


def without(function):
    """A function of `os` for which the files are not there."""

    def called(path, *args, **kwargs):
        if hidden(path):
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *args, **kwargs)

    return called


def opened(event, args):
    if event in ("open", "os.listdir", "os.scandir") and hidden(args[0]):
        raise FileNotFoundError(2, "No such file or directory", args[0])


def symbol(library, name):
    if name in FUNCTIONS:
        raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
    return found_symbol(library, name)


def found_program(name, *args, **kwargs):
    return None if name in PROGRAMS else which(name, *args, **kwargs)


def limited(kind, limits):
    if kind == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")
    return setrlimit(kind, limits)


def usage(who):
    """The largest memory in bytes, where Linux counts kilobytes."""
    values = list(getrusage(who))
    values[2] *= 1024
    return resource.struct_rusage(values)


def pair(family=None, kind=socket.SOCK_STREAM, proto=0):
    if kind == socket.SOCK_SEQPACKET:
        raise OSError(43, "Protocol not supported")
    return socketpair(family, kind, proto)


sys.__class__ = Interpreter
asked_machine, found_symbol, which = platform.system, ctypes.CDLL.__getattr__, shutil.which
setrlimit, getrusage, socketpair = resource.setrlimit, resource.getrusage, socket.socketpair
machine = platform.machine
platform.system = lambda: {"darwin": "Darwin", "win32": "Windows"}[SYSTEM] if by_mafrt() else asked_machine()
platform.machine = lambda: "arm64" if by_mafrt() else machine()
platform.libc_ver = lambda *args, **kwargs: ("", "")
ctypes.CDLL.__getattr__ = symbol
shutil.which = found_program
resource.setrlimit, resource.getrusage, socket.socketpair = limited, usage, pair
os.stat, os.lstat, os.access, os.readlink = map(without, (os.stat, os.lstat, os.access, os.readlink))
for module, names in NAMES.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
sys.addaudithook(opened)
