"""Messages that share something: a node's network card.

A message holds its own link alone, one message at a time. A network card is different: everything that passes it at a
moment shares its rate. So a *flow* (a message, or a collective) has a lead, in which it is on its way and disturbs
nobody (latency, phases inside a node), and then work on the cards that it passes. While the cards can carry all flows,
work takes its time; where they are asked for twice what they can carry, it takes twice as long. Whenever a flow joins
or leaves, those that share a card with it change their speed.
"""

# Compiled code: to numba a numpy integer and a Python one are the same.
# mypy: disable-error-code="assignment, arg-type, misc"

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# What an event of the queue is: something starts, ends, or comes to its cards. An end that has been overtaken by
# another is known by its version.
START, END, JOIN = 0, 1, 2


@dataclass(frozen=True)
class Flows:
    """Which operations pass which cards. Cards are numbered; an operation that passes none is no flow."""

    card_start: Ints  # operation → cards, as a ragged array
    card_items: Ints
    share: Floats  # of each of these cards that the operation asks for
    lead: Floats  # operation → seconds before it comes to its cards
    cards: int


def no_flows(ops: int) -> Flows:
    """Nothing is shared."""
    return Flows(np.zeros(ops + 1, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(ops), 0)


@njit(cache=True)
def balance(
    queue: list[Any], serial: int, now: float, flows: Ints, count: int, card_start: Ints, card_items: Ints,
    share: Floats, load: Floats, left: Floats, since: Floats, factor: Floats, version: Ints, beside: Floats,
) -> int:  # fmt: skip
    """Give the first `count` flows the speed that their cards allow from now on; their new ends go into the queue.

    `left` is the work of a flow that was left at `since`, and has taken `factor` times as long since then; `beside` is
    how many times as long it takes because of what its ranks do meanwhile.
    """
    load[:] = 0.0
    for k in range(count):
        for c in range(card_start[flows[k]], card_start[flows[k] + 1]):
            load[card_items[c]] += share[c]
    for k in range(count):
        flow = flows[k]
        slower = 1.0
        for c in range(card_start[flow], card_start[flow + 1]):
            slower = max(slower, load[card_items[c]])
        slower *= beside[flow]
        if slower == factor[flow]:
            continue
        if factor[flow] > 0:
            left[flow] = max(left[flow] - (now - since[flow]) / factor[flow], 0.0)
        since[flow], factor[flow] = now, slower
        version[flow] += 1
        heapq.heappush(queue, (now + left[flow] * slower, serial, flow, END, version[flow]))
        serial += 1
    return serial


@njit(cache=True)
def leave(flows: Ints, count: int, flow: int) -> int:
    """Take a flow out of the first `count`; how many are left."""
    for k in range(count):
        if flows[k] == flow:
            flows[k] = flows[count - 1]
            break
    return count - 1
