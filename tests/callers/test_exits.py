"""The end of a process without the interpreter's own."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, logging, sys
from logging.handlers import MemoryHandler
from sensorium.callers.exits import end_process

class Slow:
    def __del__(self):
        print("taken apart")

kept = Slow()
atexit.register(print, "atexit")
logging.getLogger().addHandler(MemoryHandler(100, target=logging.StreamHandler(sys.stdout)))
logging.warning("held back")
print("out", end="")
end_process(3)
"""


def test_streams_logs_and_atexit_and_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "outatexit\nheld back\n", "")


def test_a_closed_stream_is_no_error() -> None:
    program = "import sys; from sensorium.callers.exits import end_process; sys.stdout.close(); end_process(0)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).stderr == b""


def test_the_command_line_and_the_engines_process_end_so() -> None:
    """Neither is taken apart: a module of theirs that is kept by a global would say so."""
    watch = "class Slow:\n    def __del__(self): print('taken apart')\nkept = Slow()\n"
    program = f"import sys; sys.argv = ['sensorium', 'list']\n{watch}from sensorium.__main__ import main\nmain()\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, "taken apart" in done.stdout, bool(done.stdout)) == (0, False, True)
    program = f"import sys\nfrom sensorium.engine.core import server\n{watch}"
    program += "server._end_with_parent = lambda *_: None\n"
    program += "server._Server = lambda *_: type('Ended', (), {'run': lambda self: print('served')})()\n"
    program += "server.Connection = server.Activity = server.Channel = lambda *_: sys.stdin\n"
    program += "sys.argv = ['', '3', '4']\nserver.main()\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "served\n")


def test_output_that_cannot_be_written_is_a_failure() -> None:
    program = "from sensorium.callers.exits import end_process; print('a'); end_process(0)"
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", program], stdout=full, check=False).returncode == 1
