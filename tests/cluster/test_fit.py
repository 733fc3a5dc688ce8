"""From samples to a cluster's values: made-up samples with known answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainplan.cluster.probe import fit
from trainplan.cluster.probe.messages import pairs
from trainplan.cluster.probe.team import levels


@given(latency=st.floats(1e-6, 1e-2), rate=st.floats(1e7, 1e12))
def test_a_line_is_found_again(latency, rate):
    sizes = [1, 4096, 2**20, 2**25]
    found_latency, found_rate = fit.line(sizes, [latency + size / rate for size in sizes])
    assert found_latency == pytest.approx(latency + 1 / rate)
    if 2**25 / rate > latency / 100:  # else nothing in the samples tells the rate
        assert found_rate == pytest.approx(rate, rel=0.02)


@given(
    compute=st.floats(0.5, 2.0), share=st.floats(0.2, 3.0), factor=st.floats(1.0, 15.0), slowed=st.floats(1.0, 6.0),
    issue=st.floats(0, 0.05), drift=st.lists(st.floats(0.8, 1.25), min_size=1, max_size=7),
)  # fmt: skip
def test_slowdown_is_found_again_when_the_machine_follows_the_clocks_rule(
    compute, share, factor, slowed, issue, drift
):  # fmt: skip
    """The definition in `Slowdown`: each advances at a fraction of its speed while the other goes on."""
    communication = share * compute
    rest = communication - issue  # the other part passes before compute starts
    both = min(slowed * rest, factor * compute)  # seconds in which both go on
    together = compute + both - both / factor
    over = issue + both + rest - both / slowed
    samples = []
    for speed in drift:  # all of a round are slower or faster together
        sample = {"alone": compute, "communication": communication, "issue": issue}
        sample |= {"together": together, "over": over}
        samples.append({name: seconds * speed for name, seconds in sample.items()})
    if both / slowed > 0.11 * communication:  # else next to nothing of it went on beside compute
        assert fit.slowdown(samples) == (pytest.approx(factor), pytest.approx(slowed))


def test_slowdown_has_bounds():
    base = {"alone": 1.0, "communication": 0.5, "issue": 0.0, "over": 0.5}
    assert fit.slowdown([base | {"together": 0.9, "over": 0.4}]) == (1.0, 1.0)  # noise cannot make anything faster
    assert fit.slowdown([base | {"together": 5.0}]) == (fit.MOST_SLOWDOWN, 1.0)  # nor slower than standing still
    assert fit.slowdown([base | {"together": 1.0, "over": 1.5}]) == (1.0, 1.0)  # nothing went on beside it: not known
    assert fit.slowdown([]) == (1.0, 1.0)


def test_a_collective_lasts_from_the_last_arrival_to_the_last_departure():
    first = {"all_reduce.2.4": [(0.0, 1.0), (10.0, 12.0)], "all_reduce.2.400": [(0.0, 5.0), (10.0, 15.0)]}
    second = {"all_reduce.2.4": [(0.5, 1.5), (11.0, 11.5)], "all_reduce.2.400": [(1.0, 4.0), (10.0, 16.0)]}
    (curve,) = fit.collectives([first, second, {}])
    assert (curve.op, curve.ranks, curve.bytes) == ("all_reduce", 2, (4, 400))
    assert curve.seconds == (1.0, 5.0)  # medians of (1.0, 1.0) and of (4.0, 6.0)


def test_groups_that_are_at_it_at_once_have_curves_of_their_own():
    samples = {"all_gather.2.4": [(0.0, 1.0)], "all_gather.2.4.2": [(0.0, 1.5)], "all_gather.2.8.2": [(0.0, 3.0)]}
    alone, beside = fit.collectives([samples, samples, samples, samples])
    assert (alone.groups, alone.bytes, alone.seconds) == (1, (4,), (1.0,))
    assert (beside.groups, beside.bytes, beside.seconds) == (2, (4, 8), (1.5, 3.0))


def test_messages_of_every_pair():
    first = {"p2p.0.1.1": [1.0, 3.0, 2.0], "p2p.0.1.100": [4.0], "p2p.0.2.1": [1.0], "p2p.0.2.100": [40.0]}
    curves = fit.messages([first, {"p2p.1.2.1": [3.0], "p2p.1.2.100": [5.0]}, {}])
    assert curves[0, 1].seconds == (2.0, 4.0)
    assert fit.together(list(curves.values())).seconds == (2.0, 5.0)
    assert fit.apart(curves) == [(0, 2)]


def test_contention_never_falls_and_fills_what_was_not_measured():
    samples = {
        "busy.1": [1.0, 1.2, 1.0],
        "busy.2": [1.1, 1.3, 1.1],
        "busy.4": [1.5, 1.8, 1.5],
        "busy.6": [1.4, 1.6, 1.3],
    }
    assert fit.contention([samples], 6) == pytest.approx((1.0, 1.1, 1.3, 1.5, 1.5, 1.5))


@given(count=st.integers(1, 64))
def test_what_is_measured_with_covers_every_worker(count):
    assert levels(count)[0] == 1
    assert levels(count)[-1] == count
    assert levels(count) == sorted(set(levels(count)))
    assert {rank for pair in pairs(count) for rank in pair} == (set(range(count)) if count > 1 else set())
    assert all(0 <= a < b < count for a, b in pairs(count))
