"""Estimated against measured on one device: how good a device file is for whole models.

    python benchmarks/estimates.py estimate --out benchmarks/data/estimates-gpu.json
    python benchmarks/estimates.py measure --device cuda:0 --for 280 --out benchmarks/data/estimates-gpu.json
    python benchmarks/estimates.py show --out benchmarks/data/estimates-gpu.json

`estimate` needs no device: each case is a step of one model at one batch size in one precision, predicted for the
device of a file (`--file`; without it, that of the package), with its memory. `measure` trains the same model by a
plain loop where the device is, no line of it ours, and notes seconds of a step and the peak of memory; cheapest first.
Hosts of machines that are shared take now as long and now half as long again, and small steps are bound by the host. So
beside each case it is read how many times as long the host takes as in the file; `adjust` estimates each case once more
with a host that is as slow as that, and both errors are told. All of them write after every case and do not do again
what is there, so they can be stopped (`--for` SECONDS) and started again; `--again` estimates anew, with another file
or another model of it. A case that does not fit or cannot be captured has its error. On a CPU (`--device cpu` for both)
there are a few small cases, in fp32.

What is known of the H200 was looked at by the cases that are usual here, so they are no test of it any more. `--cases
blind` are others: other batch sizes, depths, widths, sequences and images, each network in another precision.

    python benchmarks/estimates.py estimate --cases blind --out benchmarks/data/estimates-blind.json
    python benchmarks/estimates.py measure --device cuda:0 --for 500 --out benchmarks/data/estimates-blind.json
    python benchmarks/estimates.py adjust --out benchmarks/data/estimates-blind.json
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import trainplan
from trainplan import files
from trainplan.cluster import catalogue
from trainplan.errors import TrainplanError
from trainplan.profile.bounds import in_half
from trainplan.profile.device.file import DeviceFile, Issue
from trainplan.profile.device.issue import Lane, Pace
from trainplan.profile.device.model import Model
from trainplan.profile.estimate import estimate
from trainplan.profile.timing import DeviceClock, clock_of
from trainplan.units import percent, seconds
from trainplan.workload.batch import each_tensor
from trainplan.workload.load import load

ZOO = ("resnet18", "resnet50", "resnet152", "vgg11", "vgg16", "mobilenetv2")
GPT = "gpt:layers={},hidden={},heads={},seq={},vocab=50257"
USER = "benchmarks/networks.py:"
PRECISIONS = ("tf32", "bf16", "pure-bf16")  # the second is autocast's
WARM_UP, LEAST, MOST, TIMED_S = 3, 6, 40, 1.0  # steps, and seconds of them
HOST_BOUND = 0.9  # of a step's seconds, that the host takes to issue it
ESTIMATED = ("estimated_s", "estimated_bytes", "estimated_issue_s", "error")
BESIDE = 2  # readings of the host's pace before a case, and after it


@dataclass(frozen=True)
class Case:
    """A model at a batch size in a precision, estimated and measured."""

    workload: str
    samples: int
    precision: str
    estimated_s: float = 0.0
    estimated_bytes: int = 0  # allocated at the most, in later steps
    estimated_issue_s: float = 0.0  # of the host
    adjusted_s: float = 0.0  # estimated with the host's pace beside the measurement; 0: not yet
    measured_s: float = 0.0
    measured_bytes: int = 0
    issue_s: float = 0.0  # of the host, for a step that finds the device idle
    spread: float = 0.0  # between the halves of the measurement
    pace: float = 0.0  # times as long as in the device file that the host takes beside it; 0: it was not read
    error: str = ""  # why there is no number

    @property
    def key(self) -> tuple[str, int, str]:
        return self.workload, self.samples, self.precision

    @property
    def off(self) -> float:
        """Estimated over measured, less one."""
        return self.estimated_s / self.measured_s - 1

    @property
    def bytes_off(self) -> float:
        return self.estimated_bytes / self.measured_bytes - 1

    @property
    def adjusted_off(self) -> float:
        return self.adjusted_s / self.measured_s - 1

    @property
    def host_bound(self) -> bool:
        """By what is estimated, so that it does not depend on what the host did while it was measured."""
        return self.estimated_issue_s > HOST_BOUND * self.estimated_s


Wanted = tuple[str, tuple[int, ...], str]  # model, batch sizes, precision


def wanted(which: str) -> Iterator[Wanted]:
    """The cases of a list; precisions take turns over the models, so that each kind has several."""
    zoo, rest = LISTS[which]()
    for number, (name, sizes) in enumerate([*zoo, *rest]):
        # The second time that a network of the zoo comes, with other images, it is another one's turn. In another list
        # everybody has the next one's.
        turn = number + number // len(ZOO) + list(LISTS).index(which)
        yield name, sizes, "fp32" if which == "cpu" else PRECISIONS[turn % len(PRECISIONS)]


Sized = tuple[str, tuple[int, ...]]  # model, batch sizes
Listed = tuple[list[Sized], list[Sized]]  # of the zoo, and others


def _zoo(small: tuple[int, ...], large: tuple[int, ...]) -> list[Sized]:
    return [
        (f"{network}:{data}", sizes) for data, sizes in (("cifar10", small), ("imagenet", large)) for network in ZOO
    ]


def _usual() -> Listed:
    images, texts = (8, 32, 128), (2, 8, 32)
    return _zoo((32, 128, 512), images), [
        (GPT.format(12, 768, 12, 1024), (1, 4, 16)),
        (GPT.format(24, 1024, 16, 1024), (1, 4, 8)),
        (GPT.format(36, 1280, 20, 1024), (1, 2, 4)),
        *((f"{USER}llama,seq={seq}", (size,)) for seq, size in ((1024, 4), (2048, 2), (512, 16))),
        *((f"{USER}{name}", images) for name in ("vit", "convnext", "densenet")),
        *((f"{USER}{name}", texts) for name in ("bert", "t5")),
    ]


def _blind() -> Listed:
    llama = f"{USER}llama,layers=22,hidden=1792,heads=14"
    return _zoo((64, 256, 768), (16, 48, 96)), [
        (GPT.format(12, 768, 12, 512), (2, 6, 24)),
        (GPT.format(24, 1024, 16, 768), (2, 6, 10)),
        (GPT.format(36, 1280, 20, 512), (2, 4, 6)),
        *((f"{llama},seq={seq}", (size,)) for seq, size in ((768, 4), (1536, 3), (384, 12))),
        (f"{USER}vit,hidden=1024,heads=16,side=192", (16, 48, 96)),
        (f"{USER}convnext,width=128,side=192", (16, 48, 96)),
        (f"{USER}densenet,growth=48,side=192", (16, 48, 96)),
        (f"{USER}bert,layers=16,hidden=1024,heads=16,seq=256", (4, 12, 48)),
        (f"{USER}t5,layers=8,hidden=1024,heads=16,seq=384", (4, 12, 24)),
    ]


def _cpu() -> Listed:
    rest: list[Sized] = [("gpt:layers=4,hidden=256,heads=4,seq=128,vocab=1000", (1, 4))]
    return [(f"{network}:cifar10", (4, 16)) for network in ("resnet18", "vgg11", "mobilenetv2")], rest


LISTS: dict[str, Callable[[], Listed]] = {"usual": _usual, "blind": _blind, "cpu": _cpu}


def estimated(name: str, sizes: tuple[int, ...], precision: str, model: Model) -> Iterator[Case]:
    """The cases of one model, by what is known of the device."""
    device = catalogue.device(model.device)
    try:
        workload = in_half(load(name), "bf16" if precision == "pure-bf16" else precision)
        profile = estimate(
            workload, device, samples=sizes, precision="tf32" if precision == "tf32" else "fp32", model=model,
            autocast="bf16" if precision == "bf16" else "",
        )  # fmt: skip
    except TrainplanError as error:
        yield from (Case(name, size, precision, error=str(error)) for size in sizes)
        return
    for size in sizes:
        try:
            there = f"1x{model.device}" if model.device != "cpu" else "1xcpu"
            found = trainplan.predict(name, "single", there, batch=size, profile=profile).prediction
        except TrainplanError as error:
            yield Case(name, size, precision, error=str(error))
            continue
        taken = found.occupancy.later_steps.allocated if found.occupancy else found.peak_bytes
        issues = ("forward_issue_s", "backward_issue_s")
        issue = sum(profile.total(name, 0, len(profile.blocks), size) for name in issues)
        issue += sum(block.update_issue_s for block in profile.blocks)
        yield Case(name, size, precision, found.step_s, taken, issue)


def slower(file: DeviceFile, times: float) -> DeviceFile:
    """The same device with a host that takes so many times as long."""
    host = {family: Issue(one.forward_s * times, one.backward_s * times) for family, one in file.host.items()}
    return replace(file, host=host, update_op_s=file.update_op_s * times, update_tensor_s=file.update_tensor_s * times)


def pace_of(device: str, file: DeviceFile) -> Callable[[], float]:
    """What reads the host's pace against a file; where the host is the device, it is always 1."""
    if not device.startswith("cuda"):
        return lambda: 1.0
    at = torch.device(device)
    clock = clock_of(at)
    assert isinstance(clock, DeviceClock)
    pace = Pace(Lane(at, lambda: torch.cuda.synchronize(at), clock.hold), file.host)
    return lambda: statistics.median(pace.now() for _ in range(BESIDE))


def measured(case: Case, device: str, pace: Callable[[], float]) -> Case:
    """The same model trained by a plain loop."""
    backends: Any = torch.backends
    backends.cuda.matmul.fp32_precision = "tf32" if case.precision == "tf32" else "ieee"
    cuda = device.startswith("cuda")
    workload = in_half(load(case.workload), "bf16" if case.precision == "pure-bf16" else case.precision)
    with torch.device(device):
        model = workload.build().train()
    optimizer = workload.optimizer(list(model.named_parameters()))
    batch = each_tensor(workload.inputs(case.samples, 0), lambda tensor: tensor.to(device))
    cast = torch.autocast("cuda", dtype=torch.bfloat16) if case.precision == "bf16" else nullcontext()

    def step() -> None:
        with cast:
            loss = workload.loss.function(model(*batch.args, **batch.kwargs), batch.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    def timed(count: int) -> tuple[float, float]:
        """(a step, and until the last was issued) in seconds."""
        wait()
        start = time.perf_counter()
        for _ in range(count):
            step()
        issued = time.perf_counter() - start
        wait()
        return (time.perf_counter() - start) / count, issued / count

    for _ in range(WARM_UP):
        one, _ = timed(1)
    before = pace()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    count = max(LEAST, min(MOST, int(TIMED_S / one / 2)))
    halves = [timed(count)[0] for _ in range(2)]
    issue = statistics.median(timed(1)[1] for _ in range(3))
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    middle = statistics.mean(halves)
    return replace(
        case, measured_s=middle, measured_bytes=peak, issue_s=issue, spread=abs(halves[0] - halves[1]) / middle,
        pace=(before + pace()) / 2, adjusted_s=0.0,
    )  # fmt: skip


def said(rows: list[Case]) -> str:
    """The errors in words."""
    done = [row for row in rows if row.measured_s and row.estimated_s]
    lines = [
        f"{row.workload:<58} {row.samples:>4} {row.precision:<9} estimated {seconds(row.estimated_s):>9}  measured "
        f"{seconds(row.measured_s):>9}  {percent(row.off):>8}{'  host' if row.host_bound else ''}"
        for row in done
    ]
    for what, some in (
        ("all", done),
        ("device-bound", [row for row in done if not row.host_bound]),
        ("host-bound", [row for row in done if row.host_bound]),
    ):
        lines += _off(what, [(row.off, row) for row in some])
        lines += _off(f"{what}, at the host's pace", [(row.adjusted_off, row) for row in some if row.adjusted_s])
    lines += _off("memory", [(row.bytes_off, row) for row in done if row.measured_bytes])
    lines += [f"{row.workload} {row.samples} {row.precision}: {row.error}" for row in rows if row.error]
    return "\n".join(lines) or "nothing was measured"


def _off(what: str, some: list[tuple[float, Case]]) -> list[str]:
    """The middle and the worst of some errors, in words."""
    if not some:
        return []
    off, worst = max(some, key=lambda pair: abs(pair[0]))
    middle = statistics.median(abs(off) for off, _ in some)
    where = f"{worst.workload}, {worst.samples}, {worst.precision}"
    return [f"{what}: median {percent(middle)} over {len(some)} cases, worst {percent(off)} ({where})"]


class Rows:
    """The cases of a file, written after every change."""

    def __init__(self, path: str) -> None:
        self.path = path
        there = files.read(path, "estimates") if Path(path).is_file() else []
        self.rows = {row.key: row for row in (files.from_json(Case, row) for row in there)}

    def note(self, row: Case) -> None:
        self.rows[row.key] = row
        files.write(self.path, "estimates", files.to_json(list(self.rows.values())))
        state = row.error or (percent(row.off) if row.measured_s and row.estimated_s else "done")
        print(f"{row.workload} {row.samples} {row.precision}: {state}", file=sys.stderr, flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("estimate", "measure", "adjust", "show"))
    parser.add_argument("--out", required=True)
    parser.add_argument("--file", default="", help="of the device: trainplan device measure -o FILE")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--cases", choices=("usual", "blind"), default="usual", help="which to estimate")
    parser.add_argument("--for", dest="limit", type=float, default=float("inf"), help="seconds after which to stop")
    parser.add_argument("--first", type=int, default=None, help="only so many models, or cases")
    parser.add_argument("--again", action="store_true", help="estimate what is estimated already")
    asked = parser.parse_args()
    until = time.monotonic() + asked.limit
    found = Rows(asked.out)
    file = DeviceFile.load(asked.file) if asked.file else trainplan.device("show", "H200").file
    if asked.action == "estimate":
        model = Model(file)
        for name, sizes, precision in list(wanted("cpu" if asked.device == "cpu" else asked.cases))[: asked.first]:
            old = [found.rows.get((name, size, precision)) for size in sizes]
            if time.monotonic() > until or (not asked.again and all(row and row.estimated_s for row in old)):
                continue
            for row, before in zip(estimated(name, sizes, precision, model), old, strict=True):
                kept = before or row
                known = {name: getattr(row, name) for name in ESTIMATED}
                found.note(replace(kept, **known, adjusted_s=0.0))
    if asked.action == "measure":
        pace = pace_of(asked.device, file)
        left = [row for row in found.rows.values() if not row.measured_s and not row.error]
        for row in sorted(left, key=lambda row: row.estimated_s)[: asked.first]:
            if time.monotonic() > until:
                break
            try:
                found.note(measured(row, asked.device, pace))
            except (TrainplanError, RuntimeError) as error:  # out of memory, for one
                found.note(replace(row, error=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"))
            gc.collect()
            if asked.device.startswith("cuda"):
                torch.cuda.empty_cache()
    if asked.action == "adjust":
        for row in [row for row in found.rows.values() if row.pace and not row.adjusted_s][: asked.first]:
            if time.monotonic() > until:
                break
            there = Model(slower(file, row.pace))
            [anew] = estimated(row.workload, (row.samples,), row.precision, there)
            found.note(replace(row, adjusted_s=anew.estimated_s))
    print(said(list(found.rows.values())))


if __name__ == "__main__":
    main()
