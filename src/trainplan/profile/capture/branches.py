"""Where the paths to the weights leave the way back to the inputs.

A backward pass in two parts (`halves.py`) first goes back to the inputs, and keeps the gradient at every operator that
reads both a weight and something that came in: the second part goes on from there. So what lies between the two parts
is as large as what those operators make.
"""

from __future__ import annotations

from torch import fx

from trainplan.profile.capture.captured import Captured


def branch_bytes(captured: Captured) -> list[float]:
    """For every block the bytes a sample of the gradients that the first part of its backward keeps for the second."""
    flow, exported = captured.flow, captured.exported
    weights = {node for node, name in exported.holds.items() if exported.held[name].trainable}  # and what they become
    joins: set[fx.Node] = set()

    def comes_in(node: fx.Node) -> bool:
        return node in exported.inputs or (node in flow.facts and flow.facts[node].needs_grad)

    for node in flow.ops:  # in order, so what is made of weights alone is known when it is read
        sources = node.all_input_nodes
        if not weights.intersection(sources):
            continue
        (joins if any(comes_in(s) for s in sources if s not in weights) else weights).add(node)
    return [
        sum(shape.bytes_per_sample for node in block.nodes if node in joins and (shape := flow.shape[node]) is not None)
        for block in captured.blocks
    ]
