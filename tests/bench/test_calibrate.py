"""Constants that are found again in timelines of a machine that has others; and what is refused, or kept as it was."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import trainplan.api as api
from synthetic import chain
from trainplan.bench.calibrate.calibrate import Calibration, calibrate
from trainplan.bench.calibrate.constants import changed, constants
from trainplan.bench.calibrate.seen import gather, same_machines
from trainplan.bench.results import Outcome, Result, load
from trainplan.bench.row import Row
from trainplan.cluster.cluster import Cluster, Curve, Device, Link, Node, Slowdown
from trainplan.cluster.parse import cluster as parse_cluster
from trainplan.errors import InputError
from trainplan.plan.text import parse, text
from trainplan.predict.accuracy import plan_kind
from trainplan.predict.predict import predict
from trainplan.predict.replay import Replay
from trainplan.solve.resolve import resolve

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
MB = 10**6
# Two networks: one whose gradients outlast its work, one with large activations.
NETWORKS = {
    "heavy": chain(5, 0.004, 0.008, weights=16 * MB, boundary=MB // 4, samples=(1, 2, 4, 8), flat=False),
    "wide": chain(6, 0.005, 0.011, weights=2 * MB, boundary=2 * MB, samples=(1, 2, 4, 8), flat=False),
}
PLANS = [
    "dp=2", "dp=4", "dp=4 exchange=ring", "zero=1 dp=4", "zero=2 dp=2", "pp=2 schedule=gpipe micro=4",
    "pp=4 schedule=1f1b micro=8", "zero=3 dp=4", "zero=1 dp=2",
]  # fmt: skip


def probed() -> Cluster:
    """Four workers of one machine, as a probe describes them."""
    sizes = (4, 4096, MB, 8 * MB, 32 * MB)

    def curve(op: str, ranks: int, latency: float, rate: float) -> Curve:
        return Curve(op, ranks, sizes, tuple(latency + size / rate for size in sizes))

    curves = [curve("p2p", 2, 1e-4, 2e9)]
    for ranks in (2, 4):
        curves.append(curve("all_reduce", ranks, 2e-4 * ranks, 1.2e9))
        curves += [curve(op, ranks, 1e-4 * ranks, 2e9) for op in ("all_gather", "reduce_scatter")]
    device = Device("cpu", 10**10, {"fp32": 1e11}, 2e10)
    node = Node("here", (device,) * 4, Link("inside", 1e-4, 2e9, message_s=2e-5, source="probed"), cores=4)
    return Cluster(
        "four", (node,), "gloo", tuple(curves), Slowdown(collective=1.2, slowed_collective=1.3, slowed_message=1.2),
        contention=(1.0, 1.05, 1.1, 1.15), source="probed",
    )  # fmt: skip


def measured(folder: Path, truth: Cluster, believed: Cluster, noise: float = 0.0, plans: list[str] = PLANS) -> str:
    """A folder of results as a machine with the constants of `truth` would leave it, where `believed` was believed."""
    draw = random.Random(1)
    believed.save(folder / "workers.json")
    for name, profile in NETWORKS.items():
        profile.save(folder / f"{name}.profile.json")
        results = []
        for line in plans:
            plan = resolve(parse(line), profile, believed, 8)
            expected, happened = predict(plan, profile, believed, 8), predict(plan, profile, truth, 8, keep=True)
            off = draw.gauss(0.0, noise)
            step_s = happened.step_s * (1 + off)
            spent = {k: s / plan.world * (1 + off) for k, s in happened.timeline().seconds_by_kind().items()}
            error = expected.step_s / step_s - 1
            row = Row(
                name, text(plan), plan_kind(plan), plan.world, 8, expected.step_s, step_s, error, error, noise, 6, {},
                drift=1.0, spent=spent,
            )  # fmt: skip
            results.append(Result(plan_kind(plan), line, text(plan), predicted_s=expected.step_s, row=row))
        Outcome(
            "a machine", "cpu", "2.13", "2026-01-01", "", name, "made up", name, 4, 8, results=tuple(results),
            cluster="workers.json", profile=f"{name}.profile.json",
        ).save(folder / f"{name}.json")  # fmt: skip
    return str(folder)


def outcomes(folder: str) -> list[Outcome]:
    return [load(Path(folder) / f"{name}.json") for name in NETWORKS]


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 2, 3))])
def test_other_constants_are_found_again(tmp_path: Path, seed: int) -> None:
    """Three of them, some more and some less than was believed, in what a machine of that kind would have left."""
    draw, believed = random.Random(seed), probed()
    names = draw.sample(["messages.bytes", "sums.bytes", "shares.bytes", "contention.4"], 3)
    own = {c.name: c for c in constants(believed, [2, 4])}
    truth = {}
    for name in names:
        other = own[name].value * draw.choice([0.6, 1.7, 2.5])
        truth[name] = min(max(other, own[name].low), own[name].high)
    found = calibrate(gather(outcomes(measured(tmp_path, changed(believed, truth), believed))))
    assert found.helps
    after = {change.name: change.after for change in found.changes if change.moved}
    for name, value in truth.items():
        assert after[name] == pytest.approx(value, rel=0.12), name
    assert found.fitted.mean[1] < 0.015
    for error in found.held_out:  # where all of a kind are held out, nothing tells of it
        assert error.mean[1] < 0.6 * error.mean[0]


def test_noise_is_not_learned(tmp_path: Path) -> None:
    """A machine that is as it was believed to be, measured with 4 % of noise."""
    believed = probed()
    folder = measured(tmp_path, believed, believed, noise=0.04, plans=PLANS[:5])
    found = calibrate(gather(outcomes(folder)))
    moved = [(change.before, change.after) for change in found.changes if change.moved]
    assert not found.helps or all(abs(np.log(after / before)) < 0.1 for before, after in moved)
    assert all(error.mean[1] < error.mean[0] + 0.005 for error in found.held_out)


def test_a_better_file_is_written_whole_with_its_sources(tmp_path: Path) -> None:
    believed = probed()
    (tmp_path / "results").mkdir()
    folder = measured(tmp_path / "results", changed(believed, {"sums.bytes": 0.06}), believed, plans=PLANS[:4])
    answer = api.calibrate([f"{folder}/heavy.json", f"{folder}/wide.json"], output=str(tmp_path / "new.yaml"))
    assert answer.path
    again = parse_cluster(str(tmp_path / "new.yaml"))
    assert again == answer.found.cluster
    assert "calibrated" in again.source
    assert any("sums.bytes" in note and "observations" in note for note in again.notes)
    assert "held out by networks" in str(answer)
    assert answer.to_json()["written"] == str(tmp_path / "new.yaml")
    # Whatever is predicted with the new file is what was measured.
    profile = NETWORKS["heavy"]
    plan = resolve(parse("dp=4"), profile, again, 8)
    row = next(r.row for r in outcomes(folder)[0].results if r.asked == "dp=4" and r.row)
    assert predict(plan, profile, again, 8).step_s == pytest.approx(row.measured_s, rel=0.03)


def test_what_makes_unseen_runs_worse_is_not_written(tmp_path: Path) -> None:
    """Two networks that say the opposite: what one teaches, the other pays for."""
    believed = probed()
    (tmp_path / "results").mkdir()
    folder = measured(tmp_path / "results", believed, believed, plans=PLANS[:4])
    told = []
    for outcome, factor in zip(outcomes(folder), (1.6, 0.7), strict=True):
        rows = [replace(r, row=_slower(r.row, factor)) for r in outcome.results if r.row]
        told.append(replace(outcome, results=tuple(rows)))
    for outcome in told:
        outcome.save(Path(folder) / f"{outcome.network}.json")
    new = tmp_path / "new.json"
    paths = [f"{folder}/heavy.json", f"{folder}/wide.json"]
    answer = api.calibrate(paths, output=str(new))
    assert not answer.found.helps
    assert not new.exists()
    assert "kept as it was: mean errors get worse" in str(answer)
    api.calibrate(paths, output=str(new), force=True)
    assert new.exists()


def _slower(row: Row, factor: float) -> Row:
    step_s = row.measured_s * factor
    error = row.predicted_s / step_s - 1
    spent = {kind: took * factor for kind, took in row.spent.items()}
    return replace(row, measured_s=step_s, error=error, raw_error=error, spent=spent)


def test_predictions_are_made_anew_where_it_is_asked(tmp_path: Path) -> None:
    """What an older version predicted, twice too much, is as far off as this one's then; what was measured stays."""
    believed = probed()
    folder = measured(tmp_path, changed(believed, {"sums.bytes": 0.06}), believed, plans=PLANS[:3])
    paths = [f"{folder}/{name}.json" for name in NETWORKS]
    ours = api.bench_accuracy(paths)
    for outcome, path in zip(outcomes(folder), paths, strict=True):
        rows = [
            replace(r.row, predicted_s=2 * r.row.predicted_s, error=1 + 2 * r.row.error)
            for r in outcome.results
            if r.row
        ]
        old = [replace(r, row=row, predicted_s=row.predicted_s) for r, row in zip(outcome.results, rows, strict=True)]
        replace(outcome, results=tuple(old)).save(path)
    (then,), (now,) = (api.bench_accuracy(paths, again=again).errors["all"] for again in (False, True))
    assert then.median > 0.5
    assert now.median == pytest.approx(ours.errors["all"][0].median)
    assert now.worst == pytest.approx(ours.errors["all"][0].worst)
    Path(folder, "workers.json").unlink()
    with pytest.raises(InputError, match="a profile and a cluster beside it"):
        api.bench_accuracy(paths, again=True)


def test_refusals(tmp_path: Path) -> None:
    believed = probed()
    folder = measured(tmp_path, believed, believed, plans=PLANS[:3])
    known = outcomes(folder)
    with pytest.raises(InputError, match="nothing in these results has run"):
        gather([replace(outcome, results=()) for outcome in known])
    with pytest.raises(InputError, match="profile and the cluster beside it"):
        gather([replace(outcome, at="") for outcome in known])
    with pytest.raises(InputError, match="there are 3 runs"):
        gather(known[:1])
    with pytest.raises(InputError, match="other machines"):
        gather(known, parse_cluster("4xT4"))
    alike = replace(known[0], results=known[0].results[:1] * 7)
    with pytest.raises(InputError, match="one network and one system"):
        calibrate(gather([alike]))
    slow = replace(believed, nodes=(replace(believed.nodes[0], devices=(Device("cpu", 1, {"fp32": 4e10}, 2e10),) * 4),))
    slow.save(tmp_path / "slow.json")
    with pytest.raises(InputError, match="2 clusters"):
        gather([known[0], replace(known[1], cluster="slow.json")])
    with pytest.raises(InputError, match="a cluster's file ends in"):
        api.calibrate([folder], output="cluster.txt")


def test_the_same_machines() -> None:
    believed = probed()
    node = believed.nodes[0]
    assert same_machines(replace(believed, nodes=(replace(node, devices=node.devices[:2]),)), believed)
    assert same_machines(changed(believed, {"sums.bytes": 0.1, "memory_rate": 2.5e10}), believed)
    assert not same_machines(replace(believed, backend="nccl"), believed)
    assert not same_machines(replace(believed, nodes=(node, node)), believed)


@pytest.mark.parametrize("line", [*PLANS, "dp=4 exchange=horovod", "dp=2 pp=2 schedule=gpipe micro=2"])
def test_a_replay_is_a_prediction(line: str) -> None:
    """On the cluster that it was made for, and on others: to the last bit where nothing is decided while running."""
    profile, first = NETWORKS["heavy"], probed()
    plan = resolve(parse(line), profile, first, 8)
    replay = Replay(plan, profile, first, 8)
    other = changed(first, {"sums.bytes": 0.09, "spread": 0.1, "slowdown.collective": 1.5})
    for there in (first, other) if "horovod" not in line else (first,):
        expected, (step_s, kinds) = predict(plan, profile, there, 8), replay.on(there)
        assert step_s == pytest.approx(expected.step_s)
        assert {k: s * plan.world for k, s in kinds.items()} == pytest.approx(expected.seconds_by_kind)


def test_every_constant_can_be_moved_and_is_read_back() -> None:
    """Of a probed machine and of one from the catalogue: the new value is what is found there, and nothing else is."""
    for cluster in (probed(), parse_cluster("2x2xT4+eth10")):
        own = constants(cluster, [2])
        for constant in own:
            value = constant.moved(0.5 * constant.ends[1] or 0.5 * constant.ends[0])
            there = {c.name: c.value for c in constants(changed(cluster, {constant.name: value}), [2])}
            assert there[constant.name] == pytest.approx(value, rel=1e-6), constant.name
            others = {c.name: c.value for c in own if c.name != constant.name}
            assert {name: there[name] for name in others} == pytest.approx(others), constant.name


def _kept(name: str) -> Calibration:
    from trainplan.bench.results import read

    return calibrate(gather(read([DATA / f"{name}.json"])))


@pytest.mark.slow
def test_kept_runs_that_were_held_out_are_not_predicted_worse() -> None:
    """21 runs on slices of an H200. (Every day the page about it asks for them, too.)"""
    found = _kept("exchanges-gpu")
    assert [error.of for error in found.held_out] == ["held out by systems"]
    assert found.helps == (not any(error.worse for error in found.held_out))
    assert all(error.mean[1] < error.mean[0] + 0.01 for error in found.held_out)
    assert found.fitted.mean[1] < found.fitted.mean[0]


@pytest.mark.slow
def test_kept_runs_of_cores_are_not_predicted_worse() -> None:
    """114 runs on 9 cores, as above; they teach little."""
    found = _kept("exchanges-cores")
    assert not any(error.worse for error in found.held_out)
