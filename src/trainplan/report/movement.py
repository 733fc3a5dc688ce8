"""A study of data movement: which share of a step goes into bringing inputs, and which into moving the model.

Under nn.DataParallel (`exchange=dataparallel`) everything passes the first device: the whole batch is brought to it and
scattered, weights go out from it, gradients come back. So it is the first device's step that is shared out, no moment
counted twice (`exclusive`): what it waits for inputs is *input*, what it waits for weights and gradients is *model*.
Loaded ahead (`preload=on`), every device is brought its own part of the batch during the step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from trainplan import files
from trainplan.program.timeline import Timeline
from trainplan.report.exclusive import steps
from trainplan.report.picture import blank, save
from trainplan.report.table import milliseconds, table

INPUT = ("LOAD", "SEND_INPUT", "RECV_INPUT")
MODEL = ("SEND_W", "RECV_W", "SEND_G", "RECV_G")
BATCHES = ("off", "on")  # words of `preload`


@dataclass(frozen=True)
class Moved:
    """One network on so many devices."""

    network: str
    devices: int
    preload: str
    how: str  # predicted or measured
    batch: int
    fits: bool
    step_s: float
    input: float  # shares of the step
    model: float


@dataclass(frozen=True)
class Movement:
    """The answer of `study data-movement`."""

    found: tuple[Moved, ...]
    device: str
    made: str
    command: str
    paths: tuple[str, ...] = ()

    def __str__(self) -> str:
        headers = ["network", ">devices", "preload", "", ">step ms", ">input %", ">model %", ">both %"]
        rows = [[*_about(row), *_shares(row)] for row in self.found]
        words = [f"{self.device}: shares of a step of the first device under nn.DataParallel"]
        words += [table(headers, rows, lines=True), ""]
        words.append("× does not fit; input: a batch is brought and scattered; model: weights out, gradients back")
        return "\n".join([*words, *(f"written  {path}" for path in self.paths)])

    def to_json(self) -> dict[str, Any]:
        rest = {"made": self.made, "command": self.command, "device": self.device}
        return rest | {"rows": [asdict(row) for row in self.found]}

    def save(self, path: str) -> None:
        files.write(path, "data-movement", self.to_json())


def shares(timeline: Timeline) -> tuple[float, float, float]:
    """(step, input, model): seconds of a step of the first device, and the shares of it; medians over the steps after
    the first, which has nothing loaded ahead."""
    every = [step for step in steps(timeline)[1:] if step.seconds > 0]

    def share(kinds: Sequence[str]) -> float:
        return median(
            sum(own.seconds for own in step.shares if own.rank == 0 and own.kind in kinds) / step.seconds
            for step in every
        )

    return median(step.seconds for step in every), share(INPUT), share(MODEL)


def _about(row: Moved) -> list[str]:
    return [row.network, str(row.devices), row.preload, row.how]


def _shares(row: Moved) -> list[str]:
    if not row.fits:
        return ["×"] * 4
    both = (row.input, row.model, row.input + row.model)
    return [milliseconds(row.step_s), *(f"{100 * share:.2f}" for share in both)]


def draw(study: Movement, path: str) -> None:
    """Shares of inputs and of the model over devices: a panel for each network, a bar for each way to load."""
    networks = list(dict.fromkeys(row.network for row in study.found))
    figure = blank(3 * len(networks), 3.2)
    panels = figure.subplots(1, len(networks), sharey=True, squeeze=False)[0]
    kinds = list(dict.fromkeys((row.how, row.preload) for row in study.found))
    wide = 0.8 / len(kinds)
    counts = sorted({row.devices for row in study.found})
    for network, axes in zip(networks, panels, strict=True):
        for number, (how, preload) in enumerate(kinds):
            own = [r for r in study.found if (r.network, r.how, r.preload) == (network, how, preload) and r.fits]
            places = [counts.index(row.devices) + (number - (len(kinds) - 1) / 2) * wide for row in own]
            low, high = [100 * row.input for row in own], [100 * row.model for row in own]
            words, solid = f"{how}, preload={preload}", 1.0 if preload == "off" else 0.5
            axes.bar(places, low, wide, color="C0", alpha=solid, label=f"input ({words})")
            axes.bar(places, high, wide, bottom=low, color="C1", alpha=solid, label=f"model ({words})")
        for number, count in enumerate(counts):
            if not any(row.fits for row in study.found if (row.network, row.devices) == (network, count)):
                axes.text(number, 0.5, "×", ha="center")
        axes.set(title=network, xlabel="devices")
        axes.set_xticks(range(len(counts)), [str(count) for count in counts])
        axes.grid(alpha=0.3, axis="y")
    panels[0].set(ylabel="% of a step")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    save(figure, path, "--picture")
