"""Which parameters, or pieces of them, are with which parameter server.

The rule is MXNet's. Parameters are numbered in the order in which their gradients arrive. A small one goes whole to
server (number · 9973) mod S: 9973 is a prime, so any S neighbours go to S different servers. One of `split` elements or
more is cut into S nearly equal pieces, one for each server: so large ones load all servers alike. Workers and servers
both ask this function, and nobody has to be told.

>>> deal([("embedding", 10), ("bias", 3), ("head", 7)], servers=2, split=8)
(Piece(name='embedding', first=0, last=5, server=0, whole=False), Piece(name='embedding', first=5, last=10, server=1, \
whole=False), Piece(name='bias', first=0, last=3, server=1, whole=True), Piece(name='head', first=0, last=7, server=0, \
whole=True))
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SPLIT = 1_000_000  # elements from which on a parameter is split, as usual: MXNet's
_PRIME = 9973
_PART = re.compile(r"(?P<name>.*)\[(?P<first>\d+):(?P<last>\d+)\]")


@dataclass(frozen=True)
class Piece:
    """Elements first ≤ e < last of a parameter that is laid out flat, on one server."""

    name: str
    first: int
    last: int
    server: int
    whole: bool  # all of the parameter

    @property
    def count(self) -> int:
        return self.last - self.first

    def __str__(self) -> str:
        return self.name if self.whole else f"{self.name}[{self.first}:{self.last}]"


def deal(parameters: Sequence[tuple[str, int]], servers: int, split: int = SPLIT) -> tuple[Piece, ...]:
    """The pieces of parameters that are given as (name, elements)."""
    found: list[Piece] = []
    for number, (name, count) in enumerate(parameters):
        if servers == 1 or count < max(split, servers):
            found.append(Piece(name, 0, count, number * _PRIME % servers, True))
            continue
        cuts = [round(count * server / servers) for server in range(servers + 1)]
        found += [Piece(name, cuts[server], cuts[server + 1], server, False) for server in range(servers)]
    return tuple(found)


def idle(pieces: Sequence[Piece], servers: int) -> list[int]:
    """The servers to which nothing was dealt.

    >>> idle(deal([("a", 4), ("b", 4)], servers=3), servers=3)
    [2]
    """
    return sorted(set(range(servers)) - {piece.server for piece in pieces})


def most_servers(sizes: Sequence[int], split: int = SPLIT) -> int:
    """As many servers as have something each of parameters of so many elements: one for each, or, where there are any
    that are split, as many as the largest has elements.

    >>> most_servers([10, 3, 7]), most_servers([10, 3, 7], split=8), most_servers([10] * 12, split=8)
    (3, 10, 12)
    """
    largest = max(sizes, default=0)
    return max(len(sizes), largest if largest >= split else 0)


def part_of(named: str, tensors: Mapping[str, Any]) -> Any:
    """The tensor, or the piece of one, that a piece's name stands for.

    >>> import numpy
    >>> part_of("w[2:4]", {"w": numpy.arange(6).reshape(2, 3)}).tolist()
    [2, 3]
    """
    if named in tensors:
        return tensors[named]
    match = _PART.fullmatch(named)
    if match is None:
        raise KeyError(named)
    return tensors[match["name"]].reshape(-1)[int(match["first"]) : int(match["last"])]
