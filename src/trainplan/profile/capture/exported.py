"""A model's forward pass as one graph: the values that `export` makes and everything else reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from trainplan.profile.capture.tensors import Held

ROOT = "model"  # the model's name inside the wrapper through which it is traced


@dataclass(frozen=True)
class Input:
    """One tensor of the batch: where it is found, and what it must look like."""

    name: str
    path: tuple[Any, ...]  # keys from (args, kwargs) down to the tensor
    shape: tuple[int, ...]  # of the example
    stride: tuple[int, ...]
    dtype: torch.dtype
    per_sample: bool  # its first dimension is the number of samples


@dataclass(frozen=True)
class Constant:
    """An argument that is not a tensor. It is part of the graph, so every batch must have the same."""

    path: tuple[Any, ...]
    value: Any


@dataclass
class Output:
    """How the model's output is rebuilt: a tree whose leaves are values of the graph or constants."""

    spec: pytree.TreeSpec
    leaves: list[fx.Node | Any]  # nodes of the graph, or plain values
    opaque: list[str]  # what was found in the output and is neither


@dataclass
class Exported:
    """A model's forward pass as one graph.

    Every placeholder of the graph is one of: a tensor that the model holds (`holds`), a constant (`constants`), a
    tensor of the batch (`inputs`), or the number of samples (`samples`).
    """

    graph: fx.Graph
    root: nn.Module  # owns the sub-graphs (autocast and no_grad regions) that `get_attr` nodes name
    held: dict[str, Held]
    holds: dict[fx.Node, str]
    constants: dict[fx.Node, Tensor]
    inputs: dict[fx.Node, Input]
    samples: fx.Node
    symbols: frozenset[sympy.Symbol]  # the number of samples, as it appears in traced shapes (one for each input)
    fixed: list[Constant]
    arguments: tuple[int, set[str]]  # how many positional arguments, and which keywords
    output: Output
    device: torch.device
    example_samples: int
    training: bool
    notes: list[str]
    replaced: frozenset[str]  # buffers in whose place forward puts other tensors: the graph writes them instead

    @property
    def operators(self) -> list[fx.Node]:
        """The nodes that compute something, in order."""
        return [node for node in self.graph.nodes if node.op == "call_function"]


VALUE = object()  # stands for a value of the graph


class Returned:
    """The form of the model's output. An object of its own, because export resets the attributes of modules."""

    spec: pytree.TreeSpec | None = None
    leaves: list[Any]
