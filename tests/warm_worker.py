"""An interpreter that begins with imports done: `SUFFIX -u ...` runs `python ...` in a fork of a warm server.

Usage: python warm_worker.py SUFFIX -u WORDS, with the socket of the server that holds torch in the environment. The
suffix is empty, or `.tests` for the server that holds the tests too. The fork reads and writes the streams of this
process, which waits for its end.
"""

import os
import signal
import sys
import tempfile
from pathlib import Path

from helpers_warm import ADDRESS, Server, WarmProcess

with tempfile.TemporaryDirectory() as folder:
    server = Server(Path(os.environ[ADDRESS] + sys.argv[1]))
    job = {"folder": folder, "argv": sys.argv[3:], "cwd": os.getcwd(), "env": dict(os.environ)}
    server.send(job, (0, 1, 2))
    process = WarmProcess(server, Path(folder))
    signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))
    code = process.wait()
sys.exit(code)
