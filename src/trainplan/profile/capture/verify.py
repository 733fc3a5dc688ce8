"""Is the captured chain the same model? Held against eager on one batch, before anything relies on it.

Both start from the same values and the same random state. Eager runs the model in one piece; the chain runs every
block as a stage of its own, on tensors that were cut from the graph of the stage before (as if received), with
gradients handed back from stage to stage. The chain draws random numbers in the order in which eager does, so dropout
stays on and the masks are the same. Compared are the loss, the output, every gradient, and every buffer afterwards, and
what a pass writes into parameters.

Eager also runs again, twice: a model that answers the same question differently, or whose Python state does not come
to rest (`state.py`), is more than any graph of operators, and is refused.

If each block alone is right, so is every way to put blocks together to stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trainplan.errors import ModelError
from trainplan.profile.capture.captured import Captured
from trainplan.profile.capture.loss import checked
from trainplan.profile.capture.mean import Inputs, hold_to_mean
from trainplan.profile.capture.stage import Stage
from trainplan.profile.capture.state import CALLS, State, kept, python_state, settled
from trainplan.profile.capture.tensors import entries_of, put, replaced, values_of, within_parameters
from trainplan.workload.workload import Batch, Loss

# Allowed difference, as a share of the largest element of the tensor. The operators are the same; only the order in
# which gradients of a tensor with several readers are added may differ.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 5e-2}
# Gradients that are zero but for rounding (a bias before batch norm) are measured against the largest gradient of the
# model instead, times this.
FLOOR = 1e-2
SEEDS = (1, 2, 3)  # of batches that are looked at beside the one that is trained, of seed 0


def verify(
    captured: Captured, model: nn.Module, batch: Batch, loss: Loss, seed: int = 0, inputs: Inputs | None = None
) -> float:
    """Hold the captured chain against the model on one batch, and the loss to its mean, for which `inputs` makes wider
    batches; the model and the random state are left as they were.

    Returns the largest relative difference found. Raises `ModelError` with the name of the first thing that differs.
    """
    if inputs is not None:
        hold_to_one_form(captured, batch.samples, inputs)
    values = values_of(model)
    if any(value.is_meta for value in values.values()):
        raise ModelError("verify", "the model is on the meta device, so there is nothing to compare", "a real model")
    allowed = allowed_differences(captured)
    with _random_state_kept(), torch.enable_grad():
        with kept(model):
            expected = _eager_again_and_again(model, batch, loss, seed, allowed)
        found, output = _chain(captured, values, batch, loss, seed)
        with kept(model):
            hold_to_mean(output, batch, loss, inputs, run=_in_evaluation(model, values))
    worst = _compare(_unwritten(found, expected) | expected, found, allowed, _mismatch)
    captured.verified = True
    return worst


def hold_to_one_form(captured: Captured, samples: int, inputs: Inputs) -> None:
    """Refuse `inputs` whose batches differ in shape by their seed, before anything is timed: each step has its own."""
    whole = Stage(captured, 0, len(captured.blocks))
    for seed in SEEDS:
        whole.check(inputs(samples, seed))


def allowed_differences(captured: Captured) -> dict[torch.dtype, float]:
    """The allowed difference of tensors by type: a float64 model that computes in float32 inside is no better than it.

    (Some models compute their norms or rotations in float32, whatever they are given.)
    """
    made = [leaf for node in captured.flow.ops for leaf in pytree.tree_leaves(node.meta.get("val"))]
    types = {leaf.dtype for leaf in made if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point}
    return TOLERANCE if types <= {torch.float64} else TOLERANCE | {torch.float64: TOLERANCE[torch.float32]}


def run_split(
    stages: Sequence[Stage],
    batch: Batch,
    loss: Loss,
    before_block: Callable[[int], None] | None = None,
) -> tuple[Tensor, Any]:
    """Forward and backward through stages as different ranks would run them: nothing shared but what is sent.

    Gradients are added to the stages' own parameters. Returns the loss and the output.
    """
    needs_grad = {crossing.name: crossing.needs_grad for crossing in stages[0].captured.crossings}
    sent: dict[str, Tensor] = {}
    received: list[dict[str, Tensor]] = []
    made: list[dict[str, Tensor]] = []
    output: Any = None
    for stage in stages:
        inbox = {name: sent[name].detach().clone().requires_grad_(needs_grad[name]) for name in stage.reads}
        outbox, output = stage(inbox, batch, before_block)
        received.append(inbox)
        made.append(outbox)
        sent.update(outbox)
    value = loss.function(output, batch.targets)
    if value.requires_grad:
        value.backward()
    for index in reversed(range(len(stages) - 1)):
        ends, gradients = [], []
        for name, tensor in made[index].items():
            parts = [inbox[name].grad for inbox in received[index + 1 :] if name in inbox]
            present = [part for part in parts if part is not None]
            if tensor.requires_grad and present:
                ends.append(tensor)
                gradients.append(sum(present[1:], present[0]))
        if ends:
            torch.autograd.backward(ends, gradients)
    return value.detach(), output


# -- the two sides --------------------------------------------------------------------------------------------------

Result = dict[str, Tensor | None]  # "loss", "output 0", "gradient of …", "buffer …", "parameter …"
_PARAMETER = "the parameter "  # that forward wrote into


def _fresh(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters on the same memory with gradients of their own; buffers copied, because they are written."""
    return {
        name: nn.Parameter(value.detach(), value.requires_grad)
        if isinstance(value, nn.Parameter)
        else value.detach().clone()
        for name, value in values.items()
    }


@contextmanager
def _given_back(values: Mapping[str, Tensor]) -> Iterator[Result]:
    """Parameters have their values again afterwards; those that were written are given as they were left."""
    before = {name: value.detach().clone() for name, value in values.items() if isinstance(value, nn.Parameter)}
    written: Result = {}
    try:
        yield written
    finally:
        for name, value in before.items():
            now = values[name].detach()
            if not torch.equal(now, value):
                written[f"{_PARAMETER}{name} after forward"] = now.clone()
                now.copy_(value)


def _unwritten(one: Result, other: Result) -> Result:
    """The parameters that one side writes and the other does not: None, as of the other."""
    return {name: None for name in one if name.startswith(_PARAMETER) and name not in other}


def _eager_again_and_again(
    model: nn.Module, batch: Batch, loss: Loss, seed: int, allowed: Mapping[torch.dtype, float]
) -> Result:
    """What eager gives, if it gives the same again from the same values and the same random state."""
    given = values_of(model)  # once: a tensor that forward keeps from now on is its own to keep
    first, *others = [_Call(*_eager(model, given, batch, loss, seed, backward=n == 0)) for n in range(CALLS)]
    settled(model, [first.state, *(other.state for other in others)])
    lasting = {name: value for name, value in first.result.items() if not name.startswith("the grad")}
    for other in others:
        _compare(_unwritten(other.result, lasting) | lasting, other.result, allowed, _moody)
    return first.result


class _Call(NamedTuple):
    result: Result
    state: State


def _eager(
    model: nn.Module, given: dict[str, Tensor], batch: Batch, loss: Loss, seed: int, backward: bool
) -> tuple[Result, State]:
    # What forward put there in a call before, and is no part of the model as it was given: it stays what forward made.
    own = {name: tensor for name, tensor in values_of(model).items() if name not in given}
    # What lies in a parameter's memory stays there: forward may write into the parameter through it.
    values = _fresh(given) | {name: given[name].detach() for name in within_parameters(given)}
    with replaced(model, values | own), _given_back(given) as written:
        torch.manual_seed(seed)
        try:
            output = model(*_own(batch.args), **_own(batch.kwargs))
            value = loss.function(output, batch.targets)
        except Exception as error:
            why = f"it raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            instead = "model(*batch.args) and loss(output, batch.targets) by themselves, as eager would run them"
            raise ModelError(f"your model and its loss, on a batch of {batch.samples}", why, instead) from error
        checked(value)
        if backward and value.requires_grad:
            value.backward()
        after = {name: tensor for name, tensor in values_of(model).items() if name in given}  # may have been replaced
        found, state = _result(value, output, values, after), python_state(model)
        made = [entry for entry in entries_of(model) if entry[0] not in given]
    for _name, kind, owner, key, tensor in made:
        put(kind, owner, key, tensor)
    return found | written, state


def _chain(captured: Captured, values: dict[str, Tensor], batch: Batch, loss: Loss, seed: int) -> tuple[Result, Any]:
    fresh = _fresh(values)
    stages = [captured.stage(index, index + 1).bind(fresh) for index in range(len(captured.blocks))]
    after = dict(fresh)
    torch.manual_seed(seed)
    own = Batch(batch.samples, _own(batch.args), _own(batch.kwargs), batch.targets)
    with _given_back(values) as written:
        value, output = run_split(stages, own, loss)
    return _result(value, output, fresh, after) | written, output


def _in_evaluation(model: nn.Module, values: dict[str, Tensor]) -> Callable[[Batch], Any]:
    """The model's output of some samples, which depends on no others: in training, batch norm's would."""

    def run(batch: Batch) -> Any:
        with replaced(model.eval(), _fresh(values)), torch.no_grad():
            return model(*_own(batch.args), **_own(batch.kwargs))

    return run


def _own(arguments: Any) -> Any:
    """Arguments that forward may write into."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.clone(), arguments)


def _result(value: Tensor, output: Any, parameters: dict[str, Tensor], after: dict[str, Tensor]) -> Result:
    result: Result = {"the loss": value.detach()}
    for place, leaf in named_leaves(output):
        result[f"output{place}"] = leaf.detach()
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.Parameter):
            result[f"the gradient of {name}"] = parameter.grad
    for name, tensor in after.items():
        if not isinstance(tensor, nn.Parameter):
            result[f"the buffer {name}"] = tensor.detach()
    return result


def named_leaves(output: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of an output with their places: `.logits`, `[0]`.

    By key where there are keys, because a transformers ModelOutput leaves out what is None.
    """
    if isinstance(output, Tensor):
        yield place, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from named_leaves(value, f"{place}.{key}")
    else:
        parts = output if isinstance(output, list | tuple) else pytree.tree_leaves(output)
        for index, value in enumerate(parts):
            if value is not output:
                yield from named_leaves(value, f"{place}[{index}]")


def _compare(
    expected: Result,
    found: Result,
    allowed: Mapping[torch.dtype, float],
    refusal: Callable[[str, str], ModelError],
) -> float:
    gradients = [g.abs().max() for name, g in expected.items() if name.startswith("the grad") and g is not None]
    largest = float(max((g for g in gradients if g.numel()), default=0.0))
    worst = 0.0
    for name, want in expected.items():
        have = found.get(name)
        if name.startswith("output") and have is None:
            continue  # a part of the output that the loss does not read, and that was not kept
        if (want is None) != (have is None):
            # A parameter that eager gives a gradient of zeros and the chain none (or the other way) is the same.
            present = want if want is not None else have
            if present is not None and present.abs().max() > 0:
                raise refusal(name, "it is there on one side only")
            continue
        if want is None or have is None or want.numel() == 0:
            continue
        if want.shape != have.shape or want.dtype != have.dtype:
            raise refusal(name, f"{tuple(have.shape)} {have.dtype} instead of {tuple(want.shape)} {want.dtype}")
        if not want.dtype.is_floating_point:
            if not torch.equal(want, have):
                raise refusal(name, "its values differ")
            continue
        same = torch.equal(torch.isfinite(want), torch.isfinite(have))
        difference = float((want - have).nan_to_num().abs().max())
        scale = float(want.nan_to_num().abs().max())
        if name.startswith("the grad"):
            scale = max(scale, FLOOR * largest)
        relative = difference / scale if scale else difference
        limit = allowed.get(want.dtype, 1e-4)
        if not same or relative > limit:
            raise refusal(name, f"relative difference {relative:.1e}, allowed {limit:.0e}")
        worst = max(worst, relative)
    return worst


def _mismatch(name: str, why: str) -> ModelError:
    return ModelError(
        f"captured model against eager: {name}",
        f"{why}, so forward does something that tracing cannot see",
        "rewriting that module with plain operators (every plan, dp too, runs the captured model)",
    )


def _moody(name: str, why: str) -> ModelError:
    return ModelError(
        f"eager model against itself: {name}",
        f"{why} between two calls with the same batch, values and random state, so forward keeps something from call "
        "to call that tracing cannot see",
        "a forward that depends on its arguments, parameters and buffers alone",
    )


@contextmanager
def _random_state_kept() -> Iterator[None]:
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield
