"""The folder of a checkpoint: what lies in it, whether it is whole, and which of several is the latest.

checkpoint/
  trainplan.json       what it is of, the step, the seed, the place in the data, and the sizes of all files
  training.pt          groups (names of their parameters, and their settings) and the scheduler's state
  .metadata, *.distcp  the tensors
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from trainplan import files
from trainplan.amounts import believable
from trainplan.errors import InputError

ABOUT, TRAINING = "trainplan.json", "training.pt"


@dataclass(frozen=True)
class About:
    """What a checkpoint says of itself."""

    workload: str
    plan: str
    optimizer: str  # the name of its class
    scheduler: str  # "": none
    step: int  # steps that are done
    seed: int
    place: dict[str, Any]  # in the data: what `Trainer.place` was
    files: dict[str, int] = field(default_factory=dict)  # name → bytes, of all files but this one


def old_place(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def put_back(path: Path) -> None:
    """The checkpoint that stood here, should somebody have been killed between the two renames of `save`."""
    if not path.exists() and old_place(path).exists():
        os.replace(old_place(path), path)
    shutil.rmtree(old_place(path), ignore_errors=True)


def read_about(path: Path) -> About:
    """What a checkpoint says of itself, if all its files are there."""
    if not (path / ABOUT).is_file():
        why = f"there is no {ABOUT} in it, so it is not one of trainplan's" if path.is_dir() else "it is not there"
        raise InputError(f"checkpoint {path}", f"it cannot be read: {why}", _neighbour(path))
    where = f"checkpoint {path}"
    about = files.from_json(About, files.read(path / ABOUT, "checkpoint"), where)
    believable(about, where, "checkpoint", free=("place",))
    for name, size in about.files.items():
        found = (path / name).stat().st_size if (path / name).is_file() else 0
        if found != size:
            raise broken(path, f"{name} has {found:,} of {size:,} bytes")
    return about


def latest(folder: Path, since: float = 0.0) -> Path | None:
    """The checkpoint with the most steps among those that a run left in its folder, `since` a time.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("checkpoint-8", "checkpoint-12", ".checkpoint-16.partial"):
    ...     (folder / name).mkdir()
    ...     (folder / name / "trainplan.json").touch()
    >>> latest(folder).name, latest(folder, since=1e12)
    ('checkpoint-12', None)
    """
    found = [
        path
        for path in folder.glob("checkpoint-*")
        if re.fullmatch(r"checkpoint-\d+", path.name)
        and (path / ABOUT).is_file()
        and (path / ABOUT).stat().st_mtime >= since
    ]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _neighbour(path: Path) -> str:
    """Another checkpoint that may have been meant."""
    folders = [folder for folder in (path, path.parent) if folder.is_dir()]
    return next((str(found) for folder in folders if (found := latest(folder))), "a folder that trainplan saved")


def broken(path: Path, why: str) -> InputError:
    return InputError(f"checkpoint {path}", f"it is broken: {why}", "the checkpoint before it")


def saved_tensors(path: Path) -> dict[str, Any]:
    try:
        return dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata
    except Exception as error:  # whatever unpickling a broken file raises
        raise broken(path, f"the table of its tensors cannot be read ({line_of(error)})") from None


def line_of(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]:.200}" if text else type(error).__name__


def reason(error: CheckpointException) -> str:
    """What the first rank that failed said."""
    rank, (first, _) = min(error.failures.items(), key=lambda item: item[0])
    return f"rank {rank}: {line_of(first)}"


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's remark that a run of one process is one of one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
