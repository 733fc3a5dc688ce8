"""Some consecutive blocks of a captured model as a module that can be run.

For every block the graph's operators are printed as one Python function (by `torch.fx`), so running a block costs no
more than running the module it came from. The function takes everything it needs as arguments: the model's tensors,
the crossings, the tensors of the batch, the number of samples.

Parameters and buffers have the names that they have in the model (`stage.state_dict()` is a part of the model's).
Tied weights are one parameter under its first name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from trainplan.errors import ModelError
from trainplan.profile.capture.captured import Block, Captured
from trainplan.profile.capture.code import Code
from trainplan.profile.capture.exported import Constant
from trainplan.profile.capture.sliced import Slice
from trainplan.profile.capture.tail import Watched, without_tail
from trainplan.profile.capture.tensors import within_parameters
from trainplan.workload.workload import Batch

Environment = dict[str, Any]  # crossings and constants of one micro-batch, by name
_CONSTANTS = -1  # the place of the constants' code among that of the blocks


class Stage(nn.Module):
    """Blocks first ≤ b < last of a captured model.

    reads         crossings that it needs from earlier blocks
    makes         crossings that blocks from `last` on need from it
    batch_inputs  tensors of the batch that it reads
    holds         names of the model's tensors that it needs: what `bind` must be given
    """

    def __init__(self, captured: Captured, first: int, last: int) -> None:
        super().__init__()
        self.captured, self.first, self.last = captured, first, last
        blocks = captured.blocks[first:last]
        self.reads = tuple(c.name for c in captured.crossings if c.producer < first and _read(c.consumers, first, last))
        self.makes = tuple(c.name for c in captured.crossings if first <= c.producer < last and c.consumers[-1] >= last)
        wanted = {name for block in blocks for name in block.inputs}
        self.batch_inputs = tuple(i.name for i in captured.exported.inputs.values() if i.name in wanted)
        held = {name for block in blocks for name in block.holds}
        self.holds = tuple(name for name in captured.exported.held if name in held)
        self.is_last = last == len(captured.blocks)
        self._device = torch.device("meta")
        self._inputs = {i.name: i for i in captured.exported.inputs.values() if i.name in wanted}
        self._drops = self._last_reads()
        self._code: dict[tuple[int, Slice | None], Code] = {}
        self._code_again: dict[tuple[int, Slice | None], Code] = {}
        self._compile_options: dict[str, Any] | None = None
        self._plant()
        self.train(captured.exported.training)

    # -- values -----------------------------------------------------------------------------------------------------

    def _plant(self) -> None:
        """Register tensors without values under the model's own names.

        Straight into the dictionaries of `nn.Module`, because a model may have a part called `first` or `forward`.
        """
        for name in self.holds:
            item = self.captured.exported.held[name]
            owner, key = self._owner(name, make=True)
            empty = torch.empty(item.shape, dtype=item.dtype, device="meta")
            if item.kind == "parameter":
                owner._parameters[key] = nn.Parameter(empty, item.trainable)
            else:
                owner._buffers[key] = empty
                if not item.persistent:
                    owner._non_persistent_buffers_set.add(key)

    def _owner(self, name: str, make: bool = False) -> tuple[nn.Module, str]:
        path, _, key = name.rpartition(".")
        owner: nn.Module = self
        for part in path.split(".") if path else ():
            if make and part not in owner._modules:
                owner._modules[part] = nn.Module()
            owner = owner._modules[part]  # type: ignore[assignment]
        return owner, key

    def bind(self, values: Mapping[str, Tensor], device: torch.device | str | None = None) -> Stage:
        """Give the stage its values, by their names in the model; more names than needed may be given.

        A `Parameter` that is already on the device is used itself, not a copy, so a stage can share a model's.
        """
        missing = [name for name in self.holds if name not in values]
        if missing:
            raise ModelError(
                f"stage of blocks {self.first} to {self.last}",
                f"{len(missing)} of its {len(self.holds)} tensors were not given, first {missing[0]!r}",
                "materialise(build, set(stage.holds), …)",
            )
        device = None if device is None else _exact(device)
        # Where forward puts another tensor in the place of one, the graph writes into that: not into a parameter.
        apart = within_parameters(values) & self.writes
        for name in sorted(apart - self.captured.exported.replaced):
            raise ModelError(
                f"value of {name!r}",
                "it lies in the memory of a parameter, which forward changes through it, and a plan holds them apart",
                "writing the parameter itself, in forward under torch.no_grad()",
            )
        for name in self.holds:
            item, value = self.captured.exported.held[name], values[name]
            if tuple(value.shape) != item.shape or value.dtype != item.dtype:
                raise ModelError(
                    f"value of {name!r}",
                    f"it is {tuple(value.shape)} {value.dtype}, and {item.shape} {item.dtype} was captured",
                    "capturing the model in the form in which it is trained",
                )
            if device is not None and value.device != device:
                value = value.detach().to(device)
            owner, key = self._owner(name)
            if item.kind == "parameter":
                if not isinstance(value, nn.Parameter):
                    value = nn.Parameter(value.detach(), item.trainable)
                owner._parameters[key] = value
            else:
                owner._buffers[key] = value.detach().clone() if name in apart else value.detach()
        if device is None and not self.holds:  # nothing of its own says where it is
            device = next((value.device for value in values.values()), self.captured.exported.device)
        return self._settle(device)

    @property
    def writes(self) -> set[str]:
        """Names of the model's tensors that it writes."""
        return {name for block in self.captured.blocks[self.first : self.last] for name in block.writes}

    @property
    def device(self) -> torch.device:
        """Where it runs; meta until it is bound."""
        return self._device

    def to_device(self, device: torch.device | str) -> Stage:
        """Move values and code to a device."""
        self.to(device)
        return self._settle(_exact(device))

    def train(self, mode: bool = True) -> Stage:
        """Refused unless it is the mode that was captured: dropout and batch norm are part of the graph."""
        if mode != self.captured.exported.training:
            raise ModelError(
                f"stage of blocks {self.first} to {self.last} in {'training' if mode else 'evaluation'}",
                f"the model was captured in {'evaluation' if mode else 'training'}",
                f"capturing model.{'train' if mode else 'eval'}() as well",
            )
        return super().train(mode)

    def _apply(self, function: Callable[..., Any], recurse: bool = True) -> Stage:
        super()._apply(function, recurse)
        return self._settle(None)

    def _settle(self, device: torch.device | None) -> Stage:
        """The device of the code follows that of the values."""
        found = next((t.device for t in [*self.parameters(), *self.buffers()]), None)
        settled = device or found or self.device
        if settled != self.device:
            self._device, self._code, self._code_again = settled, {}, {}
        return self

    # -- running ----------------------------------------------------------------------------------------------------

    def forward(
        self,
        crossings: Mapping[str, Tensor],
        batch: Batch,
        before_block: Callable[[int], None] | None = None,
        part: Slice | None = None,
        before_each: Callable[[int, Environment], None] | None = None,
    ) -> tuple[Environment, Any]:
        """Run the blocks: what later stages read, and the model's output if this is the last stage (else None).

        `before_block(b)` is called before every block that draws random numbers, so that it can be seeded. With a
        `part`, crossings and output are those of a slice of the batch's sequences; the batch is whole, since what
        depends on it alone is worked out for whole sequences. (Keys and values are carried: `sliced.carrying`.)
        `before_each(b, env)` is called before every block, with what there is then of the crossings.
        """
        self.check(batch)
        missing = [name for name in self.reads if name not in crossings]
        if missing:
            raise ModelError(f"stage of blocks {self.first} to {self.last}", f"it was not given {', '.join(missing)}")
        env: Environment = {name: crossings[name] for name in self.reads}
        for index in range(self.first, self.last):
            if before_each is not None:
                before_each(index, env)
            if before_block is not None and self.captured.blocks[index].random:
                before_block(index)
            self.run_block(index, env, batch, part)
            for name in self._drops[index]:
                del env[name]
        output = self.output(env) if self.is_last else None
        return {name: env[name] for name in self.makes}, output

    def run_block(self, index: int, env: Environment, batch: Batch, part: Slice | None = None) -> None:
        """Run one block: it takes its crossings from `env` and puts what it makes there.

        The last block also puts the leaves of the model's output there, which `output` collects.
        """
        code = self._code.get((index, part)) or self._write(index, part)
        self._work_out_constants(code, env, batch)
        self._run(code, env, batch)

    def run_again(self, index: int, env: Environment, batch: Batch, part: Slice | None = None) -> None:
        """Run a block once more, for its backward pass alone: what it makes has its graph, and no values where backward
        does not need them (`tail.py`). A compiled block is one operator for autograd, and is run whole."""
        if self._compile_options is not None:
            self.run_block(index, env, batch, part)
            return
        plain = self._code.get((index, part)) or self._write(index, part)
        self._work_out_constants(plain, env, batch)
        code = self._code_again.get((index, part))
        if code is None:
            watched = Watched(plain.module)
            self._run(plain, env, batch, lambda *args: watched.watch(args))
            shorter = without_tail(plain.module, watched.needed) if watched.tail_flops else plain.module
            self._code_again[index, part] = plain.of(shorter)
        else:
            self._run(code, env, batch)

    def has_tail(self, index: int) -> bool:
        """Whether a block that was run again before has one."""
        again = self._code_again.get((index, None))
        return again is not None and again.module is not self._code[index, None].module

    def _work_out_constants(self, code: Code, env: Environment, batch: Batch) -> None:
        if code.constants and code.constants[0] not in env:
            self._run(self._code.get((_CONSTANTS, None)) or self._write(_CONSTANTS), env, batch)

    def _run(
        self, code: Code, env: Environment, batch: Batch, function: Callable[..., tuple[Any, ...]] | None = None
    ) -> None:
        """Call code, or another function in its place, with what it takes."""
        args: list[Any] = [store[key] for store, key in code.slots]
        args += [env[name] for name in code.reads]
        args += [value_at(batch, item.path) for item in code.inputs]
        if code.counts:
            args.append(batch.samples)
        env.update(zip(code.makes, (function or code.function)(*args), strict=True))

    def output(self, env: Environment) -> Any:
        """The model's output, rebuilt as it was (dicts, tuples, a transformers ModelOutput …)."""
        leaves = self.captured.output_leaves
        values = [env[leaf.name] if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        return pytree.tree_unflatten(values, self.captured.exported.output.spec)

    def check(self, batch: Batch) -> None:
        """Refuse a batch for which the captured graph is not right."""
        for name, item in self._inputs.items():
            value = value_at(batch, item.path)
            want = (batch.samples, *item.shape[1:]) if item.per_sample else item.shape
            if not isinstance(value, Tensor) or tuple(value.shape) != want or value.dtype != item.dtype:
                found = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
                why = f"input {name!r} is {found}, and the model was captured for {want} {item.dtype}"
                instead = _like_the_example(name, value, want, item.dtype)
                raise ModelError(f"batch of {batch.samples} samples", why, instead)
        for constant in self.captured.exported.fixed:
            _check_constant(batch, constant)
        arguments = self.captured.exported.arguments
        if (len(batch.args), set(batch.kwargs)) != arguments:
            more = sorted(set(batch.kwargs) - arguments[1]) or [f"argument {arguments[0]}"]
            raise ModelError(
                f"batch of {batch.samples} samples",
                f"it has {more[0]!r}, which the model was captured without",
                "an example (inputs=) that has it, too, or leaving it out",
            )

    @contextmanager
    def buffers_kept(self, only: set[str] | None = None) -> Iterator[None]:
        """Buffers (all, or only these) as they were, afterwards: for running blocks a second time (recomputation,
        timing), or as another copy of them would."""
        names = self.writes if only is None else self.writes & only
        buffers = [owner._buffers[key] for owner, key in map(self._owner, names) if key in owner._buffers]
        saved = [(buffer, buffer.detach().clone()) for buffer in buffers if buffer is not None]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in saved:
                    buffer.copy_(value)

    def compiled(self, **options: Any) -> Stage:
        """Run blocks through `torch.compile` from now on."""
        self._compile_options, self._code, self._code_again = options, {}, {}
        return self

    def _last_reads(self) -> dict[int, tuple[str, ...]]:
        """For every block, the crossings that nobody in this stage or after it reads any more."""
        drops: dict[int, list[str]] = {index: [] for index in range(self.first, self.last)}
        for crossing in self.captured.crossings:
            inside = [b for b in crossing.consumers if self.first <= b < self.last]
            returned = self.is_last and inside and inside[-1] == self.last - 1
            made_or_read = crossing.name in self.reads or self.first <= crossing.producer < self.last
            if made_or_read and inside and crossing.name not in self.makes and not returned:
                drops[inside[-1]].append(crossing.name)
        return {index: tuple(names) for index, names in drops.items()}

    # -- code -------------------------------------------------------------------------------------------------------

    def _write(self, index: int, part: Slice | None = None) -> Code:
        captured = self.captured
        if index == _CONSTANTS:
            blocks = captured.blocks[self.first : self.last]
            wanted = {name for block in blocks for name in block.constants}
            outputs = {node.name: node for node in captured.flow.ops if node.name in wanted}
            nodes = sorted(captured.flow.closure(outputs.values()), key=captured.flow.position.__getitem__)
            code = Code(captured, self._owner, self.device, nodes, outputs)
        else:
            block = captured.blocks[index]
            code = Code(captured, self._owner, self.device, block.nodes, _block_outputs(captured, index), part)
            code.constants = block.constants
        if self._compile_options is not None and index != _CONSTANTS:
            code.function = torch.compile(code.function, **self._compile_options)
        self._code[index, part] = code
        return code


def _block_outputs(captured: Captured, index: int) -> dict[str, fx.Node]:
    """Names in the environment and nodes of what a block returns: its crossings; for the last, also the output."""
    block: Block = captured.blocks[index]
    by_name = {node.name: node for node in block.nodes}
    outputs = {name: by_name[name] for name in block.makes}
    if index == len(captured.blocks) - 1:
        made_before = {crossing.name for crossing in captured.crossings}
        for leaf in captured.output_leaves:
            if isinstance(leaf, fx.Node) and leaf.name not in made_before:
                outputs[leaf.name] = leaf
    return outputs


def _exact(device: torch.device | str) -> torch.device:
    """A device with its number: tensors on `cuda` say `cuda:0`."""
    return torch.empty(0, device=device).device


def _read(consumers: tuple[int, ...], first: int, last: int) -> bool:
    return any(first <= block < last for block in consumers)


def value_at(batch: Batch, path: tuple[Any, ...]) -> Any:
    """The value at a path from (args, kwargs) down."""
    value: Any = batch.args if path[0] == 0 else batch.kwargs
    for key in path[1:]:
        try:
            value = value[key] if isinstance(value, tuple | list | dict) else getattr(value, key)
        except (KeyError, IndexError, AttributeError):
            raise ModelError(
                f"batch of {batch.samples} samples",
                f"it has no input {'.'.join(map(str, path[1:]))!r}, which the model was captured with",
                "a batch with the same arguments as the example",
            ) from None
    return value


def _like_the_example(name: str, value: Any, want: tuple[int, ...], dtype: torch.dtype) -> str:
    """What to do about an input that is not as it was captured: most often, samples that have other sizes by nature."""
    if not isinstance(value, Tensor) or value.dtype != dtype:
        return f"a tensor of {dtype} for {name!r}"
    if value.dim() == len(want) and len(want) > 1:
        return f"giving {name!r} the same size in every batch: sequences padded to one length, images of one size"
    return f"a tensor of {len(want)} dimensions for {name!r}"


def _check_constant(batch: Batch, constant: Constant) -> None:
    value = value_at(batch, constant.path)
    if type(value) is not type(constant.value) or value != constant.value:
        raise ModelError(
            f"batch of {batch.samples} samples",
            f"argument {'.'.join(map(str, constant.path[1:]))!r} is {value!r}, and the model was captured with "
            f"{constant.value!r}, which is part of the graph",
            "the value that it has in the example (inputs=), or passing it as a tensor",
        )
