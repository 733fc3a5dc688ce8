"""What is said to be too big before it is simulated is too big, however it is cut."""

import pytest

from search.models import model
from search.spaces import some_space
from trainplan.cluster.parse import cluster
from trainplan.errors import PlanError
from trainplan.plan.plan import Plan, plan
from trainplan.plan.text import text
from trainplan.search.closer import Closer
from trainplan.search.floor import floors
from trainplan.search.hopeless import Hopeless
from trainplan.search.space import sent_away
from trainplan.solve.limits import limited
from trainplan.solve.partition.ranges import Tables
from trainplan.solve.resolve import draft
from trainplan.units import GIB, MIB


@pytest.mark.parametrize(("seed", "tied"), [(2, True), (7, False), (11, True), (13, False), (23, True)])
def test_nothing_that_fits_is_ruled_out(seed: int, tied: bool) -> None:
    """Of random spaces, also with activations away and with smaller batches than the space has; and most that are ruled
    out by the bounds of the search are so here."""
    found = some_space(seed, 16, tied)
    known = floors(found)
    tables, hopeless = Closer(found, known).tables, Hopeless(found.profile, found.cluster)
    for row in range(len(found)):
        sketch = found.sketch(row)
        assert hopeless(sketch, found.batch) == (not known.fits[row]), text(sketch)
        for changed in (sketch, *sent_away(sketch)):
            for batch in (found.batch, found.batch // 2):
                if hopeless(changed, batch):
                    assert not draft(changed, found.cluster, batch, tables(row)).fits, text(changed)


def test_states_alone_are_too_much_with_activations_away_and_without() -> None:
    """1 GiB of weights, as much of gradients and twice as much of states; two ranks have half of that each."""
    profile = model(0, 8, weights=128 * MIB)
    where = cluster("4xTitanRTX")
    context = where.device(0).context_bytes

    def hopeless(sketch: Plan, room: float) -> bool:
        return Hopeless(profile, limited(where, round((room + context) / 0.94)))(sketch, 16)

    whole = profile.state_bytes_per_parameter / 4 + 2  # GiB
    for away in ("none", "activations"):
        one = plan(blocks=8, offload=away)
        two = plan(blocks=8, pp=2, micro=4, schedule="1f1b", offload=away)
        assert hopeless(one, 0.99 * whole * GIB)
        assert hopeless(two, 0.99 * whole / 2 * GIB)
    assert not hopeless(plan(blocks=8, offload="activations"), 1.01 * whole * GIB)


def test_of_what_is_no_plan_nothing_is_said() -> None:
    """Whoever tries it hears why not."""
    profile, where = model(0, 8, weights=128 * MIB), limited(cluster("16xTitanRTX"), GIB)
    tables = Tables(profile)
    others = ({"dp": 17}, {"pp": 9, "schedule": "1f1b"}, {"pp": 2, "schedule": "zb-v"})
    for sketch in (plan(blocks=8, **other) for other in others):
        assert not Hopeless(profile, where)(sketch, 16)
        with pytest.raises(PlanError):
            draft(sketch, where, 16, tables)
    served = plan(dp=2, servers=1, exchange="ps-bsp", blocks=8)
    assert not Hopeless(profile, where)(served, 16)
