"""Seconds of exchanges: the price of their rounds is what is known in closed form, with the worked numbers."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainplan.cluster.cluster import Cluster, Curve, Device, Link, Node
from trainplan.predict import collectives, nccl
from trainplan.predict.exchanges import in_rounds, summed
from trainplan.program.exchanges import BY_ROUNDS, HIERARCHICAL, TELLING
from trainplan.program.ops import Kind
from trainplan.program.program import CostClass

ALPHA, BETA, GAMMA = 50e-6, 1e-9, 0.1e-9  # seconds a message, a byte, a byte that is added
LOCAL = (5e-6, 0.01e-9)
B = 100_000_000
CLOSE = {"rel": 1e-9, "abs": 1e-15}


def cluster(
    nodes: int, inside: int = 1, shared: bool = False, gamma: float = GAMMA, alpha: float = ALPHA, beta: float = BETA
) -> Cluster:  # fmt: skip
    """Adding reads two numbers and writes one, so a byte takes as long as three of the memory's."""
    device = Device("cpu", 2**30, {}, 3 / gamma if gamma else math.inf)
    network, local = Link("network", alpha, 1 / beta, shared=shared), Link("local", LOCAL[0], 1 / LOCAL[1])
    return Cluster("test", (Node("node", (device,) * inside, local, network),) * nodes, "gloo")


def seconds(word: str, ranks: int, size: int = B, **constants: float) -> float:
    return in_rounds(cluster(ranks, **constants), word, tuple(range(ranks)), size).seconds


# Milliseconds of 100 MB on 2, 4 and 8 ranks.
WORKED = {
    "ring": (105.1, 157.8, 184.45),
    "tree": (210.1, 420.2, 630.3),
    "halving-doubling": (105.1, 157.7, 184.05),
    "all-to-all": (110.05, 330.05, 770.05),
}
SMALL = {  # microseconds of 1 kB
    "ring": (101.05, 301.575, 701.8375),
    "halving-doubling": (101.05, 201.575, 301.8375),
    "all-to-all": (51.1, 53.3, 57.7),
}


@pytest.mark.parametrize("word", WORKED)
def test_worked_numbers(word: str) -> None:
    assert [1e3 * seconds(word, ranks) for ranks in (2, 4, 8)] == pytest.approx(WORKED[word], **CLOSE)
    if word in SMALL:
        assert [1e6 * seconds(word, ranks, 1000) for ranks in (2, 4, 8)] == pytest.approx(SMALL[word], **CLOSE)


def test_worked_numbers_of_six_ranks() -> None:
    """Where they are no power of two, halving is far behind: two of six send everything twice over."""
    assert 1e3 * seconds("ring", 6) == pytest.approx(175.5, **CLOSE)
    assert 1e3 * seconds("halving-doubling", 6) == pytest.approx(367.8, **CLOSE)


def test_worked_numbers_of_hierarchical() -> None:
    """Two nodes of four: a network card for each rank, or one for all of a node; against a ring over the network."""
    ranks = tuple(range(8))
    own, shared = (in_rounds(cluster(2, 4, card, gamma=0), HIERARCHICAL, ranks, B, 4) for card in (False, True))
    assert [1e3 * own.seconds, 1e3 * shared.seconds] == pytest.approx([26.63, 101.63], **CLOSE)
    assert 1e3 * in_rounds(cluster(8, gamma=0), "ring", ranks, B).seconds == pytest.approx(175.7, **CLOSE)
    assert own.cards == ()
    # What passes the cards can be slowed down by others, what happens inside the nodes cannot.
    assert shared.bytes_s == pytest.approx(0.1, **CLOSE)
    assert dict(shared.cards) == pytest.approx({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0})


def test_worked_numbers_of_recursive_doubling() -> None:
    """Everything to one rank a round, to one twice as far away each time: so ranks tell each other what is ready. (No
    sum goes that way, since all others send less.)"""
    assert [1e3 * seconds(TELLING, ranks) for ranks in (2, 4, 8)] == pytest.approx([110.05, 220.1, 330.15], **CLOSE)


def test_worked_numbers_of_a_double_tree() -> None:
    """2 ⌈log₂ W⌉ α + 2 B β + B γ. Between nodes NCCL has one; we have its seconds, not its rounds: what adding takes is
    in the rate that it reaches (here 10 ms), and so is that this is 0.92 of a ring's."""
    for ranks, worked in ((2, 210.1), (4, 210.2), (8, 210.3)):
        network = Link("network", ALPHA, 1 / BETA)
        lie = nccl.Lie(ranks, nodes=ranks, most=1, inside=network, network=network, ring=1 / BETA)
        assert 1e3 * (lie.up_and_down + 2 * B * BETA + B * GAMMA) == pytest.approx(worked, **CLOSE)
        device = Device("gpu", 2**30, {}, math.inf)
        inside = Link("inside", 0.0, 1e15, reached=1.0)
        there = Cluster("test", (Node("node", (device,), inside, network),) * ranks, "nccl")
        found = nccl.all_reduce(there, tuple(range(ranks)), B)
        ring, rate = 2 * (ranks - 1), nccl.CARDS / BETA
        ways = (ring * ALPHA + ring / ranks * B / rate, lie.up_and_down + 2 * B / (nccl.TREE * rate))
        assert found == pytest.approx(lie.lead(B) + min(ways), **CLOSE)


def closed_form(word: str, w: int, b: float, alpha: float, beta: float, gamma: float) -> float:
    """As in textbooks (Thakur; Patarasuk and Yuan; Rabenseifner)."""
    log, power = math.ceil(math.log2(w)), 2 ** (w.bit_length() - 1)
    if word == "ring":
        return 2 * (w - 1) * alpha + 2 * (w - 1) / w * b * beta + (w - 1) / w * b * gamma
    if word == "tree":
        return 2 * log * (alpha + b * beta) + log * b * gamma
    if word == "all-to-all":
        return alpha + (w - 1) * b * (beta + gamma)
    if word == "all-to-all-sliced":
        return 2 * alpha + 2 * (w - 1) / w * b * beta + (w - 1) / w * b * gamma
    halved = 2 * math.log2(power) * alpha + (power - 1) / power * b * (2 * beta + gamma)
    return halved + (2 * (alpha + b * beta) + b * gamma if w > power else 0.0)


@pytest.mark.system("all-to-all", "P")
@pytest.mark.parametrize("word", [word for word in BY_ROUNDS if word != HIERARCHICAL])
@settings(max_examples=30)
@given(
    ranks=st.integers(2, 17), size=st.integers(1, 10**9), alpha=st.floats(0, 1e-2), beta=st.floats(1e-12, 1e-6),
    gamma=st.floats(1e-13, 1e-7),
)  # fmt: skip
def test_all_to_all_and_others_take_as_long_as_their_closed_forms(word, ranks, size, alpha, beta, gamma) -> None:
    found = seconds(word, ranks, size, alpha=alpha, beta=beta, gamma=gamma)
    assert found == pytest.approx(closed_form(word, ranks, size, alpha, beta, gamma), rel=1e-9)


@settings(max_examples=30)
@given(n=st.integers(1, 5), m=st.integers(1, 5), size=st.integers(1, 10**9), shared=st.booleans())
def test_rounds_take_as_long_as_the_short_forms_that_searches_use(n: int, m: int, size: int, shared: bool) -> None:
    """`collectives` has rings and hierarchies in few steps, for backends that do them: with the same answer."""
    there, ranks = cluster(n, m, shared, gamma=0), tuple(range(n * m))
    if n * m > 1:
        flat, ours = collectives.ring(there, ranks, size), in_rounds(there, "ring", ranks, size)
        assert ours.seconds == pytest.approx(flat.seconds, rel=1e-9)
        assert ours.bytes_s == pytest.approx(flat.bytes_s, rel=1e-9)
        assert dict(ours.cards) == pytest.approx(dict(flat.cards), rel=1e-9)
    tiered = collectives.hierarchical(there, ranks, size)
    if tiered is not None:
        ours = in_rounds(there, HIERARCHICAL, ranks, size, m)
        assert ours.seconds == pytest.approx(tiered.seconds, rel=1e-9)
        assert dict(ours.cards) == pytest.approx(dict(tiered.cards), rel=1e-9)


def test_many_messages_cost_the_host_that_posts_them() -> None:
    """The seconds of a message's ends, for each message of the member that has most."""
    for word, messages in (("ring", 2 * 2 * 3), ("all-to-all", 2 * 3), ("all-to-all-sliced", 2 * 2 * 3)):
        plain, dear = (cluster(4) for _ in range(2))
        dear = replace(dear, nodes=tuple(replace(n, network=replace(n.network, message_s=1e-3)) for n in dear.nodes))
        more = in_rounds(dear, word, (0, 1, 2, 3), B).seconds - in_rounds(plain, word, (0, 1, 2, 3), B).seconds
        assert more == pytest.approx(messages * 1e-3)


def test_where_messages_were_measured_ours_is_no_faster_than_what_gloo_was_measured_to_do() -> None:
    """Messages one at a time take 1 s + 1 s/MB; gloo's ring of four was three times as slow as so many of them. In a
    tree's four rounds two, one, one and two of the four send: one is as fast as ever, two are slowed by a third."""
    probed = cluster(1, 4, gamma=0)
    message = Curve("p2p", 2, (0, 10**6), (1.0, 2.0))
    alone = replace(probed, collectives=(message,))
    four = (0, 1, 2, 3)
    assert in_rounds(alone, "ring", four, 10**6).seconds == pytest.approx(6 * 1.25)
    assert in_rounds(alone, "tree", four, 10**6).seconds == pytest.approx(4 * 2.0)
    crowded = replace(probed, collectives=(message, Curve("all_reduce", 4, (0, 10**6), (18.0, 22.5))))
    assert in_rounds(crowded, "ring", four, 10**6).seconds == pytest.approx(22.5)
    assert in_rounds(crowded, "tree", four, 10**6).seconds == pytest.approx(2 * 2.0 + 2 * 2.0 * (1 + 2 / 3))
    assert in_rounds(crowded, "all-to-all", four, 10**6).seconds == pytest.approx(
        3 * in_rounds(alone, "all-to-all", four, 10**6).seconds
    )
    quick = replace(probed, collectives=(message, Curve("all_reduce", 4, (0, 10**6), (1.0, 2.0))))
    assert in_rounds(quick, "ring", four, 10**6).seconds == pytest.approx(6 * 1.25)  # it does things at once: not ours


def test_through_host_memory_by_the_parts_that_were_measured() -> None:
    """Copies 1 s/MB there and back; a round 2 s/MB; a message 1 s/MB, 0.2 of it copies at 10 MB/s; adding 0.5 s/MB."""
    probed, megabyte = cluster(1, 4, gamma=0), 10**6
    node = probed.nodes[0]
    node = replace(node, devices=tuple(replace(device, host_rate=1e7) for device in node.devices))
    slopes = {("p2p", 2): 1.0, ("round", 4): 2.0, ("stage", 4): 1.0, ("add", 4): 0.5}
    curves = tuple(Curve(op, ranks, (0, megabyte), (0.0, slope)) for (op, ranks), slope in slopes.items())
    sliced = replace(probed, nodes=(node,), backend="gloo-staged", collectives=curves)
    four = (0, 1, 2, 3)
    assert in_rounds(sliced, "ring", four, megabyte).seconds == pytest.approx(1 + 6 * 0.25 * 2 + 3 * 0.25 * 0.5)
    # A tree's rounds: two, one, one and two of four send, alone at 0.8 s/MB, and a third of the way to 2 s/MB.
    assert in_rounds(sliced, "tree", four, megabyte).seconds == pytest.approx(1 + 2 * 0.8 + 2 * 1.2 + 2 * 0.5)
    assert in_rounds(sliced, "all-to-all", four, megabyte).seconds == pytest.approx(1 + 3 * 2 + 3 * 0.5)
    # Workers on cores have nothing to copy.
    cores = replace(sliced, backend="gloo", collectives=tuple(c for c in curves if c.op != "stage"))
    assert in_rounds(cores, "ring", four, megabyte).seconds == pytest.approx(6 * 0.25 * 2 + 3 * 0.25 * 0.5)
    # A cluster that was probed before these were measured.
    before = replace(sliced, collectives=curves[:1])
    assert in_rounds(before, "ring", four, megabyte).seconds == pytest.approx(6 * 0.25)


def test_buckets_that_are_on_their_way_together_take_as_long_as_was_measured_of_several() -> None:
    """One sum takes 2 s/MB; of several at once each takes 1.2 s/MB. A thread that sums on behalf of others, as
    Horovod's, has one on its way; so has a count of samples."""
    slopes = {"p2p": (2, 1.0), "all_reduce": (4, 2.0), "all_reduces": (4, 1.2)}
    curves = tuple(Curve(op, ranks, (0, 10**6), (0.0, slope)) for op, (ranks, slope) in slopes.items())
    probed = replace(cluster(1, 4), backend="gloo-staged", collectives=curves)
    four = (0, 1, 2, 3)
    bucket = CostClass(Kind.REDUCE_GRAD, 0, -1, 0, 1, 0, 10**6, four)
    assert summed(probed, bucket).seconds == pytest.approx(1.2)
    assert summed(probed, bucket._replace(background=True)).seconds == pytest.approx(2.0)
    assert summed(probed, bucket._replace(kind=Kind.COUNT)).seconds == pytest.approx(2.0)
    before = replace(probed, collectives=curves[:2])  # probed when only one at a time was measured
    assert summed(before, bucket).seconds == pytest.approx(2.0)
