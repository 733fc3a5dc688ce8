"""Operators that need values where there are none are refused by name, and end in no traceback."""

import pytest
import torch
from torch import Tensor, nn

import trainplan
from trainplan.cluster.catalogue import device
from trainplan.errors import ModelError
from trainplan.profile.estimate import estimate


@torch.library.custom_op("trainplan_tests::by_group", mutates_args=())
def by_group(given: Tensor, ends: Tensor) -> Tensor:
    return torch.cat([part * 2 for part in given.tensor_split(ends.tolist())])


@by_group.register_fake
def _(given: Tensor, ends: Tensor) -> Tensor:
    return torch.empty_like(given)


def _back(ctx, gradient: Tensor):
    return torch.cat([part * 2 for part in gradient.tensor_split(ctx.ends.tolist())]), None


def _keep(ctx, inputs, output) -> None:
    ctx.ends = inputs[1]


by_group.register_autograd(_back, setup_context=_keep)


class Groups(nn.Module):
    """Rows go where their values say, as tokens do to experts."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.before(rows)
        return self.after(by_group(rows, rows.argmax(1).sort().values))


def test_an_operator_that_goes_back_by_values_is_refused_by_name():
    given = (torch.zeros(4, 8), torch.zeros(4, dtype=torch.long))
    workload = trainplan.load(Groups(), inputs=given, loss="cross_entropy", batch=4)
    with pytest.raises(ModelError, match=r"trainplan_tests\.by_group in the model's own forward") as refused:
        estimate(workload, device("A100-80"), samples=[2])
    assert "test_untraceable.py, line" in str(refused.value)
    assert "going back it needs values" in str(refused.value)
