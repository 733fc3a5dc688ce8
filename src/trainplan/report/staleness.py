"""A study of staleness: a table of epochs and speed-ups, and a picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trainplan import files
from trainplan.report.picture import blank, save
from trainplan.report.table import number, table
from trainplan.study.staleness import Middle, Reached, middles
from trainplan.units import some


@dataclass(frozen=True)
class Staleness:
    """The answer of `study staleness`."""

    found: tuple[Reached, ...]
    targets: dict[str, float]  # task → accuracy
    made: str
    command: str
    paths: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows, parts = middles(self.found), []
        for task, target in self.targets.items():
            own = [row for row in rows if row.task == task]
            parts.append(f"{task}: epochs to {target:.0%} of what was held out, median of {some(own[0].seeds, 'seed')}")
            headers = ["rule", ">workers", ">epochs", ">least", ">most", ">reached", ">staleness", ">speed-up"]
            parts += [table(headers, [_cells(row) for row in own], lines=True), ""]
        parts.append("staleness: updates that the weights of a push lacked; speed-up: of the time to that accuracy, if")
        parts.append("messages cost nothing")
        return "\n".join([*parts, *(f"written  {path}" for path in self.paths)])

    def to_json(self) -> dict[str, Any]:
        rest = {"made": self.made, "command": self.command, "targets": self.targets}
        return rest | {
            "rows": [asdict(row) for row in middles(self.found)],
            "runs": [asdict(one) for one in self.found],
        }

    def save(self, path: str) -> None:
        files.write(path, "staleness", self.to_json())


def _cells(row: Middle) -> list[str]:
    return [
        row.rule, str(row.workers), number(row.epochs), number(row.least), number(row.most),
        f"{row.reached} of {row.seeds}", number(row.staleness), number(row.speedup),
    ]  # fmt: skip


def draw(study: Staleness, path: str) -> None:
    """Epochs and speed-ups over workers, a line for each rule, a row of panels for each task."""
    rows, tasks = middles(study.found), list(study.targets)
    counts = sorted({row.workers for row in rows})
    figure = blank(9, 3.5 * len(tasks))
    panels = figure.subplots(len(tasks), 2, squeeze=False)
    for task, (left, right) in zip(tasks, panels, strict=True):
        for rule in dict.fromkeys(row.rule for row in rows):
            own = sorted((r for r in rows if (r.task, r.rule) == (task, rule) and r.epochs), key=lambda r: r.workers)
            workers = [row.workers for row in own]
            left.plot(workers, [row.epochs for row in own], marker="o", label=rule)
            left.fill_between(workers, [row.least for row in own], [row.most for row in own], alpha=0.1)
            timed = [row for row in own if row.speedup]
            right.plot([row.workers for row in timed], [row.speedup for row in timed], marker="o", label=rule)
        left.set(ylabel="epochs", title=f"{task}: to {study.targets[task]:.0%}")
        right.set(ylabel="speed-up", title=f"{task}: time to that")
        for axes in (left, right):
            axes.set(xscale="log", xlabel="workers", xlim=(0.8 * counts[0], 1.25 * counts[-1]))
            axes.set_xticks(counts, [str(count) for count in counts])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
    save(figure, path, "--picture")
