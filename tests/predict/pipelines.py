"""Pipelines of equal stages, a block each, and their clock: what the tests of closed forms are about."""

import numpy as np

from synthetic import chain
from trainplan.plan.plan import plan
from trainplan.predict.clock import Played, play, seconds_by_kind
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.ops import Kind
from trainplan.program.program import Program


def pipeline(schedule: str, ranks: int, micro: int, chunks: int = 1, **fields) -> Program:
    """A block a stage, 100 bytes saved in each, 10 bytes at each boundary, 1000 bytes of weights a block."""
    stages = ranks * chunks
    chosen = plan(
        pp=ranks, micro=micro, schedule=schedule if ranks > 1 else "naive", chunks=chunks,
        stages=tuple(range(1, stages)), blocks=stages, **fields,
    )  # fmt: skip
    return check(lower(chosen, chain(stages), micro * chosen.dp))


def timed(
    program: Program, forward=1.0, backward=2.0, message=0.0, *, first=1.0, second=1.0, chunks=1, **other
) -> Played:
    """Play with so many seconds a rank's worth of forward and backward passes (`first` and `second`: its two parts).

    They are of all stages alike, or one number for each. `message`: its latency; `other`: seconds by kind, else none.
    """
    table = dict.fromkeys(Kind, 0.0) | dict.fromkeys((Kind.SEND_F, Kind.SEND_B), message)
    run = seconds_by_kind(program, table | {Kind[name]: value for name, value in other.items()})
    passes = {Kind.F: forward, Kind.R: forward, Kind.B: backward, Kind.I: first, Kind.W: second}
    for kind, value in passes.items():
        chosen = program.kind == kind
        each = np.broadcast_to(value, int(program.stage.max()) + 1) / chunks
        run[chosen] = each[program.stage[chosen]]
    return play(program, run)


def in_flight(program: Program, rank: int) -> int:
    """The most micro-batches (of one stage each) that a rank holds: forwards whose backward is not over."""
    kinds = program.kind[program.lists.row(rank)]
    change = np.where(kinds == Kind.F, 1, np.where((kinds == Kind.B) | (kinds == Kind.W), -1, 0))
    return int(np.cumsum(change).max())
