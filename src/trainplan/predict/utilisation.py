"""Model FLOP utilisation: what the arithmetic of a step would take at the devices' peaks, over what the step takes.

    MFU = 3 × batch × (forward FLOPs of products / their peak + of convolutions / their peak) / (step × devices)

A backward pass counts as two forward passes, and recomputation is not counted: it is not work of the model's. Products
and convolutions may run in different precisions (`profile.arithmetic`), so each is divided by its own peak.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainplan.cluster.catalogue import peak
from trainplan.cluster.cluster import Cluster, Device
from trainplan.profile.profile import Profile
from trainplan.units import percent, significant, tflops


@dataclass(frozen=True)
class Utilisation:
    """A share, and the formula that it is by; or None, and why there is none."""

    share: float | None
    note: str


def utilisation(profile: Profile, cluster: Cluster, ranks: int, batch: int, step_s: float) -> Utilisation:
    """The utilisation of the first so many devices of a cluster."""
    work = {  # what → (forward FLOPs of a sample, precision)
        "products": (profile.flops - profile.convolution_flops, profile.products_in),
        "convolutions": (profile.convolution_flops, profile.convolutions_in),
    }
    work = {what: (flops, precision) for what, (flops, precision) in work.items() if flops > 0}
    if not work:
        return Utilisation(None, "MFU is not given: the profile counts no FLOPs")
    unknown = [what for what, (_, precision) in work.items() if not precision]
    if unknown:
        why = f"the profile does not say in which precision {' and '.join(unknown)} ran"
        return Utilisation(None, f"MFU is not given: {why}")
    devices = [cluster.device(rank) for rank in range(1 if cluster.uniform else ranks)]
    for _, precision in work.values():
        lacking = [device for device in devices if not peak(device, precision)]
        if lacking:
            best = lacking[0].flops.get(precision)
            why = f"; {_shown(best)} is the best that was measured of it" if best else ""
            return Utilisation(
                None, f"MFU is not given: the peak of {lacking[0].name} in {precision} is not known{why}"
            )
    total = sum(flops for flops, _ in work.values())

    def rate(device: Device) -> float:
        """FLOP/s on this mix."""
        return total / sum(flops / (peak(device, precision) or 0.0) for flops, precision in work.values())

    share = 3 * total * batch / (step_s * sum(map(rate, devices)) * (ranks / len(devices)))
    parts = {what: (flops / total, precision) for what, (flops, precision) in work.items()}
    part_of = f" of {devices[0].processors} of {devices[0].slice_of} processors" if devices[0].slice_of else ""
    peaks = " and ".join(
        f"{_shown(peak(devices[0], precision) or 0.0)} {precision} dense{part_of}"
        + (f" for {what} ({percent(part)} of them)" if len(parts) > 1 else "")
        for what, (part, precision) in parts.items()
    )
    if share > 1:
        why = (
            f"it would be {percent(share)} of {peaks}: what ran needs fewer FLOPs than counted, or the peak is too low"
        )
        return Utilisation(None, f"MFU is not given: {why}")
    return Utilisation(
        share, f"MFU = 3 × forward FLOPs of the batch (recomputation not counted) / (step × devices × {peaks})"
    )


def _shown(rate: float) -> str:
    return tflops(rate) if rate >= 1e12 else f"{significant(rate / 1e9)} GFLOP/s"
