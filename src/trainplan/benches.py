"""The public functions about the benchmark suite. They belong to `trainplan.api`, which names them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from trainplan.errors import InputError

if TYPE_CHECKING:
    from trainplan.bench.answers import Benched, Scored
    from trainplan.bench.calibrate.answer import Calibrated
    from trainplan.bench.published.answer import Published
    from trainplan.cluster.cluster import Cluster


def bench_run(
    out: str = "bench-results",
    networks: str = "",
    datasets: str = "",
    workload: Sequence[str] = (),
    systems: str = "",
    workers: str = "2",
    batch: int = 0,
    memory: str = "",
    link: str = "",
    delay: str = "",
    uneven: int = 1,
    slices: int = 0,
    steps: int = 5,
    rounds: int = 3,
    seconds: float = 10.0,
    quick: bool = False,
    minutes: float = 0.0,
    hard: bool = False,
) -> Benched:
    """Measure the suite: its data sets × networks × systems × numbers of workers, predicted and run.

    Everything that is not said is all there is. Called again with the same folder, it goes on where it stopped;
    `minutes` is how long one call may take (0: until it is done). `workload`: others than the suite's. `hard`: only the
    cases of the suite in which it matters what is chosen (slow link, uneven workers, little memory).
    """
    from trainplan.bench.cases import RECOMMENDED, Conditions, cases, whole_numbers
    from trainplan.bench.cases import hard as hard_cases
    from trainplan.bench.cases import systems as known
    from trainplan.report.lines import command
    from trainplan.units import parse_bytes, parse_rate, parse_seconds

    for option, value, least in (("uneven", uneven, 1), ("steps", steps, 1), ("rounds", rounds, 1)):
        if value < least:
            raise InputError(f"--{option} {value}", f"it is at least {least}", f"--{option} {least + 1}")
    conditions = Conditions(
        parse_bytes(memory) if memory else 0, parse_rate(link) if link else 0.0, parse_seconds(delay) if delay else 0.0,
        uneven, slices,
    )  # fmt: skip
    if delay and not link:
        raise InputError(f"--delay {delay}", "it is a link that is late, and none is asked for", "--link 1Gbit/s")
    counts = whole_numbers("workers", _words(workers))
    if hard and (networks or datasets or workload or conditions != Conditions()):
        why = "these are cases of their own, with workloads and conditions of their own"
        raise InputError("--hard with other workloads or conditions", why, "--hard --workers 4 --systems ddp,dapple")
    chosen = cases(_words(networks), _words(datasets), list(workload), counts, conditions, batch)
    chosen = hard_cases(counts, batch) if hard else chosen
    picks = [word for word in _words(systems) if word == RECOMMENDED]
    named = [word for word in _words(systems) if word != RECOMMENDED]
    wanted = [*(known(named) if named else ()), *picks]
    options = {
        "networks": networks, "datasets": datasets, "workload": list(workload), "systems": systems, "workers": workers,
        "batch": batch or "", "memory": memory, "link": link, "delay": delay, "uneven": uneven if uneven > 1 else "",
        "slices": slices or "", "steps": steps, "rounds": rounds,
    }  # fmt: skip
    typed = command("bench run", out=Path(out).name, **options).replace("'bench run'", "bench run")
    typed += " --hard" if hard else ""
    from trainplan.bench.answers import Benched
    from trainplan.bench.slices import sliced
    from trainplan.bench.suite import Effort, Suite
    from trainplan.report.progress import progress

    Path(out).mkdir(parents=True, exist_ok=True)
    with sliced(slices) if slices else nullcontext(), progress() as report:
        suite = Suite(
            chosen, Path(out), wanted, Effort(steps, rounds, seconds, quick), minutes or float("inf"), typed,
            report if sys.stderr.isatty() else _line,
        )  # fmt: skip
        outcomes = suite.run()
    again = typed if suite.unfinished else f"trainplan bench accuracy {out}"
    left_out = tuple(f"{name}: {error}" for name, error in suite.left_out.items())
    return Benched(tuple(outcomes), out, suite.unfinished, again, left_out)


def bench_accuracy(results: Sequence[str], picture: Sequence[str] = (), again: bool = False) -> Scored:
    """Join predictions with measurements: errors by system, network, data set and operation; hits and regret.

    `results` are files or folders of `bench run`, or files of benchmarks/accuracy.py. Each `picture` ends in .svg, .png
    or .pdf. `again`: predictions are made anew, where the profile and the cluster were kept; the others are left out.
    """
    from trainplan.bench.answers import Scored, draw
    from trainplan.bench.believed import anew, believed, with_equations
    from trainplan.bench.results import read
    from trainplan.bench.scores import by_operation, errors, judge, rule_of, summaries
    from trainplan.report.picture import check_picture

    for path in picture:
        check_picture(path, "--picture")
    found = read(results)
    if again:
        found = [anew(outcome) for outcome in found if believed(outcome)]
    outcomes = [with_equations(outcome) for outcome in found]
    points = [(r.system, r.predicted_s, r.measured_s) for o in outcomes for r in o.ran if r.measured_s is not None]
    if not points:
        why = "nothing in it has run" if not again else "nothing in it has a profile and a cluster beside it"
        raise InputError(f"bench accuracy {' '.join(results)}", why, "trainplan bench run")
    groups = {
        "system": errors(outcomes, lambda outcome, result: result.system),
        "network": errors(outcomes, lambda outcome, result: outcome.network),
        "data set": errors(outcomes, lambda outcome, result: outcome.dataset),
        "operation": by_operation(outcomes),
        "all": errors(outcomes, lambda outcome, result: "all"),
    }
    judged = judge(outcomes)
    for path in picture:
        draw(points, judged, path)
    machines = dict.fromkeys(f"{o.machine}, torch {o.torch}, {o.made}" for o in outcomes)
    return Scored(
        tuple(machines), {name: tuple(rows) for name, rows in groups.items()}, tuple(judged),
        tuple(summaries(judged)), tuple(rule_of(outcomes)), tuple(picture),
    )  # fmt: skip


def bench_published(data: str, only: str = "", output: str | None = None) -> Published:
    """Predict what others have published, and score it: `data` is a folder of tables, each known by its file's name.

    `only` are beginnings of names, with commas. Networks that are neither in the zoo nor in torchvision or timm, where
    these are installed, are left out by name. `output` is a file for all that was found.
    """
    from datetime import date

    from trainplan.bench.published.answer import Published
    from trainplan.bench.published.tables import TABLES, wanted
    from trainplan.cluster.probe.machine import versions
    from trainplan.report.lines import command
    from trainplan.report.progress import progress

    folder, found = Path(data), {}
    names = wanted(folder, _words(only))
    with progress() as report:
        say = report if sys.stderr.isatty() else _line
        for number, name in enumerate(names):
            share = number / len(names)
            say(name, share)
            found[name] = TABLES[name](folder, lambda what, share=share: say(what, share))  # type: ignore[misc]
    shown = Path(output).name if output else ""
    typed = command("bench published", data="FOLDER", only=only, output=shown).replace(
        "'bench published'", "bench published"
    )
    answer = Published(found, typed, f"{date.today()}", versions())
    if output:
        answer.save(output)
    return answer


def calibrate(
    results: Sequence[str], cluster: str | Cluster | None = None, output: str | None = None, force: bool = False
) -> Calibrated:
    """Improve the constants of a cluster by runs that were measured on it, and tell the error on runs held out.

    `results` are folders of `run --out` and `bench run`, or files of benchmarks/accuracy.py with what they were
    predicted from. `cluster`: which is meant, where they are of several. `output`: a .yaml or .json file for it, which
    is written only if runs that were held out are not predicted worse, or by `force`.
    """
    from trainplan.bench.calibrate.answer import Calibrated
    from trainplan.bench.calibrate.calibrate import calibrate as fit
    from trainplan.bench.calibrate.seen import gather
    from trainplan.bench.results import read
    from trainplan.cluster.parse import cluster as parse
    from trainplan.cluster.yaml_write import check_name, save_as
    from trainplan.report.progress import progress

    check_name(output)
    gathered = gather(read(results), parse(cluster) if isinstance(cluster, str) else cluster)
    with progress() as report:
        found = fit(gathered, report if sys.stderr.isatty() else _line)
    write = bool(output) and (found.helps or force)
    if output and write:
        save_as(found.cluster, output)
    return Calibrated(found, gathered.machines, gathered.left_out, output if output and write else "", output or "")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _line(what: str, share: float) -> None:
    """Where there is no terminal, a line for everything that begins."""
    print(f"{share:4.0%}  {what}", file=sys.stderr, flush=True)
