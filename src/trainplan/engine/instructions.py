"""The list of one rank, ready to be run: each operation with the values that it takes, leaves and gives up.

The program says which values an operation reads and makes; what they *are* follows from who makes and who reads them:
a value that RECV_F makes is an input of the stage, one that SEND_B reads is a gradient for the stage before, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainplan.program.ops import RECEIVES, SENDS, Kind, Value
from trainplan.program.program import Program

Ends = tuple[tuple[int, int], ...]  # (value, stage at the other end)
# What somebody reads; the rest is nothing but memory.
_READ = (Value.BOUNDARY, Value.TOKEN, Value.WEIGHTS, Value.INPUT, Value.SAVED)
_COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)


@dataclass(frozen=True)
class Instruction:
    """One operation of a rank."""

    op: int
    kind: Kind
    stage: int
    unit: int
    micro: int
    slice: int  # of the micro-batch's sequences
    peer: int  # rank at the other end of a message
    peer_stage: int
    group: int
    waits: bool  # the host stays until it is over
    reads: tuple[int, ...]
    frees: tuple[int, ...]
    sent_by: int  # of a receive: the other rank's SEND; -1
    made: tuple[int, ...]  # of a receive or collective: the values that it makes on this rank
    inputs: Ends  # activations that came in
    outputs: Ends  # activations to be sent, or read by another stage of this rank
    gradients: Ends  # gradients that came back
    backwards: Ends  # gradients to be sent back, or read by another stage of this rank
    saved: tuple[int, ...]  # values that a forward pass leaves for backward
    held: tuple[int, ...]  # values that an earlier pass left


def instructions(program: Program, rank: int) -> list[Instruction]:
    """The instructions of a rank, in the order of its list."""
    sender: dict[int, int] = {}  # value → the operation that sends it
    handed: dict[int, int] = {}  # value → the first operation of another stage of this rank that reads it
    for op in program.lists.row(rank):
        for value in program.reads.row(int(op)):
            maker = int(program.value_maker[value])
            if int(program.kind[op]) in SENDS:  # a number of numpy's asks an enumeration for dozens of attributes
                sender[int(value)] = int(op)
            elif int(program.value_kind[value]) == Value.BOUNDARY and _crosses(program, maker, int(op)):
                handed.setdefault(int(value), int(op))
    return [_instruction(program, int(op), rank, sender, handed) for op in program.lists.row(rank)]


def _crosses(program: Program, maker: int, reader: int) -> bool:
    """Whether a value is handed from one stage to another without a message."""
    if maker < 0 or int(program.kind[maker]) not in _COMPUTE or int(program.kind[reader]) not in _COMPUTE:
        return False
    return bool(program.stage[maker] != program.stage[reader])


def _instruction(
    program: Program, op: int, rank: int, sender: dict[int, int], handed: dict[int, int]
) -> Instruction:  # fmt: skip
    kind = Kind(int(program.kind[op]))
    reads = [int(v) for v in program.reads.row(op) if program.value_rank[v] in (rank, -1)]
    makes = [int(v) for v in program.makes.row(op) if program.value_rank[v] in (rank, -1)]
    here = [v for v in makes if program.value_rank[v] == rank]

    made_by_forward = {v: int(program.kind[program.value_maker[v]]) == Kind.F for v in reads if v in handed}

    def came(through: Kind, forward: bool) -> Ends:
        found = []
        for value in reads:
            maker = int(program.value_maker[value])
            if maker >= 0 and int(program.kind[maker]) == through:
                found.append((value, int(program.peer_stage[maker])))
            elif value in handed and program.stage[maker] != program.stage[op] and made_by_forward[value] == forward:
                found.append((value, int(program.stage[maker])))
        return tuple(found)

    def leaves(through: Kind) -> Ends:
        sent = [v for v in makes if int(program.kind[sender.get(v, op)]) == through]
        found = [(v, int(program.peer_stage[sender[v]])) for v in sent]
        if (kind is Kind.F) == (through is Kind.SEND_F):
            found += [(v, int(program.stage[handed[v]])) for v in makes if v in handed]
        return tuple(found)

    compute = kind in _COMPUTE
    return Instruction(
        op=op, kind=kind, stage=int(program.stage[op]), unit=int(program.unit[op]),
        micro=int(program.micro_batch[op]), slice=int(program.slice[op]), peer=int(program.peer[op]),
        peer_stage=int(program.peer_stage[op]), group=int(program.group[op]), waits=bool(program.waits[op]),
        reads=tuple(reads),
        frees=tuple(int(v) for v in program.frees.row(op) if program.value_rank[v] in (rank, -1)),
        sent_by=next((int(program.value_maker[v]) for v in reads if kind in RECEIVES), -1),
        made=() if compute else tuple(v for v in here if int(program.value_kind[v]) in _READ),
        inputs=came(Kind.RECV_F, True) if compute else (), outputs=leaves(Kind.SEND_F) if compute else (),
        gradients=came(Kind.RECV_B, False) if compute else (), backwards=leaves(Kind.SEND_B) if compute else (),
        saved=tuple(v for v in here if compute and int(program.value_kind[v]) == Value.SAVED),
        held=tuple(v for v in reads if compute and int(program.value_kind[v]) == Value.SAVED),
    )  # fmt: skip
