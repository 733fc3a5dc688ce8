"""One worker of the probe: a process that measures in rounds, in step with the others.

Timings drift by tens of percent within a minute on shared machines. So nothing is measured in one go: a round measures
everything of a phase once, rounds follow each other until the time is used up, and medians are taken over rounds.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainplan.cluster.probe import compute, machine, messages, overlap
from trainplan.cluster.probe.team import Round, Team
from trainplan.errors import RunError, TrainplanError


@dataclass(frozen=True)
class Phase:
    """Something that is measured in rounds."""

    words: str
    share: float  # of the time
    prepare: Callable[[Team, bool], Round]
    alone: bool = False  # one worker can measure it, too


PHASES = (
    Phase("products and copies", 0.15, compute.prepare, alone=True),
    Phase("messages and collectives", 0.45, messages.prepare),
    Phase("compute beside communication", 0.40, overlap.prepare),
)


def work(folder: Path, rank: int, count: int, phases: Sequence[Phase]) -> dict[str, Any]:
    """Join the others, measure, and return all samples by quantity."""
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    torch.set_num_threads(settings["threads"])
    device = _device(settings["device"], rank)
    control = None
    if count > 1:
        store = dist.FileStore(str(folder / "store"), count)
        limit = timedelta(seconds=settings["timeout_s"])
        dist.init_process_group(settings["backend"], store=store, rank=rank, world_size=count, timeout=limit)
        gloo = settings["backend"] == "gloo"
        control = dist.group.WORLD if gloo else dist.new_group(backend="gloo", timeout=limit)
    team = Team(rank, count, device, settings["backend"], control)
    samples: defaultdict[str, list[Any]] = defaultdict(list)
    done = 0.0
    for phase in (phase for phase in phases if count > 1 or phase.alone):
        seconds = settings["seconds"] * phase.share
        started = time.perf_counter()
        one_round = phase.prepare(team, settings["quick"])
        one_round(lambda name, sample: None)  # the first one warms up
        rounds = _rounds(team, one_round, samples, started + seconds, settings["least_rounds"])
        samples["rounds"].append(rounds)
        done += phase.share
        if rank == 0:
            _tell(folder, min(done, 1.0), phase.words)
    team.barrier()
    if count > 1:
        dist.destroy_process_group()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    sharers = -(-count // torch.cuda.device_count()) if device.type == "cuda" else 1
    seen = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
    return {
        "samples": samples, "device": name, "sharers": sharers, "torch": torch.__version__, "processors": seen,
        "network": machine.network(),
    }  # fmt: skip


def _rounds(team: Team, one_round: Round, samples: dict[str, list[Any]], until: float, least: int) -> int:
    """Rounds until the time is used up, at least so many; rank 0 decides for all. Returns how many."""
    rounds = 0
    while True:
        started = time.perf_counter()
        one_round(lambda name, sample: samples[name].append(sample))
        rounds += 1
        now = time.perf_counter()
        more = rounds < least or now + (now - started) < until
        if not team.agree(float(more)):
            return rounds


def _device(kind: str, rank: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RunError("device cuda", f"torch {torch.__version__} sees no CUDA device here", "device cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _tell(folder: Path, share: float, words: str) -> None:
    with open(folder / "progress", "a", encoding="utf-8") as stream:
        stream.write(f"{share:.2f} {words}\n")


def _write(path: Path, content: Any) -> None:
    """Whole or not at all: the launcher may look at any moment."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    os.replace(partial, path)


def _end_with_the_launcher() -> None:
    """End this process when the launcher is gone and its end of our standard input closes."""
    while os.read(0, 1):
        pass
    os._exit(3)


def main(folder: Path, rank: int, count: int, phases: Sequence[Phase] = PHASES) -> None:
    """Measure these phases as one of so many workers."""
    threading.Thread(target=_end_with_the_launcher, daemon=True).start()
    try:
        result = work(folder, rank, count, phases)
    except BaseException as error:
        told: dict[str, Any] = {"time": time.time(), "traceback": traceback.format_exc()}
        if isinstance(error, TrainplanError):
            told["said"] = [error.asked, error.why, error.instead]
        _write(folder / f"error-{rank}.json", told)
        # At once: the others wait for us, and a process group in trouble may hang while it is taken down.
        os._exit(1)
    _write(folder / f"result-{rank}.json", result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
