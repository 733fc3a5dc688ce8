"""Some devices of a cluster: each is what it was, and so is the link between any two."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainplan.cluster.cluster import Cluster, Device, Link, Node, Pair, Slowdown
from trainplan.cluster.parse import cluster
from trainplan.cluster.part import part
from trainplan.errors import PlanError

_NVLINK = Link("nvlink", 1e-6, 1e11)
PAIRED = Cluster(
    "paired",
    (
        Node(
            "n",
            tuple(Device(f"d{i}", 1 + i, {}, 1.0) for i in range(5)),
            Link("pcie", 1e-5, 1e10),
            pairs=(Pair(0, 1, _NVLINK), Pair(1, 3, _NVLINK), Pair(2, 4, _NVLINK)),
        ),
    ),
    "nccl",
    slowdown=Slowdown(slowed_collective=3.0),
    slowdown_of_two=Slowdown(slowed_collective=1.5),
)
CLUSTERS = [PAIRED, cluster("3x4xA100-80"), cluster(str(Path(__file__).parents[2] / "examples" / "mixed.yaml"))]


@given(st.data())
def test_what_is_left_is_what_it_was(data: st.DataObject) -> None:
    whole = data.draw(st.sampled_from(CLUSTERS))
    kept = sorted(data.draw(st.sets(st.integers(0, whole.world - 1), min_size=1)))
    few = part(whole, kept)
    assert few.world == len(kept)
    assert [few.device(rank) for rank in range(few.world)] == [whole.device(rank) for rank in kept]
    for a, old_a in enumerate(kept):
        for b, old_b in enumerate(kept):
            assert (few.node_of(a) == few.node_of(b)) == (whole.node_of(old_a) == whole.node_of(old_b))
            if a != b:
                assert few.link(a, b) == whole.link(old_a, old_b)
    # With so many at it, compute and communication slow each other down as they did.
    assert few.slowdown_of(len(kept)) == whole.slowdown_of(len(kept))


def test_all_of_them_are_the_cluster() -> None:
    assert part(PAIRED, range(5)) is PAIRED


@pytest.mark.parametrize("ranks", [(), (0, 5), (1, 0), (2, 2), (-1, 0)], ids=str)
def test_devices_that_there_are_not(ranks: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match=r"of paired: it has 5 devices.*Try \[0, 1, 2, 3, 4\]"):
        part(PAIRED, ranks)
