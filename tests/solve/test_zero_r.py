"""How much a plan offloads: no more than it must, and where not even that is enough it says what would be."""

from dataclasses import replace

import pytest

from synthetic import chain
from trainplan.cluster.cluster import Cluster, Device, Link, Node, Slowdown
from trainplan.errors import PlanError
from trainplan.plan.plan import plan
from trainplan.plan.text import parse, text
from trainplan.predict.predict import Prediction, predict
from trainplan.solve.resolve import solve
from trainplan.units import MIB, parse_bytes

pytestmark = pytest.mark.system("zero-r", "P")
PROFILE = chain(12, saved=100 * MIB, weights=4 * MIB, boundary=MIB, device="gpu", forward=0.1, backward=0.2)


def cluster(ranks: int = 2, host: int = 0, rate: float = 16e9) -> Cluster:
    device = Device("gpu", 80 * 2**30, {}, 1e12, host_rate=rate)
    return Cluster(
        "made up", (Node("node", (device,) * ranks, Link("link", 1e-6, 1e11), host_memory_bytes=host),), "nccl"
    )


def solved(line: str, **where) -> Prediction:
    return solve(parse(line), PROFILE, cluster(**where), 8)


@pytest.mark.parametrize("plan_", ["zero-r dp=2 bucket=4MiB", "offload=activations", "offload=activations micro=2"])
def test_less_memory_sends_more_away_and_it_fits(plan_: str) -> None:
    away = []
    for memory in (2000, 1200, 1000, 800, 600):
        found = solved(f"{plan_} memory={memory}MiB")
        assert found.fits
        assert found.peak_bytes <= found.limit_bytes < memory * MIB
        away.append(max(found.plan.away, default=(0,))[0])
        again = parse(text(found.plan))
        assert replace(solve(again, PROFILE, cluster(), 8).plan, key=found.plan.key) == found.plan  # all is said
    assert away[0] == 0
    assert away == sorted(away)
    assert len(set(away)) > 3


def test_no_more_goes_than_must() -> None:
    """One section less would be too much for the device."""
    found = solved("offload=activations memory=800MiB")
    (depth,) = found.plan.away[0]
    less = predict(replace(found.plan, away=((depth - 1,),)), PROFILE, cluster(), 8)
    assert less.peak_bytes > found.limit_bytes >= found.peak_bytes
    assert found.host_bytes == depth * 100 * MIB


def test_where_it_fits_nothing_goes_and_nothing_changes() -> None:
    found, plain = solved("zero-r dp=2"), solved("zero3 dp=2")
    assert found.plan.away == ()
    assert found.step_s == plain.step_s
    assert found.host_bytes == 0


def test_too_little_is_refused_with_what_is_enough() -> None:
    with pytest.raises(PlanError, match="with all activations away that can be") as caught:
        solved("offload=activations memory=200MiB")
    instead = str(caught.value).split("memory=")[-1].split(",")[0]
    assert solved(f"offload=activations memory={instead}").fits
    with pytest.raises(PlanError):
        solved(f"offload=activations memory={parse_bytes(instead) - 2 * MIB}B")


def test_a_host_without_room_is_not_enough() -> None:
    assert solved("zero-r dp=2 bucket=4MiB memory=800MiB", host=2**31).fits
    with pytest.raises(PlanError, match="in the memory of one host"):
        solved("zero-r dp=2 bucket=4MiB memory=800MiB", host=512 * MIB)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_pipelines_whose_first_stages_hold_more_send_more_away(schedule: str) -> None:
    found = solved(f"pp=2 micro=4 schedule={schedule} offload=activations memory=1000MiB")
    assert found.fits
    assert len(found.plan.away) == 2
    first, second = (sum(row) * (4 if len(row) == 1 else 1) for row in found.plan.away)
    assert first >= second
    assert first > 0


@pytest.mark.parametrize(("way", "seconds"), [("fast", 0.05), ("slow", 0.5)])
def test_a_step_by_its_closed_form(way: str, seconds: float) -> None:
    """n blocks of f and b seconds, of which the first d have parcels that take c: where copies are longer than what
    they are beside, every parcel but the first costs that much more on the way there, and every one on the way back."""
    n, d, f, b, c = 12, 5, 0.1, 0.2, seconds
    profile = replace(PROFILE, samples=(1, 8))
    chosen = plan(blocks=n, offload="activations", away=((d,),))
    found = predict(chosen, profile, cluster(1, rate=100 * MIB / c), 1)
    there = f + d * max(c, f) + (n - d - 1) * f
    back = (n - d - 1) * b + d * max(c, b) + b
    assert found.step_s == pytest.approx(there + back, rel=1e-6)


def test_slowed_by_copies_as_the_probe_says() -> None:
    chosen, where = plan(blocks=12, offload="activations", away=((5,),)), cluster(1, rate=2e9)
    slow = replace(where, slowdown=Slowdown(copy=2.0))
    copies = 2 * 5 * 100 * MIB / 2e9
    plain, slowed = (predict(chosen, PROFILE, each, 1).step_s for each in (where, slow))
    assert slowed == pytest.approx(plain + copies / 2, rel=0.01)


def test_buckets_are_chosen_where_it_is_said_what_goes_away() -> None:
    """On a slow link: one bucket for everything hides nothing. What goes away stays as it was said."""
    device = Device("cpu", 80 * 2**30, {}, 1e12, host_rate=16e9)
    slow = Cluster("slow", (Node("node", (device,) * 2, Link("link", 1e-6, 50e6)),), "gloo")
    profile = replace(PROFILE, device="cpu")
    whole, found = (solve(parse(f"zero-r dp=2 away=4{more}"), profile, slow, 8) for more in (" bucket=25MiB", ""))
    assert found.plan.away == whole.plan.away == ((4,),)
    assert found.plan.bucket < 25 * MIB
    assert found.step_s < 0.95 * whole.step_s
