"""Workers: started together, watched, and ended, whatever happens.

A worker is `python -m MODULE FOLDER RANK COUNT`. It reads `settings.json` in the folder, leaves `result-RANK.json`
there, and may append lines `SHARE WORDS` to `progress`. If it fails it leaves its traceback as `error-RANK.json`. Its
standard input is a pipe from us that carries nothing: when it closes, we are gone, and the worker ends too.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trainplan
from trainplan.errors import RunError

POLL_S = 0.02
_OTHERWISE = "a cluster of this machine's devices by name, such as 2xcpu, which needs no probing"
GRACE_S = 0.5  # after a first failure, for the others to tell theirs: the earliest is the cause
TAIL = 4000  # characters of a worker's output that an error shows

Progress = Callable[[str, float], None]
Place = Callable[[int, int], contextlib.AbstractContextManager[None]]  # (rank, of so many) → where it is started


def run_workers(
    module: str,
    count: int,
    settings: dict[str, Any],
    *,
    timeout_s: float,
    threads: int = 1,
    progress: Progress | None = None,
    place: Place | None = None,
) -> list[Any]:
    """Run `count` workers of a module and return what each left, by rank. Each is started inside its `place`.

    Raises RunError with the traceback of the worker that failed first, or says which one was killed or hung. No
    worker outlives this call.
    """
    folder = Path(tempfile.mkdtemp(prefix="trainplan-probe-"))
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            with place(rank, count) if place else contextlib.nullcontext():
                workers.append(_start(module, rank, count, folder, threads))
        _watch(workers, folder, timeout_s, progress)
        return [json.loads((folder / f"result-{rank}.json").read_text(encoding="utf-8")) for rank in range(count)]
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.wait()
            if worker.stdin:
                with contextlib.suppress(OSError):
                    worker.stdin.close()
        shutil.rmtree(folder, ignore_errors=True)


def _start(module: str, rank: int, count: int, folder: Path, threads: int) -> subprocess.Popen[bytes]:
    root = str(Path(trainplan.__file__).resolve().parent.parent)
    known = os.environ.get("PYTHONPATH")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([root, known] if known else [root]),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
    }
    if sys.platform.startswith("linux"):
        # All are on this machine; a host name that does not resolve must not stop us.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with open(folder / f"output-{rank}", "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(folder), str(rank), str(count)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
        )


def _watch(workers: list[subprocess.Popen[bytes]], folder: Path, timeout_s: float, progress: Progress | None) -> None:
    """Return when all have ended well; raise when one has not, or when time is up."""
    deadline = time.monotonic() + timeout_s
    told = 0
    while True:
        codes = [worker.poll() for worker in workers]
        told = _tell(folder / "progress", told, progress)
        if any(code not in (None, 0) for code in codes):
            time.sleep(GRACE_S)
            raise _failure([worker.poll() for worker in workers], folder)
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            waiting = [rank for rank, code in enumerate(codes) if code is None]
            why = f"worker {waiting[0]} of {len(workers)} was not done after {timeout_s:.0f} s"
            why += _tail(folder, waiting[0])
            raise RunError("probing this machine", why, "fewer workers, or a machine that is less busy")
        time.sleep(POLL_S)


def _failure(codes: list[int | None], folder: Path) -> RunError:
    """The error of the worker that failed first: the others mostly tell that their connection to it broke."""
    killed = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
    if killed:
        name = signal.Signals(-codes[killed[0]]).name  # type: ignore[operator]
        why = f"worker {killed[0]} of {len(codes)} was killed by {name}{_tail(folder, killed[0])}"
        return RunError("probing this machine", why, "fewer workers, if memory was short")
    errors = []
    for rank in range(len(codes)):
        path = folder / f"error-{rank}.json"
        if path.is_file():
            errors.append((json.loads(path.read_text(encoding="utf-8")), rank))
    if errors:
        error, rank = min(errors, key=lambda item: item[0]["time"])
        if "said" in error:  # an error of our own, which needs no traceback
            return RunError(*error["said"])
        why = f"worker {rank} of {len(codes)} failed:\n{error['traceback'].rstrip()}"
        return RunError("probing this machine", why, _OTHERWISE)
    rank = next(rank for rank, code in enumerate(codes) if code)
    why = f"worker {rank} of {len(codes)} ended with code {codes[rank]}{_tail(folder, rank)}"
    return RunError("probing this machine", why, _OTHERWISE)


def _tail(folder: Path, rank: int) -> str:
    path = folder / f"output-{rank}"
    text = path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""
    return f"; its last words:\n{text[-TAIL:]}" if text else ""


def _tell(path: Path, told: int, progress: Progress | None) -> int:
    """Hand new lines of the progress file on; returns how many were told so far."""
    if progress is None or not path.is_file():
        return told
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for line in lines[told:]:
        if not line.endswith("\n"):
            break  # still being written
        share, _, words = line.strip().partition(" ")
        progress(words, float(share))
        told += 1
    return told
