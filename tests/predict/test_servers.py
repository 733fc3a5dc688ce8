"""Parameter servers and DataParallel as they are predicted: closed forms, incast, memory; and what is refused."""

from dataclasses import replace

import pytest

from tests.synthetic import chain
from trainplan.cluster.cluster import Cluster, Curve, Device, Link, Node
from trainplan.errors import PlanError
from trainplan.plan.plan import plan
from trainplan.plan.rules import check, check_model
from trainplan.plan.text import parse, text
from trainplan.predict.predict import predict
from trainplan.profile.profile import Profile
from trainplan.program.check import check as check_program
from trainplan.program.lower import lower
from trainplan.program.lower.backend import backend
from trainplan.program.lower.layout import Layout
from trainplan.program.ops import Value
from trainplan.program.traffic import sent_by_rank
from trainplan.solve.resolve import resolve

STAGES = {"pp": 2, "stages": (2,), "schedule": "1f1b", "micro": 2}
PIPELINES = {**STAGES, "dp": 2}
LATENCY, RATE, ADD = 50e-6, 1e9, 0.1e-9  # seconds, bytes a second, seconds a byte
BYTES = 100_000_000


def one_block(state: float = 0.0) -> Profile:
    """100 MB of parameters, and no compute but that of adding gradients and of stepping."""
    profile = chain(1, forward=0.0, backward=0.0, weights=BYTES, saved=0, state_bytes_per_parameter=state)
    blocks = [replace(block, accumulate_s=BYTES * ADD, update_s=BYTES * ADD) for block in profile.blocks]
    return replace(profile, blocks=tuple(blocks))


def in_parts() -> Profile:
    """The same as 25 parameters of 4 MB, so that there can be several buckets."""
    profile = one_block()
    parts = [replace(profile.parameters[0], name=f"w{i}", count=10**6, bytes=4 * 10**6) for i in range(25)]
    return replace(profile, parameters=tuple(parts))


def machines(count: int, shared: bool = True, each: int = 1) -> Cluster:
    device = Device("cpu", 10**10, {}, 1e9)
    network = Link("net", LATENCY, RATE, shared=shared)
    return Cluster(
        "machines", (Node("node", (device,) * each, Link("inside", LATENCY, RATE), network),) * count, "gloo"
    )


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("servers", "want"), [(1, 0.8401), (2, 0.4201), (4, 0.2101)])
@pytest.mark.system("ps-bsp", "P")
def test_ps_bsp_in_step(servers: int, want: float, shared: bool) -> None:
    """2α + 2 · max(B β, W/S · B β) + W/S · B γ: all workers send to every server at once, and share its way in."""
    choices = plan(dp=4, servers=servers, exchange="ps-bsp", bucket=BYTES, blocks=1)
    found = predict(choices, one_block(), machines(4 + servers, shared), 8)
    filling = BYTES * ADD  # of its bucket, by every worker: the form leaves that out
    assert found.step_s - filling == pytest.approx(want, rel=1e-3)


@pytest.mark.system("ps-bsp", "P")
def test_ps_bsp_on_one_node_shares_ports() -> None:
    """The same where nobody crosses a network: a device has one way in."""
    found = [
        predict(plan(dp=4, servers=s, exchange="ps-bsp", bucket=BYTES, blocks=1), one_block(), machines(1, each=8), 8)
        for s in (1, 2)
    ]
    assert found[0].step_s == pytest.approx(0.8401 + 0.01, rel=1e-3)
    assert found[1].step_s == pytest.approx(0.4201 + 0.01, rel=1e-3)


def test_slices_of_a_gpu_take_what_a_probe_found_of_a_server() -> None:
    """Eight messages at one rank take half as long as one after the other: of the four that push at once each takes
    twice as long as alone, not four times. And the copies at their ends, half a message, pass no port."""
    message, hub = Curve("p2p", 2, (0, BYTES), (0.0, 0.1)), Curve("hub", 5, (0, BYTES), (0.0, 0.4))
    slices = replace(machines(1, each=5), backend="gloo-staged", collectives=(message, hub))
    choices, steps = plan(dp=4, servers=1, exchange="ps-bsp", bucket=BYTES, blocks=1), []
    for host_rate in (1e15, 4e9):  # the copies of a message take nothing, or half of it
        device = replace(slices.device(0), host_rate=host_rate)
        there = replace(slices, nodes=(replace(slices.nodes[0], devices=(device,) * 5),))
        if host_rate < 1e15:
            there = replace(there, collectives=(message, replace(hub, seconds=(0.0, 0.2))))
        steps.append(predict(choices, one_block(), there, 8).step_s)
    adding = 0.04 + 0.01
    assert steps[0] == pytest.approx(2 * 2 * 0.1 + adding, rel=0.01)
    assert steps[1] == pytest.approx(2 * (0.05 + 2 * 0.05) + adding, rel=0.01)


@pytest.mark.system("ps-bsp", "P")
def test_ps_bsp_pushes_and_pulls_at_once() -> None:
    """With many buckets the server receives one while it sends another: the longer way counts, not their sum."""
    whole, small = (
        predict(plan(dp=4, servers=1, exchange="ps-bsp", bucket=size, blocks=1), in_parts(), machines(5), 8).step_s
        for size in (BYTES, 4 * 10**6)
    )
    assert small < 0.65 * whole


@pytest.mark.system("dataparallel", "P")
def test_dataparallel_goes_through_the_root() -> None:
    """(W − 1) P out, (W − 1) P in, one after the other, and the root's own adding and stepping."""
    found = predict(plan(dp=4, exchange="dataparallel", bucket=4 * 10**6, blocks=1), in_parts(), machines(4), 8)
    latencies, adding = (3 * 25 + 25) * LATENCY, (1 + 3 + 1 + 0.7) * BYTES * ADD
    assert found.step_s == pytest.approx(2 * 3 * BYTES / RATE + latencies + adding, rel=0.02)


@pytest.mark.system("ps-bsp", "P")
def test_memory_of_ps_bsp() -> None:
    """Workers: weights and gradients, no optimizer. Servers: a share of the weights and of the states."""
    found = predict(
        plan(dp=2, servers=2, exchange="ps-bsp", bucket=BYTES, blocks=1), one_block(state=8.0), machines(4), 8
    )
    worker, server = found.peaks[0].breakdown, found.peaks[2].breakdown
    assert worker["weights"] == worker["gradients"] == BYTES
    assert "optimizer" not in worker
    assert server["weights"] == BYTES // 2
    assert server["optimizer"] == 2 * BYTES // 2  # 8 bytes for each of 4
    # Of both workers, for a half: one that has arrived, and one on its way.
    assert server["gradients"] + server["communication"] == 2 * BYTES // 2


@pytest.mark.system("dataparallel", "P")
def test_memory_of_dataparallel() -> None:
    found = predict(plan(dp=3, exchange="dataparallel", bucket=BYTES, blocks=1), one_block(state=8.0), machines(3), 8)
    root, other = (peak.breakdown for peak in found.peaks[:2])
    assert root["optimizer"] == 2 * BYTES
    assert "optimizer" not in other
    assert root["gradients"] + root["communication"] == 3 * BYTES


@pytest.mark.system("ps-bsp", "P")
def test_ps_bsp_under_pipelines() -> None:
    """Every stage pushes and pulls its own, so servers get and give as many bytes as from whole models; workers hold a
    stage each, and no optimizer; and nothing that was sent between stages stays for ever."""
    profile = chain(2, 0.0, 0.0, weights=BYTES // 2, saved=0, state_bytes_per_parameter=8.0)
    choices = plan(
        dp=2, pp=2, micro=2, schedule="1f1b", stages=(1,), servers=1, exchange="ps-bsp", bucket=BYTES, blocks=2
    )
    found = predict(choices, profile, machines(5), 8)
    assert found.step_s == pytest.approx(2 * 2 * BYTES / RATE, rel=0.01)
    worker, server = found.peaks[0].breakdown, found.peaks[4].breakdown
    assert worker["weights"] == worker["gradients"] == BYTES // 2
    assert "optimizer" not in worker
    assert (server["weights"], server["optimizer"]) == (BYTES, 2 * BYTES)
    program = lower(choices, profile, 8)
    whole = lower(plan(dp=2, servers=1, exchange="ps-bsp", bucket=BYTES, blocks=2), profile, 8)
    assert sent_by_rank(program)[4] == sent_by_rank(whole)[2] == 2 * BYTES
    assert program.value_end[program.value_kind == Value.BOUNDARY].min() >= 0


@pytest.mark.parametrize("name", ["gloo", "gloo-staged", "nccl"])
def test_programs_with_servers_are_legal_on_every_backend(name: str) -> None:
    profile = chain(4, tied=((0, 3),), skips=((0, 3),))
    check_program(lower(plan(**PIPELINES, exchange="ps-bsp", servers=2, split=8, blocks=4), profile, 8, name, steps=2))
    check_program(lower(plan(dp=3, exchange="dataparallel", blocks=4), profile, 8, name, steps=2))
    check_program(lower(plan(dp=3, exchange="ssp", bound=(1,), servers=2, blocks=4), profile, 8, name, steps=2))


def test_what_two_stages_hold_servers_sum_over_both() -> None:
    profile = chain(4, weights=1000, tied=((0, 3),))
    choices = plan(dp=2, pp=2, stages=(2,), schedule="gpipe", servers=1, exchange="ps-bsp", blocks=4)
    service = Layout(choices, profile, 8, backend("gloo"), (0, 1)).service
    assert [(load.stages, load.bytes) for load in service.loads] == [((1,), 2000), ((0,), 2000), ((0, 1), 1000)]
    assert service.pushes(service.loads[-1]) == [(0, 0), (1, 0), (0, 1), (1, 1)]


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "why", "instead"),
    [
        ({"exchange": "ps-bsp", "servers": 0}, "has servers, and servers=0", "servers=1"),
        ({"exchange": "ps-bsp", "servers": 1, "bound": (1,)}, "has no bound, not 1", "exchange=ssp"),
        ({"exchange": "all-reduce", "servers": 1}, "exchange=all-reduce has none", "exchange=ps-bsp"),
        ({"exchange": "ssp", "servers": 1}, "has one bound, not none", "bound=3"),
        ({"exchange": "ssp", "servers": 1, "bound": (-1,)}, "a bound of -1", "bound=0"),
        ({"exchange": "dssp", "servers": 1, "bound": (4, 1)}, "upper bound 1 is below the lower one, 4", "bound=1,4"),
        ({"exchange": "dssp", "servers": 1, "bound": (4,)}, "a lower and an upper bound, not 4", "bound=3,15"),
        ({"exchange": "dataparallel", "dp": 1}, "several workers", "dp=2"),
        ({"exchange": "ps-asp", "servers": 1, **STAGES}, "comes in parts from 2 ranks", "exchange=ps-bsp"),
        ({"exchange": "dataparallel", **STAGES}, "with pp=2 one stage of the model", "exchange=ps-bsp"),
        (
            {"exchange": "ps-bsp", "servers": 1, **STAGES, "schedule": "chimera"},
            "under chimera a replica has several copies",
            "schedule=1f1b",
        ),
    ],
)
def test_refused_plans(choices: dict, why: str, instead: str) -> None:
    with pytest.raises(PlanError) as error:
        check(plan(**{"dp": 2, "blocks": 4, **choices}), 8)
    assert why in error.value.why
    assert instead in (error.value.instead or "")


def test_refused_models() -> None:
    with pytest.raises(PlanError, match=r"5 servers for 4 parameters: 1 would have nothing.*servers=4"):
        check_model(plan(dp=2, exchange="ps-bsp", servers=5, blocks=4), chain(4))
    with pytest.raises(PlanError, match=r"no server sees all of them.*exchange=dataparallel"):
        check_model(plan(dp=2, exchange="ps-bsp", servers=1, blocks=4), chain(4, clip_norm=1.0))
    with pytest.raises(PlanError, match=r"counts the steps that a worker may be ahead.*bound=0"):
        resolve(parse("ssp dp=2 bound=-2"), chain(4), machines(4), 8)
    with pytest.raises(PlanError, match=r"4 workers and 1 server are 5 devices, and there are 4.*dp=1 servers=1"):
        resolve(parse("ps-bsp dp=2 pp=2 schedule=1f1b micro=2"), chain(4), machines(4), 8)
    with pytest.raises(PlanError, match=r"3 workers and 2 servers are 5 devices, and there are 4.*Try servers=1"):
        resolve(parse("ps-bsp dp=3 servers=2"), chain(4), machines(4), 8)


def test_what_is_left_open() -> None:
    """One server and the other devices as workers; bounds as usual."""
    found = resolve(parse("ps-bsp"), chain(4), machines(4), 8)
    assert (found.dp, found.servers, found.world) == (3, 1, 4)
    assert text(replace(found, bucket=2**20)) == "dp=3 exchange=ps-bsp bucket=1MiB servers=1"
    assert resolve(parse("exchange=dssp dp=2"), chain(4), machines(4), 8).bound == (3, 15)
    assert resolve(parse("dataparallel dp=2"), chain(4), machines(4), 8).servers == 0
    found = resolve(parse("ps-bsp pp=2 schedule=1f1b micro=2"), chain(4), machines(6), 8)
    assert (found.dp, found.pp, found.servers) == (2, 2, 1)
