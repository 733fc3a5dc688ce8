"""Gradient buckets: the rule, and torch's own DDP doing the same."""

import multiprocessing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthetic import chain
from tests.program.ddp_worker import DEFAULT, UNUSED, UNUSED_CAP_4, train
from tests.program.strategies import examples
from trainplan.plan.plan import plan
from trainplan.program.lower import lower
from trainplan.program.lower.buckets import fill, stage_buckets
from trainplan.program.ops import Kind
from trainplan.units import KIB, MIB

# Six layers in the order of the model, in MiB; their gradients arrive last layer first.
LAYERS = (0.5, 0.5, 4, 8, 16, 2)
# What travels together from the second step on, by the limit in MiB. (Only where no limit is given, DDP has another
# one for its first bucket; plans always give one.)
TABLE = {
    25: [[2, 16, 8], [4, 0.5, 0.5]],
    4: [[2, 16], [8], [4], [0.5, 0.5]],
    1: [[2], [16], [8], [4], [0.5, 0.5]],
}
# What no plan asks for: the limits that torch has by itself (1 MiB first, then 25), and parameters that may be unused,
# which are put together from the first step on in the order of the model, from its end, and never again.
OF_TORCH = {
    DEFAULT: [[2], [16, 8, 4], [0.5, 0.5]],
    UNUSED: [[2], [4, 8, 16], [0.5, 0.5]],
    UNUSED_CAP_4: [[2], [16], [8], [0.5, 0.5, 4]],
}


def filled(layers, limit: float, unit: int) -> list[list[float]]:
    """The sizes, bucket by bucket, in order of arrival."""
    arriving = layers[::-1]
    buckets = fill([int(size * unit) for size in arriving], int(limit * unit))
    return [[arriving[number] for number in bucket] for bucket in buckets]


@pytest.mark.parametrize("limit", TABLE)
def test_the_worked_table(limit: int) -> None:
    assert filled(LAYERS, limit, MIB) == TABLE[limit]


def test_torch_ddp_fills_its_buckets_by_the_same_rule(tmp_path) -> None:
    """Two processes, a hook that notes the bytes of every bucket; a 32nd of the sizes, so that it is quick, but where
    the limits are torch's own."""
    unit = MIB // 32
    sizes = [int(layer * unit) for layer in LAYERS]
    told = [*(limit / 32 for limit in TABLE), 100 * KIB / MIB, *OF_TORCH]
    whole = [int(layer * MIB) for layer in LAYERS]
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    workers = [
        context.Process(target=train, args=(rank, str(tmp_path), sizes, told, whole, send), daemon=True)
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    try:
        assert receive.poll(90), "the workers did not answer"
        reports = [receive.recv()]
        assert receive.poll(30)
        reports.append(receive.recv())
    finally:
        for worker in workers:
            worker.join(20)
            worker.kill()
    assert reports[0] == reports[1]
    for own, table in OF_TORCH.items():
        first, *later = reports[0].pop(own)
        sums = [int(sum(bucket) * MIB) for bucket in table]
        assert first == ([sum(whole)] if own == DEFAULT else sums)
        assert later == [sums] * 2
    for cap, steps in reports[0].items():
        first, *later = steps
        assert first == [sum(sizes)]  # one bucket with everything, before it knows the order of arrival
        assert later == [[int(sum(bucket) * unit) for bucket in filled(LAYERS, cap * 32, unit)]] * 2
    wanted = {limit / 32: [int(sum(bucket) * unit) for bucket in TABLE[limit]] for limit in TABLE}
    assert {cap: steps[-1] for cap, steps in reports[0].items() if cap in wanted} == wanted


@examples(200)
@given(st.lists(st.integers(1, 50)), st.integers(1, 100))
def test_buckets_are_closed_once_they_have_reached_the_limit(sizes: list[int], limit: int) -> None:
    buckets = fill(sizes, limit)
    assert [number for bucket in buckets for number in bucket] == list(range(len(sizes)))
    for place, bucket in enumerate(buckets):
        within = [sizes[number] for number in bucket]
        assert sum(within[:-1]) < limit  # it was open when its last gradient came
        if place < len(buckets) - 1:
            assert sum(within) >= limit


def test_buckets_are_ready_when_their_last_gradient_is() -> None:
    """Four equal blocks of 1000 bytes each; two of them fill a bucket of 1500."""
    profile = chain(4)
    found = stage_buckets(profile, profile.parameters, 0, 4, limit=1500, samples=1)
    assert [(b.names, b.bytes, b.block, b.ready) for b in found] == [
        (("w3", "w2"), 2000, 2, 0.5),
        (("w1", "w0"), 2000, 0, 1.0),
    ]
    program = lower(plan(dp=2, bucket=1500, blocks=4), profile, batch=2)
    assert program.rank_list(0) == ["0F0", "0B0", "0REDUCE_GRAD", "0B0.1", "0REDUCE_GRAD.1", "0LOSS", "0STEP"]
    assert [c.until - c.since for c in program.classes if c.kind is Kind.B] == [0.5] * 4
