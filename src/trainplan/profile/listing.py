"""The operators of one training step as a profiler shows them: the list, and the same list from a profiler.

`listed` traces a model on fake tensors, for a GPU too that is not here; `profiled` runs it where it is. What both call
an operator is what autograd calls: `addmm`, not the `linear` that it was written as, nor the kernels that it consists
of. Views, and memory that is only reserved, are no operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainplan.profile.attention import Gpu
from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.loss import without_values
from trainplan.profile.capture.materialise import Skeleton
from trainplan.profile.capture.tensors import values_of
from trainplan.profile.on_gpu import OnGpu, at_once
from trainplan.profile.operators import Listed, Recorder
from trainplan.workload.batch import each_tensor
from trainplan.workload.modes import in_training
from trainplan.workload.optimizer import make
from trainplan.workload.workload import Batch, Workload

# What a step may be run in: (the type of the weights, the type of autocast).
PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "fp32": (None, None),
    "tf32": (None, None),
    "bf16": (None, torch.bfloat16),
    "fp16": (None, torch.float16),
    "pure-bf16": (torch.bfloat16, None),
}


def listed(
    workload: Workload, samples: int, gpu: Gpu | None = None, precision: str = "fp32"
) -> dict[str, list[Listed]]:
    """The operators of the forward pass, the backward pass and the optimizer's step, on such a GPU; None: on a CPU."""
    stored, lower = PRECISIONS[precision]
    model = Skeleton(workload.build).model
    captured = capture(model.to(stored) if stored else model, in_type(workload.inputs(2, 0), stored), workload.loss)
    given = in_type(workload.inputs(samples, 0), stored)  # with values, which the user's function may look at
    parts: dict[str, list[Listed]] = {}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
        values: dict[str, Tensor] = {}
        for name, item in captured.exported.held.items():
            value = torch.empty(item.shape, dtype=item.dtype)
            values[name] = nn.Parameter(value, item.trainable) if item.kind == "parameter" else value
        stage = captured.stage(0, len(captured.blocks)).bind(values, "cpu")
        batch = each_tensor(given, mode.from_tensor)
        valued = without_values(workload.loss, given.targets)
        recorder = Recorder(gpu is not None, lists=True, like=gpu)
        with OnGpu(lower, gpu) if gpu else nullcontext(), recorder:
            _, output = stage({}, batch)
            loss = valued.function(output, batch.targets)
            parts["forward"], recorder.listed = recorder.listed or [], []
            loss.backward()
            parts["backward"] = recorder.listed or []
        trained = {name: p for name, p in stage.named_parameters() if p.grad is not None}
        optimizer, _ = make(workload.optimizer, captured.stand_ins(), trained)
        optimizer = at_once(optimizer) if gpu else optimizer
        with torch.no_grad():
            optimizer.step()  # the first step makes the state
            recorder.listed = []
            with recorder:
                optimizer.step()
            parts["update"] = recorder.listed
    return {part: [op for op in ops if op.name not in VIEWS] for part, ops in parts.items()}


def in_type(batch: Batch, stored: torch.dtype | None) -> Batch:
    """A batch whose numbers are of the type of the weights."""
    if stored is None:
        return batch
    return each_tensor(batch, lambda tensor: tensor.to(stored) if tensor.dtype is torch.float32 else tensor)


# -- a profiler -------------------------------------------------------------------------------------------------------


def profiled(
    workload: Workload, samples: int, device: str, precision: str = "fp32"
) -> dict[str, list[tuple[Listed, int]]]:
    """The same from a step that is run, each operator with the kernels that it started on a GPU.

    What was captured is run, as the engine does. (A model may do other things while it is captured: those of
    transformers then make masks that they leave out in eager mode.)
    """
    stored, lower = PRECISIONS[precision]
    model = in_training(workload.build()).to(device=device, dtype=stored)
    batch = each_tensor(in_type(workload.inputs(max(2, samples), 0), stored), lambda tensor: tensor.to(device))
    captured = capture(model, batch, workload.loss)
    stage = captured.stage(0, len(captured.blocks)).bind(values_of(model), device)
    optimizer = workload.optimizer(list(stage.named_parameters()))
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.startswith("cuda"):
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    cast = torch.autocast(torch.device(device).type, dtype=lower) if lower is not None else nullcontext()

    def step() -> None:
        with torch.profiler.record_function("part:forward"), cast:
            loss = workload.loss.function(stage({}, batch)[1], batch.targets)
        with torch.profiler.record_function("part:backward"):
            loss.backward()
        with torch.profiler.record_function("part:update"):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # makes the optimizer's state, and chooses algorithms
    details = torch._C._profiler._ExperimentalConfig(capture_overload_names=True)
    with torch.profiler.profile(
        activities=kinds, record_shapes=True, acc_events=True, experimental_config=details
    ) as profiler:
        step()
    kind = torch.device(device).type.upper()
    return {part: list(_operators(profiler, part, kind)) for part in ("forward", "backward", "update")}


VIEWS = {
    "detach", "alias", "view", "_unsafe_view", "as_strided", "t", "transpose", "permute", "expand", "slice", "select",
    "unsqueeze", "squeeze", "split", "split_with_sizes", "unbind", "chunk", "narrow", "diagonal", "_reshape_alias",
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "lift_fresh",
    "detach_", "unfold", "movedim", "view_as_real", "view_as_complex", "is_same_size", "as_strided_", "scalar_tensor",
}  # fmt: skip


def _operators(profiler: torch.profiler.profile, part: str, kind: str) -> Iterator[tuple[Listed, int]]:
    """The operators of a part, in the order in which they began, each the outermost that is not composed."""
    events = sorted(profiler.events() or [], key=lambda event: event.time_range.start)
    begin, end = next((e.time_range.start, e.time_range.end) for e in events if e.name == f"part:{part}")
    until: dict[int, float] = {}  # thread → the end of the operator that it is in
    for event in events:
        start = event.time_range.start
        if not event.name.startswith("aten::") or not begin <= start < end or start < until.get(event.thread, 0.0):
            continue
        if _is_composed(event.name, event.overload_name, kind) or _is_cast(event):
            continue
        until[event.thread] = event.time_range.end
        name = event.name.removeprefix("aten::")
        if name in VIEWS:
            continue
        if part == "backward" and name == "add_":  # where gradients meet: in place, if nobody else holds one of them
            name = "add"
        shapes = tuple(tuple(shape) for shape in event.input_shapes or () if shape)
        yield Listed(name, shapes, ""), len(_kernels(event))


def _kernels(event: Any) -> list[Any]:
    return [*event.kernels, *(kernel for child in event.cpu_children for kernel in _kernels(child))]


def _is_composed(name: str, overload: str, kind: str) -> bool:
    """Whether autograd sees what an operator is made of, and not itself: there is no kernel of it for the device."""
    full = f"{name}.{overload}" if overload else name
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    try:
        return bool(known(full, "CompositeImplicitAutograd") and not known(full, kind))
    except RuntimeError:  # torch does not know it
        return False


def _is_cast(event: Any) -> bool:
    """Whether autocast casts what an operator is given, and calls it again: casts and operator are its children."""
    names = [child.name for child in event.cpu_children]
    return event.name in names and "aten::to" in names
