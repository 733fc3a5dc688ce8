"""GPT-2 by shape (Radford et al. 2019): learned positions, pre-norm blocks, output tied to the token embedding.

Parameter names are transformers' (`h.0.attn.c_attn` …), weights are stored as `nn.Linear` stores them. Parameters:
vocab·h + seq·h + layers·(12h² + 13h) + 2h with a feed-forward width of 4h.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    later: Tensor

    def __init__(self, hidden: int, heads: int, seq: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.fused = heads, dropout, fused
        if not fused:  # which scores look ahead
            self.register_buffer("later", torch.ones(seq, seq, dtype=torch.bool).triu(1), persistent=False)
        self.c_attn = nn.Linear(hidden, 3 * hidden)
        self.c_proj = nn.Linear(hidden, hidden)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, hidden = x.shape
        # (samples, length, 3, heads, width) → three of (samples, heads, length, width)
        q, k, v = self.c_attn(x).view(samples, length, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            # Operator by operator, with all scores in memory: as before there were fused kernels.
            scores = (q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1)).masked_fill(self.later, -math.inf)
            out = F.dropout(scores.softmax(-1), dropout) @ v
        return self.resid_dropout(self.c_proj(out.transpose(1, 2).reshape(samples, length, hidden)))


class FeedForward(nn.Module):
    def __init__(self, hidden: int, width: int, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(hidden, width)
        self.act = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(width, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, seq: int, width: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(hidden), Attention(hidden, heads, seq, dropout, fused)
        self.ln_2, self.mlp = nn.LayerNorm(hidden), FeedForward(hidden, width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(
        self,
        layers: int,
        hidden: int,
        heads: int,
        seq: int,
        vocab: int,
        mlp: int,
        dropout: float,
        attention: str = "fused",
    ) -> None:
        super().__init__()
        fused = attention == "fused"
        self.wte, self.wpe = nn.Embedding(vocab, hidden), nn.Embedding(seq, hidden)
        self.drop = nn.Dropout(dropout)
        self.h = nn.Sequential(*(Block(hidden, heads, seq, mlp, dropout, fused) for _ in range(layers)))
        self.ln_f = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                # Each block adds two terms to the residual stream: scaled so that its variance does not grow.
                deviation = 0.02 / math.sqrt(2 * layers) if name.endswith("c_proj") else 0.02
                nn.init.normal_(module.weight, 0, deviation)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.drop(self.wte(ids) + self.wpe(positions))
        return self.lm_head(self.ln_f(self.h(x)))
