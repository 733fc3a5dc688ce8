"""Slices of sequences: what a model computes slice by slice is what it computes on the whole; and what is refused."""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tests.program.strategies import examples
from trainplan.errors import ModelError
from trainplan.profile.capture.captured import Captured, capture
from trainplan.profile.capture.sliced import Carry, carrying, slices_of
from trainplan.profile.capture.stage import Stage
from trainplan.profile.capture.tensors import values_of
from trainplan.profile.capture.tokens import Tokens, tokens_of
from trainplan.workload.losses import IGNORE, cross_entropy, token_cross_entropy
from trainplan.workload.workload import Batch, Loss
from trainplan.workload.zoo.gpt import GPT

LENGTH, WIDTH, WORDS = 8, 8, 11


def batch(samples: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, WORDS, (2, samples, LENGTH), generator=generator)
    targets[:, 2] = IGNORE
    return Batch(samples, (tokens,), {}, targets)


def labelled(samples: int, seed: int) -> Batch:
    """As transformers' models want it: they shift the labels, and compute the loss."""
    made = batch(samples, seed)
    return Batch(samples, (), {"input_ids": made.args[0], "labels": made.targets})


PICKED = Loss(lambda output, _: output["loss"], lambda b: int((b.kwargs["labels"][:, 1:] != IGNORE).sum()), "tokens")


def captured(model: nn.Module, example: Batch, loss: Loss) -> Captured:
    return capture(model.double().train(), example, loss)


Prepared = tuple[Stage, Tokens, Batch, Loss]


def prepared(model: nn.Module, inputs: Callable[[int, int], Batch], loss: Loss) -> Prepared:
    chain = captured(model, inputs(2, 0), loss)
    tokens = tokens_of(chain, LENGTH, loss, inputs(2, 0))
    return chain.stage(0, len(chain.blocks)).bind(values_of(model)), tokens, inputs(3, 1), loss


def both(subject: Prepared, lengths: tuple[int, ...]) -> tuple:
    """Loss and gradients of a batch: whole, and slice by slice."""
    stage, tokens, piece, loss = subject

    def seeded(block: int) -> None:
        torch.manual_seed(100 + block)

    def gradients() -> dict[str, Tensor]:
        found = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
        stage.zero_grad()
        return found

    whole = loss.function(stage({}, piece, seeded)[1], piece.targets)
    whole.backward()
    wanted = gradients()
    passes: list[tuple[Tensor, Carry]] = []
    for part in slices_of(tokens, lengths):
        carry = Carry([carry for _, carry in passes])
        with carrying(carry):
            output = stage({}, piece, seeded, part)[1]
        own = part.targets(piece.targets)
        weight = 1.0 if tokens.mean else loss.count(Batch(3, targets=own)) / loss.count(piece)
        passes.append((loss.function(output, own) * weight, carry))
    for value, carry in reversed(passes):
        roots, seeds = carry.roots()
        torch.autograd.backward([value, *roots], [None, *seeds])
    return whole.detach(), wanted, torch.stack([value.detach() for value, _ in passes]).sum(), gradients()


def hold(whole: Tensor, wanted: dict[str, Tensor], found: Tensor, gradients: dict[str, Tensor], **close) -> None:
    torch.testing.assert_close(found, whole, **close)
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@cache
def gpt(dropout: float) -> Prepared:
    torch.manual_seed(3)
    model = GPT(layers=2, hidden=WIDTH, heads=2, seq=LENGTH, vocab=WORDS, mlp=12, dropout=dropout)
    return prepared(model, batch, token_cross_entropy())


@examples(8)
@given(st.sets(st.integers(1, LENGTH - 1), min_size=1), st.sampled_from([0.0, 0.3]))
def test_any_slices_are_the_whole(cuts: set[int], dropout: float) -> None:
    lengths = tuple(np.diff([0, *sorted(cuts), LENGTH]).tolist())
    hold(*both(gpt(dropout), lengths), rtol=1e-12, atol=1e-12)


class Decoder(nn.Module):
    """An embedding, something that is done with the tokens, and an output for each."""

    def __init__(self, middle: Callable[[nn.Module, Tensor], Tensor], after: Callable[[Tensor], Tensor] | None = None):
        super().__init__()
        torch.manual_seed(4)
        self.embed, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.places = nn.Parameter(torch.randn(1, LENGTH, WIDTH))
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop, self.batch_norm = nn.LayerNorm(WIDTH), nn.Dropout(0.3), nn.BatchNorm1d(LENGTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril().bool())
        self._middle, self._after = middle, after

    def forward(self, ids: Tensor) -> Tensor:
        x = self._middle(self, self.embed(ids))
        return self._after(self.out(x)) if self._after else self.out(x)


def _causal(x: Tensor, **options) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, **{"is_causal": True, **options})


def _positions(m: nn.Module, x: Tensor) -> Tensor:
    """Learned positions, and a table that is made for as many tokens as there are."""
    table = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / torch.arange(1, WIDTH + 1, dtype=x.dtype)
    return _causal((x + m.places) * table.cos())


def _rows(m: nn.Module, x: Tensor) -> Tensor:
    """Samples and tokens in one dimension, dropout there, and back."""
    samples, length, width = x.shape
    rows = m.drop(F.gelu(m.query(x.reshape(samples * length, width))))
    return _causal(torch.cat([rows.view(samples, length, width)[..., :4], x[:, :, 4:]], -1))


def _turned(m: nn.Module, x: Tensor) -> Tensor:
    """Tokens in front, dropout on memory in another order, a softmax over features, heads apart and together again."""
    y = m.drop(x.transpose(0, 1)).softmax(-1).permute(1, 0, 2)
    y = y.unsqueeze(1).squeeze((1, 3))  # of which only one is of one element
    heads = torch.stack(y.chunk(2, dim=-1), dim=1)
    return _causal(heads, scale=0.3).transpose(1, 2).flatten(2) + x.mean(-1, keepdim=True)


def _window(m: nn.Module, x: Tensor) -> Tensor:
    """A mask that is causal whatever the batch: only the three tokens before."""
    at = torch.arange(LENGTH)
    mask = (at[:, None] >= at) & (at[:, None] - at < 3)
    return _causal(x, is_causal=False, attn_mask=mask) + _causal(x, is_causal=False, attn_mask=mask, dropout_p=0.2)


def _grouped(m: nn.Module, x: Tensor) -> Tensor:
    """Two queries for each key."""
    q = m.query(x).view(-1, LENGTH, 4, 2).transpose(1, 2)
    k, v = m.key(x).view(-1, LENGTH, 2, 2, 2).permute(3, 0, 2, 1, 4)
    options = {"is_causal": True, "enable_gqa": True}
    some = F.scaled_dot_product_attention(q, k, v, **options)
    others = F.scaled_dot_product_attention(q, v, k, dropout_p=0.2, **options)
    return (some + others).transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("middle", [_positions, _rows, _turned, _window, _grouped], ids=lambda f: f.__name__)
def test_what_can_be_sliced_is_the_whole(middle: Callable) -> None:
    hold(*both(prepared(Decoder(middle), batch, token_cross_entropy()), (3, 1, 4)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_transformers_models_that_compute_their_own_mean(family: str) -> None:
    """Their mask is a tensor that the same code makes for every batch; so are their shifted labels."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(5)
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": WIDTH, "vocab_size": WORDS}
    config = {
        "gpt2": lambda: transformers.GPT2Config(n_positions=LENGTH, use_cache=False, **shape),
        "llama": lambda: transformers.LlamaConfig(
            num_key_value_heads=1, intermediate_size=12, use_cache=False, max_position_embeddings=LENGTH, **shape
        ),
    }[family]()
    model = transformers.AutoModelForCausalLM.from_config(config)
    # They compute the loss itself in float32.
    hold(*both(prepared(model, labelled, PICKED), (4, 1, 3)), rtol=1e-6, atol=1e-6)


# -- refusals ---------------------------------------------------------------------------------------------------------

HERE = "(test_tokens.py, line "


def _by_hand(m: nn.Module, x: Tensor) -> Tensor:
    scores = m.query(x) @ m.key(x).transpose(1, 2) / math.sqrt(WIDTH)
    return scores.masked_fill(~m.mask, float("-inf")).softmax(-1) @ x


MIXING = {
    "encoder": (lambda m, x: _causal(x, is_causal=False), "scaled_dot_product_attention in the model's own forward"),
    "attention by hand": (_by_hand, "is F.scaled_dot_product_attention(…, is_causal=True)"),
    "masked both ways": (
        lambda m, x: _causal(x, is_causal=False, attn_mask=torch.ones(LENGTH, LENGTH).bool()),
        "has a mask that lets tokens attend to later ones",
    ),
    "mask in a buffer": (lambda m, x: _causal(x, is_causal=False, attn_mask=m.mask), "made of 'mask', whose values"),
    "mask of the batch": (
        lambda m, x: _causal(x, is_causal=False, attn_mask=(x[..., :1] > 0) & m.mask), "a mask that the model computes",
    ),
    "convolution": (lambda m, x: m.convolution(x.transpose(1, 2)).transpose(1, 2), "conv1d in module 'convolution'"),
    "batch norm": (lambda m, x: m.batch_norm(x), "batch_norm in module 'batch_norm'"),
    "softmax over tokens": (lambda m, x: x.softmax(1), "softmax in the model's own forward"),
    "mean over tokens": (lambda m, x: x - x.mean(1, keepdim=True), "mean in the model's own forward"),
    "sum of all": (lambda m, x: x / x.sum(), "goes over all tokens"),
    "cumulated": (lambda m, x: x.cumsum(1), "goes over the tokens"),
    "last token": (lambda m, x: x + x[:, -1:], "takes some of the tokens"),
    "into features": (lambda m, x: x.flatten(1).view(-1, LENGTH, WIDTH), "puts tokens and features into one dimension"),
    "beside each other": (lambda m, x: torch.cat([x, x], 1)[:, :LENGTH], "puts tokens beside other tokens"),
    "turned round": (lambda m, x: x + x.transpose(1, 2), "brings tokens together with other tokens"),
    "squeezed": (lambda m, x: x.squeeze(1), "goes over the tokens"),  # a slice of one token would lose its dimension
    "noise": (lambda m, x: x + torch.rand_like(x), "rand_like"),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_tokens_is_refused_by_name_and_place(name: str) -> None:
    middle, why = MIXING[name]
    chain = captured(Decoder(middle), batch(2, 0), token_cross_entropy())
    with pytest.raises(ModelError) as caught:
        tokens_of(chain, LENGTH, token_cross_entropy(), batch(2, 0))
    assert why in caught.value.why
    assert HERE in caught.value.why
    assert caught.value.instead == "schedule=1f1b or gpipe, which take sequences whole"


def test_outputs_targets_and_losses_that_are_no_sum_over_tokens_are_refused() -> None:
    turned = Decoder(lambda m, x: _causal(x), lambda x: x.transpose(1, 2))
    plain, pooled = Decoder(lambda m, x: _causal(x)), Decoder(lambda m, x: _causal(x), lambda x: x.amax(-1))
    for model, loss, example, length, why in (
        (plain, cross_entropy(), batch(2, 0), LENGTH, "its loss is a mean over samples"),
        (plain, token_cross_entropy(), batch(2, 0), 0, "it has 0 tokens a sample (tokens_per_sample)"),
        (plain, token_cross_entropy(), batch(2, 0), LENGTH + 1, "none of its inputs has 9 tokens"),
        (pooled, Loss(lambda o, t: o.sum(), lambda b: 1, "tokens"), Batch(2, batch(2, 0).args, {}, torch.zeros(2)),
         LENGTH, "a target has the shape (2,)"),
        (turned, Loss(lambda o, t: o.sum(), lambda b: 1, "tokens"), batch(2, 0), LENGTH,
         "is not one value for each token"),
    ):  # fmt: skip
        chain = captured(model, example, loss)
        with pytest.raises(ModelError) as caught:
            tokens_of(chain, length, loss, example)
        assert why in caught.value.why
