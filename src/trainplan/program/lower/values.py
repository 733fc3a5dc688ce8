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

from trainplan.program.lower.activations import activations, carried_apart, recomputed_activations
from trainplan.program.lower.buckets import held_by_stage
from trainplan.program.lower.decided import decided
from trainplan.program.lower.found import Found
from trainplan.program.lower.gradients import gradients, updates
from trainplan.program.lower.ledger import Ledger, Values
from trainplan.program.lower.loads import inputs
from trainplan.program.lower.messages import messages
from trainplan.program.lower.passes import FINAL_FORWARD, FIRST_BACK, FIRST_FORWARD
from trainplan.program.lower.phases import phases_of
from trainplan.program.lower.rows import Entries
from trainplan.program.lower.served import served_states
from trainplan.program.lower.shared_out import Shared, gathered, in_stream, scattered, shares
from trainplan.program.ops import Kind, Value
from trainplan.program.program import Ints, nonzero


def values(found: Found, lists: Entries, ops: Ints, payload: Ints) -> Values:
    """The values of a program whose operations are `found`, and are those of `lists` by `ops`; `payload` is that of
    messages and collectives."""
    ledger = Ledger()
    layout = found.layout
    homes = found.homes()  # stage, place
    _states(ledger, found)
    inputs(ledger, found)
    for chosen, put in ((~found.recomputed, activations), (found.recomputed, recomputed_activations)):
        if chosen.all():
            put(ledger, found, homes)
        elif chosen.any():
            put(ledger, found.only(chosen), homes[:, chosen])
    if layout.plan.slices and layout.recomputes:
        carried_apart(ledger, found, homes)
    if any(layout.units):
        shared = Shared(found, homes)
        gathered(ledger, shared)
        if not layout.backend.host_computes:  # which comes to it by itself
            in_stream(ledger, lists, ops)
        scattered(ledger, shared)
    gradients(ledger, found)
    if layout.decides:
        decided(ledger, found)
    updates(ledger, found)
    _counts(ledger, found)
    messages(ledger, found, homes, payload)
    if layout.in_phases:
        _barriers(ledger, found, homes)
    return ledger.close(len(payload))


def _states(ledger: Ledger, found: Found) -> None:
    """What is there before the first step, but for the batch."""
    profile, layout = found.layout.profile, found.layout
    holdings = layout.holdings
    never = np.full(len(holdings), -1, dtype=np.int64)
    stage, _, rank = layout.held
    own, stepped, buffers = (column[stage] for column in held_by_stage(profile, layout.plan.bounds))
    if layout.plan.zero:
        own, stepped = shares(layout, own, stepped)
    held = np.round(stepped * profile.state_bytes_per_parameter).astype(np.int64)
    if layout.service is not None:
        held *= np.array([layout.steps_at(h.rank) for h in holdings])
    for kind, sizes in ((Value.WEIGHTS, own), (Value.OPTIMIZER, held), (Value.BUFFERS, buffers)):
        ledger.add(kind, sizes, rank, never, never)
    if layout.service is not None:
        served_states(ledger, layout, layout.service)


def _counts(ledger: Ledger, found: Found) -> None:
    """What the copies of the last stage share: the count before its first backward pass, the loss at the end."""
    layout = found.layout
    final = layout.stages[-1]
    stage, _, rank = layout.held
    copies = nonzero(stage == final)
    home = np.repeat(rank[copies][:, None], found.steps, axis=1)
    if layout.counts:
        count = np.repeat(found.shared(Kind.COUNT, [final]), len(copies), axis=0)
        first = found.earliest(FIRST_BACK)[copies]
        ledger.add(Value.TOKEN, 0, home, count, first, (first,))
    if layout.sums_loss:
        loss = np.repeat(found.shared(Kind.LOSS, [final]), len(copies), axis=0)
        ledger.add(Value.TOKEN, 0, home, found.latest(FINAL_FORWARD)[copies], loss, (loss,))
        # A step gives its loss to whoever trains, who cannot start the next one before that.
        first = found.earliest(FIRST_FORWARD)[copies]
        if layout.crosses and layout.stepping[final]:  # which begins with the steps that the one before has left to it
            block = next(iter(layout.stepping[final]))
            step = found.once(Kind.STEP, [layout.holdings[copy] for copy in copies], block)
            ledger.add(Value.TOKEN, 0, home, loss, step, (step,))
        ledger.add(Value.TOKEN, 0, home[:, :-1], loss[:, :-1], first[:, 1:], (first[:, 1:],))


def _barriers(ledger: Ledger, found: Found, homes: Ints) -> None:
    """A barrier waits for what its ranks did in the phase that it ends. Where hosts wait for that themselves, they come
    to the barrier only then; where they go ahead, it reads what was done. A message is over when it was received."""
    layout, phases = found.layout, phases_of(found.layout)
    step = np.arange(found.places) // layout.plan.micro % found.steps

    def ends(ops: Ints, rank: Ints, phase: Ints) -> None:
        barrier = found.barriers[found.replica, step, phase]
        ledger.add(Value.TOKEN, 0, rank, ops, barrier, (barrier,))

    every, micro = np.array(layout.stages)[:, None], found.piece
    if not layout.backend.host_computes:
        ends(found.ops(Kind.F, layout.stages), homes, phases.forward(every, micro))
        ends(found.backward(layout.stages, final=True), homes, phases.backward(every, micro))
    if not layout.backend.receives_wait:
        there = [e for e in layout.edges if layout.is_message(e, 0)]
        back = [e for e in there if e.gradients]
        source, target = [e.source for e in there], [e.target for e in there]
        phase = phases.activation(np.array(target)[:, None], micro)
        ends(found.ops(Kind.RECV_F, target, source), homes[target], phase)
        source, target = [e.source for e in back], [e.target for e in back]
        phase = phases.gradient(np.array(target)[:, None], micro)
        ends(found.ops(Kind.RECV_B, source, target), homes[source], phase)
