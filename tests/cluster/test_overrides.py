"""What-ifs."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainplan.cluster.cluster import Curve, Slowdown
from trainplan.cluster.overrides import KEYS, with_overrides
from trainplan.cluster.parse import cluster
from trainplan.errors import InputError

VALUES = {
    "link": "25GB/s", "inside": "25GB/s", "network": "eth100", "latency": "10us", "inside_latency": "1us",
    "network_latency": "9us", "message": "3us", "memory": "16GiB", "memory_rate": "100GB/s", "host_link": "8GB/s",
    "context": "1GiB", "price": 2.5, "node_price": "30", "host_memory": "64GB", "cores": 12, "disk": "1GB/s",
    "slowdown": 1.5, "dispatch": "30us", "backend": "gloo",
}  # fmt: skip


def test_every_key_changes_what_it_says_and_nothing_is_left_out():
    assert set(VALUES) == set(KEYS)
    start = cluster("2xtitan4")
    for key, value in VALUES.items():
        changed = with_overrides(start, {key: value})
        assert dataclasses.replace(changed, notes=()) != dataclasses.replace(start, notes=()), key
        assert f"changed: {key}={value}" in changed.notes
    assert with_overrides(start, {}) is start


def test_links():
    start = cluster("2xtitan4")
    everywhere = with_overrides(start, {"link": "25GB/s"})
    assert {everywhere.link(a, b).rate for a, b in [(0, 1), (1, 2), (0, 4)]} == {25e9}
    inside = with_overrides(start, {"inside": "8GB/s", "inside_latency": "2us"})
    assert [inside.link(a, b).rate for a, b in [(0, 1), (1, 2), (0, 4)]] == [8e9, 8e9, 5e9]
    assert inside.link(0, 4).latency_s == start.link(0, 4).latency_s
    network = with_overrides(start, {"network": "4xib-hdr", "network_latency": "5us"})
    assert (network.link(0, 4).rate, network.link(0, 4).shared) == (25e9, False)
    assert network.link(0, 4).latency_s == pytest.approx(5e-6)
    assert network.link(0, 1) == start.link(0, 1)
    assert start == cluster("2xtitan4")  # the original is as it was


NVSWITCH, DGX = "NVSwitch 300 GB/s each way", "8 × A100-80 as in a DGX-A100: NVSwitch"
LIST = "prices are list prices, good to an order of magnitude"
BETWEEN = "network as given: Ethernet 100 Gb/s, 12.5 GB/s shared by the node"


@pytest.mark.parametrize(
    ("changes", "notes"),
    [
        (
            {"link": "25GB/s"},
            (
                f"{DGX} (changed)", LIST, "changed: link=25GB/s",
                "changed links: inside (NVSwitch) 300 → 25.0 GB/s; network (Ethernet 100 Gb/s) 12.5 → 25.0 GB/s",
            ),
        ),
        (
            {"inside": "25GB/s", "price": 2},
            (
                f"{DGX} (changed)", BETWEEN, "changed: inside=25GB/s price=2",
                "changed links: inside (NVSwitch) 300 → 25.0 GB/s",
            ),
        ),
        (
            {"network_latency": "9us", "message": "2us"},
            (
                f"8 × A100-80 as in a DGX-A100: {NVSWITCH}", BETWEEN, LIST, "changed: network_latency=9us message=2us",
                (
                    "changed links: inside (NVSwitch) 0 µs → 2.00 µs of the host a message; "
                    "network (Ethernet 100 Gb/s) 50.0 µs → 9.00 µs, 0 µs → 2.00 µs of the host a message"
                ),
            ),
        ),
        ({"cores": 3}, (f"8 × A100-80 as in a DGX-A100: {NVSWITCH}", BETWEEN, LIST, "changed: cores=3")),
    ],
)  # fmt: skip
def test_no_note_contradicts_what_was_changed(changes, notes):
    assert with_overrides(cluster("2x8xA100-80+eth100"), changes).notes == notes


def test_a_network_that_was_changed_is_no_longer_assumed():
    fabric = with_overrides(cluster("2x8xH100-SXM"), {"network": "eth100"})
    assert fabric.notes[0] == "8 × H100-SXM as in a DGX-H100: NVSwitch 450 GB/s each way"
    start = cluster("2x4xT4")
    assert "network assumed" in " ".join(start.notes)
    assert "network assumed" not in " ".join(with_overrides(start, {"network": "1GB/s"}).notes)


def test_devices_and_prices():
    start = cluster("2x8xA100-80")
    small = with_overrides(start, {"memory": "16GiB", "price": 1})
    assert small.device(15).memory_bytes == 16 * 2**30
    assert small.device(0).sources["memory"] == "given"
    assert small.price_per_hour() == 16
    assert with_overrides(small, {"node_price": 5}).price_per_hour() == 10
    assert with_overrides(with_overrides(small, {"node_price": 5}), {"price": 2}).price_per_hour() == 32
    assert with_overrides(start, {"slowdown": 2}).slowdown == Slowdown(2.0, 2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("links", "25GB/s", f"a cluster has no 'links' to change; the keys are {', '.join(KEYS)}. Try link."),
        ("qqq", "25GB/s", f"a cluster has no 'qqq' to change; the keys are {', '.join(KEYS)}. Try link."),
        ("link", "25GiB", "unknown unit 'GiB'"),
        ("link", "0GB/s", "it must be more than zero"),
        ("link", "25", "link=25: it has no unit. Try 25GB/s"),
        ("latency", "1.5", "it has no unit. Try 1.5us"),
        ("memory", "24", "it has no unit. Try 24GiB"),
        ("context", "300", "it has no unit. Try 300MiB"),
        ("memory", "-1GiB", "it must be more than zero"),
        ("memory", 0, "it must be more than zero"),
        ("network", "eth1000", "there is no such link in the catalogue. Try eth100"),
        ("price", "cheap", "it is not a number"),
        ("price", "nan", "it must be zero or more, and finite"),
        ("cores", 1.5, "a whole number of 1 or more was expected"),
        ("backend", "mpi", "there is no such backend. Try gloo"),
        ("slowdown", 0.5, "it would make compute faster"),
    ],
)
def test_mistakes(key, value, message):
    with pytest.raises(InputError) as raised:
        with_overrides(cluster("2xtitan4"), {key: value})
    assert str(raised.value).startswith(f"{key}={value}")
    assert message in str(raised.value)


@settings(max_examples=50, deadline=None)
@given(
    slow=st.floats(0.1, 100), factor=st.floats(1, 50), latency=st.floats(0, 1e-3),
    size=st.integers(1, 2**26), seconds=st.floats(1e-6, 1.0),
)  # fmt: skip
def test_a_faster_link_never_makes_a_measured_collective_slower(slow, factor, latency, size, seconds):
    start = dataclasses.replace(cluster("8xcpu"), collectives=(Curve("all_reduce", 2, (size,), (seconds,)),))
    slower = with_overrides(start, {"link": slow * 1e9, "latency": latency})
    faster = with_overrides(start, {"link": slow * factor * 1e9, "latency": latency})
    assert faster.collectives[0].seconds[0] <= slower.collectives[0].seconds[0] * (1 + 1e-12)
    assert with_overrides(start, {"link": 2e9}).collectives[0].seconds[0] == pytest.approx(seconds)
