"""The study of data movement: every network on so many devices, predicted, and run where there are such devices here.
It belongs to `trainplan.studies`, which names it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from trainplan.cluster.catalogue import device as catalogued
from trainplan.errors import InputError
from trainplan.report.movement import BATCHES, Moved, shares
from trainplan.situation import Changes, Situation, cluster_for, device_here, plan_for, profile_here, refuse_changed

if TYPE_CHECKING:
    from trainplan.cluster.cluster import Device
    from trainplan.profile.profile import Profile

WARM_UP = 2  # steps of a run that do not count
Report = Callable[[str, float], None]


def moved(
    models: Sequence[str], counts: Sequence[int], batch: int, device: str, set: Changes, steps: int, report: Report
) -> list[Moved]:
    """All rows of the study. `steps`: of every run on real workers; 0: nothing is run."""
    if batch < max(counts):
        why = f"{max(counts)} devices want a sample each"
        raise InputError(f"--batch {batch}", why, f"--batch {max(counts)}")
    device, here = catalogued(device).name, device_here(device)
    if steps and here is None:
        why = f"this machine has no {device}"
        raise InputError(f"--steps {steps} on {device}", why, "--device cpu, or --steps 0: only predicted")
    if 0 < steps <= WARM_UP:
        why = f"the first {WARM_UP} steps warm up and do not count, and the one after has no step before it"
        raise InputError(f"--steps {steps}", why, f"--steps {WARM_UP + 8}")
    place = cluster_for(f"1x{device}", set).device(0)
    if here is not None:
        refuse_changed(device, set, "measured here", "a device that is not here (--device GTX1080Ti)")
    found = []
    for number, model in enumerate(models):
        report(f"{model} on {device}", number / len(models))
        profile = _profile(model, counts, batch, place, here)
        for count in counts:
            # Devices have equal parts, so a batch may be some samples smaller.
            s = Situation(profile.workload, profile, cluster_for(f"{count}x{device}", set), batch - batch % count)
            for preload in BATCHES:
                report(f"{model} on {count} × {device}, preload={preload}", number / len(models))
                found += _rows(s, model, count, preload, steps)
    return found


def _profile(model: str, counts: Sequence[int], batch: int, place: Device, here: str | None) -> Profile:
    """Of all sizes that a device has to compute: measured where it is here, and else of a device with its changes."""
    from trainplan.profile.device.known import model_of
    from trainplan.profile.estimate import estimate
    from trainplan.workload.load import load

    if here is not None:
        return profile_here(model, here, batch)
    sizes = sorted({batch // count for count in counts})
    return estimate(load(model, batch=batch), place, samples=sizes, model=model_of(place, measured_here=True))


def _rows(s: Situation, model: str, count: int, preload: str, steps: int) -> list[Moved]:
    """One way to load on so many devices: what is predicted of it, and what a run of so many steps shows."""
    from trainplan.predict.predict import predict
    from trainplan.program.timeline import Timeline

    words = f"dp={count} exchange=dataparallel" if count > 1 else "single"
    plan, there = plan_for(f"{words} preload={preload}", s)
    expected = predict(plan, s.profile, there, s.batch, keep=True)
    row = Moved(model, count, preload, "predicted", s.batch, expected.fits, *shares(expected.timeline()))
    if not steps or not expected.fits:
        return [row]
    from trainplan.starting import run_here

    with TemporaryDirectory() as folder:
        ran = run_here(s, plan, there, steps, str(Path(folder) / "run"), show=False)
        timeline = Timeline.load(str(Path(ran.out) / "timeline.json"))
    step, inputs, weights = shares(timeline)
    return [row, replace(row, how="measured", step_s=step, input=inputs, model=weights)]
