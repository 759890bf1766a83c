"""An interpreter for pytest-xdist that begins with the tests imported: `-u -c CODE` runs in a fork of the warm server.

Usage: python warm_worker.py -u -c CODE, with the server's socket in the environment. The fork reads and writes the
streams of this process, which waits for its end.
"""

import os
import sys
import tempfile
from pathlib import Path

from helpers_warm import ADDRESS, Server, WarmProcess

with tempfile.TemporaryDirectory() as folder:
    server = Server(Path(os.environ[ADDRESS] + ".tests"))
    job = {"folder": folder, "argv": sys.argv[2:], "cwd": os.getcwd(), "env": dict(os.environ)}
    server.send(job, (0, 1, 2))
    code = WarmProcess(server, Path(folder)).wait()
sys.exit(code)
