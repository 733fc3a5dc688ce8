"""Samples of replicas on unlike devices: as fast as any way to deal out the samples."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthetic import chain
from trainplan.cluster.cluster import Cluster, Device, Link, Node
from trainplan.errors import PlanError
from trainplan.plan.plan import plan
from trainplan.plan.rules import check, of_replicas
from trainplan.plan.text import parse, text
from trainplan.predict.predict import predict
from trainplan.solve.ratio import balanced
from trainplan.solve.resolve import resolve

PROFILE = replace(chain(2, samples=(1, 64), flat=False, forward=1e-3, backward=2e-3), device="fast", products_in="fp32")


def mixed(*rates: float, memory: int = 2**40) -> Cluster:
    """A node of devices that reach so many FLOP/s; the first is that of the profile."""
    names = {rate: "fast" if rate == rates[0] else f"at {rate:g}" for rate in rates}
    devices = tuple(Device(names[rate], memory, {"fp32": rate}, memory_rate=1e15) for rate in rates)
    return Cluster("mixed", (Node("node", devices, Link("bus", 0.0, 1e15)),), "gloo")


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 4), st.integers(0, 200))
def test_samples_are_dealt_out_in_proportion(ratio, micro, more):
    made = plan(dp=len(ratio), micro=micro, ratio=tuple(ratio))
    batch = len(ratio) * micro + more
    counts = of_replicas(made, batch)
    assert sum(counts) == batch
    assert min(counts) >= micro
    exact = [batch * part / sum(ratio) for part in ratio]
    if min(exact) >= micro + 1:  # nobody had to be given some of another's
        assert all(abs(count - fair) < 1 for count, fair in zip(counts, exact, strict=True))


@given(st.lists(st.sampled_from([1.0, 0.5, 0.3]), min_size=2, max_size=3), st.integers(3, 12))
def test_no_other_way_to_deal_them_out_is_faster(rates, batch):
    rates, many = [1.0, *rates], len(rates) + 1
    batch = max(batch, many)
    ratio = balanced(plan(dp=many, blocks=2), PROFILE, mixed(*rates), batch)
    chosen = of_replicas(plan(dp=many, ratio=ratio), batch)

    def slowest(counts):
        return max(count / rate for count, rate in zip(counts, rates, strict=True))

    ways = (way for way in itertools.product(range(1, batch + 1), repeat=many) if sum(way) == batch)
    assert slowest(chosen) == pytest.approx(min(map(slowest, ways)))
    assert bool(ratio) == (len(set(rates)) > 1)


def test_the_solver_gives_the_fast_ones_more_and_the_step_is_as_much_shorter():
    """Of 16 samples a device that is three times as fast has 12: 12 units of time instead of 3 × 8."""
    cluster = mixed(3e12, 1e12)
    uneven = resolve(parse("dp=2"), PROFILE, cluster, 16)
    assert uneven.ratio == (3, 1)
    assert "ratio=3,1" in text(uneven)
    even = resolve(parse("dp=2 ratio=1,1"), PROFILE, cluster, 16)
    assert text(resolve(parse(text(even)), PROFILE, cluster, 16)) == text(even)  # who asks for equal ones gets them
    seconds = [predict(each, PROFILE, cluster, 16).step_s for each in (even, uneven)]
    assert seconds[0] / seconds[1] == pytest.approx(2.0, rel=0.01)
    assert resolve(parse("dp=2"), PROFILE, mixed(1e12, 1e12), 16).ratio == ()


def test_where_the_fast_one_has_no_room_all_have_as_much():
    profile = replace(PROFILE, blocks=tuple(replace(b, saved_bytes=(10e6, 640e6)) for b in PROFILE.blocks))
    roomy, tight = (mixed(3e12, 1e12, memory=memory) for memory in (2**40, 2 * 10 * 10**6 * 11))
    assert resolve(parse("dp=2"), profile, roomy, 16).ratio == (3, 1)
    assert resolve(parse("dp=2"), profile, tight, 16).ratio == (1, 1)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("dp=4 ratio=3,1", "2 numbers for 4 replicas"),
        ("dp=2 ratio=1,0", "counts from 1"),
        ("ps-asp dp=2 ratio=2,1", "takes more steps"),
        ("dp=2 ratio=a,b", "in proportion"),
    ],
)
def test_what_does_not_go_is_refused(line, why):
    with pytest.raises(PlanError, match=why) as refused:
        resolve(parse(line), PROFILE, mixed(*[1e12] * 4), 16)
    assert refused.value.instead


def test_a_plan_with_shares_is_checked_and_read_back():
    made = check(plan(dp=2, ratio=(3, 1)), 8)
    assert parse(text(made)).ratio == (3, 1)
