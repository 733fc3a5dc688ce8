"""Memory: what every operation makes, reads and frees.

For a micro-batch on a stage, without and with recomputation:

    RECV_F ─ in ─┬─ F ─ out ─ SEND_F             RECV_F ─ in ─┬─ F ─ out ─ SEND_F
                 │  └─ saved ─┐                               │  └─ inputs of blocks ─ R ─ saved ─┐
                 └────────────┴─ B ─ gout ─ SEND_B            └───────────────────────────────────┴─ B ─ gout ─ SEND_B
    RECV_B ─ gin ─────────────┘                  RECV_B ─ gin ────────────────────────────────────┘

Weights, optimizer state, running statistics and the batch are there from the start. Gradients are there from the start
where buckets keep them, and otherwise from the first backward pass of a step to its STEP.

What holds for every stage (or edge, block, bucket) is said once, of arrays with a row for each of them and a column
for each micro-batch (`Found`): of passes in `activations.py`, of weights in `gradients.py`, of what crosses stages in
`messages.py`.
"""

from __future__ import annotations

import numpy as np

from trainplan.program.lower.activations import activations, recomputed_activations
from trainplan.program.lower.found import Found
from trainplan.program.lower.gradients import gradients, updates
from trainplan.program.lower.ledger import Ledger, Values
from trainplan.program.lower.messages import messages
from trainplan.program.ops import Kind, Value
from trainplan.program.program import Ints


def values(found: Found, ops: int, payload: Ints) -> Values:
    """The values of a program whose operations are `found`; `payload` is that of messages and collectives."""
    ledger = Ledger()
    layout = found.layout
    ranks = np.array([[layout.local(r, s) for r in layout.replicas] for s in range(layout.plan.pp)])  # stage, replica
    homes = ranks[:, found.replica]  # stage, place
    _states(ledger, found, ranks)
    (recomputed_activations if layout.recomputes else activations)(ledger, found, homes)
    gradients(ledger, found, ranks)
    updates(ledger, found, ranks)
    _counts(ledger, found, ranks)
    messages(ledger, found, homes, payload)
    return ledger.close(ops)


def _states(ledger: Ledger, found: Found, ranks: Ints) -> None:
    """What is there before the first step. Every rank gets the whole batch of its replica, inputs and targets."""
    profile, layout = found.layout.profile, found.layout
    never = np.full(ranks.shape, -1, dtype=np.int64)
    weights, states, buffers = [], [], []
    for (first, last), parameters in zip(layout.plan.bounds, layout.parameters, strict=True):
        weights.append(sum(p.bytes for p in parameters))
        states.append(round(sum(p.count for p in parameters if p.trainable) * profile.state_bytes_per_parameter))
        buffers.append(sum(block.buffer_bytes for block in profile.blocks[first:last]))
    for kind, sizes in ((Value.WEIGHTS, weights), (Value.OPTIMIZER, states), (Value.BUFFERS, buffers)):
        ledger.add(kind, np.array(sizes)[:, None], ranks, never, never)
    local_batch = np.array([sum(sizes) for sizes in layout.sizes])[list(layout.replicas)]
    inputs = np.round(profile.input_bytes_per_sample * local_batch).astype(np.int64)
    ledger.add(Value.INPUT, inputs[None, :], ranks, never, never)


def _counts(ledger: Ledger, found: Found, ranks: Ints) -> None:
    """What the last stage shares with its replicas: the count before its first backward pass, the loss at the end."""
    layout = found.layout
    final = [layout.plan.pp - 1]
    home = np.repeat(ranks[final], found.steps, axis=1)
    if layout.counts:
        count = found.shared(Kind.COUNT, final)
        first = found.passes(found.backward(final, final=False)).min(axis=2)
        ledger.add(Value.TOKEN, 0, home, count, first, (first,))
    if layout.plan.dp > 1:
        loss, forwards = found.shared(Kind.LOSS, final), found.passes(found.ops(Kind.F, final))
        ledger.add(Value.TOKEN, 0, home, forwards.max(axis=2), loss, (loss,))
        # A step gives its loss to whoever trains, who cannot start the next one before that.
        rank, made, then = (
            column.reshape(-1, found.steps) for column in (home, loss, forwards.min(axis=2))
        )  # a row for each replica
        ledger.add(Value.TOKEN, 0, rank[:, :-1], made[:, :-1], then[:, 1:], (then[:, 1:],))
