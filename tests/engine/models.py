"""Small workloads in float64 for equality tests, by name, so that a worker process can make them again."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from trainplan.workload.batch import each_tensor
from trainplan.workload.workload import Batch, Loss, Workload
from trainplan.workload.zoo.gpt import GPT


class Residual(nn.Module):
    """Convolutions with batch norm, dropout in every block, a frozen parameter, and a skip that crosses blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.ModuleList(self._block() for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(4, 3)

    @staticmethod
    def _block() -> nn.Module:
        # No bias before batch norm: its gradient would be rounding alone, which Adam makes as large as the rest.
        convolution = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        first = h = F.relu(self.stem(x))
        for block in self.blocks:
            h = h + block(h) * self.scale
        return self.head(self.drop((h + first).mean((2, 3))))


class Tied(nn.Module):
    """An embedding that is also the output layer, and no randomness."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.out(self.norm(h))


class Chain(nn.Module):
    """Plain layers: no batch norm, no dropout, so any plan also equals the whole batch in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(5)), nn.Linear(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Idle(Chain):
    """A chain with a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(3))


def _images(samples: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 1, 5, 5, generator=generator, dtype=torch.float64)
    return Batch(samples, (x,), {}, torch.randint(0, 3, (samples,), generator=generator))


def _tokens(samples: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (samples, 4), generator=generator)
    targets = torch.randint(0, 11, (samples, 4), generator=generator)
    targets[torch.rand(samples, 4, generator=generator) < 0.3] = -100
    targets[:, 0] = 1  # every micro-batch has a token that counts
    return Batch(samples, (tokens,), {}, targets)


LENGTH = 8  # tokens of a sequence


def _gpt() -> nn.Module:
    """Causal attention, a tied embedding, and dropout everywhere."""
    return GPT(layers=3, hidden=8, heads=2, seq=LENGTH, vocab=11, mlp=12, dropout=0.2).double()


class Judge(nn.Module):
    """A model that is given the targets, and returns the mean over those that count."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = _gpt()

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": _token_loss(self.gpt(tokens), labels)}


def _labelled(samples: int, seed: int) -> Batch:
    made = _sequences(samples, seed)
    return Batch(samples, (), {"tokens": made.args[0], "labels": made.targets})


def _sequences(samples: int, seed: int) -> Batch:
    """Some targets do not count, and in some slices of some sequences none."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, 11, (2, samples, LENGTH), generator=generator)
    targets[torch.rand(samples, LENGTH, generator=generator) < 0.3] = -100
    targets[:, 3:5] = -100
    targets[:, 0] = 1
    return Batch(samples, (tokens,), {}, targets)


def _vectors(samples: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(samples, 2, generator=generator, dtype=torch.float64)
    return Batch(samples, (x,), {}, y)


def _token_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=-100)


def _picked(output: dict[str, Tensor], targets: None) -> Tensor:
    return output["loss"]


def _count_labels(batch: Batch) -> int:
    return int((batch.kwargs["labels"] != -100).sum())


def _count_samples(batch: Batch) -> int:
    return batch.samples


def _count_tokens(batch: Batch) -> int:
    return int((batch.targets != -100).sum())


def _groups(named: list[tuple[str, nn.Parameter]]) -> list[dict]:
    """Three groups by name, shape and place; on most stages of a pipeline one or another of them is empty."""
    slow = [named[0]]  # the first layer of the whole model, whichever stage holds it
    norms = [pair for pair in named[1:] if pair[1].dim() == 1]
    rest = [pair for pair in named[1:] if pair[1].dim() > 1]
    return [
        {"params": rest},
        {"params": norms, "weight_decay": 0.0, "lr": 0.03},
        {"params": slow, "lr": 0.004, "weight_decay": 0.2},
    ]


OPTIMIZERS: dict[str, Callable] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "grouped_sgd": lambda p: torch.optim.SGD(_groups(p), lr=0.1, momentum=0.9, weight_decay=1e-2),
    "grouped_adamw": lambda p: torch.optim.AdamW(_groups(p), lr=0.01, weight_decay=0.1),
}

SCHEDULES: dict[str, Callable] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [lambda step, k=k: 1 / (1 + k * step) for k in range(3)]),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.05, 0.03, 0.02], total_steps=6),
    "steps": lambda o: lr_scheduler.MultiStepLR(o, milestones=[1, 1, 3], gamma=0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4, eta_min=1e-4),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.7)], milestones=[3]
    ),
}


def in_single_precision(made: Workload) -> Workload:
    """The same workload in float32, with the same batch again and again, which it can learn by heart."""

    def batch(samples: int, seed: int) -> Batch:
        return each_tensor(made.inputs(samples, 0), lambda t: t.float() if t.is_floating_point() else t)

    return replace(made, build=lambda: made.build().float(), inputs=batch)


def workload(name: str, optimizer: str = "sgd", *, schedule: str = "", single: bool = False, **fields) -> Workload:
    """A small workload; its fields can be replaced, the schedule by a key of `SCHEDULES`."""
    if schedule:
        fields["schedule"] = SCHEDULES[schedule]
    samples = Loss(F.cross_entropy, _count_samples)
    found = {
        "residual": Workload("residual", lambda: Residual().double(), _images, samples, OPTIMIZERS[optimizer], 8, 80),
        "tied": Workload(
            "tied", lambda: Tied().double(), _tokens, Loss(_token_loss, _count_tokens, "tokens"), OPTIMIZERS[optimizer],
            8, 80,
        ),
        "gpt": Workload(
            "gpt", _gpt, _sequences, Loss(_token_loss, _count_tokens, "tokens"), OPTIMIZERS[optimizer], 8, 80,
            tokens_per_sample=LENGTH,
        ),
        "judge": Workload(
            "judge", Judge, _labelled, Loss(_picked, _count_labels, "tokens"), OPTIMIZERS[optimizer], 8, 80,
            tokens_per_sample=LENGTH,
        ),
        "idle": Workload(
            "idle", lambda: Idle().double(), _vectors, Loss(F.mse_loss, _count_samples), OPTIMIZERS[optimizer], 8, 80
        ),
        "chain": Workload(
            "chain", lambda: Chain().double(), _vectors, Loss(F.mse_loss, _count_samples), OPTIMIZERS[optimizer], 8, 80
        ),
    }[name]  # fmt: skip
    made = replace(found, **fields)
    return in_single_precision(made) if single else made
