"""Telling the rank that failed from those that only noticed.

When a rank dies, the others see a broken connection. Theirs are errors too, but the user wants the first: so a rank
that fails writes `rank-N.error`, and one that lost another `rank-N.lost`. A rank that was killed writes nothing:
whoever started it (torchrun, or `independent.py`) says which it was.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainplan.errors import RunError

_LOST = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe", "remote worker")


def is_lost(error: BaseException) -> bool:
    """Whether an error only says that another rank has gone."""
    cause: BaseException | None = error
    while cause is not None:
        if any(words in str(cause) for words in _LOST):
            return True
        cause = cause.__cause__
    return False


def failure(folder: Path, asked: str, code: int, said: Path) -> RunError:
    """What went wrong in a run whose torchrun ended with this code, and `said` this much.

    The traceback of the first to fail comes last.
    """
    raised = _raised(asked, folder.glob("rank-*.error"))
    if raised is not None:
        return raised
    lost = sorted(folder.glob("rank-*.lost"), key=lambda path: path.stat().st_mtime)
    log = said.read_text(errors="replace")
    noticed = "".join(f"\n{path.stem}: {_what_it_noticed(path)}" for path in lost)
    found = re.search(r"Root Cause.*?rank\s+: (\d+).*?exitcode\s+: (-?\d+)", log, re.DOTALL)
    if found:
        why = f"rank {found[1]} {how(int(found[2]))}; its log is {folder / f'rank-{found[1]}.log'}{noticed}"
        return RunError(
            asked, why, "a plan that needs less memory, if that was short; or --save-every 10 --max-restarts 1"
        )
    tail = "\n".join(log.strip().splitlines()[-15:])
    return RunError(asked, f"torchrun ended with code {code} and no rank left an error{noticed}\n{tail}")


def of_ranks(codes: Mapping[int, int], when: str, asked: str, instead: str, said: Path) -> RunError:
    """What went wrong in a run that these ranks, which ended with these codes, keep from going on. `said`: the log of
    those that had not opened one of their own."""
    folder = said.parent
    raised = _raised(asked, (folder / f"rank-{rank}.error" for rank in codes))
    if raised is not None:
        return raised
    killed = [rank for rank, code in codes.items() if code < 0]
    noticed = "".join(
        f"\nrank {rank}: {_what_it_noticed(path)}"
        for rank in codes if (path := folder / f"rank-{rank}.lost").exists()
    )  # fmt: skip
    first, *others = killed or codes
    also = f" ({len(others)} more with it)" if others else ""
    own = folder / f"rank-{first}.log"
    why = f"rank {first} {how(codes[first])}{also}, {when}; its log is {own if own.exists() else said}{noticed}"
    return RunError(asked, why, "" if noticed else instead)


def how(code: int) -> str:
    """How a process ended that did not end well.

    >>> how(-9), how(3)
    ('was killed (SIGKILL)', 'ended with code 3')
    """
    return f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"


def gone(folder: Path, said: Path) -> list[int]:
    """The ranks that a run has lost: killed, or ended without a word, as its torchrun has it.

    torchrun also names those that it ended because of them, which are still there. So are one that raised, which has
    said why, and one that only noticed.
    """
    log = said.read_text(errors="replace")
    rows = re.findall(r"rank\s+: (\d+) \(.*?exitcode\s+: (-?\d+) \(pid: (\d+)\)", log, re.DOTALL)
    ended = set(re.findall(r"Sending process (\d+) closing signal", log))
    spoke = {path.stem.removeprefix("rank-") for path in folder.glob("rank-*.error")}
    noticed = {path.stem.removeprefix("rank-") for path in folder.glob("rank-*.lost")}
    return sorted(
        int(rank)
        for rank, code, process in rows
        if process not in ended and rank not in spoke and (int(code) < 0 or rank not in noticed)
    )


def _raised(asked: str, files: Iterable[Path]) -> RunError | None:
    """What the first said of those that left an error; None: nobody did."""
    errors = sorted((path for path in files if path.exists()), key=lambda path: path.stat().st_mtime)
    if not errors:
        return None
    rank = errors[0].stem.removeprefix("rank-")
    others = f" ({len(errors) - 1} more after it)" if len(errors) > 1 else ""
    own = errors[0].with_suffix(".log")
    where = own if own.exists() else "on its own node"
    return RunError(asked, f"rank {rank} failed{others}; its log is {where}\n{errors[0].read_text()}")


def _what_it_noticed(path: Path) -> str:
    """The last line that says so; frames of the callback in which DDP noticed may follow it."""
    lines = path.read_text().strip().splitlines()
    said = [line.strip() for line in lines if any(words in line for words in _LOST)]
    return (said or lines)[-1]
