"""Inputs as they are predicted: closed forms of the step with and without preloading, bytes, memory, what is chosen;
and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.predict.test_servers import LATENCY, RATE, in_parts, machines
from tests.program.surgery import change, find, move, reread, values_between
from tests.synthetic import chain
from trainplan.cluster.cluster import Cluster, Device, Link, Node
from trainplan.errors import PlanError, ProgramError
from trainplan.plan.plan import plan
from trainplan.plan.text import parse, text
from trainplan.predict.clock import play
from trainplan.predict.memory import peaks
from trainplan.predict.predict import Prediction, predict
from trainplan.profile.profile import Input, Profile
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.ops import Kind
from trainplan.program.program import Program
from trainplan.search.recommend import recommend
from trainplan.solve.resolve import resolve

HOST = 10e9  # bytes a second


def gpus(count: int = 1, backend: str = "nccl", host: float = HOST, memory: int = 10**12) -> Cluster:
    device = Device("gpu", memory, {"fp32": 1e12}, 1e12, host_rate=host)
    return Cluster("gpus", (Node("node", (device,) * count, Link("inside", 0.0, 1e15)),), backend)


def fed(sample: float, blocks: int = 4, **fields) -> Profile:
    """Blocks of 1 + 2 seconds, inputs of so many bytes a sample and a target of 8."""
    inputs = (Input("args[0]", (0,), sample), Input("targets", (blocks - 1,), 8.0), Input("kwargs[unused]", (), 64.0))
    return chain(blocks, input_bytes_per_sample=sample + 8.0 + 64.0, inputs=inputs, device="gpu", **fields)


def found(profile: Profile, cluster: Cluster, preload: str, batch: int = 8, **choices) -> Prediction:
    return predict(plan(blocks=4, preload=preload, **choices), profile, cluster, batch, keep=True)


@settings(max_examples=25, deadline=None)
@given(st.floats(1e6, 1e11), st.integers(1, 64), st.sampled_from(["nccl", "gloo-staged", "gloo"]))
@pytest.mark.system("preload", "P")
def test_step_with_and_without_preload(sample: float, batch: int, backend: str) -> None:
    """Without, load and compute follow each other: L + C. With it the longer of the two counts: max(L, C)."""
    sample = float(round(sample))
    cluster = gpus(backend=backend, host=0.0 if backend == "gloo" else HOST)
    rate = cluster.device(0).memory_rate / 2 if backend == "gloo" else HOST  # in memory: read once, written once
    load, compute = batch * (sample + 8) / rate, 4 * 3.0
    step = {word: found(fed(sample), cluster, word, batch).step_s for word in ("given", "off", "on")}
    assert step["given"] == pytest.approx(compute)
    assert step["off"] == pytest.approx(load + compute)
    assert step["on"] == pytest.approx(max(load, compute))


@pytest.mark.parametrize(
    "choices",
    [
        {"pp": 2, "micro": 2, "schedule": "1f1b", "stages": (2,)},
        {"dp": 2, "pp": 2, "micro": 4, "schedule": "chimera", "stages": (2,)},
        {"pp": 2, "micro": 3, "schedule": "gpipe", "stages": (2,), "recompute": "full"},
        {"dp": 2, "exchange": "p3", "slice": 100},
        {"dp": 2, "zero": 3},
        {"dp": 2, "exchange": "ssp", "bound": (2,), "servers": 1},
    ],
    ids=lambda choices: choices.get("exchange", choices.get("schedule", "zero")),
)
@pytest.mark.system("preload", "P")
def test_preload_hides_what_is_shorter_than_a_step(choices: dict) -> None:
    """Under every kind of plan; without it a step is longer by what its first stage loads."""
    step = {word: found(fed(2e9), gpus(8), word, **choices).step_s for word in ("given", "off", "on")}
    plans = plan(blocks=4, **choices)
    samples = 8 // plans.dp // (2 if plans.schedule == "chimera" else 1)  # half of them go the other way
    assert step["on"] == pytest.approx(step["given"])
    assert step["off"] - step["given"] == pytest.approx(samples * 2e9 / HOST, rel=1e-3)


@pytest.mark.system("preload", "P")
def test_a_pipeline_loads_what_it_reads_with_preload() -> None:
    """The first stage its inputs, the last one its targets, those between nothing, and nobody what nobody reads."""
    choices = {"pp": 4, "micro": 2, "schedule": "1f1b", "stages": (1, 2, 3)}
    program = lower(plan(blocks=4, preload="on", **choices), fed(1000.0), 8, steps=2)
    loads = {program.name(op.id): op.bytes for op in program.ops() if op.key.kind is Kind.LOAD}
    assert loads == {"0LOAD": 8000, "0LOAD@1": 8000, "3LOAD": 64, "3LOAD@1": 64}
    worst = found(fed(1000.0), gpus(4), "on", **choices).peaks
    assert [peak.breakdown.get("input", 0) for peak in worst] == [16000, 0, 0, 128]


@pytest.mark.parametrize(("backend", "beside"), [("nccl", 0), ("gloo", 8 * (1000 + 8 + 64))])
@pytest.mark.system("preload", "P")
def test_memory_of_preload(backend: str, beside: int) -> None:
    """One batch, or two at a time; on a CPU what they are copied from is in the same memory."""
    cluster = gpus(backend=backend)
    sizes = {word: found(fed(1000.0), cluster, word).peak.breakdown["input"] for word in ("given", "off", "on")}
    assert sizes == {"given": 8 * 1072, "off": 8 * 1008 + beside, "on": 2 * 8 * 1008 + beside}


def test_no_third_batch_comes_before_the_first_is_gone() -> None:
    """A host that runs ahead of its device would load one batch after the other."""
    program = lower(plan(blocks=4, preload="on"), fed(1000.0), 8, "nccl", steps=5)
    run = np.where(program.kind == Kind.LOAD, 0.01, 1.0)
    assert peaks(play(program, run))[0].breakdown["input"] == 2 * 8 * 1008


@pytest.mark.system("dataparallel", "P")
def test_dataparallel_scatters_inputs() -> None:
    """The whole batch to the first device, (W - 1)/W of it on from there, and all of that before weights go; with
    preloading every worker loads its own part, and nobody waits for it."""
    profile = replace(in_parts(), input_bytes_per_sample=1e8, inputs=())
    devices = replace(machines(4).nodes[0].devices[0], host_rate=HOST)
    cluster = machines(4)
    cluster = replace(cluster, nodes=tuple(replace(node, devices=(devices,)) for node in cluster.nodes))
    choices = {"dp": 4, "exchange": "dataparallel", "bucket": 4 * 10**6, "blocks": 1}
    given, off, on = (predict(plan(preload=word, **choices), profile, cluster, 8) for word in ("given", "off", "on"))
    load, scatter = 8e8 / HOST, 6e8 / RATE + 3 * LATENCY
    assert off.step_s - given.step_s == pytest.approx(load + scatter, rel=0.02)
    assert on.step_s == pytest.approx(given.step_s, rel=0.01)
    assert off.seconds_by_kind["LOAD"] == pytest.approx(load)
    assert off.seconds_by_kind["SEND_INPUT"] >= scatter - 1e-9  # they share the root's way out
    assert on.seconds_by_kind["LOAD"] == pytest.approx(load)  # by four at once, a quarter each
    assert {"SEND_W", "SEND_G"} <= on.seconds_by_kind.keys() & off.seconds_by_kind.keys()


# -- what is chosen -------------------------------------------------------------------------------------------------


def test_recommend_preloads_where_that_is_faster() -> None:
    best = recommend(fed(1e9), gpus(2), 8, top=3).best
    assert best.plan.preload == "on"
    assert best.step_s < predict(replace(best.plan, preload="off"), fed(1e9), gpus(2), 8).step_s


def test_recommend_does_not_preload_what_does_not_fit_twice() -> None:
    room = round(1.5 * 8 * 1e9)
    assert recommend(fed(1e9), gpus(1, memory=room), 8, top=1).best.plan.preload == "off"


def test_nothing_is_brought_where_the_host_is_the_device() -> None:
    assert recommend(fed(1e9), gpus(1, "gloo", host=0.0), 8, top=1).best.plan.preload == "given"


def test_a_request_says_how_its_batch_comes() -> None:
    profile, cluster = fed(1e6), gpus(2)
    assert resolve(parse("dp=2"), profile, cluster, 8).preload == "given"
    assert resolve(parse("preload dp=2"), profile, cluster, 8).preload == "on"
    assert resolve(parse("dataparallel dp=2"), profile, cluster, 8).preload == "off"
    assert text(plan(preload="on")) == "preload=on"


def test_nothing_goes_on_under_overlap_off_and_preload() -> None:
    with pytest.raises(PlanError, match=r"preload=on has the next batch.*Try preload=off"):
        resolve(parse("dp=2 overlap=off preload=on"), fed(1e6), gpus(2), 8)


# -- what is not legal ----------------------------------------------------------------------------------------------


def ahead() -> Program:
    return lower(plan(blocks=4, preload="on"), fed(1000.0), 8, steps=2)


def of_another_step() -> Program:
    """The first step trains on the batch of the second."""
    program = ahead()
    (own,), (other,) = (values_between(program, f"0LOAD{step}", f"0F0{step}") for step in ("", "@1"))
    return reread(program, find(program, "0F0"), lambda row: [other if value == own else value for value in row])


def without_inputs() -> Program:
    program = ahead()
    (own,) = values_between(program, "0LOAD", "0F0")
    return reread(program, find(program, "0F0"), lambda row: [value for value in row if value != own])


def too_late() -> Program:
    return move(ahead(), 0, "0LOAD", before="0B0")


@pytest.mark.parametrize(
    ("wrong", "rule", "why"),
    [
        (of_another_step, "loaded", "0F0 reads what 0LOAD@1 brings for another step"),
        (without_inputs, "loaded", "0F0 reads no inputs"),
        (too_late, "alive", "0F0 reads what 0LOAD makes only later"),
    ],
)
def test_wrong_inputs_are_rejected(wrong, rule: str, why: str) -> None:
    with pytest.raises(ProgramError, match=f"{rule}: {why}"):
        check(wrong())


def test_a_load_must_be_there() -> None:
    program = ahead()
    with pytest.raises(ProgramError):
        check(change(program, "rank", find(program, "0LOAD"), 1))
