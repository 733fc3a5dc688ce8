"""Asynchronous servers on real processes: what they record replays to the same weights, in one process and several."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.engine import asynchronous_job, jobs
from tests.engine.systems import BLOCKS
from trainplan.bench.pool import pool
from trainplan.engine.asynchronous import Applied
from trainplan.engine.replay import Replayed, replay
from trainplan.engine.serving import Shard
from trainplan.engine.trainer import StepResult
from trainplan.engine.worker import own_loss
from trainplan.errors import PlanError
from trainplan.plan.keys import part_of
from trainplan.plan.plan import Plan, plan
from trainplan.profile.capture.captured import capture
from trainplan.profile.structure import structure
from trainplan.program.lower import lower
from trainplan.program.lower.backend import backend
from trainplan.program.lower.layout import Layout
from trainplan.program.ops import Kind
from trainplan.program.staleness import State
from trainplan.workload.workload import Batch, Loss, Workload

CLOSE = {"rtol": 1e-9, "atol": 1e-12}
SIZES = (8, 7, 8, 8)
CASES = [
    ("ps-asp", "residual", "sgd", {"dp": 3}, {}),
    ("ps-asp", "tied", "grouped_adamw", {"dp": 2, "servers": 2, "split": 8, "micro": 2}, {"schedule": "cosine"}),
    ("ssp", "tied", "adamw", {"dp": 2, "servers": 2, "bound": (1,)}, {}),
    ("dssp", "residual", "sgd", {"dp": 3, "bound": (0, 2)}, {}),
]  # fmt: skip


def plan_of(exchange: str, model: str, choices: dict) -> Plan:
    return plan(blocks=BLOCKS[model], bucket=300, exchange=exchange, **{"servers": 1, **choices})


def again(choices: Plan, model: str, optimizer: str, fields: dict, records: list[list[Applied]]) -> Replayed:
    job, built, captured = jobs.built(model, optimizer, **fields)
    batches = [job.inputs(samples, seed=number) for number, samples in enumerate(SIZES)]
    shape = jobs.shape_of(model, **fields)
    values = jobs.values_of(copy.deepcopy(built))
    return replay(choices, job, captured, shape, values, batches.__getitem__, 7, records)


@pytest.mark.parametrize(
    ("exchange", "model", "optimizer", "choices", "fields"),
    [pytest.param(*case, marks=pytest.mark.system(case[0], "R"), id="-".join(case[:3])) for case in CASES],
)
def test_replay(exchange: str, model: str, optimizer: str, choices: dict, fields: dict) -> None:
    repeated(exchange, model, optimizer, choices, fields)


def repeated(exchange: str, model: str, optimizer: str, choices: dict, fields: dict, *device: str) -> None:
    """Three workers at different speeds. What the servers recorded, one process does again, and so do as many
    processes with the speeds the other way round: weights, optimizer states, losses; and the events are the program's.
    `device`: a backend and a device, or nothing for this machine's cores."""
    planned = plan_of(exchange, model, choices)
    pauses = [0.0, 0.02, 0.05][: planned.dp]
    told = (model, optimizer, planned, list(SIZES), fields)
    first = pool(planned.world).run(asynchronous_job.train, *told, pauses, None, *device)
    records = [found.record for found in first[planned.workers :]]
    for record in records:
        within(planned, record)
    want = again(planned, model, optimizer, fields, records)
    hold(planned, first, want)
    timeline(planned, model, optimizer, fields, first, *device[:1])
    second = pool(planned.world).run(asynchronous_job.train, *told, pauses[::-1], records, *device)
    hold(planned, second, want)
    assert [order(found.record) for found in second[planned.workers :]] == [order(record) for record in records]


@pytest.mark.parametrize(
    ("pushes", "staleness", "weights"),
    [
        ("AABAB", (0, 0, 2, 1, 1), (0.25, 0.4375, 1.1875, 1.328125, 1.78125)),
        ("ABABAB", (0, 1, 1, 1, 1, 1), (0.25, 1.0, 1.1875, 1.6875, 1.640625, 1.96875)),
    ],
)
def test_worked_orders(pushes: str, staleness: tuple[int, ...], weights: tuple[float, ...]) -> None:
    """One weight, from nought; A wants it to be 1, B 3, each by a quarter of the way that was left when it pulled,
    right after its own push. (A push has a worker's half of the batch, so the rate is a half.)"""
    net, goals = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64), (1.0, 3.0)
    torch.nn.init.zeros_(net.weight)
    targets = torch.tensor(goals, dtype=torch.float64)[:, None]

    def batch(samples: int, seed: int) -> Batch:
        return Batch(samples, (torch.ones(samples, 1, dtype=torch.float64),), {}, targets[:samples])

    loss = Loss(lambda output, wanted: 0.5 * torch.nn.functional.mse_loss(output, wanted), lambda own: own.samples)
    job = Workload("one", lambda: copy.deepcopy(net), batch, loss, lambda own: torch.optim.SGD(own, 0.5), 2, 2)
    captured = capture(net, job.inputs(2, 0), job.loss, device="cpu")
    chosen = plan(blocks=len(captured.blocks), dp=2, exchange="ps-asp", servers=1, bucket=8)
    shape = structure(captured, job, job.inputs(2, 0))
    record, versions = list[Applied](), [0, 0]
    for update, letter in enumerate(pushes):
        worker = "AB".index(letter)
        number = sum(entry.worker == worker for entry in record)
        record.append(Applied(worker, number, float(update), update - versions[worker], (worker,)))
        versions[worker] = update + 1
        values = {name: tensor.detach().clone() for name, tensor in jobs.values_of(net).items()}
        found = replay(chosen, job, captured, shape, values, lambda step: job.inputs(2, step), 7, [record])
        assert [float(weight) for weight in found.weights[0].values()] == [weights[update]]
    assert tuple(entry.staleness for entry in record) == staleness


def order(record: list[Applied]) -> list[tuple[int, tuple[int, ...]]]:
    return [(entry.worker, entry.released) for entry in record if entry.worker >= 0]


def within(planned: Plan, record: list[Applied]) -> None:
    """Every push was applied once; those released are those that the rule releases; nobody was further ahead."""
    assert sorted((e.worker, e.number) for e in record if e.worker >= 0) == [
        (worker, number) for worker in range(planned.dp) for number in range(len(SIZES))
    ]
    asynchronous_job.by_the_rule(planned, record)


def hold(planned: Plan, ranks: list, want: Replayed) -> None:
    for server, found in enumerate(ranks[planned.workers :]):
        assert found.weights.keys() == want.weights[server].keys()
        for name, weight in found.weights.items():
            torch.testing.assert_close(weight, want.weights[server][name], **CLOSE, msg=lambda m, n=name: f"{n}: {m}")
        for name, state in found.state.items():
            for key, value in state.items():
                torch.testing.assert_close(value, want.state[server][name][key], **CLOSE)
    for worker, found in enumerate(ranks[: planned.workers]):
        torch.testing.assert_close(found.losses, [want.losses[worker, k] for k in range(len(SIZES))], **CLOSE)
        for name, weight in found.weights.items():
            torch.testing.assert_close(weight, part_of(name, want.pulled[worker]), **CLOSE)


def timeline(
    planned: Plan, model: str, optimizer: str, fields: dict, ranks: list, transport: str = "gloo"
) -> None:  # fmt: skip
    """Workers do what the program says in its order; servers do all of it, each push before its weights go out."""
    program = lower(planned, jobs.shape_of(model, **fields), SIZES[-1], transport, steps=2)
    for rank, found in enumerate(ranks):
        ops = program.lists.row(rank)
        wanted = [(program.name(op), int(program.bytes[op])) for op in ops]
        events = [(event.name, event.bytes) for event in sorted(found.events, key=lambda e: (e.start, e.end))]
        if rank < planned.workers:
            compute = {Kind.F.name, Kind.B.name, Kind.RECV_W.name}
            names = [event.name for event in sorted(found.events, key=lambda e: e.start) if event.kind in compute]
            assert names == [program.name(op) for op in ops if Kind(program.kind[op]).name in compute]
        assert sorted(events) == sorted(wanted)


def test_another_moment_or_another_release_would_be_noticed() -> None:
    """Of dssp, whose bound moves with the moments of pushes: worker 0 pushes every second, worker 1 every 4 seconds."""
    planned = plan(dp=2, servers=1, exchange="dssp", bound=(0, 3), blocks=4)
    moments = sorted([*((float(k), 0) for k in range(1, 4)), (4.0, 1), (8.0, 1), (8.5, 0), (9.5, 0), (10.5, 0)])
    state, record, numbers = State(2), list[Applied](), [0, 0]
    for moment, worker in moments:
        released = state.push(worker, moment, (0, 3))
        record.append(Applied(worker, numbers[worker], moment, 0, tuple(released)))
        numbers[worker] += 1
    asynchronous_job.by_the_rule(planned, record)
    changed = [replace(e, moment=e.moment + 3.6) if e.moment == 8.5 else e for e in record]
    more = [replace(e, released=(0, 1)) if e.moment == 9.5 else e for e in record]
    for other in (changed, more):
        with pytest.raises(AssertionError):
            asynchronous_job.by_the_rule(planned, other)


def test_progress_tells_the_loss_of_a_worker_and_not_its_share_of_a_batch() -> None:
    """Of seven samples worker 1 has three: of a loss of 0.5 each they add 3/7 to that of the batch."""
    planned = plan(dp=2, servers=1, exchange="ssp", bound=(1,), blocks=4)
    worker = SimpleNamespace(plan=planned, replica=1, is_asynchronous=True)
    result = StepResult(0, 0.5 * 3 / 7, 1.0, 7)
    assert own_loss(result, worker) == pytest.approx(0.5)
    assert own_loss(result, SimpleNamespace(is_asynchronous=False)) == result.loss
    assert own_loss(replace(result, loss=None), worker) is None


def test_pieces_of_a_parameter_need_an_optimizer_that_takes_them() -> None:
    """Adafactor looks at rows and columns: whole parameters are fine, pieces of them are refused."""
    job, model, captured = jobs.built("tied", "sgd")
    job = replace(job, optimizer=lambda named: torch.optim.Adafactor([p for _, p in named]))
    shape = structure(captured, job, job.inputs(2, 0))
    values, cpu = jobs.values_of(model), torch.device("cpu")

    def shard(split: int) -> Shard:
        planned = plan(dp=2, servers=2, exchange="ps-bsp", split=split, blocks=BLOCKS["tied"])
        service = Layout(planned, shape, 8, backend("gloo"), (0, 1)).service
        assert service is not None
        return Shard(service, 0, lambda names: values, job, captured.stand_ins(), cpu)

    assert shard(split=10**6).parameters
    with pytest.raises(PlanError, match=r"is split over 2 servers, and Adafactor may look.*split=\d+, or one of SGD"):
        shard(split=4)
