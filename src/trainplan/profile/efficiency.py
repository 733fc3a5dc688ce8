"""What a device reaches in practice where no file of measurements says so: a few constants. No torch here.

Each has a default with its source, and a device may have others (`Device.efficiency`), fitted to a few steps that
somebody timed: see `bench/published`. None depends on a model, a width, a micro-batch or a number of ranks. The
shares are bounded by what was ever measured: a fit that wants more has a term wrong somewhere, and would hide it here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from trainplan.cluster.cluster import Device
from trainplan.errors import InputError, nearest

CEILING = {
    "product": 0.87,
    "stream": 0.92,
    "attention": 0.8,
    "sustained": 1.0,
}  # the best of all shapes on any device of the catalogue


@dataclass(frozen=True)
class Efficiency:
    """The constants of a device and of the host that issues its work."""

    product: float = 0.85  # share of the peak of products on tensor cores (A100: 0.83 to 0.87)
    misaligned: float = 0.38  # of that, where a dimension is no multiple of 8 (vTrain: logits of 50,257)
    stream: float = 0.75  # share of the memory's rate (A100, vTrain's single-node rows; 0.82 on a Titan RTX)
    attention: float = 0.50  # share of the peak of fused attention (MPT on A100 and H100: mosaicml/llm-foundry's table)
    sustained: float = 1.0  # of all this, what is left when it is hot: clocks under load are below the best
    searched: float = 0.0  # 1: cudnn tries all algorithms of a convolution (torch.backends.cudnn.benchmark)
    kernel_s: float = 3e-6  # from one kernel to the next
    issue_s: float = 0.0  # of the host for an operator, forward or back; 0: as measured on an H200 (`roofline`)
    # Host and device overlap badly where they take about as long: g and c seconds become (gᵖ + cᵖ)^(1/p), which is the
    # longer of the two as p grows. Where ranks exchange something inside a pass, everybody waits for the slowest host.
    overlap: float = 0.0  # p of ranks by themselves; 0: the longer of the two
    overlap_sharing: float = 2.4  # p of ranks that share blocks (vTrain's rows)
    sharing: float = 0.0  # for every further rank that shares blocks, its host takes so much longer
    loss_issue_s: float = 0.0  # of the host for every micro-batch's loss, beside its operators (batches, scaling)
    step_s: float = 0.0  # of every step, beside its operators

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            value, most = getattr(self, name), CEILING.get(name)
            if value < 0 or (most is not None and not 0 < value <= most):
                if value > 0:
                    why = f"{value:g} is beyond the {most:g} that was measured"
                else:
                    why = f"{value:g} is below 0" if most is None else f"{value:g}: a share of the peak is above 0"
                raise InputError(f"efficiency {name}", why, f"{name}={most or 0:g}")
        if self.searched not in (0, 1):
            asked = f"efficiency searched {self.searched:g}"
            raise InputError(asked, "cudnn tries algorithms (1), or does not (0)", "searched=1")


def efficiency(device: Device) -> Efficiency:
    """The constants of a device.

    >>> from trainplan.cluster.catalogue import device
    >>> from dataclasses import replace
    >>> efficiency(replace(device("A100-80"), efficiency={"product": 0.8})).product, efficiency(device("T4")).stream
    (0.8, 0.75)
    """
    known = [f.name for f in fields(Efficiency)]
    for name in device.efficiency:
        if name not in known:
            raise InputError(f"efficiency {name} of {device.name}", "there is no such constant", nearest(name, known))
    return replace(Efficiency(), **device.efficiency)


def together(run: float, issue: float, power: float) -> float:
    """Seconds of a pass whose device and host take so long.

    >>> together(3.0, 4.0, 2.0), together(3.0, 4.0, 0.0), together(0.0, 4.0, 2.0)
    (5.0, 3.0, 0.0)
    """
    if not power or run <= 0 or issue <= 0:
        return run  # the clock waits for the host by itself
    longer = max(run, issue)
    return float(longer * ((run / longer) ** power + (issue / longer) ** power) ** (1 / power))
