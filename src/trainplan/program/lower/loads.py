"""How a batch comes to where it is read.

    preload=given   it is there when a step begins: no operation
    preload=off     a step begins with LOAD, and the host waits for it         LOAD F B … STEP | LOAD@1 F@1 B@1 …
    preload=on      LOAD of a step goes on during the step before              LOAD LOAD@1 F B … STEP | LOAD@2 F@1 …

A LOAD copies what one copy of a stage reads of its replica's batch: the first stage its inputs, the last one what the
loss compares with, whoever else what he reads (a mask), and most stages nothing. It is there from then on until the
last backward pass of the step; so with preload=on there are two at a time.

nn.DataParallel without preload has the whole batch on the first device, which scatters it before it sends weights:

    root     LOAD SEND_INPUT^1 SEND_INPUT^2 … SEND_W^1 …
    others   RECV_INPUT RECV_W …
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from trainplan.plan.served import AT_ROOT
from trainplan.program.lower.layout import Holding, Layout
from trainplan.program.lower.row import Row
from trainplan.program.ops import Kind, Value
from trainplan.program.program import CostClass, Ints

if TYPE_CHECKING:
    from trainplan.program.lower.found import Found
    from trainplan.program.lower.ledger import Ledger
    from trainplan.program.lower.serving import Bodies

INPUT_MESSAGES = (Kind.SEND_INPUT, Kind.RECV_INPUT)
Step = tuple[Ints, Ints, Ints]  # of a rank's list: bodies, what each is about, and how many steps ago that was


def loads(layout: Layout) -> bool:
    """Whether bringing the batch is part of the program."""
    return layout.plan.preload != "given"


def scatters(layout: Layout) -> bool:
    """Whether the first worker gets the whole batch, and gives the others their parts."""
    return layout.plan.preload == "off" and layout.plan.exchange == AT_ROOT


def loaded_bytes(layout: Layout, holding: Holding) -> int:
    """What a copy of a stage loads for a step."""
    own = np.isin(layout.line_of[:: max(1, len(layout.plan.slices))], holding.lines)
    samples = layout.batch
    if not scatters(layout):
        samples = sum(size for size, mine in zip(layout.sizes[holding.replica], own, strict=True) if mine)
    return _bytes(layout, holding.stage, samples)


def scattered_bytes(layout: Layout, replica: int) -> int:
    """What the first worker sends to another."""
    return _bytes(layout, 0, sum(layout.sizes[replica]))


def _bytes(layout: Layout, stage: int, samples: int) -> int:
    return sum(tensor.bytes(samples) for tensor in layout.profile.inputs_of(*layout.plan.bounds[stage]))


def reads_batch(layout: Layout, stage: int) -> bool:
    """Whether a stage reads anything of the batch."""
    return bool(layout.profile.inputs_of(*layout.plan.bounds[stage]))


# -- lists ----------------------------------------------------------------------------------------------------------


def fed(layout: Layout, bodies: Bodies, held: Sequence[Holding], steps: list[Step]) -> list[Step]:
    """The steps of a rank's list, with what brings their batches in front."""
    if not loads(layout):
        return steps
    replica, rank = held[0].replica, held[0].rank
    if scatters(layout):
        now, ahead = _scattered(layout, bodies, held[0]), list[int]()
    else:
        rows = [
            Row(Kind.LOAD, h.stage, h.lines[0], size=loaded_bytes(layout, h))
            for h in held
            if reads_batch(layout, h.stage)
        ]
        now = [bodies.add(rows, replica, rank)] if rows else []
        ahead = now if layout.plan.preload == "on" else []
    found = []
    for number, (body, of, ago) in enumerate(steps):
        front = [(own, 0) for own in now if number == 0 or not ahead]
        front += [(own, -1) for own in ahead if number + 1 < len(steps)]
        own, when = np.array(front, dtype=np.int64).reshape(-1, 2).T
        found.append((np.concatenate([own, body]), np.concatenate([0 * own, of]), np.concatenate([when, ago])))
    return found


def _scattered(layout: Layout, bodies: Bodies, own: Holding) -> list[int]:
    """nn.DataParallel's: the whole batch to the first worker, and from there to the others."""
    assert layout.service is not None  # of which it is the root
    root = layout.service.rank(0)
    if own.rank != root:
        row = Row(Kind.RECV_INPUT, 0, 0, peer=0, size=scattered_bytes(layout, own.replica))
        return [bodies.add([row], own.replica, own.rank)]
    whole = bodies.add([Row(Kind.LOAD, 0, 0, size=loaded_bytes(layout, own))], own.replica, root)
    return [
        whole,
        *(
            bodies.add([Row(Kind.SEND_INPUT, 0, 0, peer=0, size=scattered_bytes(layout, other))], other, root)
            for other in layout.service.pushers
        ),
    ]


# -- costs ----------------------------------------------------------------------------------------------------------


def load_class(layout: Layout, kind: Kind, rank: int, size: int) -> CostClass:
    """Of a load, or of what is scattered; `rank` is the worker's."""
    if kind is Kind.LOAD:
        return CostClass(kind, rank, bytes=size)
    assert layout.service is not None
    root = layout.service.rank(0)
    ends = (root, rank) if kind is Kind.SEND_INPUT else (rank, root)
    return CostClass(kind, *ends, bytes=size, tensors=len(layout.profile.inputs_of(*layout.plan.bounds[0])))


# -- memory ---------------------------------------------------------------------------------------------------------


def inputs(ledger: Ledger, found: Found) -> None:
    """The batch: of every rank its replica's, all the time, where it is given there; and what is loaded.

    On a CPU the host's memory is the device's. There what is copied from is beside what is loaded.
    """
    layout = found.layout
    if not loads(layout) or layout.backend.host_computes:
        batches = {h.rank: sum(layout.sizes[h.replica]) for h in layout.holdings}
        if scatters(layout):
            batches = {layout.holdings[0].rank: layout.batch}
        sizes = np.round(layout.profile.input_bytes_per_sample * np.array(list(batches.values()))).astype(np.int64)
        never = np.full(len(batches), -1, dtype=np.int64)
        ledger.add(Value.INPUT, sizes, np.array(list(batches)), never, never)
    if not loads(layout):
        return
    for holding in (h for h in layout.holdings if reads_batch(layout, h.stage)):
        own = [holding]
        load, size = found.once(Kind.LOAD, own), loaded_bytes(layout, holding)
        if scatters(layout):
            load, size = _scattering(ledger, found, holding, load, size)
        over = found.own(found.backward([holding.stage], final=True), own).max(axis=2)
        numbers = ledger.add(Value.INPUT, size, holding.rank, load, over)
        passes = found.own(found.ops(Kind.F, [holding.stage]), own)
        ledger.reads(passes, np.broadcast_to(numbers[..., None], passes.shape))
        _in_turn(ledger, found, holding, load, over)
        if scatters(layout) and holding is layout.holdings[0]:
            for other in range(1, layout.plan.dp):
                ledger.reads(_of(found, Kind.SEND_INPUT, other), numbers[0])


def _in_turn(ledger: Ledger, found: Found, holding: Holding, load: Ints, over: Ints) -> None:
    """A host that runs ahead of its device does not load ahead of it, too: whoever trains gives the batch of a step
    when the step before is over; or, where loads go ahead, when the one before that is, and there is room for it."""
    ago = 2 if found.layout.plan.preload == "on" else 1
    if found.layout.backend.host_computes or found.steps <= ago:
        return
    step = over if found.layout.crosses else found.once(Kind.STEP, [holding])
    end = np.where(step >= 0, step, over)[:, :-ago]
    ledger.add(Value.TOKEN, 0, holding.rank, end, load[:, ago:], (load[:, ago:],))


def _scattering(ledger: Ledger, found: Found, holding: Holding, load: Ints, size: int) -> tuple[Ints, int]:
    """What brings a worker's part of the batch where it is scattered; and its bytes there."""
    if holding is found.layout.holdings[0]:
        return load, size
    size = scattered_bytes(found.layout, holding.replica)
    send, receive = (_of(found, kind, holding.replica) for kind in INPUT_MESSAGES)
    ledger.add(Value.MESSAGE, size, -1, send, receive, (receive,))
    return receive[None], size


def _of(found: Found, kind: Kind, replica: int) -> Ints:
    """The messages of a kind with a worker's inputs, by step."""
    every = found.ops(kind, [0], [0])[0].reshape(len(found.layout.replicas), found.steps, -1)
    return np.asarray(every[replica, :, 0])
