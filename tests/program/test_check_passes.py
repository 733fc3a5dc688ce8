"""`check` finds operations in the wrong lists, and micro-batches that are lost or go through twice."""

from dataclasses import replace

import numpy as np

from tests.program.legality import rejecting, replicas, two_stages
from tests.program.surgery import find, relist, twice, values_between, without
from trainplan.program.builder import Builder
from trainplan.program.ops import Value
from trainplan.program.program import Program


def left_out() -> Program:
    program = two_stages()
    return relist(program, 1, lambda row: [op for op in row if op != find(program, "1F1")])


def listed_twice() -> Program:
    program = two_stages()
    return relist(program, 0, lambda row: [*row, find(program, "0F0")])


def on_a_strange_rank() -> Program:
    program = two_stages()
    op = find(program, "1F1")
    return relist(relist(program, 1, lambda row: [o for o in row if o != op]), 0, lambda row: [*row, op])


def member_does_not_come() -> Program:
    program = replicas()
    return relist(program, 1, lambda row: [op for op in row if op != find(program, "0REDUCE_GRAD")])


def forward_doubled() -> Program:
    return twice(two_stages(), "0F1")


def backward_doubled() -> Program:
    return twice(two_stages(), "1B0")


def never_forward() -> Program:
    return without(two_stages(), "0F1")


def never_backward() -> Program:
    return without(two_stages(), "1B1@1")


def micro_batch_skips_a_stage() -> Program:
    names = ("0SEND_F1", "1RECV_F1", "1F1", "1B1", "1SEND_B1", "0RECV_B1")
    messages = [v for a, b in ((0, 1), (4, 5)) for v in values_between(two_stages(), names[a], names[b])]
    program = without(two_stages(), *names)
    # Nor do the messages exist any more: the count is wrong, and what 0F1 makes is for nobody.
    keep = ~np.isin(np.arange(len(program.value_kind)), messages)
    number = np.cumsum(keep) - 1
    names = ("kind", "bytes", "rank", "maker", "end", "late", "early")
    reads = replace(program.reads, items=number[program.reads.items])
    return replace(program, reads=reads, **{f"value_{name}": getattr(program, f"value_{name}")[keep] for name in names})


def stages_see_other_micro_batches() -> Program:
    """As many on each stage, but not the same."""
    build = Builder(world=2)
    for rank, micro in ((0, 0), (0, 1), (1, 0), (1, 2)):
        saved = f"{rank} {micro}"
        build.op(rank, f"{rank}F{micro}", makes={saved: (Value.SAVED, 1)})
        build.op(rank, f"{rank}B{micro}", reads=[saved], frees=[saved])
    return build.program()


def weights_part_is_missing() -> Program:
    build = Builder(world=1)
    for text in ("0F0", "0I0", "0W0", "0F1", "0I1"):
        build.op(0, text)
    return build.program()


def input_part_is_missing() -> Program:
    build = Builder(world=1)
    for text in ("0F0", "0B0", "0W0"):
        build.op(0, text)
    return build.program()


test_rejects = rejecting(
    (left_out, "listed", "1F1 missing", "stands 0 times"),
    (listed_twice, "listed", "0F0", "stands 2 times"),
    (on_a_strange_rank, "listed", "1F1", "stands in the list of rank 0, not its own"),
    (member_does_not_come, "listed", "0REDUCE_GRAD missing", r"for ranks \[0, 1\] and stands in the lists of \[0\]"),
    (forward_doubled, "once", "0F1", "forward runs a second time"),
    (backward_doubled, "once", "1B0", "backward runs a second time", "alive"),
    (never_forward, "once", "0B1", "goes backward but never forward"),
    (never_backward, "once", "1F1@1", "goes forward but never backward"),
    (micro_batch_skips_a_stage, "once", "1F0", "stage 1 sees 3 micro-batches where its pipeline has 4", "matched"),
    (stages_see_other_micro_batches, "once", "0F0", "stage 0 sees 2 micro-batches where its pipeline has 3"),
    (weights_part_is_missing, "once", "0I1", "not the weights'"),
    (input_part_is_missing, "once", "0W0", "not the input's"),
)
