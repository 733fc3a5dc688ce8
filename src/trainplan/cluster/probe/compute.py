"""Compute: matrix products, memory copies, copies to the host, and how busy neighbours slow a worker down."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numba
import psutil
import torch
from torch import nn

from trainplan.cluster.probe.team import Record, Round, Team, levels
from trainplan.units import MIB


class Kernel:
    """A piece of a ResNet, forward and backward: what workers really do, in miniature."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        width, samples, side = (64, 2, 28) if device.type == "cpu" else (256, 32, 28)
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.layers = nn.Sequential(*layers).to(device)
        self.inputs = torch.randn(samples, width, side, side, device=device, requires_grad=True)

    def __call__(self) -> None:
        self.layers(self.inputs).sum().backward()


class Issuing:
    """Many operators that are nothing to a device, forward and backward: the seconds are those of the host."""

    def __init__(self, device: torch.device) -> None:
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(32))).to(device)
        self.inputs = torch.zeros(8, 8, device=device)

    def __call__(self) -> None:
        self.layers.zero_grad(set_to_none=True)
        self.layers(self.inputs).sum().backward()


def prepare(team: Team, quick: bool) -> Round:
    """A round of this phase: each product and copy on rank 0 alone, then the kernel on 1, 2, … workers at once; and,
    where hosts issue what devices do, as many of them at once."""
    cuda = team.device.type == "cuda"
    before = 0 if cuda else _resident()
    factors = _factors(team) if team.rank == 0 else {}
    copied = (256 if cuda else 64) * MIB  # more than caches hold
    source = torch.zeros(copied // 4, device=team.device)
    target = torch.empty_like(source)
    kernel, issuing = Kernel(team.device), Issuing(team.device)
    hosts = {}
    if cuda and team.rank == 0:
        hosts = {kind: torch.zeros(64 * MIB // 4, pin_memory=kind == "pinned") for kind in ("pinned", "pageable")}
    repeats = 2 if quick else 3
    deep = 10 if cuda else 1  # a GPU is given several at once, so that the host's part does not show

    def one_round(record: Record) -> None:
        for name, factor in factors.items():
            torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
            record(f"product.{name}", 2 * len(factor) ** 3 / seconds(team, partial(torch.matmul, factor, factor), deep))
        torch.backends.cuda.matmul.allow_tf32 = False
        if team.rank == 0:
            record("copy", 2 * copied / seconds(team, partial(target.copy_, source), deep))  # read once, written once
            for kind, host in hosts.items():
                _host_copies(team, kind, host, target[: host.numel()], record)
        for busy in levels(team.count):
            team.barrier()
            if team.rank < busy:
                record(f"busy.{busy}", seconds(team, kernel, repeats))
            if cuda:
                team.barrier()
                if team.rank < busy:
                    record(f"issuing.{busy}", seconds(team, issuing, repeats))
        team.barrier()
        record("memory", _memory(team, before))

    return one_round


def seconds(team: Team, work: Callable[[], object], repeats: int = 1) -> float:
    """Seconds of one call, the device's part included.

    On a CPU those that the thread has a core for, so that other programs on the machine do not count.
    """
    clock = time.perf_counter if team.device.type == "cuda" else time.thread_time
    started = clock()
    for _ in range(repeats):
        work()
    team.sync()
    return (clock() - started) / repeats


def _factors(team: Team) -> dict[str, torch.Tensor]:
    """A square matrix for each precision that is worth measuring."""
    if team.device.type == "cuda":
        kinds = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        sides = dict.fromkeys(kinds, 4096)
    else:
        kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
        sides = {"fp32": 768, "bf16": 384}  # without units for it bf16 is several times slower
    return {name: torch.randn(sides[name], sides[name], device=team.device).to(kind) for name, kind in kinds.items()}


def _host_copies(team: Team, kind: str, host: torch.Tensor, on_device: torch.Tensor, record: Record) -> None:
    """Bytes per second from the host's memory to the device's, and back."""
    size = host.numel() * host.element_size()
    record(f"host.{kind}", size / seconds(team, partial(on_device.copy_, host, non_blocking=True)))
    record(f"host.{kind}", size / seconds(team, partial(host.copy_, on_device, non_blocking=True)))


def _resident() -> int:
    """Bytes of a rank that has done a little of everything and has no tensors yet. Libraries load most of what they
    need with the first call: beside a step of training, ranks capture a model, compile, and can save."""
    import_module("torch.distributed.checkpoint")
    layer, inputs = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten()), torch.zeros(2, 1, 8, 8)
    torch.export.export(layer, (inputs,))
    numba.njit(lambda x: x)(1)
    layer(inputs).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.0, momentum=0.9).step()
    return psutil.Process().memory_info().rss


def _memory(team: Team, before: int) -> dict[str, Any]:
    """What driver and libraries take beside tensors (on a GPU: what all its processes take), and what there is."""
    if team.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(team.device)
        reserved, uuid = torch.cuda.memory_reserved(team.device), torch.cuda.get_device_properties(team.device).uuid
        return {"taken": total - free, "tensors": reserved, "total": total, "gpu": str(uuid).removeprefix("GPU-")}
    return {"taken": before, "tensors": 0, "total": psutil.virtual_memory().total}
