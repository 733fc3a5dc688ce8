"""Small models of the shapes that matter: residual, inverted residual, long skips, dict output, tied, frozen, …"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainplan.workload.workload import Batch, Loss


class Residual(nn.Module):
    """A ResNet basic block."""

    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = (
            nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if stride != 1 or width != out
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, depths: tuple[int, ...] = (2, 2, 2, 2), width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        inside = width
        for index, depth in enumerate(depths):
            out = width * 2**index
            layers = [Residual(inside if i == 0 else out, out, 2 if i == 0 and index else 1) for i in range(depth)]
            self.add_module(f"layer{index + 1}", nn.Sequential(*layers))
            inside = out
        self.depths = len(depths)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for index in range(self.depths):
            x = self.get_submodule(f"layer{index + 1}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


def conv_bn_relu(width: int, out: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(width, out, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU6(inplace=True),
    )


class Inverted(nn.Module):
    """MobileNet v2's inverted residual."""

    def __init__(self, width: int, out: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = width * expand
        self.skip = stride == 1 and width == out
        layers: list[nn.Module] = [conv_bn_relu(width, hidden, 1)] if expand != 1 else []
        layers += [
            conv_bn_relu(hidden, hidden, 3, stride, hidden),
            nn.Conv2d(hidden, out, 1, bias=False),
            nn.BatchNorm2d(out),
        ]
        self.conv = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.skip else self.conv(x)


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            conv_bn_relu(3, 8, 3, 2),
            Inverted(8, 8, 1, 1),
            Inverted(8, 12, 2, 4),
            Inverted(12, 12, 1, 4),
            conv_bn_relu(12, 32, 1),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


class VGG(nn.Module):
    def __init__(self, batch_norm: bool = True) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = 3
        for item in (4, "M", 8, "M", 8, 8, "M", 12, 12, "M", 12, 12):
            if item == "M":
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(width, int(item), 3, padding=1)]
                layers += [nn.BatchNorm2d(int(item))] if batch_norm else []
                layers += [nn.ReLU(inplace=True)]
                width = int(item)
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(width, 16), nn.ReLU(True), nn.Dropout(0.5), nn.Linear(16, 16), nn.ReLU(True), nn.Linear(16, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


class DoubleConv(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu_(self.bn1(self.conv1(x))))))


class UNet(nn.Module):
    """Long skips: what the first level makes is read by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = DoubleConv(3, 4), DoubleConv(4, 8), DoubleConv(8, 16)
        self.up2, self.dec2 = nn.ConvTranspose2d(16, 8, 2, 2), DoubleConv(16, 8)
        self.up1, self.dec1 = nn.ConvTranspose2d(8, 4, 2, 2), DoubleConv(8, 4)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        middle = self.middle(F.max_pool2d(two, 2))
        x = self.dec2(torch.cat([two, self.up2(middle)], 1))
        return self.head(self.dec1(torch.cat([one, self.up1(x)], 1)))


class Wrapped(nn.Module):
    """A model inside a module of another kind."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class DictOutput(nn.Module):
    """Keyword inputs, a dict output of which one part is made early, an optional input, a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.side = nn.Linear(8, 2)
        self.scale = torch.tensor(0.5)  # state that is neither parameter nor buffer
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor, *, gate: Tensor, temperature: float = 1.0) -> dict[str, Any]:
        h = torch.tanh(self.first(x)) * gate.unsqueeze(1)
        early = self.side(h)
        self.seen += 1
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        h = self.second(h) * self.scale
        return {"early": early, "late": (self.third(F.relu(h)) / temperature,), "temperature": temperature}


class TinyGPT(nn.Module):
    """Tied embedding, dropout, a mask made in forward, parameters that nobody uses, a frozen one."""

    class Layer(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
            self.drop = nn.Dropout(0.1)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            b, s, w = x.shape
            q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(w, dim=-1))
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1 if self.training else 0.0)
            x = x + self.drop(self.out(a.transpose(1, 2).reshape(b, s, w)))
            return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))

    def __init__(self, layers: int = 3, width: int = 16, vocab: int = 23, length: int = 8) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(0.1)
        self.layers = nn.ModuleList(TinyGPT.Layer(width, 2) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.layers[0].unused = nn.Linear(3, 3)
        self.layers[1].up.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        s = ids.shape[1]
        mask = torch.ones(s, s, dtype=torch.bool, device=ids.device).tril()
        mask[:, 0] = True
        x = self.drop(self.tokens(ids) + self.places(torch.arange(s, device=ids.device)))
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


class Oddities(nn.Module):
    """Regions without gradient and with autocast, a shared module, a view that is written, a constant in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.shared, self.b = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.lonely = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        h[:, :2] = h[:, 2:4] * 2  # a view is written: T5 does this with its labels
        with torch.no_grad():
            weight = self.frozen(h).sigmoid()
        h = self.shared(torch.relu(self.shared(h))) * weight
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = h + self.shared(h)
        h = h.to(x.dtype) * torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8], device=x.device)
        return self.b(h), h.argmax(1)


@dataclass
class Case:
    """A model, batches for it, and its loss."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Loss


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _images(samples: int, seed: int, size: int = 16) -> Batch:
    g = _generator(seed)
    x = torch.randn(samples, 3, size, size, generator=g)
    return Batch(samples, (x,), {}, torch.randint(0, 10, (samples,), generator=g))


def _segments(samples: int, seed: int) -> Batch:
    g = _generator(seed)
    x = torch.randn(samples, 3, 8, 8, generator=g)
    return Batch(samples, (x,), {}, torch.randint(0, 2, (samples, 8, 8), generator=g))


def _gated(samples: int, seed: int) -> Batch:
    g = _generator(seed)
    x, gate = torch.randn(samples, 6, generator=g), torch.rand(samples, generator=g)
    return Batch(samples, (x,), {"gate": gate, "temperature": 2.0}, torch.randint(0, 2, (samples,), generator=g))


def _tokens(samples: int, seed: int) -> Batch:
    g = _generator(seed)
    ids = torch.randint(0, 23, (samples, 9), generator=g)
    return Batch(samples, (ids[:, :-1].contiguous(),), {}, ids[:, 1:].contiguous())


def _vectors(samples: int, seed: int) -> Batch:
    g = _generator(seed)
    x = torch.randn(samples, 6, generator=g)
    return Batch(samples, (x,), {}, torch.randint(0, 4, (samples,), generator=g))


def _dict_loss(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output["early"], targets) + F.cross_entropy(output["late"][0], targets)


def _token_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


SAMPLES = Loss(F.cross_entropy, lambda batch: batch.samples)
CASES = {
    case.name: case
    for case in (
        Case("resnet", ResNet, _images, SAMPLES),
        Case("mobilenet", MobileNet, _images, SAMPLES),
        Case("vgg", VGG, _images, SAMPLES),
        Case("unet", UNet, _segments, SAMPLES),
        Case("dict", DictOutput, _gated, Loss(_dict_loss, lambda batch: batch.samples)),
        Case("gpt", TinyGPT, _tokens, Loss(_token_loss, lambda batch: batch.samples * 8, "tokens")),
        Case(
            "oddities", Oddities, _vectors, Loss(lambda out, y: F.cross_entropy(out[0], y), lambda batch: batch.samples)
        ),
    )
}
