"""Estimated against measured on one device of this machine: how good a device file is for whole models.

    python benchmarks/estimates.py --file core.json --device cpu --out benchmarks/data/estimates-cpu.json
    python benchmarks/estimates.py --file H200.json --device cuda:0 --for 280 --out benchmarks/data/estimates-gpu.json

Each case is estimated first, by the file alone, and then measured block by block and in one piece. Rows are written
after every case, and cases that are in the file already are not done again, so it can be stopped (`--for` SECONDS) and
started again. A case that does not fit or cannot be captured is a row with its error.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from trainplan import files
from trainplan.cluster import catalogue
from trainplan.cluster.cluster import Device
from trainplan.errors import TrainplanError
from trainplan.profile.device.file import DeviceFile
from trainplan.profile.device.model import Model
from trainplan.profile.estimate import estimate
from trainplan.profile.gap import two_lanes
from trainplan.profile.measure import measure
from trainplan.profile.profile import Profile
from trainplan.units import percent
from trainplan.workload.load import load

ZOO = ("resnet18", "resnet50", "resnet152", "vgg11", "vgg16", "mobilenetv2")
GPT = "gpt:layers={},hidden={},heads={},seq=1024,vocab=50257"
LARGE = {
    **{f"{network}:cifar10": (32, 128, 512) for network in ZOO},
    **{f"{network}:imagenet": (8, 32, 128) for network in ZOO},
    GPT.format(12, 768, 12): (1, 4, 16),
    GPT.format(24, 1024, 16): (1, 4, 8),
    GPT.format(36, 1280, 20): (1, 2, 4),
}
SMALL = {f"{network}:cifar10": (4, 16) for network in ZOO if network != "resnet152"} | {
    "gpt:layers=4,hidden=256,heads=4,seq=128,vocab=1000": (1, 4)
}


@dataclass(frozen=True)
class Case:
    """A model at a micro-batch size, estimated and measured."""

    workload: str
    samples: int
    estimated_s: dict[str, float] = field(default_factory=dict)  # forward, backward, update: of both lanes
    measured_s: dict[str, float] = field(default_factory=dict)
    host_bound: bool = False  # as measured: issuing takes longer than running
    spread: float = 0.0
    error: str = ""  # why there is no measurement

    @property
    def off(self) -> float:
        """Estimated over measured, of the whole step, less one."""
        return sum(self.estimated_s.values()) / sum(self.measured_s.values()) - 1


def lanes(profile: Profile) -> dict[str, list[tuple[float, float]]]:
    """(run, issue) of every block in every pass."""
    blocks = profile.blocks
    return {
        "forward": [(b.forward_s[0], b.forward_issue_s[0]) for b in blocks],
        "backward": [(b.backward_s[0], b.backward_issue_s[0]) for b in reversed(blocks)],
        "update": [(b.update_s, b.update_issue_s) for b in blocks],
    }


def one(name: str, samples: int, model: Model, target: Device, device: str, seconds: float) -> Case:
    """Estimate a case, then measure it."""
    try:
        workload = load(name, batch=samples)
        guess = lanes(estimate(workload, target, samples=[samples], model=model))
        truth = measure(workload, device=device, samples=[samples], seconds=seconds, verify=False)
    except TrainplanError as error:
        return Case(name, samples, error=str(error))
    found = lanes(truth)
    wholes = [w for w in truth.whole if w.samples == samples]
    if wholes:
        measured = {what: getattr(wholes[0], f"{what}_s") for what in found}
    else:
        measured = {what: two_lanes(work) for what, work in found.items()}
    run, issue = (sum(pair[lane] for work in found.values() for pair in work) for lane in (0, 1))
    return Case(
        name, samples, {what: two_lanes(work) for what, work in guess.items()}, measured, issue > run,
        truth.provenance.spread,
    )  # fmt: skip


def said(rows: list[Case]) -> str:
    """The errors in words."""
    lines = []
    for what, some in (
        ("device-bound", [r for r in rows if r.measured_s and not r.host_bound]),
        ("host-bound", [r for r in rows if r.measured_s and r.host_bound]),
    ):
        if some:
            worst = max(some, key=lambda row: abs(row.off))
            middle = statistics.median(abs(row.off) for row in some)
            lines.append(
                f"{what}: median {percent(middle)} over {len(some)} cases, worst {percent(worst.off)} "
                f"({worst.workload}, {worst.samples})"
            )
    return "\n".join(lines) or "nothing was measured"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", required=True, help="of the device: trainplan device measure -o FILE")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", required=True)
    parser.add_argument("--for", dest="limit", type=float, default=float("inf"), help="seconds after which to stop")
    parser.add_argument("--seconds", type=float, default=4.0, help="of measuring a case")
    parser.add_argument("--first", type=int, default=None, help="only so many cases")
    asked = parser.parse_args()
    started = time.monotonic()
    model = Model(DeviceFile.load(asked.file))
    target = catalogue.device(model.device)
    rows: list[Case] = []
    if Path(asked.out).is_file():
        rows = [files.from_json(Case, row) for row in files.read(asked.out, "estimates")]
    wanted = [
        (name, samples)
        for name, sizes in (SMALL if asked.device == "cpu" else LARGE).items()
        for samples in sizes
        if (name, samples) not in {(row.workload, row.samples) for row in rows}
    ]
    for name, samples in wanted[: asked.first]:
        if time.monotonic() - started > asked.limit:
            break
        row = one(name, samples, model, target, asked.device, asked.seconds)
        rows.append(row)
        files.write(asked.out, "estimates", files.to_json(rows))
        print(f"{name} {samples}: {row.error or percent(row.off)}", file=sys.stderr, flush=True)
    print(said(rows))


if __name__ == "__main__":
    main()
