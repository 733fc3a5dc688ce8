"""A fixed piece of work that tells how fast the machine is right now.

Machines drift: the same step may take 10 to 40 % longer a minute later, because of clocks, power or neighbours. So
whatever is timed is timed beside this kernel, and what is kept is the ratio of the two. A profile says how long the
kernel took while it was made (`Provenance.reference_s`); whoever compares a run with the profile runs the kernel beside
the run and compares ratios.

The kernel is what training is made of, in small: a convolution with batch norm, forward and backward, a matrix product,
and a sum over memory that is larger than the nearest caches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

TRIES = 3  # a measurement is the median of so many runs


class Reference:
    """The kernel on one device. It has its own tensors and draws from its own generator.

    >>> Reference("cpu").seconds() > 0
    True
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        small = self.device.type == "cpu"
        samples, width, side, long = (2, 64, 16, 2**20) if small else (32, 256, 28, 2**25)
        generator = torch.Generator().manual_seed(0)

        def made(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.device)

        self.images = made(samples, width, side, side).requires_grad_()
        self.weight = nn.Parameter(made(width, width, 3, 3) / width)
        self.scale, self.shift = nn.Parameter(made(width)), nn.Parameter(made(width))
        self.factor = made(side * 16, side * 16)
        self.stream, self.sums = made(long), torch.zeros(long, device=self.device)
        self.seconds()  # the first run chooses algorithms and allocates

    def seconds(self) -> float:
        """Seconds of one run of the kernel now, by the clock on the wall: to go with steps timed by that clock."""
        return self._device_seconds() if self.device.type == "cuda" else self._host_seconds(time.perf_counter)

    def core_seconds(self) -> float:
        """Seconds that one run has the core for: to go with work timed so (`timing.HostClock`).

        On a GPU, and on a CPU where no other process wants the core, they are the seconds on the wall.
        """
        return self._device_seconds() if self.device.type == "cuda" else self._host_seconds(time.thread_time)

    def _device_seconds(self) -> float:
        found = []
        for _ in range(TRIES):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.device(self.device):
                begin.record()
                self.run()
                end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(found)

    def _host_seconds(self, clock: Callable[[], float]) -> float:
        found = []
        for _ in range(TRIES):
            start = clock()
            self.run()
            found.append(clock() - start)
        return statistics.median(found)

    def run(self) -> None:
        """One run of the kernel."""
        with torch.enable_grad():
            images = F.conv2d(self.images, self.weight, padding=1)
            images = F.batch_norm(images, None, None, self.scale, self.shift, training=True)
            F.relu(images).sum().backward()
        for tensor in (self.images, self.weight, self.scale, self.shift):
            tensor.grad = None
        with torch.no_grad():
            torch.mm(self.factor, self.factor)
            self.sums.add_(self.stream, alpha=1e-3)
