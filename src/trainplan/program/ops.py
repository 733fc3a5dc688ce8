"""The kinds of operation, one row each.

A new effect is a new row here, a cost rule (`predict/cost.py`), a memory rule (what its lowering makes and frees) and
a handler (`engine/handlers.py`); a test fails until all of them exist.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class Kind(IntEnum):
    """What an operation does. The names are those of torch's schedule files where torch has them."""

    F = 0  # forward of a unit
    B = 1  # backward of a unit, whole
    I = 2  # backward, gradient of the input only
    W = 3  # backward, gradient of the weights only
    R = 4  # forward once more, for backward
    SEND_F = 5  # an activation to a later stage
    RECV_F = 6
    SEND_B = 7  # its gradient back
    RECV_B = 8
    REDUCE_GRAD = 9  # sum of a bucket of gradients over the replicas (or over the holders of tied weights)
    COUNT = 10  # number that the loss's mean is over, summed over the replicas
    LOSS = 11  # loss summed over the replicas, for the log
    NORM = 12  # squared norm of the gradients, summed over the stages
    STEP = 13  # optimizer step of a stage
    SEND_G = 14  # gradients to a server
    RECV_G = 15
    SEND_W = 16  # weights from a server
    RECV_W = 17
    BARRIER = 18  # nobody goes on before all ranks of a replica have come
    SCATTER_GRAD = 19  # sum of a unit's gradients over replicas that share it out: each gets its share of the sum
    GATHER_F = 20  # weights of a unit from all who have a share of them, for forward
    GATHER_B = 21  # the same once more, for backward
    TICK = 22  # a cycle passes before ranks look again at what is ready
    NEGOTIATE = 23  # the ranks tell each other what is ready
    LOAD = 24  # what a stage reads of a step's batch, from the host's memory to its device
    SEND_INPUT = 25  # a worker's part of the batch from the first device to its own (nn.DataParallel)
    RECV_INPUT = 26
    OFFLOAD = 27  # what a section has saved, to the host's memory
    FETCH = 28  # and back, before it is read


class Lane(IntEnum):
    """What kind of thing an operation occupies; together with a rank (and a peer or group) it is a resource."""

    COMPUTE = 0
    LINK = 1  # one direction between two ranks
    GROUP = 2  # the queue of one process group on one rank
    COPY_IN = 3  # host to device
    COPY_OUT = 4  # device to host
    HOST = 5  # the host's own arithmetic
    DISK = 6


class Value(IntEnum):
    """What a value in memory is, for the breakdown of a peak."""

    WEIGHTS = 0
    GRADIENTS = 1
    OPTIMIZER = 2
    BUFFERS = 3  # running statistics
    SAVED = 4  # activations kept for backward
    BOUNDARY = 5  # activations and gradients that cross stages (or blocks that are recomputed)
    WORKSPACE = 6  # alive only while one operation runs
    INPUT = 7  # the batch itself
    MESSAGE = 8  # in flight: on no rank
    TOKEN = 9  # no bytes: a fact that another operation waits for
    COMMUNICATION = 10  # buffers of receives that are posted ahead, and copies that are exchanged
    HOST = 11  # what was offloaded: in the memory of the host, and not of the device


@dataclass(frozen=True)
class Spec:
    """What is always true of a kind."""

    lane: Lane
    what: str
    message: bool = False
    collective: bool = False
    twin: Kind | None = None  # the kind at the other end of a message


SPECS: dict[Kind, Spec] = {
    Kind.F: Spec(Lane.COMPUTE, "forward"),
    Kind.B: Spec(Lane.COMPUTE, "backward"),
    Kind.I: Spec(Lane.COMPUTE, "backward, input"),
    Kind.W: Spec(Lane.COMPUTE, "backward, weights"),
    Kind.R: Spec(Lane.COMPUTE, "recompute"),
    Kind.SEND_F: Spec(Lane.LINK, "send activation", message=True, twin=Kind.RECV_F),
    Kind.RECV_F: Spec(Lane.LINK, "receive activation", message=True, twin=Kind.SEND_F),
    Kind.SEND_B: Spec(Lane.LINK, "send gradient", message=True, twin=Kind.RECV_B),
    Kind.RECV_B: Spec(Lane.LINK, "receive gradient", message=True, twin=Kind.SEND_B),
    Kind.REDUCE_GRAD: Spec(Lane.GROUP, "reduce gradients", collective=True),
    Kind.COUNT: Spec(Lane.GROUP, "count", collective=True),
    Kind.LOSS: Spec(Lane.GROUP, "sum of losses", collective=True),
    Kind.NORM: Spec(Lane.GROUP, "gradient norm", collective=True),
    Kind.STEP: Spec(Lane.COMPUTE, "optimizer step"),
    Kind.SEND_G: Spec(Lane.LINK, "push gradient", message=True, twin=Kind.RECV_G),
    Kind.RECV_G: Spec(Lane.LINK, "receive pushed gradient", message=True, twin=Kind.SEND_G),
    Kind.SEND_W: Spec(Lane.LINK, "send weights", message=True, twin=Kind.RECV_W),
    Kind.RECV_W: Spec(Lane.LINK, "pull weights", message=True, twin=Kind.SEND_W),
    Kind.BARRIER: Spec(Lane.GROUP, "barrier", collective=True),
    Kind.SCATTER_GRAD: Spec(Lane.GROUP, "scatter gradients", collective=True),
    Kind.GATHER_F: Spec(Lane.GROUP, "gather weights", collective=True),
    Kind.GATHER_B: Spec(Lane.GROUP, "gather weights again", collective=True),
    Kind.TICK: Spec(Lane.HOST, "cycle"),
    Kind.NEGOTIATE: Spec(Lane.GROUP, "negotiation", collective=True),
    Kind.LOAD: Spec(Lane.COPY_IN, "load inputs"),
    Kind.SEND_INPUT: Spec(Lane.LINK, "scatter inputs", message=True, twin=Kind.RECV_INPUT),
    Kind.RECV_INPUT: Spec(Lane.LINK, "receive inputs", message=True, twin=Kind.SEND_INPUT),
    Kind.OFFLOAD: Spec(Lane.COPY_OUT, "copy out"),
    Kind.FETCH: Spec(Lane.COPY_IN, "copy in"),
}
SENDS = tuple(kind for kind in Kind if kind.name.startswith("SEND"))
RECEIVES = tuple(kind for kind in Kind if kind.name.startswith("RECV"))
COLLECTIVES = tuple(kind for kind in Kind if SPECS[kind].collective)
PER_REPLICA = (Kind.NORM, Kind.BARRIER)  # collectives of the ranks of one replica; the others are of copies of a stage
GATHERS = (Kind.GATHER_F, Kind.GATHER_B)
SHARED_OUT = (Kind.SCATTER_GRAD, *GATHERS)  # collectives of replicas that share out a stage; others are of all copies
COPIES = (Kind.OFFLOAD, Kind.FETCH)  # between a device and its host, beside everything else
COMPUTES = tuple(kind for kind in Kind if SPECS[kind].lane is Lane.COMPUTE)


def goes_ahead(found: Iterable[tuple[int, Kind]]) -> bool:
    """Whether some rank computes for others and waits for none of them, as one does whose stage is frozen: it begins
    the next step at once. `found`: operations, each with a rank that takes part.

    >>> goes_ahead([(0, Kind.F), (0, Kind.SEND_F), (1, Kind.RECV_F), (1, Kind.F), (1, Kind.B)])
    True
    >>> goes_ahead([(0, Kind.F), (1, Kind.RECV_F), (1, Kind.F), (0, Kind.RECV_B)]), goes_ahead([(0, Kind.F)])
    (False, False)
    """
    computing, waiting = set[int](), set[int]()
    for rank, kind in found:
        if kind in (Kind.F, Kind.B):
            computing.add(rank)
        elif kind in RECEIVES or kind in COLLECTIVES:
            waiting.add(rank)
    return len(computing) > 1 and not computing <= waiting
