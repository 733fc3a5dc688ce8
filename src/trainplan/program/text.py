"""Names of operations: torch's schedule strings, extended.

    2F0            forward of stage 2, micro-batch 0
    2SEND_F0       send that activation to the next stage        0SEND_F1>3   … to stage 3, over the others
    0REDUCE_GRAD.1 second gradient bucket of stage 0             2STEP        optimizer step of stage 2
    0B3.2          third piece (unit 2) of the backward          1F0/2        slice 2 of the micro-batch
    1F0^1          in pipeline 1                                 1F0@2        in step 2
    1F0#1          of job 1                                      0BARRIER.3   fourth barrier of a step
    0NEGOTIATE.2   third round of a step's exchange              0TICK.2      the cycle before it
    0LOAD^1@2      inputs of stage 0 in pipeline 1, of step 2    0SEND_INPUT0>0^1   the part of worker 1

Whatever is zero is left out, except the micro-batch of an operation that has one.

>>> parse("0SEND_F1>3^1@2")
Key(kind=<Kind.SEND_F: 5>, stage=0, micro_batch=1, unit=0, slice=0, pipeline=1, step=2, job=0, peer=3)
>>> name(parse("0SEND_F1>3^1@2")), name(parse("2REDUCE_GRAD.1"))
('0SEND_F1>3^1@2', '2REDUCE_GRAD.1')
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainplan.errors import InputError, nearest
from trainplan.program.ops import SPECS, Kind

_PATTERN = re.compile(
    r"(?P<stage>\d+)(?P<kind>[A-Z]+(?:_[A-Z]+)*)(?P<micro>\d+)?"
    r"(?:\.(?P<unit>\d+))?(?:/(?P<slice>\d+))?(?:>(?P<peer>\d+))?"
    r"(?:\^(?P<pipeline>\d+))?(?:@(?P<step>\d+))?(?:#(?P<job>\d+))?"
)
# Kinds that are about the whole batch: no micro-batch in their name.
WITHOUT_MICRO_BATCH = (
    Kind.REDUCE_GRAD, Kind.COUNT, Kind.LOSS, Kind.NORM, Kind.STEP, Kind.BARRIER, Kind.TICK, Kind.NEGOTIATE,
    Kind.LOAD,
)  # fmt: skip


@dataclass(frozen=True)
class Key:
    """What identifies an operation. `peer` is the other stage of a message."""

    kind: Kind
    stage: int
    micro_batch: int = 0
    unit: int = 0
    slice: int = 0
    pipeline: int = 0
    step: int = 0
    job: int = 0
    peer: int = -1


def neighbour(kind: Kind, stage: int) -> int:
    """The stage at the other end of a message that does not name it: the next one, or the one before."""
    if not SPECS[kind].message:
        return -1
    return stage + 1 if kind in (Kind.SEND_F, Kind.RECV_B) else stage - 1


def name(key: Key) -> str:
    """The text form of a key."""
    text = f"{key.stage}{key.kind.name}"
    if key.kind not in WITHOUT_MICRO_BATCH:
        text += str(key.micro_batch)
    if key.unit:
        text += f".{key.unit}"
    if key.slice:
        text += f"/{key.slice}"
    if key.peer >= 0 and key.peer != neighbour(key.kind, key.stage):
        text += f">{key.peer}"
    for mark, value in (("^", key.pipeline), ("@", key.step), ("#", key.job)):
        if value:
            text += f"{mark}{value}"
    return text


def parse(text: str) -> Key:
    """The key that a text form names."""
    match = _PATTERN.fullmatch(text.strip())
    if not match:
        raise InputError(f"operation {text!r}", "it is not of the form 2F0", "STAGE KIND MICRO_BATCH, such as 2SEND_F0")
    groups = match.groupdict()
    try:
        kind = Kind[groups["kind"]]
    except KeyError:
        raise InputError(
            f"operation {text!r}", f"no kind {groups['kind']!r}", nearest(groups["kind"], Kind.__members__)
        ) from None
    if groups["micro"] is None and kind not in WITHOUT_MICRO_BATCH:
        raise InputError(f"operation {text!r}", "it needs a micro-batch", f"{text}0")
    stage = int(groups["stage"])
    peer = int(groups["peer"]) if groups["peer"] is not None else neighbour(kind, stage)
    number = {part: int(groups[part] or 0) for part in ("micro", "unit", "slice", "pipeline", "step", "job")}
    return Key(
        kind,
        stage,
        number["micro"],
        number["unit"],
        number["slice"],
        number["pipeline"],
        number["step"],
        number["job"],
        peer,
    )
