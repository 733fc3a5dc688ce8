"""What a program must know of the thing that will run it."""

from __future__ import annotations

from dataclasses import dataclass

from trainplan.errors import InputError, nearest


@dataclass(frozen=True)
class Backend:
    """How ranks talk, and what keeps a host busy."""

    name: str
    host_computes: bool  # a CPU worker: the host is the device, so it waits for every computation
    receives_wait: bool  # the host waits for a message (gloo), or only the device does (NCCL)
    receives_on_device: bool = True  # a posted receive has its buffer on the device, or in host memory
    # A GPU's host waits itself for what gloo sums or shares out, before it issues what computes with that; of NCCL only
    # the device does. It ends a step by waiting for its device.
    hosts_attend: bool = False
    tagged: bool = True  # messages between two ranks are told apart by tags, or only by their order

    @property
    def sums_by(self) -> str:
        """Whose collectives these are."""
        return "nccl" if self.name == "nccl" else "gloo"

    def untested(self, ranks: int) -> str:
        """What whoever runs so many ranks must be told, because nobody has seen it work; nothing where it is tested."""
        if self.name != "nccl" or ranks < 2:
            return ""
        return (
            f"NCCL above one rank is not tested, but for the order of its messages, on gloo; here it has {ranks} ranks"
        )


BACKENDS = {
    "gloo": Backend("gloo", host_computes=True, receives_wait=True),
    "gloo-staged": Backend(
        "gloo-staged", host_computes=False, receives_wait=True, receives_on_device=False, hosts_attend=True
    ),
    "nccl": Backend("nccl", host_computes=False, receives_wait=False, tagged=False),
}


def backend(name: str) -> Backend:
    """The backend of that name."""
    if name not in BACKENDS:
        raise InputError(f"backend {name!r}", "there is no such backend", nearest(name, BACKENDS))
    return BACKENDS[name]
