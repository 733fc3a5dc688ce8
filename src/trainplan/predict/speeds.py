"""Devices of different kinds in one cluster: how fast each computes, in units of the one that the profile is of.

A profile has seconds of one device. Where it is an estimate, it has the operators, too: then another device is as much
slower as its own estimate of all blocks is. Where it was measured, the model's arithmetic takes as much longer as the
other device's peak is lower: the ratio of what both would do of this mix of products and convolutions at their peaks,
which is wrong where a block is bound by memory or by its host. Either is one number a device, whatever the block, so
such predictions carry no measured error.
"""

from __future__ import annotations

from trainplan.cluster.cluster import Cluster, Device
from trainplan.errors import PlanError
from trainplan.profile.profile import MIXED, Profile
from trainplan.profile.variant import seconds_on


def device_of(profile: Profile, cluster: Cluster) -> Device:
    """The first device of the cluster that the profile is of; refused where there is none."""
    if profile.device not in cluster.kinds:
        names = sorted(cluster.kinds)
        raise PlanError(
            f"a profile made on {profile.device} for the cluster {cluster.name}",
            f"its devices are {', '.join(names)}",
            f"a profile for {names[0]}",
        )
    return next(d for node in cluster.nodes for d in node.devices if d.name == profile.device)


def speeds(profile: Profile, cluster: Cluster) -> tuple[float, ...]:
    """The speed of the device of every rank.

    Refused where the profile is of no device of the cluster, or the peak of one is not known.
    """
    device_of(profile, cluster)
    names = cluster.kinds
    if len(names) == 1:
        return (1.0,) * cluster.world
    devices = [cluster.device(rank) for rank in range(cluster.world)]
    if profile.recipes and profile.kind == "estimated":
        rates = {name: 1 / seconds_on(profile, device) for name, device in names.items()}
    else:
        rates = {name: _rate(profile, device, cluster) for name, device in names.items()}
    return tuple(rates[device.name] / rates[profile.device] for device in devices)


def _rate(profile: Profile, device: Device, cluster: Cluster) -> float:
    """FLOP/s on this model's mix."""
    total = profile.flops or 1.0
    work = [
        (total - profile.convolution_flops, profile.products_in or profile.precision),
        (profile.convolution_flops, profile.convolutions_in or profile.precision),
    ]
    # What torch may compute in tf32 it computes in fp32 on a device that has no units for it.
    work = [(flops, "fp32" if p == "tf32" and p not in device.flops else p) for flops, p in work if flops > 0]
    for _, precision in work:
        if not precision or precision.startswith(MIXED):
            why = f"how fast {device.name} is beside {profile.device} is not known: weights are of several types"
            raise PlanError(f"cluster {cluster.name}", why, "devices of one kind")
        if not device.flops.get(precision):
            why = f"how fast {device.name} is beside {profile.device} is not known: it has no peak in {precision}"
            raise PlanError(f"cluster {cluster.name}", why, f"flops: {{{precision}: …}} for it in the cluster's file")
    return total / sum(flops / device.flops[precision] for flops, precision in work)
