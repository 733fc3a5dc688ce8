"""Measuring a model that does not fit the device: one block after the other, each there only while it is measured.

For every micro-batch size the tensors between blocks are kept, as a pipeline would keep them between stages; weights
are made up, because how long a block takes does not depend on them. The gradients that its backward starts from are
made up too. Sizes take turns and the reference kernel runs between any two passes, which also keeps the caches from
being warmer than they are in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from trainplan.profile.capture.stage import Stage
from trainplan.profile.in_chain import note_arrivals
from trainplan.profile.memory import Saved, watch
from trainplan.profile.once_more import time_once_more
from trainplan.profile.subject import BlockBytes, Subject, drop_gradients
from trainplan.profile.timing import Spent
from trainplan.profile.update import time_updates
from trainplan.profile.walk import Walk


def measure_one_by_one(
    subject: Subject,
    buffers: dict[str, Tensor],
    sizes: Iterable[int],
    repeats: int,
    seconds: float,
    progress: Callable[[str, float], None],
) -> None:
    """Measure all blocks for these sizes, each at least `repeats` times; more while its share of `seconds` lasts."""
    walks = {size: subject.walk(size) for size in sizes}
    crossings = {crossing.name: crossing for crossing in subject.captured.crossings}
    saved_by: dict[str, set[int]] = {name: set() for name in crossings}
    for index in subject.blocks:
        progress(f"block {subject.captured.blocks[index].name}", index / len(subject.blocks))
        stage = subject.stage(index, index + 1, made_up(subject, index, buffers))
        for size, walk in walks.items():
            _survey(subject, stage, walk, index, size, saved_by)
        deadline = subject.clock.elapsed() + seconds / len(subject.blocks)
        for turn in range(10 * repeats):
            if turn >= repeats and subject.clock.elapsed() > deadline:
                break
            for size, walk in walks.items():
                _time(subject, stage, walk, index, size)
        for _ in range(3):
            middle = sorted(walks)[len(walks) // 2]
            walk = _ready_to_go_back(walks[middle], stage, index)
            note_arrivals(subject, stage, index, middle, lambda w=walk, i=index: w.backward(i))  # type: ignore[misc]
            drop_gradients(stage)
            time_once_more(subject, stage, walk, index, middle)
        time_updates(subject, stage, index)
        for walk in walks.values():
            walk.leave(index)
    subject.saved_by = {name: tuple(sorted(blocks)) for name, blocks in saved_by.items() if blocks}


def made_up(subject: Subject, index: int, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values for one block: the model's own buffers, and weights that keep numbers in a reasonable range."""
    generator = torch.Generator().manual_seed(index)
    values: dict[str, Tensor] = {}
    for name in subject.captured.blocks[index].holds:
        item = subject.captured.exported.held[name]
        if item.kind != "parameter":
            values[name] = buffers[name].detach().clone()
        else:
            value = torch.empty(item.shape, dtype=item.dtype).normal_(std=0.02, generator=generator)
            values[name] = nn.Parameter(value, item.trainable)
    return values


def _survey(subject: Subject, stage: Stage, walk: Walk, index: int, size: int, saved_by: dict[str, set[int]]) -> None:
    saved = Saved(subject.apart(stage, size))
    for name in subject.captured.blocks[index].reads:
        saved.crossing(name, walk.crossings[name])
    with saved.block(index, lambda: walk.graphs[index].made):
        walk.forward(stage, index)
    subject.bytes[size, index] = found = BlockBytes(saved=saved.inside[index])
    for name, blocks in saved.by.items():
        saved_by[name] |= blocks
    walk.invent_gradients(index)
    walk.backward(index)
    walk.forget(index)
    with watch(subject.device) as seen:  # with gradients to add to, as in `in_chain`
        with seen.part("forward"):
            walk.forward(stage, index)
        walk.invent_gradients(index)
        with seen.part("backward"):
            walk.backward(index)
    drop_gradients(stage)
    there, back = seen.levels["forward"], seen.levels["backward"]
    found.forward_workspace = there.peak - max(there.end, there.start)
    found.backward_workspace = max(0, back.peak - back.start - subject.read_bytes(index, size))


def _ready_to_go_back(walk: Walk, stage: Stage, index: int) -> Walk:
    walk.forward(stage, index)
    walk.invent_gradients(index)
    return walk


def _time(subject: Subject, stage: Stage, walk: Walk, index: int, size: int) -> None:
    """Forward and backward, and both again with gradients to add to."""
    note, clock = subject.readings.note, subject.clock
    passes: list[float] = []
    for again in (False, True):
        subject.look()
        note(("forward", size, index), clock.time(("forward", size, index), lambda: walk.forward(stage, index)))
        subject.look()
        walk.invent_gradients(index)
        back = clock.time(("backward", size, index), lambda: walk.backward(index))
        passes.append(back.run_s)
        if not again:
            note(("backward", size, index), back)
    note(("added", index), Spent(passes[1] - passes[0], 0.0))
    subject.look()
    drop_gradients(stage)
