"""The instance that a model on a cluster is: what a profile and a cluster know, in the few numbers of the papers.

    seconds, forward, again    of a micro-batch of so many samples, host and device together as the clock counts them
    weights, states     parameters; gradients, optimizer state and running statistics
    saved, inputs       what a micro-batch in flight leaves in a block; what it leaves where blocks are recomputed
    boundary            bytes of all tensors that cross a cut, one way
    memory              what a device has, less the margin, its own libraries and the batch
    speeds              of a device, in those of the device that the profile is of
    levels, rates       devices of a node, nodes of a cluster; pair by pair where nodes or links differ

A partitioner adds blocks up, and bytes do not quite add up (a tensor that several blocks read counts once in a stage),
so these are estimates for choosing cuts. What a plan takes and whether it fits is for `predict` to say. Latencies and
what shares a network card are not in the papers, and not here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trainplan.cluster.cluster import Cluster
from trainplan.predict.predict import MEMORY_MARGIN
from trainplan.predict.speeds import speeds
from trainplan.program.lower.backend import backend
from trainplan.solve.partition.instance import Floats, Instance, instance, on
from trainplan.solve.partition.ranges import Tables


def problem(
    tables: Tables, cluster: Cluster, ranks: Sequence[int], samples: int, micro: int, recompute: str = "none"
) -> Instance:
    """The blocks of a profile at one size of micro-batch, for the devices of these ranks, in this order."""
    chain = _chain(tables, cluster, samples, recompute)
    batch_bytes = tables.profile.input_bytes_per_sample * samples * micro
    devices = [cluster.device(rank) for rank in ranks]
    memory = [max(d.memory_bytes * (1 - MEMORY_MARGIN) - d.context_bytes - batch_bytes, 1.0) for d in devices]
    pace = speeds(tables.profile, cluster)
    levels = _levels(cluster, ranks)
    rates = [] if levels else _rates(cluster, ranks)
    slowest = min((rate for row in rates for rate in row), default=float("inf"))
    return on(
        chain, len(ranks), levels=levels or [(len(ranks), slowest)], speeds=[pace[rank] for rank in ranks],
        memory=memory, rates=rates, micro=micro,
    )  # fmt: skip


def recomputed(given: Instance) -> Instance:
    """The same chain with every block recomputed: slower, and lighter in flight."""
    longer = tuple(t + more for t, more in zip(given.seconds, given.again, strict=True))
    return replace(given, seconds=longer, saved=given.inputs)


def plain(given: Instance) -> Instance:
    """The same chain, where recomputing saves nothing: a planner that may choose never does."""
    return replace(given, inputs=given.saved)


def _chain(tables: Tables, cluster: Cluster, samples: int, recompute: str) -> Instance:
    profile, joint = tables.profile, backend(cluster.backend).host_computes
    blocks = len(profile.blocks)
    # All devices of a node compute at once, and all hosts issue.
    slowed, hosted = (table[-1] if table else 1.0 for table in (cluster.contention, cluster.hosts))

    def each(quantity: str) -> Floats:
        return np.array([profile.total(quantity, b, b + 1, samples) for b in range(blocks)])

    def pace(way: str) -> Floats:
        run, issue = each(f"{way}_s") * slowed, each(f"{way}_issue_s") * hosted
        return run + issue if joint else np.maximum(run, issue)

    forward, backward = pace("forward"), pace("backward")
    weights, states = np.zeros(blocks), np.array([float(block.buffer_bytes) for block in profile.blocks])
    for p in profile.parameters:
        for block in p.blocks:  # tied weights are in every stage that uses them
            weights[block] += p.bytes
            states[block] += (p.bytes + p.count * profile.state_bytes_per_parameter) * p.trainable
    boundary, made, read = np.zeros(blocks), np.zeros(blocks), np.zeros(blocks)
    for c in profile.crossings:
        size = c.bytes(samples)
        boundary[c.producer : c.consumers[-1]] += size
        made[c.producer] += size
        read[list(c.consumers)] += size
    given = instance(
        forward + backward, weights, boundary[:-1], each("saved_bytes") + made, forward, read, states, pace("recompute")
    )  # fmt: skip
    return recomputed(given) if recompute != "none" else given


def _levels(cluster: Cluster, ranks: Sequence[int]) -> list[tuple[int, float]]:
    """Devices of a node and nodes, from the lowest; none where nodes, or links in one, differ."""
    by_node = [(node, list(group)) for node, group in itertools.groupby(ranks, key=cluster.node_of)]
    nodes = [cluster.nodes[node] for node, _ in by_node]
    first, count = nodes[0], len(by_node[0][1])
    alike = all((n.inside, n.network, n.pairs) == (first.inside, first.network, ()) for n in nodes)
    even = all(len(group) == count for _, group in by_node) and len({node for node, _ in by_node}) == len(by_node)
    if not (alike and even):
        return []
    levels = [(count, first.inside.rate)]
    if len(nodes) > 1:
        levels.append((len(nodes), cluster.link(ranks[0], ranks[count]).rate))
    return levels


def _rates(cluster: Cluster, ranks: Sequence[int]) -> list[list[float]]:
    """Pair by pair; a device to itself is as fast as can be."""
    return [[cluster.link(a, b).rate if a != b else float("inf") for b in ranks] for a in ranks]
