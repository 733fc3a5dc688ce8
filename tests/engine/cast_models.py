"""A file of small models that cast or make tensors of their own, and of losses that hold tensors or see values."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WEIGHTS = torch.tensor([1.0, 2.0, 3.0])


class Net(nn.Module):
    """Two layers; what is between them is for others to say."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(torch.tanh(self.first(x))))

    def between(self, x: Tensor) -> Tensor:
        return x


class Norm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x.float())


class Recurrent(Net):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(8, 8, batch_first=True)

    def between(self, x: Tensor) -> Tensor:
        zeros = torch.zeros(1, x.shape[0], 8)
        return self.cells(x.unsqueeze(1).expand(-1, 3, -1), (zeros, zeros))[0][:, -1]


class OneHot(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.one_hot(x, 8).float())


class Autocast(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = torch.tanh(self.first(x))
        return self.last(h.float())


class Mixed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(8, 8).bfloat16()

    def between(self, x: Tensor) -> Tensor:
        return self.middle(x.bfloat16()).float()


class Images(Net):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(self.convolution(x.float() / 255)).mean((2, 3)))


def logged(output: Tensor, targets: Tensor) -> Tensor:
    """Says what it sees, and begins otherwise than it goes on."""
    loss = F.cross_entropy(output, targets)
    print(f"the loss saw {loss.item():.3f}")
    return loss * 2 if bool((output > 0).all()) else loss


MODELS = {
    "net": Net, "norm": Norm, "recurrent": Recurrent, "one_hot": OneHot, "autocast": Autocast, "mixed": Mixed,
    "images": Images,
}  # fmt: skip
LOSSES = {
    "plain": "cross_entropy",
    "class_weights": nn.CrossEntropyLoss(weight=WEIGHTS),
    "closed": lambda output, targets: F.cross_entropy(output, targets, weight=WEIGHTS),
    "pos_weight": nn.BCEWithLogitsLoss(pos_weight=WEIGHTS),
    "logged": logged,
}


def build(model: str = "net", loss: str = "plain") -> dict:
    def inputs(samples: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        targets = torch.randint(3, (samples,), generator=generator)
        if loss == "pos_weight":
            targets = F.one_hot(targets, 3).float()
        if model == "one_hot":
            return torch.randint(8, (samples,), generator=generator), targets
        if model == "images":
            return torch.randint(256, (samples, 3, 8, 8), dtype=torch.uint8, generator=generator), targets
        return torch.randn(samples, 8, generator=generator), targets

    return {"model": MODELS[model](), "inputs": inputs, "loss": LOSSES[loss], "batch": 8}
