"""Tables of steps on one device: which network takes how long, in what order, at what ratio.

Each is predicted the way that any question is: the network is traced, its operators are priced for the device, and
the clock plays a step. Their machines differ in clocks, drivers and libraries, so one constant a table is fitted; what
is told of a row is its error with the constant of the other rows (`ratios`). It is a factor; where layers were timed
one by one, it is how long each of them waits.

* `timm_train_rtx3090_subset.csv`: training steps under autocast to fp16, by order of the images' numbers in memory and
  version of torch. (Predictions are for channels first.)
* `pipedream_profile_totals.csv`: sums over layers that were timed one by one, each waiting for the device; the GPU is
  not named and thought to be a V100.
* `pytorch_gpu_benchmark_ryujaehun_subset.csv`: forward and backward of twelve images, in fp32.
* `lambda_labs_pytorch_subset.csv`: one network (ResNet-50) on several devices.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainplan.bench.published.networks import network
from trainplan.bench.published.ratios import Named, Timed, ratios, waits
from trainplan.cluster import catalogue
from trainplan.cluster.cluster import Device
from trainplan.cluster.parse import cluster
from trainplan.plan.plan import plan
from trainplan.predict.predict import predict
from trainplan.profile.device.known import model_of, packaged
from trainplan.profile.device.model import Model
from trainplan.profile.estimate import priced
from trainplan.profile.gap import two_lanes
from trainplan.profile.profile import Profile
from trainplan.profile.roofline import speed_of
from trainplan.profile.traced import Traced

Say = Callable[[str], None]
FEW = 3  # rows below which there is no order to speak of
RYUJAEHUN = {"TITAN RTX": ("TitanRTX", "fp32"), "A100-SXM4-40GB": ("A100-40", "tf32")}
LAMBDA = {
    "A100 80GB SXM4": "A100-80", "H100 80GB PCIe Gen5": "H100-PCIe", "RTX 3090": "RTX3090", "RTX 4090": "RTX4090",
    "V100 16GB": "V100-16",
}  # fmt: skip
LIKELY = "V100-16"  # pipedream's


def table(folder: Path, name: str) -> list[dict[str, str]]:
    """The rows of a table."""
    with (folder / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def profile_of(found: Traced, device: Device, batch: int, precision: str = "fp32", scaled: bool = False) -> Profile:
    """A network priced for a device; `scaled`: from the file of the nearest that was measured, whatever it is."""
    model = Model(packaged()[0], device) if scaled else model_of(device)
    device = device if model else searching(device)
    return priced(found, device, speed_of(device, precision, model), (batch,))


def searching(device: Device) -> Device:
    """The device where cudnn tries its algorithms: scripts that measure networks set `cudnn.benchmark`, as pipedream's
    profiler does."""
    return replace(device, efficiency={**device.efficiency, "searched": 1.0})


def step_of(found: Traced, name: str, batch: int, precision: str = "fp32") -> float:
    """Seconds of a training step on one device of the catalogue."""
    profile = profile_of(found, catalogue.device(name), batch, precision)
    return predict(plan(blocks=len(profile.blocks)), profile, cluster(f"1x{name}"), batch).step_s


def passes_of(profile: Profile) -> list[tuple[float, float]]:
    """(device, host) of the forward and of the backward pass."""
    blocks = profile.blocks
    return [
        (sum(b.forward_s[0] for b in blocks), sum(b.forward_issue_s[0] for b in blocks)),
        (sum(b.backward_s[0] for b in blocks), sum(b.backward_issue_s[0] for b in blocks)),
    ]


def _scored(groups: dict[str, tuple[list[Named], list[str]]]) -> dict[str, Any]:
    return {name: ratios(rows, out) for name, (rows, out) in groups.items() if len(rows) >= FEW}


def timm(folder: Path, say: Say) -> dict[str, Any]:
    """Training steps on an RTX 3090."""
    groups: dict[str, tuple[list[Named], list[str]]] = {}
    for row in table(folder, "timm_train_rtx3090_subset.csv"):
        torch = row["framework"].split()[1]
        rows, out = groups.setdefault(f"{row['memory_format']}, torch {torch}", ([], []))
        found = network(row["model"], int(row["img_size"]), "fp16")
        if found is None:
            out.append(row["model"])
            continue
        say(f"{row['model']} on an RTX 3090")
        rows.append((row["model"], step_of(found, "RTX3090", int(row["batch"])), float(row["step_time_s"])))
    return _scored(groups)


def pipedream(folder: Path, say: Say) -> dict[str, Any]:
    """Sums over layers: by data sheets, as predictions for a V100 are; and scaled from the device that was measured."""
    groups: dict[str, tuple[list[Timed], list[str]]] = {"from its data sheet": ([], []), "scaled": ([], [])}
    for row in table(folder, "pipedream_profile_totals.csv"):
        found = network(row["model"]) if row["batch"] else None
        for way, (rows, out) in groups.items():
            if found is None:
                out.append(row["model"])
                continue
            profile = profile_of(found, catalogue.device(LIKELY), int(row["batch"]), scaled=way == "scaled")
            (ahead, _), (back, _) = passes_of(profile)
            forward, backward = (ahead, float(row["sum_forward_s"])), (back, float(row["sum_backward_s"]))
            rows.append(Timed(row["model"], int(row["n_layers"]), forward, backward))
        if found is not None:
            say(f"{row['model']} on a {LIKELY}")
    return {name: waits(rows, out) for name, (rows, out) in groups.items() if len(rows) >= FEW}


def ryujaehun(folder: Path, say: Say) -> dict[str, Any]:
    """Forward and backward of twelve images: host-bound on most hosts."""
    groups: dict[str, tuple[list[Named], list[str]]] = {}
    for row in table(folder, "pytorch_gpu_benchmark_ryujaehun_subset.csv"):
        if row["n_accel"] != "1" or not row["precision"].startswith("fp32") or row["accel"] not in RYUJAEHUN:
            continue
        name, precision = RYUJAEHUN[row["accel"]]
        rows, out = groups.setdefault(name, ([], []))
        found = network(row["model"])
        if found is None:
            out.append(row["model"])
            continue
        say(f"{row['model']} on a {name}")
        profile = profile_of(found, catalogue.device(name), int(row["global_batch"]), precision)
        rows.append((row["model"], two_lanes(passes_of(profile)), float(row["median_step_s"])))
    return _scored(groups)


def lambda_labs(folder: Path, say: Say) -> dict[str, Any]:
    """ResNet-50 on several devices: their relative speed."""
    groups: dict[str, tuple[list[Named], list[str]]] = {}
    for row in table(folder, "lambda_labs_pytorch_subset.csv"):
        if row["n_accel"] != "1" or row["model"] != "resnet50":
            continue
        half = row["precision"].startswith("fp16")
        rows, out = groups.setdefault("resnet50 in fp16" if half else "resnet50 in fp32", ([], []))
        name = LAMBDA.get(row["accel"])
        if name is None or not row["batch_per_accel"]:
            out.append(row["accel"])
            continue
        found = network("resnet50", 0, "fp16" if half else "")
        if found is not None:
            batch = int(row["batch_per_accel"])
            precision = "fp32" if half or "tf32" not in catalogue.device(name).flops else "tf32"
            say(f"resnet50 on a {name}")
            rows.append((name, step_of(found, name, batch, precision), batch / float(row["throughput"])))
    return _scored(groups)
