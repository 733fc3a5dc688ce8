"""Every system learns in float32, as the oracle does.

Equality is a matter of float64 (`test_equality.py`); here it is enough that rounding stays rounding, and that the loss
of a batch that comes again and again falls.
"""

from dataclasses import replace

import pytest
import torch

from tests.engine.runs import run
from tests.engine.systems import ONE_EACH, Case
from tests.engine.test_equality import alone

STEPS = 8
LEARNT = {"tied": 0.7, "gpt": 0.95}  # the loss afterwards, as a share; the second begins with tiny weights, and drops


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
def test_learns_in_float32(case: Case) -> None:
    case = replace(case, sizes=(8,) * STEPS, fields={"single": True})
    want = alone(case)
    assert want.losses[-1] < LEARNT[case.model] * want.losses[0]
    for trained, _, (_, stages) in run(case):
        if case.plan.depth - 1 in stages:
            torch.testing.assert_close(trained.losses, want.losses, rtol=1e-5, atol=0)
        for name, weight in trained.weights.items():
            assert weight.dtype == torch.float32
            torch.testing.assert_close(weight, want.weights[name], rtol=1e-5, atol=1e-5)
