"""Networks as users write them, of the usual kinds: `benchmarks/networks.py:llama,layers=16`.

A language model in the style of Llama (Touvron et al. 2023), an encoder in that of BERT (Devlin et al. 2018), an
encoder and a decoder in that of T5 (Raffel et al. 2020), a vision transformer (Dosovitskiy et al. 2021), a ConvNeXt
(Liu et al. 2022) and a DenseNet (Huang et al. 2017). All are plain torch, so that nothing else has to be installed
where they run.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Made = dict[str, Any]


def _images(side: int, classes: int) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    def inputs(samples: int, seed: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(seed)
        return torch.randn(samples, 3, side, side, generator=random), torch.randint(
            classes, (samples,), generator=random
        )

    return inputs


def _tokens(seq: int, vocab: int) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    def inputs(samples: int, seed: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocab, (samples, seq), generator=random)
        return ids, torch.randint(vocab, (samples, seq), generator=random)

    return inputs


class Attention(nn.Module):
    """Of queries to keys and values, which may be of another sequence."""

    def __init__(self, hidden: int, heads: int, causal: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden, bias=bias) for _ in range(4))

    def forward(self, x: Tensor, other: Tensor | None = None, turn: tuple[Tensor, Tensor] | None = None) -> Tensor:
        source = x if other is None else other
        parts = self.q(x), self.k(source), self.v(source)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        if turn is not None:
            q, k = _turned(q, *turn), _turned(k, *turn)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return out


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """With its place in the sequence, as an angle."""
    one, other = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-other, one], dim=-1) * sine


# -- language ---------------------------------------------------------------------------------------------------------


class LlamaLayer(nn.Module):
    def __init__(self, hidden: int, heads: int, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.attention = Attention(hidden, heads, causal=True, bias=False)
        self.gate, self.up, self.down = (
            nn.Linear(*sizes, bias=False) for sizes in ((hidden, width), (hidden, width), (width, hidden))
        )

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.before(x), turn=(cosine, sine))
        h = self.between(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


class Llama(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, width: int, seq: int, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(LlamaLayer(hidden, heads, width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        size = hidden // heads
        angles = torch.outer(torch.arange(seq), 10_000.0 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        out: Tensor = self.head(self.norm(x))
        return out


def llama(layers: int = 16, hidden: int = 2048, heads: int = 16, seq: int = 1024, vocab: int = 32000) -> Made:
    """A billion parameters by default."""
    width = 64 * round(hidden * 8 / 3 / 64)
    build = lambda: Llama(layers, hidden, heads, width, seq, vocab)  # noqa: E731
    return {"build": build, "inputs": _tokens(seq, vocab), "loss": "token_cross_entropy", "tokens_per_sample": seq}


def _encoder_layer(hidden: int, heads: int, first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(
        hidden, heads, 4 * hidden, activation="gelu", batch_first=True, norm_first=first, dropout=0.0
    )


class Bert(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, seq: int, vocab: int) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(vocab, hidden), nn.Parameter(torch.zeros(seq, hidden))
        self.norm = nn.LayerNorm(hidden)
        self.layers = nn.ModuleList(_encoder_layer(hidden, heads, first=False) for _ in range(layers))
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden), nn.Linear(hidden, vocab))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embedding(ids) + self.places)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def bert(layers: int = 12, hidden: int = 768, heads: int = 12, seq: int = 512, vocab: int = 30522) -> Made:
    build = lambda: Bert(layers, hidden, heads, seq, vocab)  # noqa: E731
    return {"build": build, "inputs": _tokens(seq, vocab), "loss": "token_cross_entropy", "tokens_per_sample": seq}


class T5Layer(nn.Module):
    """Of the encoder, or of the decoder, which looks at what the encoder made."""

    def __init__(self, hidden: int, heads: int, decoder: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(3 if decoder else 2))
        self.own = Attention(hidden, heads, causal=decoder, bias=False)
        self.cross = Attention(hidden, heads, bias=False) if decoder else None
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        x = x + self.own(self.norms[0](x))
        if self.cross is not None:
            x = x + self.cross(self.norms[2](x), seen)
        out: Tensor = x + self.down(F.relu(self.up(self.norms[1](x))))
        return out


class T5(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.encoder = nn.ModuleList(T5Layer(hidden, heads, decoder=False) for _ in range(layers))
        self.decoder = nn.ModuleList(T5Layer(hidden, heads, decoder=True) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        seen, x = self.embedding(ids), self.embedding(ids)  # what is written is what was read
        for layer in self.encoder:
            seen = layer(seen)
        seen = self.norms[0](seen)
        for layer in self.decoder:
            x = layer(x, seen)
        out: Tensor = self.head(self.norms[1](x))
        return out


def t5(layers: int = 12, hidden: int = 768, heads: int = 12, seq: int = 512, vocab: int = 32128) -> Made:
    build = lambda: T5(layers, hidden, heads, vocab)  # noqa: E731
    return {"build": build, "inputs": _tokens(seq, vocab), "loss": "token_cross_entropy", "tokens_per_sample": seq}


# -- images -----------------------------------------------------------------------------------------------------------


class Vit(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, side: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, hidden))
        self.places = nn.Parameter(torch.zeros((side // patch) ** 2 + 1, hidden))
        self.layers = nn.ModuleList(_encoder_layer(hidden, heads, first=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], dim=1) + self.places
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x[:, 0]))
        return out


def vit(layers: int = 12, hidden: int = 768, heads: int = 12, side: int = 224, patch: int = 16) -> Made:
    build = lambda: Vit(layers, hidden, heads, side, patch, 1000)  # noqa: E731
    return {"build": build, "inputs": _images(side, 1000), "loss": "cross_entropy"}


class ConvNextLayer(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(1e-6 * torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.scale * self.down(F.gelu(self.up(h)))
        return x + h.permute(0, 3, 1, 2)


def convnext(width: int = 96, side: int = 224) -> Made:
    """Tiny by default: three, three, nine and three layers."""

    def build() -> nn.Module:
        parts: list[nn.Module] = [nn.Conv2d(3, width, 4, 4), nn.GroupNorm(1, width)]
        for stage, layers in enumerate((3, 3, 9, 3)):
            channels = width * 2**stage
            if stage:
                parts += [nn.GroupNorm(1, channels // 2), nn.Conv2d(channels // 2, channels, 2, 2)]
            parts += [ConvNextLayer(channels) for _ in range(layers)]
        parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(8 * width), nn.Linear(8 * width, 1000)]
        return nn.Sequential(*parts)

    return {"build": build, "inputs": _images(side, 1000), "loss": "cross_entropy"}


class DenseLayer(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(channels), nn.BatchNorm2d(4 * growth)
        self.narrow = nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.wide = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.narrow(F.relu(self.first(x)))
        return torch.cat([x, self.wide(F.relu(self.second(h)))], dim=1)


def densenet(growth: int = 32, side: int = 224) -> Made:
    """DenseNet-121 by default: 6, 12, 24 and 16 layers."""

    def build() -> nn.Module:
        channels = 2 * growth
        parts: list[nn.Module] = [
            nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        ]  # fmt: skip
        for stage, layers in enumerate((6, 12, 24, 16)):
            if stage:
                parts += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1, bias=False)]
                parts += [nn.AvgPool2d(2)]
                channels //= 2
            for _ in range(layers):
                parts.append(DenseLayer(channels, growth))
                channels += growth
        parts += [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
        return nn.Sequential(*parts)

    return {"build": build, "inputs": _images(side, 1000), "loss": "cross_entropy"}
