"""Forked processes are as good as others: nothing of ours is in them yet, and they end as they should."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere no process is forked")
ABOUT = """
import json, os, sys
print(json.dumps([[m for m in sys.modules if m.startswith("trainplan")], "torch" in sys.modules, sys.argv, sys.path[:2],
                  os.getcwd(), os.environ["WORD"], sys.executable]))
sys.exit(7)
"""
SLEEPS = "import os, time\nprint(os.getpid())\ntime.sleep(60)"


def test_what_a_process_gets_from_the_one_that_starts_it(forked_python: str, tmp_path: Path) -> None:
    script = tmp_path / "about.py"
    script.write_text(ABOUT)
    done = subprocess.run(
        [forked_python, script, "one"], cwd=tmp_path, env={"WORD": "said", "PYTHONPATH": "elsewhere"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 7
    assert json.loads(done.stdout) == [
        [], True, [str(script), "one"], [str(tmp_path), "elsewhere"], str(tmp_path), "said", forked_python,
    ]  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_both(number: signal.Signals, forked_python: str, tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text(SLEEPS)
    heard = signal.getsignal(number)  # in the background of a shell SIGINT is passed over, by whoever is started there
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    process = subprocess.Popen(
        [forked_python, "-u", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    if number != signal.SIGKILL:
        signal.signal(number, heard)
    with process:
        assert process.stdout is not None
        forked = psutil.Process(int(process.stdout.readline()))
        process.send_signal(number)
        assert process.wait(20) == -number
    deadline = time.monotonic() + 20
    while forked.is_running() and forked.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not forked.is_running() or forked.status() == psutil.STATUS_ZOMBIE


def test_a_killed_process_is_said_to_be_killed(forked_python: str, tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text("import os\nos.kill(os.getpid(), 9)")
    assert subprocess.run([forked_python, script], check=False).returncode == -signal.SIGKILL
