"""How much of an exchange is hidden: eight layers of 4 MiB that sleep instead of computing, on a slow link.

    python benchmarks/overlap.py --plans dp=2 "dp=2 zero=1" --out benchmarks/data/overlap.json       (needs root)

Two processes in two network namespaces with a link of 1 Gbit/s. A layer takes 15 ms forward and 30 ms backward: it
computes what little it has to, and sleeps for the rest (how long it has to is found before, by steps that exchange
nothing; such steps, in turn with the others, tell whether that was right). Our plans, and torch's own means used by
hand: DDP, ZeroRedundancyOptimizer, FSDP2. Steps of all of them in turn, medians.

What could be reached at best ("ideal") follows from what must wait for what. Of L layers, each takes F forward and B
backward, and c is the time in which half of its bytes pass the link, in both directions at once: two ranks that gather
a layer's weights, or scatter its gradients, send half of them each; a sum of both whole takes 2c.

    dp      A sum can start when its layer's backward pass is over, and the link carries one after the other: either the
            first, and then the link never rests, or all of backward and the last one.
                L·F + max(B + L·2c, L·B + 2c)
    zero=1  Weights are gathered while layers before them compute, and gradients scattered, as above; of each, one is
    zero=2  hidden behind nothing: the layer that is last to go back is the first to go forward.
                max(c + L·F, L·c + F) + max(B + L·c, L·B + c)
    zero=3  All layers but the last are gathered once more, 3L − 1 times c on the link, and these can all be hidden if
            there is time for them: the same, or the link never rests.
                max(that of zero=2, (3L − 1)·c)

An optimizer's step follows, of all weights or of half. c is that of the link's rate; headers take another 4 % of it.

The link holds to its rate if TCP does. Under BBR (`--control bbr`) it does not: for 200 ms in ten seconds, and often
when a connection has rested for as long (as each does here while the others have their turns), BBR sends four packets
at a time, to see how long an empty link takes. A step that this falls into takes 150 ms longer; a turn has three steps.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from trainplan.bench.by_hand import Step, Training, by_hand
from trainplan.bench.command import command
from trainplan.bench.pool import placed, pool
from trainplan.bench.slow_link import CONTROL, slow_link
from trainplan.cluster.cluster import Slowdown
from trainplan.cluster.probe.probe import probe
from trainplan.engine.trainer import Trainer
from trainplan.plan.plan import Plan
from trainplan.plan.text import parse
from trainplan.predict.predict import predict
from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.profile.machine import describe
from trainplan.profile.profile import Profile
from trainplan.profile.structure import structure
from trainplan.solve.resolve import solve
from trainplan.units import parse_rate, parse_seconds
from trainplan.workload.workload import Batch, Loss, Workload

LAYERS, WIDTH, SAMPLES = 8, 1024, 4  # a layer's weights are 4 MiB
FORWARD_S, BACKWARD_S = 0.015, 0.030  # of a layer, nearly all of it asleep
RATE = {"lr": 1e-6}
# What somebody writes by hand, with how many MiB of gradients at a time, and of which stage of ZeRO it is.
BY_HAND: dict[str, tuple[str, float | None, int]] = {
    "ddp 4 MiB": ("ddp", 4, 0),
    "ddp 25 MiB": ("ddp", 25, 0),
    "zero-redundancy": ("zero-redundancy", 4, 1),
    "fsdp2 zero-2": ("fsdp2-2", None, 2),
    "fsdp2 zero-3": ("fsdp2-3", None, 3),
}

_LIBRARY = torch.library.Library("trainplan_overlap", "DEF")
_LIBRARY.define("sleep(Tensor x) -> Tensor")
_LIBRARY.define("sleep_back(Tensor gradient) -> Tensor")


_computes = {"forward": 0.0, "backward": 0.0}  # seconds of a layer in this process, which it sleeps less: by `wake`


def _nap(x: Tensor, seconds: float) -> Tensor:
    time.sleep(max(0.0, seconds))
    return x.clone()


_LIBRARY.impl("sleep", lambda x: _nap(x, FORWARD_S - _computes["forward"]), "CPU")
_LIBRARY.impl("sleep_back", lambda x: _nap(x, BACKWARD_S - _computes["backward"]), "CPU")
for _name in ("sleep", "sleep_back"):
    torch.library.register_fake(f"trainplan_overlap::{_name}", torch.empty_like)
torch.library.register_autograd(
    "trainplan_overlap::sleep", lambda _, gradient: torch.ops.trainplan_overlap.sleep_back(gradient)
)


class Layer(nn.Module):
    """Weights that a few samples pass through in no time, and a nap."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 1e-3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.trainplan_overlap.sleep(F.linear(x, self.weight))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def batch(samples: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(samples, WIDTH, generator=generator) for _ in range(2))
    return Batch(samples, (x,), {}, y)


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, **RATE)  # type: ignore[arg-type]


def workload() -> Workload:
    return Workload("naps", build, batch, Loss(F.mse_loss, lambda b: b.samples), sgd, SAMPLES, SAMPLES)


@dataclass(frozen=True)
class Alone:
    """Seconds of a step that exchanges nothing: of all layers, forward, backward, and their update."""

    forward_s: float
    backward_s: float
    update_s: float


def alone(rank: int, world: int) -> Callable[[], tuple[float, ...]]:
    """A step that exchanges nothing, and says how long its parts took."""
    model, data = build(), batch(SAMPLES // world, 0)
    optimizer = sgd(model.parameters())

    def step() -> tuple[float, ...]:
        moments = [time.perf_counter()]
        loss = F.mse_loss(model(data.args[0]), data.targets)
        moments.append(time.perf_counter())
        loss.backward()
        moments.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        moments.append(time.perf_counter())
        return tuple(end - start for start, end in pairwise(moments))

    return step


def wake(rank: int, world: int) -> None:
    """Find out what a layer computes besides sleeping, in this process."""
    step = alone(rank, world)
    step()
    forward, backward, _ = (median(part) for part in zip(*(step() for _ in range(7)), strict=True))
    _computes.update(forward=forward / LAYERS - FORWARD_S, backward=backward / LAYERS - BACKWARD_S)


def ideal(zero: int, own: Alone, share_s: float) -> float:
    """The least seconds of a step of two ranks (see above).

    >>> naps = Alone(LAYERS * FORWARD_S, LAYERS * BACKWARD_S, 0.0)
    >>> [round(1e3 * ideal(zero, naps, 4 * WIDTH * WIDTH / 2 / 125e6)) for zero in range(4)]
    [418, 406, 406, 406]
    """
    forward, backward, update = own.forward_s / LAYERS, own.backward_s / LAYERS, own.update_s / (2 if zero else 1)
    if not zero:
        summed = max(backward + LAYERS * 2 * share_s, own.backward_s + 2 * share_s)
        return own.forward_s + summed + update
    gathered = max(share_s + own.forward_s, LAYERS * share_s + forward)
    scattered = max(backward + LAYERS * share_s, own.backward_s + share_s)
    never_rests = (3 * LAYERS - 1) * share_s if zero == 3 else 0.0
    return max(gathered + scattered, never_rests) + update


def profile(own: Alone) -> Profile:
    """The model as it is, with the seconds that it takes alone, for any number of samples."""
    job = workload()
    shape = structure(capture(Skeleton(job.build).model, job.inputs(2, 0), job.loss, device="cpu"), job, batch(2, 0))
    nothing = (0.0, 0.0)
    blocks = tuple(
        replace(
            block, forward_s=(own.forward_s / LAYERS,) * 2, backward_s=(own.backward_s / LAYERS,) * 2,
            update_s=own.update_s / LAYERS, forward_issue_s=nothing, backward_issue_s=nothing,
            saved_bytes=nothing, forward_workspace_bytes=nothing, backward_workspace_bytes=nothing,
        )
        for block in shape.blocks
    )  # fmt: skip
    return replace(shape, device="cpu", samples=(1, SAMPLES), blocks=blocks)


def ours(plan: Plan) -> Step:
    """A step under a plan."""
    job = workload()
    skeleton = Skeleton(job.build)
    captured = capture(skeleton.model, job.inputs(2, 0), job.loss, device="cpu")
    trainer = Trainer(plan, job, captured, lambda names: skeleton.materialise(names, 0))
    data = job.inputs(SAMPLES, 0)
    return lambda: trainer.step(data)


def by_torch(name: str, rank: int, world: int) -> Step:
    """A step with torch's own means."""
    how, mib, _ = BY_HAND[name]
    data, own = batch(SAMPLES, 0), SAMPLES // world
    x, y = (whole[rank * own : (rank + 1) * own] for whole in (data.args[0], data.targets))
    return by_hand(how, Training(build(), F.mse_loss, x, y, torch.optim.SGD, RATE), mib)


def race(rank: int, world: int, plans: dict[str, Plan], rounds: int) -> tuple[dict[str, list[float]], Alone]:
    """Seconds of every step of each, in turn: three steps at a time, since some hide an exchange in the next step; and
    what steps take that exchange nothing, in turn with them."""
    wake(rank, world)
    runs = {line: ours(plan) for line, plan in plans.items()} | {n: by_torch(n, rank, world) for n in BY_HAND}
    found: dict[str, list[float]] = {name: [] for name in runs}
    lonely, parts = alone(rank, world), list[tuple[float, ...]]()
    for number in range(rounds + 1):
        for name, run in runs.items():
            dist.barrier()
            started = time.perf_counter()
            for _ in range(3):
                run()
            dist.barrier()
            if number:  # the first round warms up: DDP makes its buckets in the second step
                found[name].append((time.perf_counter() - started) / 3)
            dist.barrier()
            parts.append(lonely())
    return found, Alone(*(median(part) for part in zip(*parts, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", default=["dp=2"])
    parser.add_argument("--link", type=parse_rate, default=125e6)
    parser.add_argument("--delay", type=parse_seconds, default=0.0)
    parser.add_argument("--control", default=CONTROL, help="TCP's congestion control")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with slow_link(options.link, options.delay, options.control) as link:
        # Who sleeps is not slowed down by communication, nor by others who do.
        probed = probe(2, quick=True, place=link.place, timeout_s=300)
        cluster = replace(probed, slowdown=Slowdown(), contention=())
        naps = Alone(LAYERS * FORWARD_S, LAYERS * BACKWARD_S, 0.0)
        plans = {line: solve(parse(line), profile(naps), cluster, SAMPLES).plan for line in options.plans}
        with placed(link.place):
            found, own = pool(2).run(race, plans, options.rounds)[0]
    predicted = {line: predict(plan, profile(own), cluster, SAMPLES).step_s for line, plan in plans.items()}
    share = 4 * WIDTH * WIDTH / 2 / options.link
    print(f"a step's layers take {LAYERS * (FORWARD_S + BACKWARD_S) * 1e3:.0f} ms, and without any exchange it takes "
          f"{own.forward_s * 1e3:.0f} + {own.backward_s * 1e3:.0f} + {own.update_s * 1e3:.0f} ms; half of a layer "
          f"passes the link in {share * 1e3:.1f} ms")  # fmt: skip
    stage = {line: plan.zero for line, plan in plans.items()} | {name: zero for name, (*_, zero) in BY_HAND.items()}
    rows = [
        {
            "name": name, "seconds": median(times), "ideal_s": ideal(stage[name], own, share),
            "predicted_s": predicted.get(name), "turns_s": times,
        }
        for name, times in found.items()
    ]  # fmt: skip
    for row in rows:
        turns = " ".join(f"{1e3 * seconds:.0f}" for seconds in found[row["name"]])
        ours_too = f"ours, predicted {row['predicted_s'] * 1e3:.1f} ms" if row["predicted_s"] else "torch, by hand"
        print(f"{row['name']:20} {row['seconds'] * 1e3:7.1f} ms, {row['seconds'] / row['ideal_s']:.2f} of the ideal "
              f"{row['ideal_s'] * 1e3:.1f} ms   {ours_too}; by turns {turns}")  # fmt: skip
    if options.out:
        about = {
            "machine": describe(torch.device("cpu")), "made": time.strftime("%Y-%m-%d", time.gmtime()),
            "command": command(), "torch": torch.__version__, "link": options.link,
            "delay_s": options.delay, "control": options.control, "layers_s": LAYERS * (FORWARD_S + BACKWARD_S),
            "alone_s": asdict(own), "share_s": share, "rows": rows,
        }  # fmt: skip
        options.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
