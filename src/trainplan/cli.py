"""The commands: each calls the function of the same name in `trainplan.api` and prints what it returns. No logic here.

Exit codes: 0; 1 where `compare` finds a difference; 2 with a message and no traceback where something is the user's to
mend; 130 after Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from typing import Annotated, Any

import typer

from trainplan import api, files
from trainplan.bench.limit import UNFINISHED
from trainplan.errors import TrainplanError
from trainplan.version import VERSION

app = typer.Typer(
    name="trainplan",
    help="The fastest way to train your PyTorch model on your machines that fits: predicted, explained, and run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_NAMES = "resnet50:cifar10, gpt:layers=12,…, hf:gpt2, file.py:function"
Model = Annotated[str, typer.Argument(help=f"{_NAMES}, profile.json")]
Workload = Annotated[str, typer.Argument(help=_NAMES)]
Plan = Annotated[
    str, typer.Option(help="Such as 'dp=4', 'pp=2 micro=8', 'schedule=FILE.csv', or a system's key: trainplan systems.")
]
Cluster = Annotated[str, typer.Option(help="4xTitanRTX, 2x8xH100-SXM, a .yaml or .json file, or local: this machine.")]
Batch = Annotated[int | None, typer.Option(help="Samples of one optimizer step, over all devices.")]
ProfileFile = Annotated[str | None, typer.Option(help="A saved profile of the model, instead of making one.")]
Set = Annotated[list[str], typer.Option(help="What if: change the cluster, as in --set link=25GB/s. Repeatable.")]
Compile = Annotated[bool, typer.Option("--compile", help="Blocks go through torch.compile.")]
Refresh = Annotated[bool, typer.Option("--refresh", help="Measure again, though it is known.")]
Output = Annotated[str | None, typer.Option("--output", "-o", help="Save the result to this file.")]
Trace = Annotated[str | None, typer.Option(help="Write a trace for ui.perfetto.dev, such as plan.json.gz.")]
Seed = Annotated[int, typer.Option(help="Of weights, data and dropout.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _answer(json: bool, function: Callable[..., Any], *arguments: object) -> Any:
    """Call the function, print its answer and return it. With JSON, what a run says meanwhile goes to stderr."""
    with redirect_stdout(sys.stderr) if json else nullcontext():
        answer = function(*arguments)
    print(files.text_of(answer.to_json()) if json else answer)
    return answer


@app.command()
def profile(
    model: Workload,
    cluster: Cluster = "local",
    batch: Batch = None,
    output: Output = None,
    compile: Compile = False,
    refresh: Refresh = False,
    json: Json = False,
) -> None:
    """Time and weigh every block of a model on the cluster's device."""
    _answer(json, api.profile, model, cluster, batch, output, compile, refresh)


@app.command()
def cluster(
    action: Annotated[str, typer.Argument(help="show, or probe: measure this machine")] = "show",
    name: Annotated[str, typer.Argument(help="as for --cluster of the other commands")] = "local",
    set: Set = [],  # noqa: B006  # typer reads it as "none"
    output: Output = None,
    refresh: Refresh = False,
    json: Json = False,
) -> None:
    """Show what is believed about a cluster, or probe this machine."""
    _answer(json, api.cluster, action, name, set, output, refresh)


@app.command()
def device(
    action: Annotated[str, typer.Argument(help="show, or measure: a device of this machine")] = "show",
    name: Annotated[str, typer.Argument(help="of show: a device's name, or a file")] = "",
    output: Output = None,
    device: Annotated[str, typer.Option(help="Of measure: cuda:0, cpu; without it, a GPU where there is one.")] = "",
    minutes: Annotated[float, typer.Option(help="That measuring may take.")] = 5.0,
    quick: Annotated[bool, typer.Option("--quick", help="A handful of shapes, to see that it works.")] = False,
    json: Json = False,
) -> None:
    """Measure what a device reaches by kind and shape of operator, or show it."""
    _answer(json, api.device, action, name, output, device, minutes, quick)


@app.command()
def roofline(
    model: Workload,
    device: Annotated[str, typer.Option(help="A device of the catalogue, or a device file.")] = "H100-SXM",
    batch: Annotated[int | None, typer.Option(help="Samples that go through at once.")] = None,
    precision: Annotated[str, typer.Option(help="Of its numbers: bf16, fp16; of their products: fp32, tf32.")] = "fp32",
    output: Annotated[str | None, typer.Option("--output", "-o", help="A picture: .svg, .png or .pdf.")] = None,
    json: Json = False,
) -> None:
    """Arithmetic intensity and bound of every operator."""
    _answer(json, api.roofline, model, device, batch, precision, output)


@app.command()
def predict(
    model: Model,
    plan: Plan,
    cluster: Cluster = "local",
    batch: Batch = None,
    profile: ProfileFile = None,
    set: Set = [],  # noqa: B006
    compile: Compile = False,
    trace: Trace = None,
    json: Json = False,
) -> None:
    """Time and memory of one plan."""
    _answer(json, api.predict, model, plan, cluster, batch, profile, set, compile, trace)


@app.command()
def recommend(
    model: Model = api.DEFAULT_WORKLOAD,
    cluster: Cluster = "local",
    batch: Batch = None,
    memory: Annotated[str | None, typer.Option(help="That a device may use at most, such as 12GiB.")] = None,
    top: Annotated[int, typer.Option(help="How many plans to show.")] = 8,
    profile: ProfileFile = None,
    set: Set = [],  # noqa: B006
    compile: Compile = False,
    run: Annotated[bool, typer.Option("--run", help="Train with the best plan and on one device, to see.")] = False,
    steps: Annotated[int, typer.Option(help="Of each of these runs.")] = 12,
    predicted: Annotated[
        str, typer.Option(help="A precision: also plans that are predicted in it, and not yet run (tp, sequence …).")
    ] = "",
    method: Annotated[
        str, typer.Option(help="model (ours), or the thesis's: benchmark, data, hardware, thesis.")
    ] = "model",
    results: Annotated[list[str], typer.Option(help="Of benchmark: what bench run wrote. Repeatable.")] = [],  # noqa: B006
    candidates: Annotated[str, typer.Option(help="Of other methods than ours: ddp,gpipe …; without it, all.")] = "",
    objective: Annotated[str, typer.Option(help="time, money, memory; or accuracy, with --study.")] = "time",
    deadline: Annotated[str | None, typer.Option(help="For all --epochs, such as 12h.")] = None,
    budget: Annotated[float | None, typer.Option(help="USD for all --epochs.")] = None,
    epochs: Annotated[float, typer.Option(help="That --deadline and --budget are for.")] = 1.0,
    devices: Annotated[int | None, typer.Option(help="That a plan may use at most.")] = None,
    synchronous: Annotated[
        bool, typer.Option("--synchronous", help="Nobody computes with stale weights (of --objective accuracy).")
    ] = False,
    framework: Annotated[
        str, typer.Option("--for", help="Only what it runs: fsdp, deepspeed, megatron, torchtitan, lightning.")
    ] = "",
    study: Annotated[str, typer.Option(help="FILE[:TASK] that trainplan study staleness -o FILE wrote.")] = "",
    json: Json = False,
) -> None:
    """The best plans that fit, with reasons."""
    _answer(
        json, api.recommend, model, cluster, batch, memory, top, profile, set, compile, run, steps, predicted, method,
        results, candidates, objective, deadline, budget, epochs, devices, synchronous, framework, study,
    )  # fmt: skip


@app.command()
def budget(
    model: Model,
    deadline: Annotated[str | None, typer.Option(help="For all epochs, such as 12h: then the cheapest.")] = None,
    budget: Annotated[float | None, typer.Option(help="USD for all epochs: then the fastest.")] = None,
    epochs: Annotated[float, typer.Option(help="That are trained.")] = 1.0,
    machines: Annotated[
        str, typer.Option(help="8xA100-80,2x8xH100-SXM …; without it, 1 to 32 of every GPU that has a price.")
    ] = "",
    batch: Batch = None,
    top: Annotated[int, typer.Option(help="How many machines to show.")] = 8,
    profile: ProfileFile = None,
    framework: Annotated[
        str, typer.Option("--for", help="Only what it runs: fsdp, deepspeed, megatron, torchtitan, lightning.")
    ] = "",
    set: Set = [],  # noqa: B006
    predicted: Annotated[
        str, typer.Option(help="A precision: also plans that are predicted in it, and not yet run (tp, sequence …).")
    ] = "",
    json: Json = False,
) -> None:
    """What to rent: the cheapest within a deadline, or the fastest within a budget."""
    _answer(json, api.budget, model, deadline, budget, epochs, machines, batch, top, profile, framework, set, predicted)


@app.command()
def explain(
    model: Model,
    plan: Plan,
    cluster: Cluster = "local",
    batch: Batch = None,
    profile: ProfileFile = None,
    set: Set = [],  # noqa: B006
    compile: Compile = False,
    json: Json = False,
) -> None:
    """A plan in plain words: what sits where, what moves when, where time and memory go."""
    _answer(json, api.explain, model, plan, cluster, batch, profile, set, compile)


@app.command()
def run(
    model: Model,
    plan: Plan,
    cluster: Cluster = "local",
    batch: Batch = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 20,
    profile: ProfileFile = None,
    out: Annotated[str | None, typer.Option(help="Folder for logs, results and checkpoints.")] = None,
    compile: Compile = False,
    data: Annotated[str, typer.Option(help="A data set or a folder; without it, made-up batches.")] = "",
    samples: Annotated[int, typer.Option(help="Of the data set; 0: all.")] = 0,
    resume: Annotated[str, typer.Option(help="A checkpoint, saved under any plan.")] = "",
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0: none.")] = 0,
    seed: Seed = 0,
    nnodes: Annotated[str, typer.Option(help="Machines, as for torchrun.")] = "1",
    endpoint: Annotated[str, typer.Option(help="HOST:PORT where several machines meet.")] = "",
    max_restarts: Annotated[
        int, typer.Option(help="When a rank fails, start all again so often, from the last checkpoint.")
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only write the job, and say how to start it.")] = False,
    elastic: Annotated[
        str, typer.Option(help="MIN:MAX workers: when some come (FOLDER/workers) or go, another plan goes on.")
    ] = "",
    again: Annotated[str, typer.Option(help="A run's folder, whose order of pushes or sums is repeated.")] = "",
    json: Json = False,
) -> None:
    """Train under a plan on real processes; predicted beside measured at the end."""
    _answer(
        json, api.run, model, plan, cluster, batch, steps, profile, out, compile, data, samples, resume, save_every,
        seed, nnodes, endpoint, max_restarts, dry_run, elastic, again,
    )  # fmt: skip


@app.command()
def compare(
    model: Model,
    plan: Plan,
    cluster: Cluster = "local",
    batch: Batch = None,
    steps: Annotated[int, typer.Option(help="That are compared.")] = 3,
    timed_steps: Annotated[int, typer.Option(help="That are timed.")] = 10,
    profile: ProfileFile = None,
    out: Annotated[str | None, typer.Option(help="Folder for the timed run.")] = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Train a few steps alone and under a plan: the differences (then exit code 1), and predicted beside measured."""
    answer = _answer(json, api.compare, model, plan, cluster, batch, steps, timed_steps, profile, out, seed)
    if not answer.comparison.same:
        raise typer.Exit(1)


@app.command()
def systems(
    keys: Annotated[list[str], typer.Argument(help="only these")] = [],  # noqa: B006
    json: Json = False,
) -> None:
    """Every named system, what it needs, and what is there of it."""
    _answer(json, api.systems, keys)


@app.command()
def timeline(
    model: Annotated[str, typer.Argument(help="a model as elsewhere, or a saved timeline.json")],
    plan: Annotated[str | None, typer.Option(help="Whose timeline to predict; not for a saved one.")] = None,
    cluster: Cluster = "local",
    batch: Batch = None,
    profile: ProfileFile = None,
    set: Set = [],  # noqa: B006
    compile: Compile = False,
    measured: Annotated[str | None, typer.Option(help="A timeline.json of a run, to put beside it.")] = None,
    step: Annotated[int | None, typer.Option(help="The step to draw; without it, the first.")] = None,
    steps: Annotated[int, typer.Option(help="How many to draw, from that one on.")] = 1,
    width: Annotated[int, typer.Option(help="Characters across.")] = 100,
    trace: Trace = None,
    csv: Annotated[str | None, typer.Option(help="Write what each rank computes, as torch's schedules do.")] = None,
    json: Json = False,
) -> None:
    """Draw what happens when on which rank."""
    _answer(
        json, api.timeline, model, plan, cluster, batch, profile, set, compile, measured, step, steps, width, trace, csv
    )  # fmt: skip


@app.command()
def study(
    what: Annotated[
        str,
        typer.Argument(
            help="staleness: epochs to an accuracy under asynchronous rules; data-movement: its shares; methods: what "
            "each raises and lowers"
        ),
    ] = "staleness",
    tasks: Annotated[str, typer.Option(help="What is learned, with commas.")] = "digits,images",
    rules: Annotated[str, typer.Option(help="Who goes on when, with commas.")] = "in step,ssp,dssp,ps-asp",
    workers: Annotated[
        str,
        typer.Option(
            help="How many, with commas; without it 1 to 16 (staleness), 1 to 4 (data-movement) or 4 (methods)."
        ),
    ] = "",
    seeds: Annotated[int, typer.Option(help="Trainings of each.")] = 5,
    epochs: Annotated[float, typer.Option(help="After which one is given up.")] = 40.0,
    output: Output = None,
    picture: Annotated[list[str], typer.Option(help="A .svg, .png or .pdf. Repeatable.")] = [],  # noqa: B006
    models: Annotated[
        str, typer.Option(help="Of data-movement, with commas (without it four of a published table); one of methods.")
    ] = "",
    device: Annotated[
        str, typer.Option(help="Of both: of the catalogue, or cpu; without it GTX1080Ti (data-movement) or A100-80.")
    ] = "",
    batch: Annotated[
        int, typer.Option(help="Of both: samples of a step, over all devices; 0: 256 (data-movement) or 8.")
    ] = 0,
    steps: Annotated[int, typer.Option(help="Of data-movement: that are run, where the device is here; 0: none.")] = 0,
    set: Set = [],  # noqa: B006
    json: Json = False,
) -> None:
    """Find out what a single prediction does not tell."""
    _answer(
        json, api.study, what, tasks, rules, workers, seeds, epochs, output, picture, models, device, batch, steps, set
    )


@app.command()
def calibrate(
    results: Annotated[
        list[str], typer.Argument(help="folders of run --out or bench run, or files with what was kept")
    ],
    cluster: Annotated[str | None, typer.Option(help="Which is meant, where results are of several: a file.")] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="A .yaml or .json file for it.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write it, though held-out runs gain nothing.")] = False,
    json: Json = False,
) -> None:
    """Improve the constants of a cluster by measured runs; tells the error on runs that were held out."""
    _answer(json, api.calibrate, results, cluster, output, force)


bench = typer.Typer(
    name="bench",
    help="The benchmark suite: measure it, and see how good predictions and recommendations are.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(bench)
_Picture = Annotated[list[str], typer.Option(help="A .svg, .png or .pdf. Repeatable.")]


@bench.command("run")
def bench_run(
    out: Annotated[str, typer.Option(help="Folder of results; what is in it is not measured again.")] = "bench-results",
    networks: Annotated[str, typer.Option(help="Such as resnet18,gpt-tiny; without it, all.")] = "",
    datasets: Annotated[str, typer.Option(help="Such as mnist,text; without it, all.")] = "",
    workload: Annotated[list[str], typer.Option(help="One that the suite has not, instead. Repeatable.")] = [],  # noqa: B006
    systems: Annotated[str, typer.Option(help="Such as ddp,recommended: our own pick; without it, all that run.")] = "",
    workers: Annotated[str, typer.Option(help="How many, with commas.")] = "2",
    batch: Annotated[int, typer.Option(help="Samples of a step, over all workers; 0: the workload's own.")] = 0,
    memory: Annotated[str, typer.Option(help="That a worker may use, such as 24GB.")] = "",
    link: Annotated[str, typer.Option(help="Between two halves of the workers, such as 1Gbit/s. Needs root.")] = "",
    delay: Annotated[str, typer.Option(help="Of that link, one way, such as 1ms.")] = "",
    uneven: Annotated[int, typer.Option(help="How many times slower half of the workers is.")] = 1,
    slices: Annotated[int, typer.Option(help="Of one GPU, a worker each; 0: CPU cores. Needs root.")] = 0,
    steps: Annotated[int, typer.Option(help="Of a candidate in a round.")] = 5,
    rounds: Annotated[int, typer.Option(help="Of all candidates, one after the other.")] = 3,
    seconds: Annotated[float, typer.Option(help="Of timing for a profile.")] = 10.0,
    quick: Annotated[bool, typer.Option("--quick", help="Probe workers less, or not where they were before.")] = False,
    minutes: Annotated[float, typer.Option(help="That this call may take; 0: as long as it takes.")] = 0.0,
    hard: Annotated[bool, typer.Option("--hard", help="Only cases in which it matters what is chosen.")] = False,
    json: Json = False,
) -> None:
    """Predict and run every system on every workload; goes on where it stopped."""
    answer = _answer(
        json, api.bench_run, out, networks, datasets, workload, systems, workers, batch, memory, link, delay, uneven,
        slices, steps, rounds, seconds, quick, minutes, hard,
    )  # fmt: skip
    if answer.unfinished:
        raise typer.Exit(UNFINISHED)


@bench.command("accuracy")
def bench_accuracy(
    results: Annotated[list[str], typer.Argument(help="files or folders of bench run, or of benchmarks/accuracy.py")],
    picture: _Picture = [],  # noqa: B006
    again: Annotated[bool, typer.Option("--again", help="Predict anew, where profile and cluster were kept.")] = False,
    json: Json = False,
) -> None:
    """Errors by system, network, data set and operation; hits and regret of recommendations."""
    _answer(json, api.bench_accuracy, results, picture, again)


@bench.command("published")
def bench_published(
    data: Annotated[str, typer.Option(help="A folder of published tables.")],
    only: Annotated[str, typer.Option(help="Tables whose names begin so, such as timm,vtrain; without it, all.")] = "",
    output: Output = None,
    json: Json = False,
) -> None:
    """Predict step times that others have published: errors, order and ratios by table."""
    _answer(json, api.bench_published, data, only, output)


def _version(asked: bool) -> None:
    if asked:
        print(f"trainplan {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


def _end(number: int, frame: object) -> None:
    """Go as after Ctrl-C: whoever has started processes ends them on the way out."""
    sys.exit(128 + number)


def main() -> None:
    """The console command."""
    for ends in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ends, _end)
    try:
        app()
    except TrainplanError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output has gone; closing it once more would only complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


if __name__ == "__main__":
    main()
