"""NCCL's collectives: closed forms, and published curves where somebody has them.

pytest tests/predict/test_nccl.py --measured FOLDER      (nccl_collectives_published.csv, vtrain_nccl_allreduce_…)
"""

from dataclasses import replace

import pytest

from trainplan.api import bench_published
from trainplan.cluster.cluster import Device
from trainplan.cluster.parse import cluster
from trainplan.errors import InputError
from trainplan.predict import collectives, nccl
from trainplan.profile.efficiency import Efficiency, efficiency, together

LARGE = 2**34
EIGHT = tuple(range(8))


def test_rings_switches_and_nodes():
    a100, h200 = cluster("8xA100-80"), cluster("8xH200")
    ring = 2 * 7 / 8 * LARGE / (0.78 * 300e9)
    assert collectives.all_reduce(a100, EIGHT, LARGE).seconds == pytest.approx(ring, rel=0.01)
    assert collectives.all_reduce(h200, EIGHT, LARGE).seconds == pytest.approx(LARGE / (0.6 * 450e9), rel=0.01)
    half = 7 / 8 * LARGE / (0.81 * 450e9)  # no switch helps to gather
    for how in (collectives.all_gather, collectives.reduce_scatter):
        assert how(h200, EIGHT, LARGE).seconds == pytest.approx(half, rel=0.01)
    # Through four nodes a ring is as fast as what leaves a node, over all its cards, or as what stays inside.
    many = cluster("4x8xA100-80")
    assert many.nodes[0].network is not None
    out = 8 * many.nodes[0].network.rate
    assert nccl.all_reduce(many, tuple(range(32)), LARGE) == pytest.approx(
        2 * 31 / 32 * LARGE / min(0.95 * out, 0.78 * 300e9), rel=0.01
    )


@pytest.mark.parametrize("name", ["2x8xH100-SXM", "2x8xA100-80", "2x8xV100-16"])
def test_nodes_with_unlike_numbers_have_rings_for_the_fewest(name):
    """They fell to one ring through one card, whatever the numbers: 15 ranks took seven times as long as 16."""
    where = cluster(name)
    network = where.nodes[0].network
    seconds = {ranks: nccl.all_reduce(where, tuple(range(ranks)), LARGE) for ranks in range(9, 17)}
    for ranks, found in seconds.items():
        out = 0.95 * (ranks - 8) * network.rate
        assert found >= 2 * (ranks - 1) / ranks * LARGE / out
    assert list(seconds.values()) == sorted(seconds.values(), reverse=True)
    assert seconds[15] < 1.2 * seconds[16]
    halves = [nccl.shared_out(where, tuple(range(ranks)), LARGE) for ranks in range(9, 17)]
    assert halves == sorted(halves, reverse=True)


@pytest.mark.parametrize(("nodes", "deep"), [(2, 1), (3, 2), (8, 3), (64, 6)])
def test_few_bytes_go_up_and_down_a_tree_of_nodes_and_many_around_a_ring(nodes, deep):
    where = cluster(f"{nodes}x8xA100-80")
    everybody, network = tuple(range(8 * nodes)), where.nodes[0].network
    few = nccl.all_reduce(where, everybody, 4096)
    rate = min(0.95 * 8 * network.rate, 0.78 * 300e9)
    tree = 2 * deep * network.latency_s + 2 * 4096 / (0.92 * rate)
    assert few == pytest.approx(nccl._lie(where, everybody).lead(4096) + tree, rel=1e-3)  # a ring of three has as many
    around = 2 * (8 * nodes - 1) / (8 * nodes) * LARGE / rate
    assert nccl.all_reduce(where, everybody, LARGE) == pytest.approx(around, rel=0.03)
    curve = [nccl.all_reduce(where, everybody, 2**k) for k in range(8, 34)]
    assert curve == sorted(curve)


def test_more_bytes_and_more_ranks_never_take_less():
    a100 = cluster("8xA100-80")
    for ranks in range(2, 9):
        curve = [nccl.all_reduce(a100, tuple(range(ranks)), 2**k) for k in range(10, 32)]
        assert curve == sorted(curve)
    small = [nccl.all_reduce(a100, tuple(range(ranks)), 2**20) for ranks in range(3, 9)]
    assert small == sorted(small)


def test_links_that_do_not_say_are_left_to_first_principles():
    for name in ("4xTitanRTX", "16xP40", "2xcpu"):
        assert nccl.all_reduce(cluster(name), (0, 1), 2**20) is None
    assert nccl.all_reduce(cluster("8xA100-80"), (0,), 2**20) is None


def test_efficiencies_stay_below_what_was_measured():
    device = Device("toy", 2**34, {"fp32": 1e13, "bf16": 1e14}, 1e12)
    assert efficiency(device) == Efficiency()
    with pytest.raises(InputError, match=r"0.95 is beyond the 0.87 that was measured"):
        efficiency(replace(device, efficiency={"product": 0.95}))
    with pytest.raises(InputError, match="there is no such constant"):
        efficiency(replace(device, efficiency={"products": 0.8}))
    assert together(1.0, 1.0, 2.0) == pytest.approx(2**0.5)
    assert together(1.0, 1.0, 0.0) == 1.0


def test_published_curves(measured):
    """From 64 MiB on, where only the rate counts; and inside a node from 1 MiB on. Between nodes the lead is that of
    somebody's network, and of two generations' switches the table has other leads than A100's."""
    found = bench_published(str(measured), "vtrain_nccl,nccl").found
    curves = {f"{file}: {name}": row for file, rows in found.items() for name, row in rows.items()}
    assert len(curves) > 25
    for name, row in curves.items():
        forwarded = "V100-32, all_reduce of 5" in name  # through a device that has links to both
        assert row["large"] < (0.2 if forwarded else 0.15), name
        if "nodes" not in name:
            assert row["mean"] < 0.15, name
