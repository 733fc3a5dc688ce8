"""Messages.

3. *matched*: each message is sent once and received once, by the rank that it is for, with the same bytes; nothing
   else passes between ranks. What a stage leaves for another on the same rank is taken by it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainplan.program.check.view import Fault, View, maker, where
from trainplan.program.ops import RECEIVES, SENDS, SPECS, Kind, Value
from trainplan.program.program import are

_SENDS, _RECEIVES = are(SENDS), are(RECEIVES)
_FORWARD, _BACKWARD, _GATHERS = are((Kind.F, Kind.SEND_F)), are((Kind.B, Kind.I)), are((Kind.B, Kind.W))
_TWIN = np.array([-1 if (twin := SPECS[kind].twin) is None else int(twin) for kind in Kind])


def handed_over(view: View) -> Iterator[Fault]:
    """What a forward pass makes for other stages is sent, or read by the forward pass of one; and a gradient that lasts
    until the backward pass of another stage is read by that."""
    program = view.program
    values = np.flatnonzero((program.value_kind == Value.BOUNDARY) & (program.value_maker >= 0))
    makers, until = program.value_maker[values], program.value_end[values]
    readers, items = program.reads.owner, program.reads.items
    forward = np.bincount(items[_FORWARD[program.kind[readers]]], minlength=len(program.value_kind))[values] > 0
    for i in where((program.kind[makers] == Kind.F) & ~forward):
        op = int(makers[i])
        yield Fault("matched", op, f"what {program.name(op)} makes for another stage is neither sent nor read by one")
    gives = _BACKWARD[program.kind[makers]] & (until >= 0) & _GATHERS[program.kind[until]]
    gives &= program.stage[makers] != program.stage[until]
    if not gives.any():
        return
    values, makers, until = values[gives], makers[gives], until[gives]
    heir = np.full(len(program.value_kind), -1, dtype=np.int64)  # value → the stage that it is left for
    heir[values] = program.stage[until]
    taken = items[_BACKWARD[program.kind[readers]] & (heir[items] == program.stage[readers])]
    for i in where(~np.isin(values, taken)):
        op, end = int(makers[i]), int(until[i])
        yield Fault(
            "matched", end, f"{program.name(end)} does not read the gradient that {program.name(op)} leaves for it"
        )


def matched(view: View) -> Iterator[Fault]:
    program = view.program
    sends, receives = _SENDS[program.kind], _RECEIVES[program.kind]
    is_message = program.value_kind == Value.MESSAGE
    for value in where(is_message != (program.value_rank < 0)):
        what = (
            f"a message, but on rank {program.value_rank[value]}" if is_message[value] else "on no rank, but no message"
        )
        yield Fault("matched", int(program.value_maker[value]), f"what {maker(program, value)} makes is {what}")
    messages = np.flatnonzero(is_message)
    makers = program.value_maker[messages]
    made = np.bincount(makers[makers >= 0], minlength=len(program))
    for op in where(sends & (made != 1)):
        yield Fault("matched", int(op), f"{program.name(op)} sends {made[op]} messages, not one")
    carried = is_message[program.reads.items]
    readers, values = program.reads.owner[carried], program.reads.items[carried]
    taken = np.bincount(readers, minlength=len(program))
    for op in where(receives & (taken != 1)):
        yield Fault("matched", int(op), f"{program.name(op)} receives {taken[op]} messages, not one")
    read = np.bincount(values, minlength=len(program.value_kind))
    for value in messages[read[messages] != 1].tolist():
        op = int(program.value_maker[value])
        yield Fault("matched", op, f"what {maker(program, value)} sends is received {read[value]} times, not once")
    senders = program.value_maker[values]
    for i in where(senders < 0):
        yield Fault("matched", int(readers[i]), f"{program.name(readers[i])} receives what nobody sends")
    readers, senders = readers[senders >= 0], senders[senders >= 0]
    wrong = (
        (program.kind[readers] != _TWIN[program.kind[senders]])
        | (program.peer_stage[readers] != program.stage[senders])
        | (program.peer_stage[senders] != program.stage[readers])
        | (program.peer[senders] != program.rank[readers])
        | (program.peer[readers] != program.rank[senders])
    )
    for column in (program.micro_batch, program.slice, program.pipeline, program.step, program.job):
        wrong |= column[readers] != column[senders]
    for i in where(wrong):
        receiver, sender = int(readers[i]), int(senders[i])
        why = f"{program.name(receiver)} on rank {program.rank[receiver]} receives what {program.name(sender)} on rank "
        yield Fault("matched", receiver, why + f"{program.rank[sender]} sends to rank {program.peer[sender]}")
    for i in where(~wrong & (program.bytes[readers] != program.bytes[senders])):
        receiver, sender = int(readers[i]), int(senders[i])
        why = f"{program.name(receiver)} expects {program.bytes[receiver]} bytes, {program.name(sender)} sends "
        yield Fault("matched", receiver, why + str(program.bytes[sender]))
