"""A model whose blocks sleep: what is measured is then the schedule and nothing else.

Computing on a few shared cores disturbs itself; sleeping does not, so that four processes on two cores sleep exactly
as long as they are told. The sleeping is an operator with a backward pass of its own (a custom autograd.Function would
be refused: tracing drops its backward), so that the model is captured, cut, recomputed and trained like any other.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from statistics import median
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.engine.systems import Case
from trainplan.bench.pool import pool
from trainplan.cluster.cluster import Cluster, Curve, Device, Link, Node
from trainplan.engine import copies
from trainplan.engine.measurement import Measurement, measure
from trainplan.engine.parcels import Way
from trainplan.engine.trainer import Trainer
from trainplan.plan.plan import Plan, plan
from trainplan.profile.capture.captured import Captured, capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.profile.profile import Profile
from trainplan.profile.structure import structure
from trainplan.workload.workload import Batch, Loss, Workload

# Milliseconds of each block for one sample: forward, and backward the gradients of its input and of its weights. No two
# blocks are alike.
BLOCKS = ((4.0, 5.0, 3.0), (6.0, 5.0, 4.0), (3.5, 3.0, 4.0), (5.0, 6.0, 4.0))
WIDTH = 4
TOKENS = 8  # of a sequence, where samples are sequences: a token takes its share of the sample
RATE = 1600.0  # bytes a second that are copied from or to the host, where that is slept through
SPIN = 2e-4  # the last so many seconds are not slept: the system wakes sleepers up to 0.1 ms late

# Defined with torch's lower-level tools: the decorator torch.library.custom_op takes 0.2 ms longer a call.
_LIBRARY = torch.library.Library("trainplan_tests", "DEF")
# Pointwise: it does nothing to one token that depends on another, so a slice of a sequence can be slept through alone.
_LIBRARY.define("sleep(Tensor x, float forward, float backward) -> Tensor", tags=torch.Tag.pointwise)
_LIBRARY.define("sleep_back(Tensor gradient, float backward) -> Tensor")
sleep, sleep_back = torch.ops.trainplan_tests.sleep.default, torch.ops.trainplan_tests.sleep_back.default


# Seconds that a block takes besides sleeping, which it sleeps less (backward half in either nap): found by `wake`.
_spare = {"forward": 0.0, "backward": 0.0}
_late: list[float] = []  # seconds by which the system woke us too late, every time
# How many times as long this process sleeps: one of a slower device; and a stretched one sleeps longer through copies,
# too, as everybody else then does.
_pace = {"times": 1.0, "stretch": 1.0}


def _nap(x: Tensor, seconds: float, spare: float) -> Tensor:
    """What comes in, after so many seconds a sample."""
    if not seconds:
        return x.clone()
    seconds *= len(x) * (x.shape[1] / TOKENS if x.dim() == 3 else 1) * _pace["times"] * _pace["stretch"]
    until = time.perf_counter() + seconds - spare
    time.sleep(max(0.0, seconds - spare - SPIN))
    while (now := time.perf_counter()) < until:
        pass
    _late.append(now - until)
    return x.clone()


def _keep(ctx, inputs, output) -> None:
    """Of a block what it makes is saved, too: else nobody would sleep again for a backward pass (`capture/tail.py`)."""
    ctx.seconds = inputs[2]
    if inputs[1]:
        ctx.save_for_backward(output)


_LIBRARY.impl("sleep", lambda x, forward, backward: _nap(x, forward, _spare["forward"]), "CPU")
_LIBRARY.impl("sleep_back", lambda gradient, seconds: _nap(gradient, seconds, _spare["backward"]), "CPU")
for name in ("sleep", "sleep_back"):  # to look at the model takes no time
    torch.library.register_fake(f"trainplan_tests::{name}", lambda x, *seconds: torch.empty_like(x))
torch.library.register_autograd(
    "trainplan_tests::sleep", lambda ctx, gradient: (sleep_back(gradient, ctx.seconds), None, None), setup_context=_keep
)


class Sleeper(nn.Module):
    """One block. It sleeps after its layer, so its gradients are complete when its backward pass is over.

    And it sleeps on the way to one of its weights, which is not on the way to its input: where a backward pass comes in
    two parts, that is the second one. (The weight is first made as long as the batch: one sleeps so much a sample.)
    """

    def __init__(self, forward: float, of_input: float, of_weights: float) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.there, self.of_input, self.of_weights = forward, of_input, of_weights

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return sleep(h + sleep(torch.zeros_like(h) + self.shift, 0.0, self.of_weights), self.there, self.of_input)


@cache
def wake() -> None:
    """Find out what a block costs besides sleeping, in this process: caches are cold for whoever was asleep."""
    _spare.update(forward=0.0, backward=0.0)  # whoever is asked again would else find what is left: nothing
    block, x = Sleeper(4e-3, 5e-3, 3e-3), torch.zeros(1, WIDTH, requires_grad=True)
    spent: dict[str, list[float]] = {"forward": [], "backward": []}
    for _ in range(15):
        began = time.perf_counter()
        made = block(x)
        between = time.perf_counter()
        made.backward(torch.ones_like(made))
        spent["forward"].append(between - began - block.there)
        spent["backward"].append(time.perf_counter() - between - block.of_input - block.of_weights)
    # The lower quartile: whoever else computes while this is found out would shorten all naps of this process for good.
    forward, backward = (sorted(seconds)[len(seconds) // 4] for seconds in spent.values())
    _spare.update(forward=forward, backward=backward / 2)


def forget(rank: int, world: int) -> None:
    """Find out anew what this machine takes, in this process: what was found may have been of a busy moment."""
    for found in (wake, _seconds, _dispatch):
        found.cache_clear()


def _model() -> nn.Module:
    return nn.Sequential(*(Sleeper(*(part / 1e3 for part in block)) for block in BLOCKS))


def _batch(samples: int, seed: int, *tokens: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(samples, *tokens, WIDTH, generator=generator) for _ in range(2))
    return Batch(samples, (x,), {}, y)


def workload(sequences: bool = False) -> Workload:
    """`sequences`: samples are sequences of tokens."""
    optimizer = partial(torch.optim.SGD, lr=0.1)
    if not sequences:
        return Workload("sleeping", _model, _batch, Loss(F.mse_loss, lambda b: b.samples), optimizer, 8, 80)
    loss = Loss(F.mse_loss, lambda batch: batch.args[0].shape[1] * batch.samples, "tokens")
    inputs = lambda samples, seed: _batch(samples, seed, TOKENS)  # noqa: E731
    return Workload("sleeping", _model, inputs, loss, optimizer, 8, 80, tokens_per_sample=TOKENS)


@cache
def _captured(sequences: bool = False) -> tuple[Workload, Skeleton, Captured]:
    job = workload(sequences)
    skeleton = Skeleton(job.build)
    skeleton.model.train()
    return job, skeleton, capture(skeleton.model, job.inputs(2, 0), job.loss, device="cpu")


def _twice(milliseconds: float, stretch: float) -> tuple[float, float]:
    """Seconds for one sample, and for two."""
    return stretch * milliseconds / 1e3, stretch * 2 * milliseconds / 1e3


@cache
def shape_of(sequences: bool = False) -> Profile:
    """What plans are lowered with: found once, not by every trainer."""
    job, _, captured = _captured(sequences)
    return structure(captured, job, job.inputs(2, 0))


@cache
def profile(sequences: bool = False, stretch: float = 1.0) -> Profile:
    """The model as it is, with exactly the seconds that its blocks sleep: so many times as long as is written above."""
    shape = shape_of(sequences)
    blocks = tuple(
        replace(
            block, forward_s=_twice(there, stretch), backward_s=_twice(of_input + of_weights, stretch),
            backward_input_s=_twice(of_input, stretch), backward_weight_s=_twice(of_weights, stretch),
            forward_issue_s=(0.0, 0.0), backward_issue_s=(0.0, 0.0), saved_bytes=(0.0, 0.0),
            forward_workspace_bytes=(0.0, 0.0), backward_workspace_bytes=(0.0, 0.0),
        )
        for block, (there, of_input, of_weights) in zip(shape.blocks, BLOCKS, strict=True)
    )  # fmt: skip
    crossings = tuple(replace(c, saved_by=c.consumers) for c in shape.crossings)  # by the layers that read them
    return replace(shape, device="cpu", samples=(1, 2), blocks=blocks, crossings=crossings)


def naps(rank: int, world: int, rounds: int = 15) -> dict[str, list[tuple[float, float]]]:
    """When this rank began and ended messages (0 → 1) and sums of a few bytes, each after a nap as blocks take."""
    tensor = torch.zeros(WIDTH)
    found: dict[str, list[tuple[float, float]]] = {"p2p": [], "all_reduce": []}
    for _ in range(rounds):
        for kind, rows in found.items():
            dist.barrier()
            if rank != 1 or kind == "all_reduce":
                time.sleep(5e-3)
            began = time.perf_counter()
            if kind == "all_reduce":
                dist.all_reduce(tensor)
            elif rank == 0:
                dist.send(tensor, 1)
            elif rank == 1:
                dist.recv(tensor, 0)
            rows.append((began, time.perf_counter()))
    return found


@cache
def _seconds(world: int) -> dict[str, float]:
    """Of a message, and of a sum over so many ranks, on this machine between processes that were asleep."""
    ranks = pool(world).run(naps)
    sums = [
        max(e for _, e in ends) - max(b for b, _ in ends)
        for ends in zip(*(r["all_reduce"] for r in ranks), strict=True)
    ]
    messages = [end - began for (began, _), (_, end) in zip(ranks[0]["p2p"], ranks[1]["p2p"], strict=True)]
    return {"p2p": median(messages), "all_reduce": median(sums)}


@cache
def _dispatch() -> float:
    """Seconds that the engine takes for a pass, besides the pass: found on one rank, where nobody waits for another.

    In a process like those of the other ranks: this one has run all tests before.
    """
    alone = plan(micro=4, blocks=len(BLOCKS))
    slept = sum(map(sum, BLOCKS)) / 1e3 * alone.micro
    (measured,) = pool(1).run(train, alone, alone.micro, 1, 5)
    taken = min(measured.seconds[1:])  # of a moment in which nobody disturbed it
    return max(0.0, taken - slept) / (2 * alone.micro)


def cluster(ranks: int, stretch: float = 1.0) -> Cluster:
    """This machine, with its host and its messages as they are: neither is free, and the profile is hand-made. And so
    is the way to the host's memory, which is slower where naps are stretched."""
    devices = (Device("cpu", 2**30, {"fp32": 1e12}, memory_rate=10e9, host_rate=RATE / stretch),) * ranks
    curves = [Curve("all_reduce", n, (0,), (_seconds(n)["all_reduce"],)) for n in (2, 4) if n <= ranks]
    if curves:
        curves.append(Curve("p2p", 2, (0,), (_seconds(2)["p2p"],)))
    node = Node("node", devices, Link("loopback", 0.0, 1e12))
    return Cluster("sleepers", (node,), "gloo", tuple(curves), dispatch_s=_dispatch())


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of inputs, which takes its time, whoever makes it. (To spin at its end would keep others from Python.)"""
    time.sleep(_pace["stretch"] * tensor.nbytes / RATE)
    return tensor.clone()


def stretched(stretch: float) -> AbstractContextManager:
    """All naps of this process, and its copies, take so many times as long."""
    return mock.patch.dict(_pace, stretch=stretch)


def train(
    rank: int, world: int, plan: Plan, batch: int, warm_up: int, steps: int, times: tuple[float, ...] = (),
    stretch: float = 1.0,
) -> Measurement:  # fmt: skip
    """On every rank: some steps under a plan; the ranks sleep so many `times` as long as they are told."""
    wake()
    job, skeleton, captured = _captured(bool(plan.slices))
    shape = shape_of(bool(plan.slices))
    trainer = Trainer(plan, job, captured, lambda names: skeleton.materialise(names, 0), shape=shape)
    # Undone afterwards: other tests run in the same processes.
    slower = mock.patch.dict(_pace, times=times[rank] if times else 1.0)
    copying = mock.patch.object(Way, "go", _slowly(Way.go)), mock.patch.object(copies, "moved", _moved)
    with slower, stretched(stretch), copying[0], copying[1]:
        measured = measure(trainer, [(job.inputs(batch, 0), None)] * (warm_up + steps), warm_up=warm_up)
    if world > 1:
        dist.barrier()
        trainer.close()
    return measured


def _slowly(go: Callable) -> Callable:
    """Copies to the host's memory and back that take as long as the cluster says."""

    def slowly(way, pairs, after, mark, *others):
        seconds = _pace["stretch"] * sum(into.nbytes for into, _ in pairs) / RATE
        naps = iter((seconds, 0.0))  # it asks for the moment before it copies, and after

        def asked():
            moment = mark()
            time.sleep(next(naps))
            return moment

        return go(way, pairs, after, asked, *others)

    return slowly


def lateness(rank: int, world: int) -> float:
    """Seconds by which this rank was woken too late since this was last asked: what a busy machine takes."""
    seconds = sum(_late)
    _late.clear()
    return seconds


def _systems() -> list[Case]:
    """Systems whose step time is held against the prediction: a line each, with and without recomputation.

    Stages are uneven (no two blocks are alike), and so are the micro-batches of a batch of 5, 7 or 9.
    """
    systems = [
        ("single", 4, {}),
        ("accumulate", 5, {"micro": 2}),
        ("ddp", 8, {"dp": 2, "bucket": 100}),
        ("ddp", 16, {"dp": 4, "bucket": 100_000}),
        ("ddp", 9, {"dp": 2, "micro": 2, "bucket": 100}),
        ("naive", 4, {"pp": 2, "stages": (3,), "micro": 2}),
        ("naive", 4, {"pp": 4, "stages": (1, 2, 3)}),
        ("gpipe", 7, {"pp": 2, "stages": (1,), "micro": 3, "schedule": "gpipe"}),
        ("gpipe", 12, {"pp": 4, "stages": (1, 2, 3), "micro": 4, "schedule": "gpipe"}),
        ("dapple", 7, {"pp": 2, "stages": (3,), "micro": 3, "schedule": "1f1b"}),
        ("dapple", 12, {"pp": 4, "stages": (1, 2, 3), "micro": 4, "schedule": "1f1b"}),
        ("gpipe", 12, {"dp": 2, "pp": 2, "stages": (1,), "micro": 3, "schedule": "gpipe", "bucket": 100}),
        ("dapple", 12, {"dp": 2, "pp": 2, "stages": (3,), "micro": 3, "schedule": "1f1b", "bucket": 100}),
    ]
    four = {"pp": 4, "stages": (1, 2, 3), "micro": 6}
    chunked = {"pp": 2, "chunks": 2, "stages": (1, 2, 3), "micro": 4}
    away = {"offload": "activations", "away": ((2, 2, 0), (1, 1, 0))}
    orders = [
        ("preload", 2, {"preload": "off"}),
        ("preload", 2, {"preload": "on"}),
        ("preload", 4, {"pp": 2, "stages": (2,), "micro": 2, "schedule": "1f1b", "preload": "on"}),
        ("dataparallel", 2, {"dp": 2, "exchange": "dataparallel", "preload": "off"}),
        ("ddp", 9, {"dp": 2, "micro": 2, "bucket": 100, "exchange": "ring"}),
        ("all-to-all", 16, {"dp": 4, "bucket": 100, "exchange": "all-to-all"}),
        ("torchgpipe-as-found", 12, {"pp": 2, "stages": (1,), "micro": 3, "schedule": "lockstep"}),
        ("looped-bfs", 16, {**chunked, "schedule": "looped"}),
        ("dapple", 24, {**four, "schedule": "1f1b-early"}),
        ("dapple", 12, {"pp": 2, "stages": (3,), "micro": 6, "schedule": "1f1b", "spread": (2, 1), "bucket": 100}),
        ("interleaved", 16, {**chunked, "schedule": "interleaved"}),
        ("zb-h1", 24, {**four, "schedule": "zb-h1"}),
        ("zb-h2", 24, {**four, "schedule": "zb-h2"}),
        ("zb-v", 16, {**chunked, "schedule": "zb-v"}),
        ("gems", 12, {"pp": 2, "stages": (2,), "micro": 4, "schedule": "gems", "bucket": 100}),
        ("chimera", 24, {**four, "schedule": "chimera", "bucket": 100}),
        ("chimera", 24, {**four, "schedule": "chimera-doubled", "bucket": 100}),
        ("zero-r", 5, {"micro": 2, "offload": "activations", "away": ((2, 1),)}),
        ("gpipe", 7, {"pp": 2, "stages": (2,), "micro": 3, "schedule": "gpipe", **away}),
        ("terapipe", 16, {"pp": 4, "stages": (1, 2, 3), "micro": 2, "schedule": "terapipe", "slices": (4, 3, 1)}),
    ]
    return [
        *(
            Case(key, "sleeping", {**choices, "recompute": recompute}, (batch,))
            for key, batch, choices in systems
            for recompute in ("none", "full")
        ),
        *(Case(key, "sleeping", choices, (batch,)) for key, batch, choices in orders),
    ]


SYSTEMS = _systems()
