"""Worker processes that are kept: what they give back."""

import pytest
import torch

from trainplan.bench.pool import pool

ODD = (torch.float64, torch.bfloat16, torch.int32, torch.bool, torch.complex64)


def made(rank: int, world: int) -> dict[str, object]:
    whole = torch.arange(12.0).reshape(3, 4)
    kinds = {str(dtype): torch.tensor([[rank, 1, 0], [2, rank, 1]]).to(dtype) for dtype in ODD}
    return {
        **kinds, "number": torch.tensor(7.5 + rank), "none": torch.empty(2, 0), "turned": whole.T, "part": whole[:, 1],
        "conjugated": torch.tensor([1 + 2j]).conj(), "weight": torch.nn.Parameter(torch.ones(2)), "rest": [rank, world],
    }  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
def test_tensors_come_back_as_they_were_and_hold_on_to_nothing(rank: int) -> None:
    found, want = pool(2).run(made)[rank], made(rank, 2)
    assert found.keys() == want.keys()
    assert found.pop("rest") == want.pop("rest")
    for name, tensor in want.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
        assert type(found[name]) is type(tensor)
        assert found[name].requires_grad == tensor.requires_grad
    assert not any(found[name].is_shared() for name in want.keys() - {"conjugated", "weight"})
    found["part"].zero_()  # nobody else's
    assert found["turned"].sum() == 66
