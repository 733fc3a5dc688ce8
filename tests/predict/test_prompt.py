"""What a step owes to its hosts: by closed forms, and in the words of whoever asks."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.program.strategies import examples
from tests.synthetic import chain
from trainplan.cluster.cluster import Cluster
from trainplan.cluster.parse import cluster
from trainplan.plan.text import parse
from trainplan.predict.many import FEWEST, predictions
from trainplan.predict.predict import Prediction, predict
from trainplan.profile.profile import Profile
from trainplan.report.answers import Predicted
from trainplan.report.explain import explain
from trainplan.search.reasons import Pieces, pieces, reason
from trainplan.situation import profile_for
from trainplan.solve.resolve import solve

SMALL = "gpt:layers=2,hidden=256,heads=4,seq=128,vocab=1000"  # whose kernels take less than it takes to issue them
BATCH = 8


def issued(run_s: float, issue_s: float, blocks: int = 3) -> Profile:
    """Every pass of a block takes the device so long, and its host so long."""
    profile = chain(blocks, run_s, run_s, device="H200")
    both = (issue_s,) * len(profile.samples)
    rows = [replace(block, forward_issue_s=both, backward_issue_s=both) for block in profile.blocks]
    return replace(profile, blocks=tuple(rows))


@pytest.fixture(scope="module")
def there() -> Cluster:
    return cluster("4xH200")


@pytest.fixture(scope="module")
def small(there: Cluster) -> Profile:
    return profile_for(SMALL, there, BATCH)


@examples(30)
@given(st.integers(1, 5), st.integers(1, 3), st.floats(1e-4, 1e-2), st.floats(0.0, 1e-2))
def test_on_one_device_it_is_what_issuing_takes_beyond_running(
    blocks: int, micro: int, run_s: float, issue_s: float
) -> None:
    """Of equal passes either the device is never idle, or its host never is."""
    found = predict(
        solve(parse(f"micro={micro}"), issued(run_s, issue_s, blocks), cluster("1xH200"), BATCH).plan,
        issued(run_s, issue_s, blocks), cluster("1xH200"), BATCH,
    )  # fmt: skip
    passes = 2 * blocks * micro
    assert found.step_s == pytest.approx(passes * max(run_s, issue_s))
    assert found.host_s == pytest.approx(passes * max(0.0, issue_s - run_s), abs=1e-9)
    assert pieces(found).compute == pytest.approx(passes * run_s)


PLANS = (
    "single", "dp=2", "dp=4 zero=3", "tp=2", "tp=2 dp=2", "pp=2 schedule=1f1b micro=4",
    "dp=2 pp=2 schedule=gpipe micro=2", "tp=2 pp=2 schedule=1f1b micro=2", "dp=2 precision=bf16",
    "ps-bsp dp=2 servers=1",
)  # fmt: skip


@pytest.mark.parametrize("words", PLANS)
def test_pieces_add_up_to_the_step(words: str, there: Cluster, small: Profile) -> None:
    found = solve(parse(words), small, there, BATCH)
    parts = [getattr(pieces(found), field.name) for field in fields(Pieces)]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(found.step_s)
    assert found.host_s > 0.3 * found.step_s
    text = reason(found, small, there)
    assert "waiting for the host" in text if words == "single" else "waiting for hosts" in text
    assert ("replica" in text) <= (found.plan.dp > 1)
    assert found.to_json()["host_s"] == found.host_s


@pytest.mark.parametrize("words", ["single", "tp=2"])
def test_who_asks_is_told_that_the_host_is_what_a_step_waits_for(words: str, there: Cluster, small: Profile) -> None:
    found = solve(parse(words), small, there, BATCH)
    shown = str(explain(found, small, there))
    assert "idle until hosts have issued what is computed" in shown
    assert "replica" not in shown
    assert "100.0 % compute" not in shown
    line = next(line for line in str(Predicted(found, small, there)).splitlines() if line.startswith("issue"))
    assert f"({found.host_s / found.step_s:.1%}".replace("%", " %") in line


def test_a_device_that_is_never_idle_waits_for_no_host(there: Cluster) -> None:
    profile = issued(1e-2, 1e-3)
    found = solve(parse("single"), profile, there, BATCH)
    assert found.host_s == 0
    assert "\nissue " not in str(Predicted(found, profile, there))
    assert reason(found, profile, there) == "100.0 % compute"


def test_on_cpus_the_host_is_what_computes() -> None:
    profile = replace(issued(1e-3, 1e-2), device="cpu")
    found = solve(parse("single"), profile, cluster("2xcpu"), BATCH)
    assert (found.hosts, found.host_s) == (None, 0.0)
    assert pieces(found).compute == pytest.approx(found.step_s)


def test_what_other_cores_predict_has_it_too(there: Cluster, small: Profile) -> None:
    alone: Prediction = solve(parse("dp=2"), small, there, BATCH)
    together = predictions([alone.plan] * 2 * FEWEST, small, there, BATCH, cores=2)
    assert together[0].host_s == together[-1].host_s == alone.host_s > 0
