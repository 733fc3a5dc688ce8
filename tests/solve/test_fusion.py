"""PACE's fusion against brute force: every way to fuse neighbours, each played moment by moment."""

import itertools
import random

import pytest

from trainplan.solve.fusion import Tensor, fused


def ways(count: int) -> list[tuple[int, ...]]:
    """All ways to fuse neighbours."""
    found = []
    for cuts in itertools.product((False, True), repeat=count - 1):
        sizes = [1]
        for cut in cuts:
            if cut:
                sizes.append(1)
            else:
                sizes[-1] += 1
        found.append(tuple(sizes))
    return found


def played(tensors: list[Tensor], forward: list[int], begin: int, latency: int, counts: tuple[int, ...]) -> int:
    """When the next forward pass is over: in every unit of time the ready tensor goes on that is needed first."""
    groups, at = [], 0
    for count in counts:
        own = tensors[at : at + count]
        at += count
        groups.append([max(t.ready for t in own), latency + sum(t.seconds for t in own), min(t.block for t in own)])
    arrived: dict[int, int] = {}  # group → moment
    now = 0
    while len(arrived) < len(groups):
        ready = [n for n, (since, _, _) in enumerate(groups) if n not in arrived and since <= now]
        if ready:
            best = min(ready, key=lambda n: (groups[n][2], -n))
            groups[best][1] -= 1
            if groups[best][1] == 0:
                arrived[best] = now + 1
        now += 1
    over = begin
    for block, seconds in enumerate(forward):
        over = max([over, *(moment for n, moment in arrived.items() if groups[n][2] == block)]) + seconds
    return over


@pytest.mark.system("pace", "S")
def test_pace_fusion_is_the_best_of_all() -> None:
    """On 500 random instances of up to seven gradients, some of them of one block."""
    draw = random.Random(5)
    for _ in range(500):
        blocks = draw.randint(1, 5)
        forward, backward = ([draw.randint(1, 4) for _ in range(blocks)] for _ in range(2))
        tensors = []
        for block in reversed(range(blocks)):
            for _ in range(draw.choice((1, 1, 2)) if len(tensors) < 6 else 1):
                tensors.append(Tensor(sum(backward[block:]), draw.randint(1, 5), block))
        begin, latency = sum(backward), draw.randint(0, 4)
        best = min(played(tensors, forward, begin, latency, counts) for counts in ways(len(tensors)))
        found = fused(tensors, forward, begin, latency)
        assert found.exact
        assert found.over == best == played(tensors, forward, begin, latency, found.counts)


@pytest.mark.system("pace", "S")
def test_pace_fuses_everything_where_latency_is_all_there_is() -> None:
    tensors = [Tensor(float(n), 0.001, 4 - n) for n in range(5)]
    assert fused(tensors, [1.0] * 5, begin=4.0, latency=10.0).counts == (5,)
    assert len(fused(tensors, [1.0] * 5, begin=4.0, latency=0.0).counts) > 1


def test_other_types_are_not_fused() -> None:
    tensors = [Tensor(0.0, 1.0, 1, "2"), Tensor(0.0, 1.0, 0, "4"), Tensor(0.0, 1.0, 0, "4")]
    assert fused(tensors, [1.0, 1.0], begin=0.0, latency=10.0).counts == (1, 2)
