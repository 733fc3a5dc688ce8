"""Sums in rounds, as the engine makes them: the definition's, bit by bit, and behind the host's back."""

import functools
import operator
import random
import time

import pytest
import torch
import torch.distributed as dist

from trainplan.bench.pool import pool
from trainplan.engine.exchanges import Sums
from trainplan.engine.telling import Telling
from trainplan.engine.transport import Gloo
from trainplan.program.exchanges import BY_ROUNDS, rounds_of
from trainplan.program.exchanges.rounds import play
from trainplan.program.traffic import summing

CPU = torch.device("cpu")
LATE = 0.4  # seconds


def held(rank: int, elements: int) -> torch.Tensor:
    """Numbers of many sizes, so that it matters in which order they are added."""
    return torch.randn(elements, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).exp()


def sums(rank: int, world: int, sizes: tuple[int, ...]) -> dict[tuple[str, int], list[float]]:
    """Of every exchange and size, what this rank has afterwards; all asked for before any is waited for."""
    members = tuple(range(world))
    group = dist.new_group(list(members))
    making = Sums(Gloo(CPU), group, members, rank)
    asked = {
        (word, size): making.start(held(rank, size), rounds_of(word, members, size, 2), 0)
        for word in BY_ROUNDS
        for size in sizes
    }
    for one in asked.values():
        one.wait()
    making.close()
    dist.barrier(group)
    dist.destroy_process_group(group)
    return {key: one.tensor.tolist() for key, one in asked.items()}


@pytest.mark.system("all-to-all", "R")
def test_all_to_all_and_others_sum_as_they_are_defined_to_the_last_bit() -> None:
    """Also where some members have nothing to send: three elements among four."""
    sizes = (3, 50)
    ranks = pool(4).run(sums, sizes)
    for word in BY_ROUNDS:
        for size in sizes:
            wanted = play(rounds_of(word, (0, 1, 2, 3), size, 2), [held(rank, size).tolist() for rank in range(4)])
            for rank, found in enumerate(ranks):
                assert found[word, size] == wanted[rank] == wanted[0]


def told(rank: int, world: int, bits: list[list[int]]) -> tuple[list[int], int]:
    """What this rank has heard, round by round, and the bytes that it sent for it. One of them is late now and then:
    the others have expected the next round by then."""
    group = dist.new_group(list(range(world)))
    telling = Telling(group, range(world), rank, words=2)
    found = []
    for number, each in enumerate(bits):
        telling.expect()
        if number % world == rank:
            time.sleep(0.01)
        found.append(telling.tell(each[rank]))
    telling.close()
    return found, telling.sent


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_hear_what_is_true_on_all_of_them(world: int) -> None:
    numbers = random.Random(world)
    bits = [[numbers.getrandbits(128) | numbers.getrandbits(128) for _ in range(world)] for _ in range(6)]
    for rank, (found, sent) in enumerate(pool(world).run(told, bits)):
        assert found == [functools.reduce(operator.and_, each) for each in bits]
        assert sent == len(bits) * summing("telling", tuple(range(world)), 16, element=8)[rank]


def waiting(rank: int, world: int) -> tuple[float, dict[str, float]]:
    """Rank 0 has a sum with rank 1, which comes late, and then one with rank 2, and goes on meanwhile. Seconds that
    asking took, and until each was over."""
    pairs = {"late": (0, 1), "early": (0, 2)}
    groups = {name: dist.new_group(list(pair)) for name, pair in pairs.items()}
    own = {name: Sums(Gloo(CPU), groups[name], pair, rank) for name, pair in pairs.items() if rank in pair}
    dist.barrier()
    began = time.perf_counter()
    if rank == 1:
        time.sleep(LATE)
    asked = {
        name: making.start(torch.ones(1000), rounds_of("ring", pairs[name], 1000), 0) for name, making in own.items()
    }
    taken = time.perf_counter() - began
    over = {name: one.over.result() - began for name, one in asked.items()}
    for making in own.values():
        making.close()
    dist.barrier()
    return taken, over


def test_nobody_waits_for_a_sum_but_whoever_needs_it() -> None:
    """Not the host that asks for it, and not the sums of another group."""
    taken, over = pool(3).run(waiting)[0]
    assert taken < LATE / 2
    assert over["early"] < LATE / 2
    assert over["late"] > LATE * 0.9
