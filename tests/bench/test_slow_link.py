"""The link between two network namespaces has the rate and the delay that were asked for."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.engine.test_bytes import stepped
from trainplan.bench.pool import placed, pool
from trainplan.bench.slow_link import SlowLink, missing, slow_link
from trainplan.cluster.probe import shares
from trainplan.errors import RunError
from trainplan.plan.plan import Plan, plan

RATE = 25e6  # bytes a second
MIB = 2**20
WHY_NOT = missing(0.01)

needs_root = pytest.mark.skipif(bool(WHY_NOT), reason=f"no slow link here: {WHY_NOT}")


def there_and_back(rank: int, world: int, size: int, repeats: int = 3) -> list[float]:
    """Seconds of two messages, one each way."""
    tensor, found = torch.zeros(size, dtype=torch.uint8), []
    dist.barrier()
    for _ in range(repeats):
        started = time.perf_counter()
        for sender in range(world):
            if sender == rank:
                dist.send(tensor, 1 - rank)
            else:
                dist.recv(tensor, 1 - rank)
        found.append(time.perf_counter() - started)
    return found


def shared_out(rank: int, world: int, size: int) -> tuple[list[float], list[float]]:
    """Seconds of scattering `size` bytes, and of gathering them again, while now one rank is late, now the other: it
    finds the other one ready, and has all the link for what it sends."""
    flat, scattered, gathered = torch.ones(size // 4), list[float](), list[float]()

    def meet(late: int) -> float:
        dist.barrier()
        time.sleep(0.01 * (rank == late % world))
        return time.perf_counter()

    def since(started: float, works: list[dist.Work]) -> float:
        for work in works:
            work.wait()
        return time.perf_counter() - started

    for late in range(2 * world):
        started = meet(late)
        works, own, received = shares.scatter(flat, None)
        scattered.append(since(started, works))
        own = own + received[0]
        gathered.append(since(meet(late), shares.gather(flat, own, None)))
        assert (flat == 2).all()
        flat.fill_(1)
    return scattered, gathered


@pytest.fixture(scope="module")
def link(request: pytest.FixtureRequest) -> Iterator[SlowLink]:
    """A link that is so late, with processes on both sides of it."""
    with slow_link(RATE, request.param) as found, placed(found.place):
        yield found


@needs_root
@pytest.mark.parametrize("link", [pytest.param(0.0, marks=pytest.mark.slow), 0.02], indirect=True)
def test_messages_take_as_long_as_the_link_says(link: SlowLink) -> None:
    delay = link.delay_s
    short = min(pool(2).run(there_and_back, 1)[0])
    before = [link.bytes_sent(side) for side in range(2)]
    long = min(pool(2).run(there_and_back, 2 * MIB)[0])
    sent = [link.bytes_sent(side) - b for side, b in enumerate(before)]
    shared = pool(2).run(shared_out, 2 * MIB)
    assert 2 * delay < short < 2 * delay + 0.02
    ideal = 2 * (delay + 2 * MIB / RATE)
    assert 0.9 * ideal < long < 1.5 * ideal  # (a token bucket lets the first 128 KiB pass)
    assert sent == pytest.approx([3 * 2 * MIB] * 2, rel=0.05)  # and the headers
    for of_ranks in zip(*shared, strict=True) if not delay else ():
        # Shares pass in both directions at once; in one after the other they take twice as long.
        assert min(map(max, zip(*of_ranks, strict=True))) < 1.5 * MIB / RATE


def congestion_control(rank: int, world: int) -> str:
    """Of a connection that this process would make."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


@needs_root
@pytest.mark.parametrize("link", [0.02], indirect=True)
def test_nobody_probes_how_long_an_empty_link_takes(link: SlowLink) -> None:
    """BBR does, and sends next to nothing meanwhile."""
    assert pool(2).run(congestion_control) == ["reno"] * 2


@needs_root
def test_a_congestion_control_that_is_not_there() -> None:
    """It is refused with those that are, and nothing is left behind."""
    before = _namespaces()
    with pytest.raises(RunError, match=r"'none-such'.*reno"), slow_link(RATE, control="none-such"):
        pass
    assert _namespaces() == before


def _namespaces() -> set[str]:
    """Of this process: others may have theirs."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {name for name in listed.split() if name.startswith(f"trainplan-{os.getpid()}-")}


STEPS = [
    plan(dp=1, exchange="ps-bsp", servers=1, bucket=MIB, blocks=3),
    plan(dp=1, exchange="ps-asp", servers=1, bucket=MIB, blocks=3),
    plan(dp=2, exchange="dataparallel", bucket=MIB, preload="off", blocks=3),
    plan(dp=2, exchange="p3", slice=2 * MIB, blocks=3),
    plan(dp=2, zero=3, bucket=MIB, blocks=3),
]


@needs_root
@pytest.mark.parametrize("link", [0.02], indirect=True)
@pytest.mark.parametrize("one", STEPS, ids=lambda one: one.exchange if not one.zero else f"zero={one.zero}")
def test_each_side_sends_what_the_program_says(link: SlowLink, one: Plan) -> None:
    """By the account of its own device, which nobody else uses: a step of servers, of nn.DataParallel … A packet that
    is sent again, on a busy machine, is as much as we allow: the least of some tries counts."""
    least = [float("inf")] * 2
    for _ in range(3):
        ranks = pool(2).run(stepped, one, link.spaces[0].device)
        planned = ranks[0][0]
        least = [min(known, sent) for known, (_, sent, _) in zip(least, ranks, strict=True)]
        if least == pytest.approx(planned, rel=0.02):
            break
    assert min(planned) > MIB
    assert least == pytest.approx(planned, rel=0.02)


@needs_root
def test_nothing_is_left_behind() -> None:
    with pytest.raises(ZeroDivisionError), slow_link(RATE, 0.01) as link:
        raise ZeroDivisionError
    assert not _namespaces() & {space.name for space in link.spaces}


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(RunError, match="needs root"), slow_link(RATE):
        pass
