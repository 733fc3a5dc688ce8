"""How ranks could share blocks, found from operators: the same for every way in which attention is written."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainplan.profile.estimate import traced
from trainplan.workload.load import load

HIDDEN, HEADS, SEQ, VOCAB, SAMPLES = 32, 4, 16, 64, 2


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.packed, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.packed(x).chunk(3, dim=-1))
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class ByTorch(nn.Module):
    def __init__(self, weights: bool = False, first: bool = True) -> None:
        super().__init__()
        self.attention, self.weights = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=first), weights
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first else x.transpose(0, 1)
        out: Tensor = self.attention(x, x, x, need_weights=self.weights)[0]
        return out if self.first else out.transpose(0, 1)


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(HIDDEN), attention

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.attention(self.norm(x))
        return out


def _inputs(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (samples, SEQ), generator=random), torch.randint(
        VOCAB, (samples, SEQ), generator=random
    )


def _middle(block: nn.Module):
    """What was found of the block between an embedding and an output layer, and the names of what is cut in it."""
    model = nn.Sequential(nn.Embedding(VOCAB, HIDDEN), block, nn.Linear(HIDDEN, VOCAB))
    workload = load(model, inputs=_inputs, loss="token_cross_entropy", batch=SAMPLES)
    found = traced(workload, [SAMPLES], gpu=True)
    cut = {parameter.name for parameter in found.base.parameters if parameter.sliced}
    return found.at(SAMPLES).blocks[1].share, {name for name in cut if name.startswith("1.")}


@pytest.mark.parametrize("attention", [ByTorch(first=False), ByTorch(weights=True)])
def test_torchs_own_attention_is_shared_as_one_that_is_written_by_hand(attention):
    """By heads: queries, keys and values along columns with their biases, the output along rows; one sum each way."""
    (ours, cut), (theirs, named) = (_middle(Block(one)) for one in (ByHand(), attention))
    assert theirs.whole == ours.whole == ""
    assert theirs.divides == ours.divides == (("heads", HEADS),)
    assert theirs.rows == ours.rows == (4 * SAMPLES * SEQ * HIDDEN,)
    assert sum(theirs.columns) == sum(ours.columns)
    assert cut == {"1.attention.packed.weight", "1.attention.packed.bias", "1.attention.out.weight"}
    weights = ("in_proj_weight", "in_proj_bias", "out_proj.weight")
    assert named == {f"1.attention.attention.{name}" for name in weights}


def test_an_encoder_layer_of_torch_is_shared_in_both_of_its_halves():
    share, cut = _middle(nn.TransformerEncoderLayer(HIDDEN, HEADS, 4 * HIDDEN, batch_first=True))
    assert share.divides == (("heads", HEADS), ("width", 4 * HIDDEN))
    assert len(share.rows) == 2
    assert {name.removeprefix("1.") for name in cut} == {
        "self_attn.in_proj_weight", "self_attn.in_proj_bias", "self_attn.out_proj.weight", "linear1.weight",
        "linear1.bias", "linear2.weight",
    }  # fmt: skip
