"""The check that no test leaves a thread in another scheduling class."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import clips
import pytest
import scheduling

HELPERS = Path(scheduling.__file__).parent
if not hasattr(os, "sched_setscheduler"):
    pytest.skip("this system has no scheduling classes", allow_module_level=True)


def test_a_thread_in_another_class_is_reported_once_and_set_back() -> None:
    ready, done, inside = threading.Event(), threading.Event(), []

    def work() -> None:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        inside.append(threading.get_native_id())
        ready.set()
        done.wait(60)
        inside.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(60)
    assert scheduling.threads_changed() == {inside[0]: os.SCHED_BATCH}
    assert scheduling.threads_changed() == {}
    done.set()
    thread.join()
    assert inside[1] == os.SCHED_OTHER


CHANGE = "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))"
IN_TEST = f"import os\ndef test_it():\n    {CHANGE}\n"
IN_FIXTURE = (
    f"import os, pytest\n@pytest.fixture(scope='session')\ndef f():\n    yield\n    {CHANGE}\ndef test_it(f):\n    pass\n"
)


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        pytest.param("def test_it():\n    pass\n", 0, "1 passed", marks=pytest.mark.full),
        pytest.param(IN_TEST, 1, "test_it", marks=pytest.mark.full),
        (IN_FIXTURE, 1, "threads are left in other scheduling classes"),
    ],
)
def test_a_run_with_such_a_test_fails(tmp_path: Path, text: str, code: int, said: str) -> None:
    (tmp_path / "test_made.py").write_text(text)
    env = os.environ | {"PYTHONPATH": str(HELPERS)}
    command = [sys.executable, "-m", "pytest", "-p", "scheduling", "-p", "no:cacheprovider", "-c", os.devnull, "test_made.py"]
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == code, run.stdout
    assert said in run.stdout


@pytest.mark.parametrize("name", clips.CLIPS)
def test_encoders_of_the_made_clips_keep_the_class(name: str) -> None:
    assert len(clips.encode(*clips.CLIPS[name], count=3)) > 200
    assert scheduling.threads_changed() == {}
