"""Seconds of operations: messages and sums over links and cards, and what compute costs where."""

from dataclasses import replace

import pytest

from synthetic import chain
from tests.predict.places import cluster
from trainplan.cluster.cluster import Curve, Link, Pair
from trainplan.plan.plan import plan
from trainplan.predict import collectives
from trainplan.predict.cost import Setting, costs
from trainplan.predict.predict import predict
from trainplan.profile.profile import Profile
from trainplan.program.lower import lower
from trainplan.program.ops import Kind


def two_by_two(**fields):
    choices = {"dp": 2, "pp": 2, "micro": 4, "schedule": "1f1b", "stages": (2,), "blocks": 4, **fields}
    return plan(**choices)


# -- messages and sums --------------------------------------------------------------------------------------------

# Seconds (here µs) of a ring over so many ranks with 50 µs a message and 1 ns a byte, without arithmetic.
RING = {(2, 100e6): 100_100.0, (4, 100e6): 150_300.0, (8, 100e6): 175_700.0, (2, 1e3): 101.0, (8, 1e3): 701.75}


@pytest.mark.parametrize(("ranks", "size"), RING)
def test_ring_all_reduce(ranks: int, size: float) -> None:
    where = cluster(devices=8, rate=1e9, latency=50e-6)
    assert collectives.all_reduce(where, tuple(range(ranks)), int(size)).seconds * 1e6 == pytest.approx(
        RING[ranks, size]
    )
    assert collectives.all_reduce(where, (3,), int(size)).seconds == 0.0


@pytest.mark.parametrize(("ranks", "rounds"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3)])
def test_a_barrier_takes_as_many_rounds_as_its_ranks_can_be_halved(ranks: int, rounds: int) -> None:
    members = tuple(range(ranks))
    where = cluster(devices=8, rate=1e9, latency=50e-6)
    assert collectives.barrier(where, members) == pytest.approx(rounds * 50e-6)
    summing = replace(where, backend="nccl")
    assert collectives.barrier(summing, members) == collectives.all_reduce(summing, members, 4).seconds


def test_measured_curves_go_before_first_principles_within_a_node() -> None:
    curves = (Curve("all_reduce", 2, (0, 100), (1.0, 2.0)), Curve("p2p", 2, (0, 100), (3.0, 4.0)))
    where = cluster(nodes=2, devices=2, rate=100.0, collectives=curves)
    assert collectives.all_reduce(where, (0, 1), 50).seconds == 1.5
    assert collectives.message(where, 0, 1, 200).seconds == 5.0
    assert collectives.all_reduce(where, (0, 2), 100).seconds == 2 * 0.5  # between nodes nothing was measured
    assert collectives.message(where, 0, 2, 50).seconds == 0.5


# Two nodes of four devices: 5 µs and 100 GB/s inside, 50 µs and 1 GB/s between; 100 MB. Milliseconds.
@pytest.mark.parametrize(
    ("backend", "shared", "wanted"),
    [("gloo", False, 175.7), ("gloo", True, 175.7), ("nccl", False, 26.63), ("nccl", True, 101.63)],
)
def test_all_reduce_over_nodes(backend: str, shared: bool, wanted: float) -> None:
    """gloo runs one ring, in which one message at a time leaves a node; NCCL also sums inside the nodes first."""
    where = cluster(2, 4, 100e9, 5e-6, network_rate=1e9, shared=shared, backend=backend)
    nodes = tuple(replace(n, network=replace(n.network, latency_s=50e-6)) for n in where.nodes)
    found = collectives.all_reduce(replace(where, nodes=nodes), tuple(range(8)), 100_000_000)
    assert found.seconds * 1e3 == pytest.approx(wanted, abs=0.005)
    assert dict(found.cards) == pytest.approx(dict.fromkeys(range(4), 1.0) if shared else {})


def test_a_ring_that_goes_to_and_fro_between_nodes() -> None:
    """Ranks 0, 2, 1, 3 of two nodes: two messages of every round leave each node, over one card or two."""
    for shared, crowd in ((False, 1), (True, 2)):
        where = cluster(2, 2, 1e3, 0.0, network_rate=10.0, shared=shared)
        assert collectives.ring(where, (0, 1, 2, 3), 400).seconds == pytest.approx(2 * 3 * 10)
        assert collectives.ring(where, (0, 2, 1, 3), 400).seconds == pytest.approx(2 * 3 * 10 * crowd)


def test_slower_rings_leave_room_at_a_card() -> None:
    """Two bytes a second inside the nodes and ten between them: a ring asks for a fifth of the card."""
    where = cluster(2, 2, 2.0, 0.0, network_rate=10.0, shared=True)
    found = collectives.ring(where, (0, 1, 2, 3), 400)
    assert found.seconds == pytest.approx(2 * 3 * 50)
    assert dict(found.cards) == pytest.approx(dict.fromkeys(range(4), 0.2))


def test_replicas_share_the_network_card_of_their_node() -> None:
    """Two pipelines from node 0 to node 1: both send 10 bytes at the same time, at 10 bytes a second."""
    for shared, each in ((False, 1.0), (True, 2.0)):
        where = cluster(2, 2, 1e9, 0.0, network_rate=10.0, shared=shared)
        for keep in (False, True):  # with one replica played, and with both
            found = predict(two_by_two(schedule="naive", micro=1), chain(4), where, batch=2, keep=keep)
            assert found.seconds_by_kind["SEND_F"] == pytest.approx(2 * each)
            assert found.seconds_by_kind["SEND_B"] == pytest.approx(2 * each)


def test_exchanges_of_several_stages_share_the_network_card() -> None:
    """Stages side by side in a node, replicas over nodes: the sums of both stages pass the same cards at once."""
    placement = (((0,), (1,)), ((2,), (3,)))  # replica → stage → rank
    choices = two_by_two(schedule="gpipe", micro=1, placement=placement)
    ends = {}
    for shared in (False, True):
        where = cluster(2, 2, 1e9, 0.0, network_rate=1000.0, shared=shared)
        found = predict(choices, chain(4, backward=0.0), where, batch=2, keep=True)
        ends[shared] = found.seconds_by_kind["REDUCE_GRAD"]
    # 2000 bytes a stage on two ranks: 2 s; the second stage's is ready first, by as much as a message takes (nothing).
    assert ends[False] == pytest.approx(4 * 2.0)
    assert ends[True] == pytest.approx(4 * 4.0, rel=0.01)


def test_no_link_of_a_ring_makes_it_slower_by_being_faster() -> None:
    """The ring is as slow as its slowest message, which need not be the one over the link with the lowest rate."""
    near, far = Link("near", 0.0, 10.0), Link("far", 5.0, 11.0)
    nodes = cluster(devices=3)
    (node,) = nodes.nodes
    seconds = []
    for link in (near, replace(near, rate=12.0)):
        pairs = (Pair(0, 1, link), Pair(1, 2, far), Pair(0, 2, link))
        seconds.append(
            collectives.all_reduce(replace(nodes, nodes=(replace(node, pairs=pairs),)), (0, 1, 2), 3).seconds
        )
    assert seconds[0] >= seconds[1]


# -- compute ------------------------------------------------------------------------------------------------------


def test_a_cpu_prepares_and_computes_one_after_the_other() -> None:
    """A GPU's host issues the next operation while the device computes; a CPU is both."""
    profile = chain(2)
    for backend, wanted in (("gloo", 3 * 0.5 + 6.0), ("nccl", 6.0)):
        where = cluster(devices=1, backend=backend, dispatch_s=0.5)
        found = predict(plan(blocks=2), profile, where, keep=True).played
        assert found.end[found.program.step == 0].max() == wanted, backend


def test_a_backward_pass_in_pieces_is_dispatched_once() -> None:
    program = lower(plan(dp=2, bucket=1000, blocks=4), chain(4), 2)
    run, issue = costs(program, Setting(chain(4), cluster(dispatch_s=0.5, backend="nccl")))
    backward = program.kind == Kind.B
    assert run[backward].sum() == 2 * 8.0
    assert issue[backward].sum() == 2 * 0.5


def halved(profile: Profile, **issued: tuple[float, ...]) -> Profile:
    """Backward was measured in two parts, too."""
    parts = {"backward_input_s": (1.0,) * 2, "backward_weight_s": (1.0,) * 2, "backward_issue_s": (0.5,) * 2}
    return replace(profile, blocks=tuple(replace(block, **parts, **issued) for block in profile.blocks))


def test_both_parts_of_a_backward_pass_are_issued() -> None:
    """As measured, or else each takes as long to issue as the whole does: torch goes through the graph for each. The
    first stage has no first part, and its second is the whole pass."""
    measured = {"backward_input_issue_s": (0.2,) * 2, "backward_weight_issue_s": (0.4,) * 2}
    choice = plan(pp=2, schedule="zb-h1", micro=2, stages=(2,), blocks=4)
    for issued, (first, second) in (({}, (0.5, 0.5)), (measured, (0.2, 0.4))):
        profile = halved(chain(4), **issued)
        program = lower(choice, profile, 2)
        _, issue = costs(program, Setting(profile, cluster(backend="nccl")))
        for kind, wanted in ((Kind.I, (0.0, 2 * first)), (Kind.W, (2 * 0.5, 2 * second))):
            for stage in (0, 1):
                found = issue[(program.kind == kind) & (program.stage == stage)]
                assert len(found)
                assert found == pytest.approx(wanted[stage]), (issued, kind, stage)


@pytest.mark.parametrize(("dp", "times"), [(1, 1.0), (2, 1.5), (4, 2.0)])  # beyond the table's end as at its end
def test_hosts_of_a_node_are_in_each_others_way(dp: int, times: float) -> None:
    def issuing(factor: float) -> Profile:
        issued = {"forward_issue_s": (3.0 * factor,) * 2, "backward_issue_s": (4.0 * factor,) * 2}
        issued |= {"update_issue_s": 0.5 * factor}
        return replace(chain(4), blocks=tuple(replace(block, **issued) for block in chain(4).blocks))

    where, choice = cluster(devices=4, backend="nccl"), plan(dp=dp, bucket=10**9, blocks=4)
    found = predict(choice, issuing(1.0), replace(where, hosts=(1.0, 1.5, 2.0)), 4 * dp).step_s
    assert found == predict(choice, issuing(times), where, 4 * dp).step_s
    assert found >= 4 * (3.0 + 4.0 + 0.5) * times


def test_passes_after_the_first_add_to_the_gradients() -> None:
    profile = chain(2)
    profile = replace(profile, blocks=tuple(replace(block, accumulate_s=0.25) for block in profile.blocks))
    found = predict(plan(micro=3, blocks=2), profile, cluster(devices=1))
    assert found.step_s == 3 * 6 + 2 * 2 * 0.25


def test_more_bytes_are_not_faster() -> None:
    """A probe that was disturbed in the middle: its neighbours are averaged, so that no bucket looks slow by chance."""
    curve = Curve("all_reduce", 2, (0, 100, 200, 300), (1.0, 4.0, 2.0, 5.0))
    assert [collectives.on_curve(curve, size) for size in (0, 50, 100, 150, 200, 250, 400)] == [1, 2, 3, 3, 3, 4, 7]


def over_gradients(**choices) -> tuple[list[int], int]:
    """How many times each backward pass of a step goes over the gradients, and whether STEP empties buckets."""
    chosen = plan(**{"blocks": 2, "bucket": 10**9, **choices})
    profile = replace(chain(2), blocks=tuple(replace(block, accumulate_s=0.25) for block in chain(2).blocks))
    program = lower(chosen, profile, chosen.dp * chosen.micro)
    run, _ = costs(program, Setting(profile, cluster()))
    mine = program.lists.row(0)
    passes = mine[(program.kind[mine] == Kind.B) & (program.stage[mine] == 0)]
    extra = [round(float(run[op] - program.classes[program.cost[op]].last * 2 + 0.0) / 0.5) for op in passes]
    (step,) = mine[program.kind[mine] == Kind.STEP]
    return extra, int(run[step] > 0)


def test_how_often_passes_go_over_the_gradients() -> None:
    """To add to those of passes before; to put them into DDP's buckets; our own buckets are added to at once."""
    assert over_gradients() == ([0], 0)
    assert over_gradients(micro=3) == ([0, 1, 1], 0)
    assert over_gradients(dp=2) == ([1], 0)
    assert over_gradients(dp=2, micro=3) == ([0, 1, 2], 0)
    assert over_gradients(dp=2, micro=3, overlap="off") == ([1, 1, 1], 1)


def test_a_host_starts_each_sum_and_goes_on() -> None:
    """Two buckets: the second piece of backward begins when the host has started the sum of the first."""
    profile = chain(2)
    for message in (0.0, 0.5):
        where = cluster(devices=2, rate=1e12, message=message)
        found = predict(plan(dp=2, bucket=1000, blocks=2), profile, where, batch=2, keep=True)
        program = found.played.program
        first, second = (
            next(i for i in program.lists.row(0) if program.name(i) == name) for name in ("0B0", "0B0.1")
        )  # fmt: skip
        assert found.played.start[second] - found.played.end[first] == pytest.approx(message)
