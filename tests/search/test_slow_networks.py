"""On slow networks few devices may be faster than many: then the search finds them, though bounds say nothing of it."""

import numpy as np
import pytest

from trainplan.cluster.catalogue import device
from trainplan.cluster.parse import cluster
from trainplan.plan.text import text
from trainplan.profile.estimate import estimate
from trainplan.profile.profile import Profile
from trainplan.search.best_first import best_first
from trainplan.search.closer import Closer
from trainplan.search.columns import space
from trainplan.search.floor import floors
from trainplan.search.front import smaller
from trainplan.search.likely import likely
from trainplan.solve.resolve import draft
from trainplan.workload.load import load

BATCH = 32
CLUSTERS = ("4x2xRTX4090", "2x4xA100-80+eth10", "4x8xA100-80+eth10")


def gpt(name: str) -> Profile:
    wide = load("gpt:layers=4,hidden=1024,heads=16,seq=256,vocab=8192,batch=32")
    return estimate(wide, device(name), samples=[1, 2, 4, 8, 16, 32])


@pytest.mark.parametrize("name", CLUSTERS)
def test_more_devices_are_no_worse_than_few(name: str) -> None:
    """… with little work, too: so what is found is not what thousands of bounds leave in the end."""
    there = cluster(name)
    profile, inside = gpt(there.device(0).name), len(there.nodes[0].devices)
    whole = space(profile, there, BATCH, "bf16", predicted=True)
    found = best_first(whole, work=20_000).fitting[0]
    for count in (1, inside // 2, inside, 2 * inside):
        few = whole.only(whole.ranks <= count)
        assert found.step_s <= best_first(few, work=20_000).fitting[0].step_s * (1 + 1e-9), count


@pytest.mark.parametrize("name", CLUSTERS[:2])
def test_what_is_likely_is_near_what_is_simulated(name: str) -> None:
    """Far nearer than bounds."""
    there = cluster(name)
    whole = space(gpt(there.device(0).name), there, BATCH, "bf16", predicted=True)
    known = floors(whole)
    stretch = np.flatnonzero(known.fits & (whole.column("pp") <= 2) & (whole.column("chunks") == 1))
    rows = np.random.default_rng(0).choice(stretch, 40, replace=False)
    cut = Closer(whole, known)
    real = np.array([draft(whole.sketch(row), there, BATCH, cut.tables(row)).step_s for row in rows.tolist()])
    off, bound = np.abs(np.log(likely(whole, known, rows) / real)), np.abs(np.log(known.seconds[rows] / real))
    assert np.median(off) < 0.35 < np.median(bound)


def test_plans_on_one_node_and_then_by_number_of_devices() -> None:
    there = cluster("4x2xRTX4090")
    whole = space(gpt("RTX4090"), there, BATCH)
    order, bounds = np.arange(len(whole)), np.arange(len(whole)) / 7
    fronts = smaller(whole, order, bounds)
    used = [sorted(set(whole.ranks[front.order].tolist())) for front in fronts]
    assert used == [[1, 2], [3], [4], [5], [6], [7]]
    few = whole.only(whole.ranks <= 2)
    assert smaller(few, np.arange(len(few)), np.zeros(len(few))) == []  # then they are all there is
    front = fronts[0]
    assert front.lowest == bounds[front.order[0]]
    assert front.fresh
    first = front.next()
    front.push((0.0, first, ()))
    assert (front.lowest, front.fresh) == (0.0, False)
    assert text(whole.sketch(front.pop()[1])) == text(whole.sketch(first))
    assert len(front.left({first, front.next()})) == len(front.order) - 2
