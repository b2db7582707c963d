"""Files of a folder appear whole or not at all, and a process that is killed leaves nothing of them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sensorium.engine.connectors import disk
from sensorium.engine.connectors.disk import DiskConnector
from sensorium.mm.hashing import digest

KEY = f"{digest('namespace')}/{digest('name')}.0"
KILLED = f"""
import os, signal, sys
from sensorium.engine.connectors import disk
disk._name_file = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
disk.DiskConnector(sys.argv[1], 1 << 20).put({KEY!r}, b"data")
"""


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_process_that_is_killed_while_it_writes_leaves_no_file(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert result.returncode == -9
    assert list(tmp_path.iterdir())
    assert not files_of(tmp_path)


@pytest.mark.parametrize("knows_unnamed_files", [True, False])
def test_a_file_is_replaced(knows_unnamed_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connector, flags = DiskConnector(tmp_path, 1 << 20), list[int]()
    open_file = os.open

    def opened(path: str, flag: int, *arguments: int) -> int:
        flags.append(flag)
        if flag & os.O_TMPFILE == os.O_TMPFILE and not knows_unnamed_files:
            raise OSError(errno.EOPNOTSUPP, "no unnamed files here")
        return open_file(path, flag, *arguments)

    monkeypatch.setattr(disk.os, "open", opened)
    for data in (b"first", b"second, longer"):
        assert connector.put(KEY, data)
        assert connector.get(KEY, 100) == data
    assert any(flag & os.O_TMPFILE == os.O_TMPFILE for flag in flags)
    assert files_of(tmp_path) == [connector.file(KEY)]
    assert connector.file(KEY).stat().st_mode & 0o777 == 0o600


def test_the_capacity_counts_the_files_of_all_writers(tmp_path: Path) -> None:
    """Four ranks of each of two engines write by turns, and none sees at once what the others have written."""
    writers = [DiskConnector(tmp_path, 100_000, writers=4) for _ in range(8)]
    for number in range(400):
        writers[number % 8].put(f"{digest(number % 8)}/{digest(number)}", bytes(1000))
        assert sum(path.stat().st_size for path in files_of(tmp_path)) <= 100_000
