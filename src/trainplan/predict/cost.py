"""Seconds of every operation: one rule a kind, worked out once a cost class.

A rule gives (run, issue): seconds on the operation's resource, and seconds of the host that issues it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainplan.cluster.cluster import Cluster
from trainplan.predict import collectives, exchanges
from trainplan.profile.efficiency import Efficiency, efficiency, together
from trainplan.profile.profile import Profile
from trainplan.program.lower.backend import backend
from trainplan.program.ops import SPECS, Kind, Lane
from trainplan.program.program import CostClass, Program

TALKS = {
    "all_reduce": collectives.all_reduce,
    "reduce_scatter": collectives.reduce_scatter,
    "all_gather": collectives.all_gather,
}
Price = tuple[float, float, float]  # seconds of the device, those of the host, and of the former those of `talking`
MOST_SETTINGS, MOST_PRICES = 8, 20_000  # that are remembered; beyond them all are forgotten
_F, _B = Kind.F, Kind.B  # by name: to look up a member of an enumeration takes ten times as long
EMPTYING = 0.7  # a bucket takes as long as this share of adding to it (CPU, 24 MB: 1.4 against 2.0 ms)


@dataclass(frozen=True)
class Setting:
    """Where a program runs, for the rules."""

    profile: Profile
    cluster: Cluster
    speeds: tuple[float, ...] = ()  # of the device of every rank; none: all as in the profile
    # How many times as long every rank computes because others of its node do too (`contention.py`); none: as if alone.
    contention: tuple[float, ...] = ()
    world: int = 1  # ranks at work, whose hosts may be in each other's way
    prompt: bool = False  # as if hosts issued everything at once
    known: dict[str, Efficiency] = field(default_factory=dict, compare=False, repr=False)
    by_rank: dict[int, Efficiency] = field(init=False, default_factory=dict, compare=False, repr=False)
    # What was priced here before. (A setting that is made from this one begins with none.)
    prices: dict[CostClass, Price] = field(init=False, default_factory=dict, compare=False, repr=False)
    # The same by the number of the object, which is kept beside it: to hash a class takes longer than to look it up.
    at_hand: dict[int, tuple[CostClass, Price]] = field(init=False, default_factory=dict, compare=False, repr=False)
    # Seconds of device and host of passes through some blocks, whoever runs them.
    passes: dict[tuple[Any, ...], tuple[float, float]] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    def efficiency(self, rank: int) -> Efficiency:
        """The constants of a rank's device, where its seconds are estimated."""
        found = self.by_rank.get(rank)
        if found is None:
            device = self.cluster.device(rank)
            if device.name not in self.known:
                self.known[device.name] = efficiency(device)
            found = self.by_rank[rank] = self.known[device.name]
        return found

    def slower(self, rank: int) -> float:
        """How much longer compute takes than in the profile: the other devices of the node compute too, and this one
        may be of another kind."""
        contention = self.contention[rank] if self.contention else 1.0
        return contention / self.speeds[rank] if self.speeds else contention

    def host(self, rank: int) -> float:
        """How much longer the host of a rank takes to issue its work than alone: those of its node do so, too."""
        table = self.cluster.hosts
        if not table:
            return 1.0
        own, machine_of = self.cluster.machine_of(rank), self.cluster.machine_of
        beside = sum(1 for other in range(min(self.world, self.cluster.world)) if machine_of(other) == own)
        return table[min(max(beside, 1), len(table)) - 1]


def setting_of(profile: Profile, cluster: Cluster, speeds: tuple[float, ...], world: int = 1) -> Setting:
    """The setting of so many ranks that compute as if alone; the same one as long as both are the same objects, so that
    what one plan has priced another need not."""
    known = profile.known_settings
    if len(known) >= MOST_SETTINGS:
        known.clear()
    world = world if cluster.hosts else 1
    key = id(cluster), speeds, world  # which the setting keeps, so that no other gets its id
    if key not in known:
        known[key] = Setting(profile, cluster, speeds, world=world)
    found: Setting = known[key]
    return found


Rule = Callable[[CostClass, Setting], tuple[float, float]]


def _forward(c: CostClass, s: Setting) -> tuple[float, float]:
    """Also of a block that is run again: `recompute_s`."""
    key = c.kind, c.first, c.last, c.samples, c.since == 0 and not c.started
    found = s.passes.get(key)
    if found is None:
        way = "forward" if c.kind is _F else "recompute"
        run = s.profile.total(f"{way}_s", c.first, c.last, c.samples)
        issue = s.profile.total(f"{way}_issue_s", c.first, c.last, c.samples)
        found = s.passes[key] = run, issue + _begun(c, s)
    run, issue = found
    return _lanes(c, s, run * s.slower(c.rank) + talking(c, s), issue)


def _backward(c: CostClass, s: Setting) -> tuple[float, float]:
    key = _B, c.first, c.last, c.samples, c.since, c.until, c.accumulate, c.started
    found = s.passes.get(key)
    if found is None:
        run = s.profile.total("backward_s", c.first, c.last, c.samples)
        run += c.accumulate * _accumulation(c, s)
        issue = s.profile.total("backward_issue_s", c.first, c.last, c.samples)
        share = c.until - c.since
        found = s.passes[key] = run * share, issue * share + _begun(c, s)
    run, issue = found
    return _lanes(c, s, run * s.slower(c.rank) + talking(c, s), issue)


def _begun(c: CostClass, s: Setting) -> float:
    """However many pieces a pass is cut into for the program, the engine starts it once."""
    return s.cluster.dispatch_s if c.since == 0 and not c.started else 0.0


def _lanes(c: CostClass, s: Setting, run: float, issue: float) -> tuple[float, float]:
    """A pass of so many seconds on the device, and of the host: of an estimated profile, how well the two overlap."""
    if s.prompt:
        return run, 0.0
    issue *= s.host(c.rank)
    if s.profile.kind != "estimated":
        return run, issue
    reaches = s.efficiency(c.rank)
    if c.kind is _F and c.last == len(s.profile.blocks):
        issue += reaches.loss_issue_s
    issue *= 1 + reaches.sharing * (max(1, len(c.sharing)) - 1)
    return together(run, issue, reaches.overlap_sharing if c.inside else reaches.overlap), issue


def talking(c: CostClass, s: Setting) -> float:
    """Seconds that the ranks that share the blocks of a pass exchange inside it."""
    if not c.inside:
        return 0.0
    known, key = s.cluster.known_groups, (c.sharing, c.inside)
    if key not in known:
        known[key] = sum(
            part.times * TALKS[part.what](s.cluster, c.sharing, part.bytes).seconds
            for part in c.inside
            if not part.hidden
        )
    seconds = float(known[key])
    # A forward pass says with `since` and `until` which blocks it is of, a backward pass which share of these.
    return seconds * (c.until - c.since if c.kind is _B else 1.0)


def _accumulation(c: CostClass, s: Setting) -> float:
    """Seconds of going over the gradients of these blocks: two numbers are read, and one is written."""
    known, key = s.profile.known_stages, ("accumulation", c.first, c.last)
    if key not in known:
        known[key] = sum(block.accumulate_s for block in s.profile.blocks[c.first : c.last])
    return float(known[key])


def _backward_input(c: CostClass, s: Setting) -> tuple[float, float]:
    if not _comes_in(c, s):
        return 0.0, s.cluster.dispatch_s
    run = s.profile.total("backward_input_s", c.first, c.last, c.samples)
    return run * s.slower(c.rank), _issued(c, s, "backward_input_issue_s")


def _backward_weight(c: CostClass, s: Setting) -> tuple[float, float]:
    if not _comes_in(c, s):  # all of it
        return _backward(c, s)
    run = s.profile.total("backward_weight_s", c.first, c.last, c.samples) + c.accumulate * _accumulation(c, s)
    return run * s.slower(c.rank), _issued(c, s, "backward_weight_issue_s")


def _issued(c: CostClass, s: Setting, quantity: str) -> float:
    """Seconds of the host for a part of a backward pass. Where they were not measured, as many as for the whole: both
    parts go through the graph."""
    known = quantity if quantity in s.profile.curves else "backward_issue_s"
    return s.profile.total(known, c.first, c.last, c.samples) * s.host(c.rank) + s.cluster.dispatch_s


def _comes_in(c: CostClass, s: Setting) -> bool:
    """Whether a stage reads anything that a gradient goes back to; else its backward has no first part."""
    return any(
        x.needs_grad and x.producer < c.first and any(c.first <= block < c.last for block in x.consumers)
        for x in s.profile.crossings
    )


def _send(c: CostClass, s: Setting) -> tuple[float, float]:
    host = s.cluster.link(c.rank, c.peer).message_s * c.tensors
    return collectives.message(s.cluster, c.rank, c.peer, c.bytes).seconds, host


def _receive(c: CostClass, s: Setting) -> tuple[float, float]:
    """The message has arrived by then; what is left is the host's work to take it, and to post the next receive. A
    probed curve has the former."""
    taking = s.cluster.link(c.peer, c.rank).message_s * c.tensors
    return s.cluster.dispatch_s + (0.0 if collectives.is_probed(s.cluster, c.peer, c.rank) else taking), 0.0


def _sum(c: CostClass, s: Setting) -> tuple[float, float]:
    seconds = exchanges.summed(s.cluster, c).seconds
    if not c.background:
        return seconds, _start(c, s)
    seconds += _start(c, s)  # which its thread does
    if c.tensors > 1:  # put side by side, and apart again
        whole = sum(p.bytes for p in s.profile.parameters if p.trainable)
        seconds += 2 * EMPTYING * _accumulation(c, s) * c.bytes / max(whole, 1) * s.slower(c.rank)
    return seconds, 0.0


def _load(c: CostClass, s: Setting) -> tuple[float, float]:
    """Over the link to the host; or, where the host is the device, in its memory: read once, written once."""
    device = s.cluster.device(c.rank)
    seconds = c.bytes / device.host_rate if device.host_rate else 2 * c.bytes / device.memory_rate
    return seconds, s.cluster.dispatch_s


def _tick(c: CostClass, s: Setting) -> tuple[float, float]:
    return c.seconds, 0.0


def _gather(c: CostClass, s: Setting) -> tuple[float, float]:
    return collectives.all_gather(s.cluster, c.members, c.bytes).seconds, _start(c, s)


def _scatter(c: CostClass, s: Setting) -> tuple[float, float]:
    return collectives.reduce_scatter(s.cluster, c.members, c.bytes).seconds, _start(c, s)


def _barrier(c: CostClass, s: Setting) -> tuple[float, float]:
    return collectives.barrier(s.cluster, c.members), _start(c, s)


def _start(c: CostClass, s: Setting) -> float:
    """The host has as much to do as with a message: noticing that a bucket is full, and starting its sum."""
    return s.cluster.dispatch_s + collectives.starting(s.cluster, c.members)


def _step(c: CostClass, s: Setting) -> tuple[float, float]:
    share = c.until - c.since  # of the parameters
    longer = s.profile.update_apart if c.apart else 1.0
    run = s.profile.update_s(c.first, c.last) * share * longer
    run += (c.accumulate * EMPTYING + c.summed * share) * _accumulation(c, s)
    issue = sum(block.update_issue_s for block in s.profile.blocks[c.first : c.last]) * s.host(c.rank)
    return run * s.slower(c.rank) + s.efficiency(c.rank).step_s, issue * share * longer + s.cluster.dispatch_s


RULES: dict[Kind, Rule] = {
    Kind.F: _forward,
    Kind.R: _forward,
    Kind.B: _backward,
    Kind.I: _backward_input,
    Kind.W: _backward_weight,
    Kind.SEND_F: _send,
    Kind.RECV_F: _receive,
    Kind.SEND_B: _send,
    Kind.RECV_B: _receive,
    Kind.SEND_G: _send,
    Kind.RECV_G: _receive,
    Kind.SEND_W: _send,
    Kind.RECV_W: _receive,
    Kind.REDUCE_GRAD: _sum,
    Kind.COUNT: _sum,
    Kind.LOSS: _sum,
    Kind.NORM: _sum,
    Kind.STEP: _step,
    Kind.BARRIER: _barrier,
    Kind.SCATTER_GRAD: _scatter,
    Kind.GATHER_F: _gather,
    Kind.GATHER_B: _gather,
    Kind.TICK: _tick,
    Kind.NEGOTIATE: _sum,
    Kind.LOAD: _load,
    Kind.SEND_INPUT: _send,
    Kind.RECV_INPUT: _receive,
    Kind.OFFLOAD: _load,
    Kind.FETCH: _load,
}


def inside(program: Program, setting: Setting) -> NDArray[np.float64]:
    """Of every operation of a program, the seconds in which ranks that share blocks exchange something inside it."""
    if program.slicers == 1:
        return np.zeros(len(program))
    return np.asarray(np.array(_prices(program, setting), dtype=np.float64)[:, 2][program.cost])


def costs(program: Program, setting: Setting) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(run, issue) seconds of every operation of a program."""
    run, issue, _ = priced(program, setting)
    return run, issue


def priced(program: Program, setting: Setting) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """The same, and those `inside`: all that a program takes, each class looked up once."""
    table = np.array(_prices(program, setting), dtype=np.float64).reshape(-1, 3)
    spoken = table[:, 2][program.cost] if program.slicers > 1 else np.zeros(len(program))
    if backend(setting.cluster.backend).host_computes:
        # The host is the device: it cannot prepare an operation while it computes that same one.
        compute = np.array([SPECS[c.kind].lane is Lane.COMPUTE for c in program.classes], dtype=bool)
        table[compute, :2] = np.column_stack([table[compute, :2].sum(axis=1), np.zeros(compute.sum())])
    return table[program.cost, 0], table[program.cost, 1], spoken


def _prices(program: Program, setting: Setting) -> list[Price]:
    """Of every class of a program."""
    prices, at_hand = setting.prices, setting.at_hand
    if len(at_hand) >= MOST_PRICES or len(prices) >= MOST_PRICES:
        for each in (prices, at_hand, setting.passes):
            each.clear()
    known = list(map(at_hand.get, map(id, program.classes)))
    found = [hit[1] for hit in known if hit is not None]
    if len(found) == len(known):
        return found
    found = []
    for c, hit in zip(program.classes, known, strict=True):
        if hit is None:
            price = prices.get(c)
            if price is None:
                price = prices[c] = (*RULES[c.kind](c, setting), talking(c, setting) if c.inside else 0.0)
            at_hand[id(c)] = c, price
            found.append(price)
        else:
            found.append(hit[1])
    return found
