"""Asynchronous servers as the clock plays them: the order is that of arrival, and the bound says who may go on."""

import numpy as np
import pytest

from tests.synthetic import chain
from trainplan.plan.plan import plan
from trainplan.predict.clock import Played, play
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.ops import Kind

GOALS, RATE = (1.0, 3.0), 0.25


def played(exchange: str, bound: tuple[int, ...], seconds: tuple[float, float], steps: int) -> Played:
    """Two workers and a server; nothing takes time but the forward passes of the workers."""
    choices = plan(dp=2, servers=1, exchange=exchange, bound=bound, blocks=1)
    program = check(lower(choices, chain(1), 8, steps=steps))
    run = np.zeros(len(program))
    for worker, own in enumerate(seconds):
        run[(program.kind == Kind.F) & (program.pipeline == worker)] = own
    return play(program, run)


def sequence(found: Played) -> str:
    """Moment, worker and weight of every push, for workers that minimise ½(w − goal)²; what a worker pulls is what the
    server has when it sends."""
    program, weight, pulled, words = found.program, 0.0, [0.0, 0.0], []
    for op in found.order.tolist():
        worker = int(program.pipeline[op])
        if program.kind[op] == Kind.STEP:
            weight -= RATE * (pulled[worker] - GOALS[worker])
            words.append(f"{found.end[op]:g}{'AB'[worker]}{weight:.10g}")
        elif program.kind[op] == Kind.SEND_W:
            pulled[worker] = weight
    return " ".join(words)


@pytest.mark.parametrize(
    ("exchange", "bound", "seconds", "want"),
    [
        pytest.param(
            "ssp", (0,), (1, 3), "1A0.25 3B1 4A1 6B1.5 7A1.375 9B1.75", marks=pytest.mark.system("ssp", "P"), id="ssp-0"
        ),
        pytest.param(
            "ssp", (1,), (1, 3),
            "1A0.25 2A0.4375 3B1.1875 4A1.140625 6B1.59375 7A1.4453125 9B1.796875 10A1.59765625",
            marks=pytest.mark.system("ssp", "P"), id="ssp-1",
        ),
        pytest.param(
            "ssp", (2,), (1, 3),
            "1A0.25 2A0.4375 3A0.578125 3B1.328125 4A1.24609375 6B1.6640625 7A1.498046875 9B1.83203125",
            marks=pytest.mark.system("ssp", "P"), id="ssp-2",
        ),
        pytest.param(
            "ps-asp", (), (1, 3),
            "1A0.25 2A0.4375 3A0.578125 3B1.328125 4A1.43359375 5A1.325195312 6A1.243896484 6B1.661865234",
            marks=pytest.mark.system("ps-asp", "P"), id="ps-asp",
        ),
        pytest.param(
            "dssp", (1, 4), (1, 2.5),
            "1A0.25 2A0.4375 2.5B1.1875 3.5A1.140625 5B1.59375 6A1.4453125 7A1.333984375 7.5B1.685546875 "
            "10B2.014160156 11A1.760620117 12A1.570465088 12.5B1.816925049",
            marks=pytest.mark.system("dssp", "P"), id="dssp-1-4",
        ),
    ],
)  # fmt: skip
def test_timed_sequences(exchange: str, bound: tuple[int, ...], seconds: tuple[float, float], want: str) -> None:
    """The worked sequences once more, as a plan that is lowered, checked and played."""
    found = sequence(played(exchange, bound, seconds, steps=10))
    assert found.startswith(want), found


def test_a_stalled_worker_blocks_the_others_exactly_at_the_bound() -> None:
    """ssp: while the second worker is still at its first step, the first one starts as many more as the bound says."""
    for bound in range(4):
        found = played("ssp", (bound,), (1, 1000), steps=12)
        program = found.program
        first = (program.kind == Kind.F) & (program.pipeline == 0) & (found.start < 1000)
        assert int(first.sum()) == bound + 1
