"""The part of a profile that needs no clock: blocks, crossings, and parameters in the order their gradients arrive.

The engine lowers a plan with it, and measuring or estimating adds seconds and bytes to it; so both see the same blocks,
the same messages and the same gradient buckets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainplan.errors import ModelError
from trainplan.profile.arithmetic import stored_in
from trainplan.profile.capture.branches import branch_bytes
from trainplan.profile.capture.captured import Captured
from trainplan.profile.capture.loss import checked, tried
from trainplan.profile.capture.stage import Stage, value_at
from trainplan.profile.capture.tokens import tokens_of
from trainplan.profile.profile import Block, Crossing, Input, Parameter, Profile
from trainplan.profile.provenance import Provenance
from trainplan.profile.untraceable import traceable
from trainplan.workload.batch import each_tensor, per_sample, tensors
from trainplan.workload.origin import origin
from trainplan.workload.workload import Batch, Workload


def structure(captured: Captured, workload: Workload, batch: Batch) -> Profile:
    """A profile whose times are all zero. `batch` is an example; of its values none but the loss sees any."""
    whole, carried = _tokens(captured, workload, batch)
    order, kept_by_loss = arrivals(captured, workload, batch)
    place = {name: number for number, name in enumerate(order)}
    last = len(order)
    parameters = sorted(captured.parameters, key=lambda use: place.get(use.name, last))
    nothing, branches = (0.0,), branch_bytes(captured)
    of = origin(workload.name)
    return Profile(
        workload=workload.name,
        sample=workload.sample,
        tokens_per_sample=workload.tokens_per_sample,
        batch=workload.batch,
        samples_per_epoch=workload.samples_per_epoch,
        epoch_assumed=workload.epoch_assumed,
        device="none",
        kind="estimated",
        compiled=False,
        precision=stored_in(use.held.dtype for use in captured.parameters),
        optimizer="",
        state_bytes_per_parameter=0.0,
        samples=(1,),
        blocks=tuple(
            Block(
                name=block.name,
                flops=0.0,
                forward_s=nothing,
                backward_s=nothing,
                accumulate_s=0.0,
                update_s=0.0,
                forward_issue_s=nothing,
                backward_issue_s=nothing,
                update_issue_s=0.0,
                saved_bytes=nothing,
                forward_workspace_bytes=nothing,
                backward_workspace_bytes=nothing,
                buffer_bytes=sum(_bytes(use.held) for use in captured.buffers if use.blocks[0] == index),
                random=block.random,
                branch_bytes=branches[index],
                carried_bytes=carried.get(index, 0.0),
            )
            for index, block in enumerate(captured.blocks)
        ),
        crossings=tuple(
            Crossing(c.name, c.producer, c.consumers, c.bytes_per_sample, c.fixed_bytes, c.needs_grad)
            for c in captured.crossings
        ),
        parameters=tuple(
            Parameter(
                use.name,
                use.blocks,
                torch.Size(use.held.shape).numel(),
                _bytes(use.held),
                1.0,
                use.held.trainable and use.name in place,
            )
            for use in parameters
        ),
        input_bytes_per_sample=_input_bytes(batch) / batch.samples,
        provenance=Provenance(
            machine="",
            made="",
            verified=captured.verified,
            source=of.path if of else "",
            digest=of.digest if of else "",
        ),
        mean_over=workload.loss.mean_over,
        clip_norm=workload.clip_norm,
        whole_sequences=whole,
        loss_bytes=kept_by_loss / batch.samples,
        inputs=_inputs(captured, batch),
        notes=captured.notes,
    )


def _inputs(captured: Captured, batch: Batch) -> tuple[Input, ...]:
    """Every tensor of the batch, and the blocks that read it."""
    batch = each_tensor(batch, Tensor.detach)  # so that no two of its places hold the same object
    readers: dict[int, list[int]] = {}
    for item in captured.exported.inputs.values():
        blocks = [number for number, block in enumerate(captured.blocks) if item.name in block.inputs]
        readers[id(value_at(batch, item.path))] = blocks
    last = len(captured.blocks) - 1
    made = []
    for place, tensor in tensors(batch).items():
        blocks = [last] if place.startswith("targets") else readers.get(id(tensor), [])
        size = tensor.nbytes
        each, fixed = (size / batch.samples, 0) if per_sample(batch, place, tensor) else (0.0, size)
        made.append(Input(place, tuple(blocks), each, fixed))
    return tuple(made)


def _tokens(captured: Captured, workload: Workload, batch: Batch) -> tuple[str | None, dict[int, float]]:
    """Why sequences cannot be cut into slices (None: they can), and the bytes that each block carries between them."""
    try:
        return None, tokens_of(captured, workload.tokens_per_sample, workload.loss, batch).carried
    except ModelError as error:
        return error.why, {}


def arrivals(captured: Captured, workload: Workload, batch: Batch) -> tuple[list[str], int]:
    """Names of the parameters in the order in which a backward pass completes their gradients; and how many bytes the
    loss keeps for it, besides what the model returned.

    Found by a step on the meta device, which computes nothing: autograd takes the same order everywhere. The loss may
    have to be run elsewhere (`loss.tried`); all that backward through the model has of it is what gets a gradient. A
    parameter that is not in the list gets none.
    """
    if not any(use.held.trainable for use in captured.parameters):
        instead = "requires_grad_() on those that are to be trained"
        raise ModelError(f"training {workload.name}", "no parameter of it is trained: all are frozen", instead)
    stage = captured.stage(0, len(captured.blocks))
    order: list[str] = []
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        for name, parameter in stage.named_parameters()
        if parameter.requires_grad
    ]
    example = Batch(batch.samples, *_meta((batch.args, batch.kwargs)))
    with torch.enable_grad():
        output = _output(stage, example)
        reached, bytes_ = _lost(workload, output, batch.targets)
        roots = [leaf for spot, leaf in enumerate(pytree.tree_leaves(output)) if spot in reached]
        if not roots:
            why = "no gradient leads from it to a parameter that is trained"
            instead = "a loss worked out from the output with torch's operators, without detach or no_grad"
            raise ModelError(f"the loss of {workload.name}", why, instead)
        with traceable(captured, "going back"):
            torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
    for handle in handles:
        handle.remove()
    return order, bytes_


def _output(stage: Stage, example: Batch) -> Any:
    """What the model gives on the meta device; refused where that takes values."""
    place = [0]

    def before(index: int, _: object) -> None:
        place[0] = index

    try:
        return stage({}, example, before_each=before)[1]
    except (RuntimeError, NotImplementedError) as error:
        block = stage.captured.blocks[place[0]].name
        why = f"what it computes depends on the values of its data ({_first_line(error)})"
        raise ModelError(f"block {block}", why, "operators whose shapes and arguments are known without them") from None


def _lost(workload: Workload, output: Any, targets: Any) -> tuple[set[int], int]:
    """Which leaves of the output get a gradient from the loss, and the bytes that it keeps for backward besides what it
    was given."""

    def back(output: Any, targets: Any) -> tuple[set[int], int]:
        kept: dict[int, Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(id(t), t), lambda t: t):
            loss = checked(workload.loss.function(output, targets))
        given = {id(leaf) for leaf in pytree.tree_leaves((output, targets))}
        size = sum(tensor.nbytes for number, tensor in kept.items() if number not in given)
        if loss.requires_grad:
            loss.backward()
        leaves = enumerate(pytree.tree_leaves(output))
        return {spot for spot, leaf in leaves if isinstance(leaf, Tensor) and leaf.grad is not None}, size

    try:
        return tried(output, targets, back)[1]
    except ModelError:
        raise
    except Exception as error:
        why = f"it raises {_first_line(error)}; it was called with outputs that are random numbers between 0 and 1"
        instead = "mending it, if it raises with yours, too; else a loss that does not look at them"
        raise ModelError(f"the loss of {workload.name}", why, instead) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _meta(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), tree)


def _bytes(held: Any) -> int:
    return torch.Size(held.shape).numel() * held.dtype.itemsize


def _input_bytes(batch: Batch) -> int:
    leaves = pytree.tree_leaves((batch.args, batch.kwargs, batch.targets))
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
