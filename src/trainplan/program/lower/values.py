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
from trainplan.program.lower.found import NEVER, Found
from trainplan.program.lower.gradients import gradients, updates
from trainplan.program.lower.ledger import Ledger, Values
from trainplan.program.lower.messages import messages
from trainplan.program.ops import Kind, Value
from trainplan.program.program import Ints


def values(found: Found, ops: int, payload: Ints) -> Values:
    """The values of a program whose operations are `found`; `payload` is that of messages and collectives."""
    ledger = Ledger()
    layout = found.layout
    homes = found.homes()  # stage, place
    _states(ledger, found)
    (recomputed_activations if layout.recomputes else activations)(ledger, found, homes)
    gradients(ledger, found)
    updates(ledger, found)
    _counts(ledger, found)
    messages(ledger, found, homes, payload)
    return ledger.close(ops)


def _states(ledger: Ledger, found: Found) -> None:
    """What is there before the first step. Every rank gets the whole batch of its replica, inputs and targets."""
    profile, layout = found.layout.profile, found.layout
    holdings = layout.holdings
    never = np.full(len(holdings), -1, dtype=np.int64)
    weights, states, buffers = [], [], []
    for (first, last), parameters in zip(layout.plan.bounds, layout.parameters, strict=True):
        weights.append(sum(p.bytes for p in parameters))
        states.append(round(sum(p.count for p in parameters if p.trainable) * profile.state_bytes_per_parameter))
        buffers.append(sum(block.buffer_bytes for block in profile.blocks[first:last]))
    stage, rank = (np.array([getattr(h, name) for h in holdings]) for name in ("stage", "rank"))
    for kind, sizes in ((Value.WEIGHTS, weights), (Value.OPTIMIZER, states), (Value.BUFFERS, buffers)):
        ledger.add(kind, np.array(sizes)[stage], rank, never, never)
    batches = {h.rank: sum(layout.sizes[h.replica]) for h in holdings}
    inputs = np.round(profile.input_bytes_per_sample * np.array(list(batches.values()))).astype(np.int64)
    ledger.add(Value.INPUT, inputs, np.array(list(batches)), never[: len(batches)], never[: len(batches)])


def _counts(ledger: Ledger, found: Found) -> None:
    """What the copies of the last stage share: the count before its first backward pass, the loss at the end."""
    layout = found.layout
    final = layout.stages[-1]
    holdings = [h for h in layout.holdings if h.stage == final]
    home = np.array([[h.rank] * found.steps for h in holdings])
    if layout.counts:
        count = np.repeat(found.shared(Kind.COUNT, [final]), len(holdings), axis=0)
        first = found.own(found.backward([final], final=False), holdings, empty=NEVER).min(axis=2)
        ledger.add(Value.TOKEN, 0, home, count, first, (first,))
    if layout.copies[final] > 1:
        loss = np.repeat(found.shared(Kind.LOSS, [final]), len(holdings), axis=0)
        forwards = found.ops(Kind.F, [final])
        ledger.add(Value.TOKEN, 0, home, found.own(forwards, holdings).max(axis=2), loss, (loss,))
        # A step gives its loss to whoever trains, who cannot start the next one before that.
        first = found.own(forwards, holdings, empty=NEVER).min(axis=2)
        ledger.add(Value.TOKEN, 0, home[:, :-1], loss[:, :-1], first[:, 1:], (first[:, 1:],))
