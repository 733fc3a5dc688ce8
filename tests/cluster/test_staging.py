"""Shares that go through host memory, and what sums in rounds are made of there: CPU tensors, real processes."""

import resource
import threading
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist

from trainplan.bench.pool import pool
from trainplan.cluster.probe import fit, messages, parts
from trainplan.cluster.probe.staging import Staging
from trainplan.cluster.probe.team import Team

CPU = torch.device("cpu")
TENSORS, SHARE = 3, 5


def shared_out(rank: int, world: int) -> tuple[list[list[float]], list[list[float]]]:
    """What is gathered, and this rank's shares of sums; all asked for before any is waited for."""
    gathers, scatters = Staging(CPU), Staging(CPU)
    gathering, scattering = [], []
    for number in range(TENSORS):
        whole = torch.full((world * SHARE,), -1.0)
        own = whole[rank * SHARE : (rank + 1) * SHARE]  # a part of it, or not
        own = own.fill_(10 * number + rank) if number else torch.full((SHARE,), float(rank))
        gathering.append((gathers.gather(whole, own, None), whole))
        scattering.append(scatters.scatter(torch.arange(float(world * SHARE)) * (rank + 1) + number, None))
    for over, _ in gathering:
        over.result(timeout=20)
    sums = []
    for over, mine, received in scattering:
        over.result(timeout=20)
        sums.append((mine + received.sum(0)).tolist())
    return [whole.tolist() for _, whole in gathering], sums


def test_everybody_gets_every_share_and_its_own_of_the_sums() -> None:
    world = 4
    for rank, (gathered, sums) in enumerate(pool(world).run(shared_out)):
        for number in range(TENSORS):
            assert gathered[number] == [10.0 * number + other for other in range(world) for _ in range(SHARE)]
            places = range(rank * SHARE, (rank + 1) * SHARE)
            assert sums[number] == [place * sum(range(1, world + 1)) + world * number for place in places]


def failing(rank: int, world: int) -> str:
    """A share that does not fit: whoever waits is told, and the next one goes as ever."""
    staging = Staging(CPU)
    over = staging.gather(torch.zeros(world * SHARE), torch.zeros(SHARE + 1), None)
    found = type(over.exception(timeout=20)).__name__
    dist.barrier()
    staging.gather(torch.zeros(world * SHARE), torch.zeros(SHARE), None).result(timeout=20)
    return found


def test_whoever_waits_is_told_what_failed() -> None:
    assert pool(2).run(failing) == ["RuntimeError"] * 2


def measured(rank: int, world: int) -> fit.Samples:
    found: fit.Samples = {}
    team = Team(rank, world, CPU, "gloo", dist.group.WORLD)
    measuring = parts.Parts(team)
    for _ in range(2):
        measuring.measure(world, dist.group.WORLD, lambda name, sample: found.setdefault(name, []).append(sample))
    return found


def test_parts_of_rounds_are_curves_of_the_cluster() -> None:
    curves = fit.collectives(pool(2).run(measured))
    expected = [(op, 2, parts.SIZES) for op in parts.PARTS if op != "stage"]  # there is no GPU to copy from
    assert [(curve.op, curve.ranks, curve.bytes) for curve in curves] == expected
    assert all(seconds > 0 for curve in curves for seconds in curve.seconds)
    assert all(curve.seconds[-1] > curve.seconds[0] for curve in curves)  # 32 MiB and 4 KiB


def faults(rank: int, world: int) -> list[int]:
    """Pages that the system had to find for 8 MiB in a thread, again and again."""
    found = []

    def write() -> None:
        for _ in range(40):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            torch.empty(2**21).fill_(1.0)
            found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    return found


def test_threads_of_a_worker_keep_their_memory() -> None:
    for found in pool(2).run(faults):
        if not any(found):
            pytest.skip("this system does not count page faults")
        assert sum(found[20:]) < 20 * 2**11 / 4  # of as many pages as 8 MiB have


def _a_round(rank: int, world: int) -> dict[str, list]:
    """What one worker of a team finds in a round of messages."""
    found = defaultdict(list)
    team = Team(rank, world, CPU, "gloo", dist.group.WORLD)
    messages.prepare(team, quick=True)(lambda name, sample: found[name].append(sample))
    return dict(found)


def test_groups_of_two_among_four():
    curves = fit.collectives(pool(4).run(_a_round))
    beside = {(curve.op, curve.ranks, curve.groups) for curve in curves if curve.groups > 1}
    assert beside == {(op, 2, 2) for op in ("all_reduce", "all_gather", "reduce_scatter")}
    assert all(curve.bytes == (2**20, 8 * 2**20, 32 * 2**20) for curve in curves if curve.groups > 1)
