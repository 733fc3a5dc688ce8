"""A loss is held to what it says its mean is over: nothing else would show parts that are weighted wrongly."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainplan.errors import ModelError
from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.verify import verify
from trainplan.workload.load import load
from trainplan.workload.losses import count_samples, count_tokens
from trainplan.workload.workload import Batch, Loss, Workload

WEIGHTS = torch.tensor([1.0, 2.0, 30.0, 4.0, 5.0])


class Tagger(nn.Module):
    """Five classes for each of six positions, with what makes samples depend on one another in training."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.last = nn.Embedding(11, 8), nn.BatchNorm1d(6), nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.norm(self.table(tokens)))


class OwnLoss(Tagger):
    """A model that returns its loss, as those of transformers do."""

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = super().forward(tokens)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def padded(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Every sample has one label fewer that counts."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (samples, 6), generator=generator)
    labels = torch.randint(5, (samples, 6), generator=generator)
    return tokens, labels.masked_fill(torch.arange(6) < torch.arange(samples)[:, None] % 6, -100)


def with_labels(samples: int, seed: int) -> Batch:
    tokens, labels = padded(samples, seed)
    return Batch(samples, kwargs={"tokens": tokens, "labels": labels}, targets=labels)


def tokens(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def of_weights(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=WEIGHTS)


def count_weights(batch: Batch) -> float:
    return float(WEIGHTS[batch.targets[batch.targets >= 0]].sum())


def contrast(logits: Tensor, labels: Tensor) -> Tensor:
    flat = logits.flatten(1)
    return F.cross_entropy(flat @ flat.T, torch.arange(len(flat)))


def every_sample(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over samples of their means over labels: what counting samples is right for."""
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    counted = (labels >= 0).sum(1)
    return (each.sum(1) / counted.clamp(min=1)).mean()


def noisy(logits: Tensor, labels: Tensor) -> Tensor:
    return tokens(logits + torch.randn_like(logits), labels)


def returned(output: dict[str, Tensor], labels: Tensor) -> Tensor:
    return output["loss"]


OVER_TOKENS = {"count": count_tokens, "mean_over": "tokens"}
RIGHT = {
    "tokens, counted": (Tagger, padded, Loss(tokens, **OVER_TOKENS)),
    "weights, counted": (Tagger, padded, Loss(of_weights, count_weights, mean_over="weights")),
    "samples": (Tagger, padded, Loss(every_sample, count_samples)),
    "said to be mixed": (Tagger, padded, Loss(contrast, count_samples, mixes_samples=True)),
    "random": (Tagger, padded, Loss(noisy, **OVER_TOKENS)),
    "the model's own": (OwnLoss, with_labels, Loss(returned, **OVER_TOKENS)),
}
WRONG = {
    "tokens as samples": (Tagger, padded, Loss(tokens, count_samples), r"mean over samples.*count.*mixes_samples"),
    "weights as tokens": (Tagger, padded, Loss(of_weights, **OVER_TOKENS), "not the mean over tokens"),
    "a sum": (Tagger, padded, Loss(summed, count_samples), "a sum over samples.*reduction='mean'"),
    "mixed": (Tagger, padded, Loss(contrast, count_samples), "the loss .contrast.*mixes_samples=True"),
    "the model's own": (OwnLoss, with_labels, Loss(returned, count_samples), "not the mean over samples"),
}


def job(model: type[nn.Module], inputs, loss: Loss) -> Workload:
    return load(model(), inputs=inputs, loss=loss, batch=8)


def held(workload: Workload, wider: bool = True) -> float:
    model, example = workload.build(), workload.inputs(2, 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    captured = capture(model, example, workload.loss)
    try:
        return verify(captured, model, example, workload.loss, inputs=workload.inputs if wider else None)
    finally:
        assert model.training
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", RIGHT)
def test_a_mean_over_what_it_says(name: str) -> None:
    assert held(job(*RIGHT[name])) < 1e-4


@pytest.mark.parametrize("wider", [True, False])
@pytest.mark.parametrize("name", WRONG)
def test_a_mean_over_something_else_is_refused(name: str, wider: bool) -> None:
    *asked, why = WRONG[name]
    with pytest.raises(ModelError, match=why):
        held(job(*asked), wider)


def test_what_only_a_wider_batch_shows() -> None:
    """The first two samples have as many labels that count; the others have fewer."""

    def inputs(samples: int, seed: int) -> tuple[Tensor, Tensor]:
        tokens, labels = padded(samples, seed)
        labels[:2] = labels[:2].clamp(min=0)
        return tokens, labels

    workload = job(Tagger, inputs, Loss(tokens, count_samples))
    assert held(workload, wider=False) < 1e-4
    with pytest.raises(ModelError, match="not the mean over samples"):
        held(workload)


def test_samples_that_are_padded_to_the_longest_of_a_batch_are_judged_among_themselves() -> None:
    def inputs(samples: int, seed: int) -> tuple[Tensor, Tensor]:
        tokens, labels = padded(samples, seed)
        return (tokens, labels) if samples == 2 else (tokens.repeat(1, 2), labels.repeat(1, 2))

    with pytest.raises(ModelError, match=r"it is .* of 2 samples, and not the mean over samples"):
        held(job(Tagger, inputs, Loss(tokens, count_samples)))


def test_that_it_is_of_the_parts_is_told_with_every_answer() -> None:
    workload = job(*RIGHT["said to be mixed"])
    notes = capture(workload.build(), workload.inputs(2, 0), workload.loss).notes
    assert any("mixes samples" in note for note in notes)
