"""Messages.

3. *matched*: each message is sent once and received once, by the rank that it is for, with the same bytes; nothing
   else passes between ranks. What a stage leaves for another on the same rank is taken by it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trainplan.program.check.view import Fault, View, maker, where
from trainplan.program.ops import RECEIVES, SENDS, SPECS, Kind, Value
from trainplan.program.program import Bools, Ints, are, nonzero

SENDING, RECEIVING = are(SENDS), are(RECEIVES)
FORWARD, BACKWARD, GATHERING = are((Kind.F, Kind.SEND_F)), are((Kind.B, Kind.I)), are((Kind.B, Kind.W))
_F, _BOUNDARY, _MESSAGE = int(Kind.F), int(Value.BOUNDARY), int(Value.MESSAGE)
# What may be wrong with a value, and with an operation: bits.
_ON_A_RANK, _NOT_TAKEN_ONCE = 1, 2
_SENDS_OTHERWISE, _TAKES_OTHERWISE, _FROM_NOBODY, _FROM_ANOTHER, _OTHER_BYTES = 1, 2, 4, 8, 16
TWIN = np.array([-1 if (twin := SPECS[kind].twin) is None else int(twin) for kind in Kind])


def handed_over(view: View) -> Iterator[Fault]:
    """What a forward pass makes for other stages is sent, or read by the forward pass of one; and a gradient that lasts
    until the backward pass of another stage is read by that."""
    program = view.program
    values = nonzero((program.value_kind == _BOUNDARY) & (program.value_maker >= 0))
    makers, until = program.value_maker[values], program.value_end[values]
    reads = program.reads
    forward = _read_by(reads.start, reads.items, program.kind, FORWARD, len(program.value_kind))[values]
    for i in where((program.kind[makers] == _F) & ~forward):
        op = int(makers[i])
        yield Fault("matched", op, f"what {program.name(op)} makes for another stage is neither sent nor read by one")
    gives = BACKWARD[program.kind[makers]] & (until >= 0) & GATHERING[program.kind[until]]
    gives &= program.stage[makers] != program.stage[until]
    if not gives.any():
        return
    values, makers, until = values[gives], makers[gives], until[gives]
    readers, items = reads.owner, reads.items
    heir = np.full(len(program.value_kind), -1, dtype=np.int64)  # value → the stage that it is left for
    heir[values] = program.stage[until]
    taken = items[BACKWARD[program.kind[readers]] & (heir[items] == program.stage[readers])]
    for i in where(~np.isin(values, taken)):
        op, end = int(makers[i]), int(until[i])
        yield Fault(
            "matched", end, f"{program.name(end)} does not read the gradient that {program.name(op)} leaves for it"
        )


@njit(cache=True)
def _read_by(read_start: Ints, read_items: Ints, kind: NDArray[np.uint8], chosen: Bools, values: int) -> Bools:
    """Value → whether an operation of the chosen kinds reads it."""
    found = np.zeros(values, np.bool_)
    for op in range(len(kind)):
        if chosen[kind[op]]:
            for k in range(read_start[op], read_start[op + 1]):
                found[read_items[k]] = True
    return found


def matched(view: View) -> Iterator[Fault]:
    program = view.program
    reads, message, senders = program.reads, program.value_kind == _MESSAGE, program.value_maker
    sends, takes, taken, misplaced, wrong = judge(
        program.kind, program.rank, program.peer, program.stage, program.peer_stage, view.names.passed, program.bytes,
        message, program.value_rank, senders, reads.start, reads.items, SENDING, RECEIVING, TWIN,
    )  # fmt: skip
    if not misplaced.any() and not wrong.any():
        return
    for value in where(misplaced & _ON_A_RANK):
        what = f"a message, but on rank {program.value_rank[value]}" if message[value] else "on no rank, but no message"
        yield Fault("matched", int(senders[value]), f"what {maker(program, value)} makes is {what}")
    for op in where(wrong & _SENDS_OTHERWISE):
        yield Fault("matched", op, f"{program.name(op)} sends {sends[op]} messages, not one")
    for op in where(wrong & _TAKES_OTHERWISE):
        yield Fault("matched", op, f"{program.name(op)} receives {takes[op]} messages, not one")
    for value in where(misplaced & _NOT_TAKEN_ONCE):
        why = f"what {maker(program, value)} sends is received {taken[value]} times, not once"
        yield Fault("matched", int(senders[value]), why)
    for receiver in where(wrong & _FROM_NOBODY):
        yield Fault("matched", receiver, f"{program.name(receiver)} receives what nobody sends")
    for bit in (_FROM_ANOTHER, _OTHER_BYTES):
        for receiver in where(wrong & bit):
            values = reads.row(receiver)
            sender = int(senders[values[message[values] & (senders[values] >= 0)][-1]])
            why = f"{program.name(receiver)} expects {program.bytes[receiver]} bytes, {program.name(sender)} sends "
            why += str(program.bytes[sender])
            if bit == _FROM_ANOTHER:
                why = f"{program.name(receiver)} on rank {program.rank[receiver]} receives what {program.name(sender)} "
                why += f"on rank {program.rank[sender]} sends to rank {program.peer[sender]}"
            yield Fault("matched", receiver, why)


@njit(cache=True)
def judge(
    kind: NDArray[np.uint8], rank: Ints, peer: Ints, stage: Ints, peer_stage: Ints, passed: Ints, bytes_: Ints,
    message: Bools, value_rank: Ints, maker: Ints, read_start: Ints, read_items: Ints, sends: Bools, receives: Bools,
    twin: Ints,
) -> tuple[Ints, Ints, Ints, NDArray[np.uint8], NDArray[np.uint8]]:  # fmt: skip
    """How many messages every operation sends and takes, and how often every value is taken; and what is wrong with
    every value, and with every operation."""
    made, takes, taken = np.zeros(len(kind), np.int64), np.zeros(len(kind), np.int64), np.zeros(len(maker), np.int64)
    misplaced, wrong = np.zeros(len(maker), np.uint8), np.zeros(len(kind), np.uint8)
    for v in range(len(maker)):
        if message[v] and maker[v] >= 0:
            made[maker[v]] += 1
        if message[v] != (value_rank[v] < 0):
            misplaced[v] = _ON_A_RANK
    for op in range(len(kind)):
        for k in range(read_start[op], read_start[op + 1]):
            v = read_items[k]
            if not message[v]:
                continue
            takes[op] += 1
            taken[v] += 1
            by = maker[v]
            if by < 0:
                wrong[op] |= _FROM_NOBODY
            elif (
                kind[op] != twin[kind[by]] or peer_stage[op] != stage[by] or peer_stage[by] != stage[op]
                or peer[by] != rank[op] or peer[op] != rank[by] or passed[op] != passed[by]
            ):  # fmt: skip
                wrong[op] |= _FROM_ANOTHER
            elif bytes_[op] != bytes_[by]:
                wrong[op] |= _OTHER_BYTES
        if sends[kind[op]] and made[op] != 1:
            wrong[op] |= _SENDS_OTHERWISE
        if receives[kind[op]] and takes[op] != 1:
            wrong[op] |= _TAKES_OTHERWISE
    for v in range(len(maker)):
        if message[v] and taken[v] != 1:
            misplaced[v] |= _NOT_TAKEN_ONCE
    return made, takes, taken, misplaced, wrong
