"""Tensor parallelism by the names of modules: `parallelize_module` and styles, as `torch.distributed.tensor.parallel`.

A style makes the parameters of one module ShardTensors on a mesh of one dim. Hooks make a module's inputs ShardTensors
(a plain tensor is this rank's part, in the layout that the style names), and its outputs plain tensors again.

Features may be of any size: a plain tensor between a `ColwiseParallel` and a `RowwiseParallel` is cut as their weights
are. Another dim of a plain tensor counts as cut into equal parts, as in torch: of parts that differ in size a style
returns ShardTensors alone (`use_local_output=False`), which know their sizes.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn

from ..torch_internals.operators import skip_in_compiler
from .construct import distribute_tensor, shared_by_layers
from .device_mesh import DeviceMesh, as_mesh
from .module import ties_kept
from .placements import Placement, Replicate, Shard, checked_placements
from .tensor import ShardTensor, wrap

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "parallelize_module",
]

Layouts = Placement | tuple[Placement | None, ...]


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Applies styles to a module and its submodules, and returns the module. Tied parameters stay tied.

    Args:
        device_mesh: of one dim, such as `mesh["tp"]`; None: that of the innermost `with mesh:`, else of the job.
        parallelize_plan: a style, or a dict from names of submodules to styles. Each part of a name between dots may
            be a pattern, as `fnmatch` has them: `{"layers.*.w1": ColwiseParallel()}`. "" is the module.
        src_data_rank: the rank of the mesh whose parameters all ranks get. None: each rank keeps its own, and nothing
            is sent.

    Raises:
        NotImplementedError: a style does not support a module.
        ValueError: the mesh has several dims; parameters that were one tensor would have two layouts.

    Warns:
        UserWarning: no plan; a name that no submodule has.
    """
    mesh = as_mesh(device_mesh)
    if mesh.ndim != 1:
        raise ValueError(f'parallelize_module: {mesh} has {mesh.ndim} dims: pass one of them, as mesh["tp"]')
    if parallelize_plan is None:
        warnings.warn("parallelize_module: no parallelize_plan, so nothing is done", stacklevel=2)
        return module
    plan = {"": parallelize_plan} if isinstance(parallelize_plan, ParallelStyle) else parallelize_plan
    if not isinstance(plan, Mapping):
        raise TypeError(f"parallelize_plan must be a ParallelStyle or a dict of them, not a {type(plan).__name__}")
    with torch.no_grad(), ties_kept(module, "parallelize_module"):
        for pattern, style in plan.items():
            modules = list(_matching(module, pattern.split(".") if pattern else [], ""))
            if not modules:
                warnings.warn(f"parallelize_module: no submodule of the module matches {pattern!r}", stacklevel=2)
            for name, child in modules:
                style.src_data_rank, style.label = src_data_rank, f"{type(style).__name__} of {name or 'the module'}"
                style._apply(child, mesh)
    return module


def _matching(module: nn.Module, tokens: Sequence[str], prefix: str) -> Iterator[tuple[str, nn.Module]]:
    if not tokens:
        yield prefix, module
        return
    for name, child in module.named_children():
        if fnmatch(name, tokens[0]):
            yield from _matching(child, tokens[1:], f"{prefix}.{name}" if prefix else name)


def _labelled(label: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a hook of a module whose communication a report attributes to `label`."""

    def op_hook(*args: Any) -> Any:
        label  # noqa: B018  # the report reads it
        return hook(*args)

    return op_hook


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Changes nothing: `cross_entropy` of ShardTensors never gathers sharded classes, inside of this context or not."""
    yield


# --- between plain tensors and ShardTensors


@skip_in_compiler
def _sharded(
    x: Any, mesh: DeviceMesh, layout: Placement, desired: Placement | None, sizes: Sequence[int] | None = None
) -> ShardTensor:
    """Returns an input as a ShardTensor in the desired layout.

    Args:
        layout: of a plain tensor; a ShardTensor has its own.
        desired: None: that which it has.
        sizes: of the shards of a plain tensor's last dim, if that is cut; None: equal ones.
    """
    if not isinstance(x, ShardTensor):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"an input with the layout {layout!r} must be a tensor, not a {type(x).__name__}")
        shapes: Any = "chunk"
        if sizes is not None and checked_placements((layout,), 1, x.dim()) == (Shard(x.dim() - 1),):
            shapes = {0: [(*x.shape[:-1], size) for size in sizes]}
        x = ShardTensor.from_local(x, mesh, (layout,), sharding_shapes=shapes)
        if isinstance(layout, Replicate) and isinstance(desired, Replicate):
            return shared_by_layers(x)
    if isinstance(desired, Replicate) and not isinstance(x.placements[0], Replicate):
        return shared_by_layers(x)
    return x if desired is None else _in_layout(x, desired)


@skip_in_compiler
def _in_layout(x: ShardTensor, layout: Placement) -> ShardTensor:
    placements = checked_placements((layout,), 1, x.dim())
    return x if x.placements == placements else x.redistribute(placements=placements)


@skip_in_compiler
def _returned(x: ShardTensor, use_local: bool) -> torch.Tensor:
    """Returns a ShardTensor, or its part.

    Raises:
        ValueError: parts of another dim than the last differ in size, which no reader of the part would know.
    """
    if not use_local:
        return x
    placement, sizes = x.placements[0], x._spec.sizes[0] or ()
    if isinstance(placement, Shard) and placement.dim != x.dim() - 1 and len(set(sizes)) > 1:
        raise ValueError(
            f"{placement!r} of shape {tuple(x.shape)} has parts of sizes {list(sizes)}, and a plain tensor counts as "
            "one of equal parts: pass use_local_output=False to the style, and to those of the modules before and "
            "after it"
        )
    return x.to_local()


def _as_tuple(layouts: Layouts | None) -> tuple[Placement | None, ...] | None:
    return (layouts,) if isinstance(layouts, Placement) else layouts


def _check_length(name: str, layouts: Any, desired: Any) -> None:
    if layouts is not None and (desired is None or len(layouts) != len(desired)):
        raise ValueError(f"{name}={layouts} and desired_{name}={desired} must have the same length")


# --- styles


class ParallelStyle(ABC):
    """A way to make one module parallel: `_apply`, which `parallelize_module` calls.

    Attributes:
        src_data_rank: the rank of the mesh whose parameters all ranks get; None: each keeps its own.
        label: of the module that it is applied to, in reports.
    """

    src_data_rank: int | None = 0
    label: str = ""

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Makes the module's parameters ShardTensors, and registers hooks for its inputs and outputs."""

    def _distribute(self, module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
        param = module._parameters[name]
        if param is not None:
            x = distribute_tensor(param.detach(), mesh, [placement], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(x, requires_grad=param.requires_grad))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in vars(self).items() if k != 'label')})"


class _CutWeights(ParallelStyle):
    """A style that cuts the weights of `nn.Linear` and `nn.Embedding`.

    Args:
        input_layouts: of a plain input.
        output_layouts: of the output.
        use_local_output: whether the output is a plain tensor, this rank's part.
    """

    _weights: dict[type[nn.Module], tuple[Placement, Placement, Placement]]  # layouts of weight, bias, needed input
    _input: Placement
    _output: Placement

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = (input_layouts or self._input,)
        self.output_layouts = (output_layouts or self._output,)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layouts = next((layouts for cls, layouts in self._weights.items() if isinstance(module, cls)), None)
        if layouts is None:
            raise NotImplementedError(
                f"{type(self).__name__} supports nn.Linear and nn.Embedding, not {type(module).__name__}: apply it to "
                "the layers of that module, by their names, or use distribute_module"
            )
        weight, bias, needed = layouts
        for name in module._parameters:
            self._distribute(module, name, device_mesh, bias if name == "bias" else weight)

        def before(mod: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            sizes = mod.weight._spec.sizes[0] if isinstance(needed, Shard) else None
            x = _sharded(inputs[0], device_mesh, self.input_layouts[0], needed, sizes)
            if isinstance(mod, nn.Embedding) and isinstance(weight, Shard) and weight.dim == 0:
                x = wrap(x._local, x._spec)
                (x._rows_to,) = checked_placements(self.output_layouts, 1, x.dim() + 1)
            return (x, *inputs[1:])

        def behind(mod: Any, inputs: Any, y: Any) -> torch.Tensor:
            return _returned(_in_layout(y, self.output_layouts[0]), self.use_local_output)

        module.register_forward_pre_hook(_labelled(self.label, before))
        module.register_forward_hook(_labelled(self.label, behind))
        return module


class ColwiseParallel(_CutWeights):
    """Cuts the output features of `nn.Linear` or `nn.Embedding`: each rank has those of its part of the weight.

    Args:
        input_layouts: of a plain input; None: Replicate.
        output_layouts: of the output; None: Shard(-1).
        use_local_output: whether the output is a plain tensor, this rank's part; else a ShardTensor.
    """

    _weights = {nn.Linear: (Shard(0), Shard(0), Replicate()), nn.Embedding: (Shard(1), Shard(0), Replicate())}
    _input, _output = Replicate(), Shard(-1)


class RowwiseParallel(_CutWeights):
    """Cuts the input features of `nn.Linear`, or the rows of `nn.Embedding`: the output is a sum over the ranks.

    Args:
        input_layouts: of a plain input; None: Shard(-1).
        output_layouts: of the output; None: Replicate, by an all-reduce. A Shard takes a reduce-scatter.
        use_local_output: whether the output is a plain tensor, this rank's part; else a ShardTensor.
    """

    _weights = {nn.Linear: (Shard(1), Replicate(), Shard(-1)), nn.Embedding: (Shard(0), Shard(0), Replicate())}
    _input, _output = Shard(-1), Replicate()


class SequenceParallel(ParallelStyle):
    """Cuts the sequence in a norm, a dropout, or any module of independent positions; its parameters are Replicate.

    Args:
        sequence_dim: of the input and the output.
        use_local_output: whether the output is a plain tensor, this rank's part; else a ShardTensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for child in module.modules():
            for name in child._parameters:
                self._distribute(child, name, device_mesh, Replicate())
        (layout,) = self.sequence_sharding

        def before(mod: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (_sharded(inputs[0], device_mesh, layout, layout), *inputs[1:])

        module.register_forward_pre_hook(_labelled(self.label, before))
        module.register_forward_hook(lambda mod, inputs, y: _returned(y, self.use_local_output))
        return module


class PrepareModuleInput(ParallelStyle):
    """Makes a module's inputs ShardTensors, and moves them to a layout.

    Args:
        input_layouts: for each positional input the layout of a plain tensor; None for one that is passed on as it is.
        desired_input_layouts: for each the layout that the module gets; None: that which it has.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same for inputs by keyword.
        use_local_output: whether the module gets plain tensors, this rank's parts.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts, self.desired_input_layouts = _as_tuple(input_layouts), _as_tuple(desired_input_layouts)
        self.input_kwarg_layouts = input_kwarg_layouts or {}
        self.desired_input_kwarg_layouts = desired_input_kwarg_layouts or {}
        self.use_local_output = use_local_output
        _check_length("input_layouts", self.input_layouts, self.desired_input_layouts)
        _check_length("input_kwarg_layouts", input_kwarg_layouts, self.desired_input_kwarg_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def prepared(x: Any, layout: Placement | None, desired: Placement | None) -> Any:
            if layout is None:
                return x
            return _returned(_sharded(x, device_mesh, layout, desired), self.use_local_output)

        def before(mod: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            layouts, desired = self.input_layouts, self.desired_input_layouts
            if layouts is not None and desired is not None:
                if len(inputs) != len(layouts):
                    raise ValueError(f"{type(mod).__name__} has {len(inputs)} inputs, but input_layouts is {layouts}")
                inputs = tuple(map(prepared, inputs, layouts, desired))
            of_keyword, desired_of = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
            return inputs, {name: prepared(x, of_keyword.get(name), desired_of.get(name)) for name, x in kwargs.items()}

        module.register_forward_pre_hook(_labelled(self.label, before), with_kwargs=True)
        return module


class PrepareModuleOutput(ParallelStyle):
    """Makes a module's outputs ShardTensors, and moves them to a layout.

    Args:
        output_layouts: for each output the layout of a plain tensor; None for one that is passed on as it is.
        desired_output_layouts: for each the layout in which it is returned.
        use_local_output: whether plain tensors are returned, this rank's parts.
    """

    def __init__(
        self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True
    ) -> None:
        self.output_layouts, self.desired_output_layouts = _as_tuple(output_layouts), _as_tuple(desired_output_layouts)
        self.use_local_output = use_local_output
        _check_length("output_layouts", self.output_layouts, self.desired_output_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def behind(mod: nn.Module, inputs: Any, outputs: Any) -> Any:
            layouts, desired = self.output_layouts or (), self.desired_output_layouts or ()
            several = outputs if isinstance(outputs, tuple) else (outputs,)
            if len(several) != len(layouts):
                raise ValueError(f"{type(mod).__name__} has {len(several)} outputs, but output_layouts is {layouts}")
            prepared = tuple(
                y if layout is None else _returned(_sharded(y, device_mesh, layout, wanted), self.use_local_output)
                for y, layout, wanted in zip(several, layouts, desired)
            )
            return prepared if len(prepared) > 1 else prepared[0]

        module.register_forward_hook(_labelled(self.label, behind))
        return module


class PrepareModuleInputOutput(ParallelStyle):
    """Makes a module's inputs and outputs ShardTensors: `PrepareModuleInput` and `PrepareModuleOutput` in one.

    Args:
        use_local_input: whether the module gets plain tensors, this rank's parts.
        use_local_output: whether plain tensors are returned.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.prepare_module_input.label = self.prepare_module_output.label = self.label
        self.prepare_module_input._apply(module, device_mesh)
        return self.prepare_module_output._apply(module, device_mesh)
