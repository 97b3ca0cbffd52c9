"""One stage as a function from received tensors and inputs to tensors to send and the model's outputs.

A `StagePlan` becomes a list of steps with numbered slots; a slot is emptied after its last use, so that a value lives
no longer than in the model itself. Modules and parameters are looked up by name in the whole model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...program.recording import TensorSpec
from ...spmd.random import checkpoint
from ...torch_internals.tensors import backward_hooks
from .splitting import StagePlan

__all__ = ["ChunkFunction", "StageFunction", "add_place"]


def add_place(error: BaseException, location: str) -> None:
    """Puts the place of an error before its message; the type of the error stays."""
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{location}: {error.args[0]}", *error.args[1:])
    elif hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"at {location}")


class _ValueSlot(NamedTuple):
    """Placeholder of a value in the arguments of a step."""

    number: int


class _StageStep(NamedTuple):
    call: Callable[..., Any] | None  # None: `lookup` returns it
    lookup: Callable[[nn.Module], Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    nested: bool  # whether slots lie deeper than in `args` and `kwargs` themselves
    out: int
    free: tuple[int, ...]  # slots that are not read after this step
    surround: Callable[[], Any] | None  # a context manager to run it in
    node: fx.Node

    @property
    def results(self) -> tuple[int, ...]:
        return (self.out,)


class _Checkpointed(NamedTuple):
    """Consecutive steps inside one activation checkpoint of the forward."""

    steps: tuple[_StageStep, ...]
    reads: tuple[int, ...]  # slots that were filled before
    results: tuple[int, ...]  # slots that are read afterwards
    free: tuple[int, ...]


class ChunkFunction(Protocol):
    """Interface of a function that runs a piece of the model on one microbatch; see `StageFunction`."""

    @property
    def received_specs(self) -> Sequence[TensorSpec]: ...

    @property
    def sent_specs(self) -> Sequence[TensorSpec]: ...

    def run(
        self, module: nn.Module, inputs: Any, received: Sequence[torch.Tensor], first: list[GradientEdge] | None = None
    ) -> tuple[list[torch.Tensor], list[Any]]: ...

    def warn_of_undivided(self, names: Sequence[str]) -> None: ...


class StageFunction:
    """Runs a plan. Holds no tensors between calls, except constants that the forward uses.

    Attributes:
        received_specs, sent_specs: those of the plan.
    """

    def __init__(self, plan: StagePlan) -> None:
        self.plan = plan
        self.received_specs, self.sent_specs = plan.received_specs, plan.sent_specs
        self._slots: dict[fx.Node, int] = {}
        last_use: dict[fx.Node, fx.Node] = {}
        for node in plan.nodes:
            for argument in node.all_input_nodes:
                last_use[argument] = node
        results = {*plan.sent, *(leaf for leaf in plan.outputs if isinstance(leaf, fx.Node))}
        ends: dict[fx.Node, list[fx.Node]] = {}
        for node, user in last_use.items():
            if node not in results:
                ends.setdefault(user, []).append(node)
        self._arrivals = [(self._slot(node), node in plan.copied) for node in plan.received]
        steps: list[_StageStep] = []
        self._inputs: list[tuple[int, int, bool]] = []  # slot, number of the input leaf, whether to copy it
        for node in plan.nodes:
            if node.op == "placeholder":
                self._inputs.append((self._slot(node), node.meta["leaf"], node in plan.copied))
            else:
                steps.append(self._step(node, ends.get(node, [])))
        self._sent = [self._slot(node) for node in plan.sent]
        self._outputs = [self._template(leaf) for leaf in plan.outputs]
        self._first = {self._slot(node) for node in _first_activations(plan)}
        self._undivided: set[str] = set()
        self._sequence: list[_StageStep | _Checkpointed] = []
        for number, group in groupby(steps, lambda step: step.node.meta["info"].checkpoint):
            together = tuple(group)
            self._sequence += together if number is None else [self._checkpointed(together)]

    def warn_of_undivided(self, names: Sequence[str]) -> None:
        """Warns of autograd nodes whose backward cannot be run in halves, once for each name."""
        new = sorted(set(names) - self._undivided)
        if new:
            self._undivided |= set(new)
            steps = [node for node in self.plan.nodes if node.op != "placeholder"]
            warnings.warn(
                f"the stage of {steps[0]} .. {steps[-1]}: the backward of {', '.join(new)} cannot be split and runs "
                "completely in the input half (I), so the weight half (W) has less to do. An autograd.Function that "
                "computes only what ctx.needs_input_grad asks for can declare it: splits_backward = True. A stage "
                "with a part compiled by torch.compile (CompiledFunctionBackward) can only be split if it is not "
                "compiled",
                stacklevel=2,
            )

    @property
    def input_leaves(self) -> list[int]:
        """Numbers of the input leaves (of `tree_flatten(inputs)`) that this stage reads."""
        return [leaf for _, leaf, _ in self._inputs]

    def run(
        self,
        module: nn.Module,
        inputs: dict[int, torch.Tensor],
        received: Sequence[torch.Tensor],
        first: list[GradientEdge] | None = None,
    ) -> tuple[list[torch.Tensor], list[Any]]:
        """Runs the stage on one microbatch.

        Args:
            module: the whole model; this stage's part of it is on a real device.
            inputs: tensors by their leaf number, at least `input_leaves`.
            received: as in `plan.received`.
            first: receives the gradient edges of the first activations of a stage that sends no gradient back:
                activations that are computed from inputs and parameters alone, such as embeddings.

        Returns:
            `(sent, outputs)`, as in `plan.sent` and `plan.outputs`.

        Raises:
            any error of a call, with the call and the line where it was recorded before the message.
        """
        values: list[Any] = [None] * len(self._slots)
        for (slot, copied), tensor in zip(self._arrivals, received):
            values[slot] = tensor.clone() if copied else tensor
        for slot, leaf, copied in self._inputs:
            values[slot] = inputs[leaf].clone() if copied else inputs[leaf]
        for item in self._sequence:
            if isinstance(item, _StageStep):
                self._run_step(item, module, values)
            else:
                read = [values[slot] for slot in item.reads]
                results = checkpoint(partial(self._run_checkpointed, item, module), *read)
                for slot, result in zip(item.results, results):
                    values[slot] = result
                for slot in item.free:
                    values[slot] = None
            if first is not None and self._first:
                for slot in self._first.intersection(item.results):
                    first += _history(values[slot])
        return [values[slot] for slot in self._sent], [_fill(leaf, values) for leaf in self._outputs]

    def _run_checkpointed(self, item: _Checkpointed, module: nn.Module, *read: Any) -> list[Any]:
        """Runs the steps of a checkpoint, in forward and again in backward."""
        values: list[Any] = [None] * len(self._slots)
        for slot, value in zip(item.reads, read):
            values[slot] = value
        for step in item.steps:
            self._run_step(step, module, values)
        return [values[slot] for slot in item.results]

    def _run_step(self, step: _StageStep, module: nn.Module, values: list[Any]) -> None:
        try:
            self._run(step, module, values)
        except Exception as error:
            add_place(error, f"{step.node} ({step.node.meta['info'].where})")
            raise
        for slot in step.free:
            values[slot] = None

    def _run(self, step: _StageStep, module: nn.Module, values: list[Any]) -> None:
        if step.lookup is not None:
            attribute = step.lookup(module)
            if step.call is None and step.node.op == "get_attr":
                values[step.out] = attribute
                return
        call = step.call if step.call is not None else attribute
        if step.nested:
            args, kwargs = _fill(step.args, values), _fill(step.kwargs, values)
        else:
            args = [values[x.number] if type(x) is _ValueSlot else x for x in step.args]
            kwargs = {key: values[x.number] if type(x) is _ValueSlot else x for key, x in step.kwargs.items()}
        if step.surround is None:
            values[step.out] = call(*args, **kwargs)
        else:
            with step.surround():
                values[step.out] = call(*args, **kwargs)

    def _step(self, node: fx.Node, ended: Sequence[fx.Node]) -> _StageStep:
        info = node.meta["info"]
        call: Callable[..., Any] | None = None
        lookup: Callable[[nn.Module], Any] | None = None
        args: Any
        kwargs: Any
        if info.kind == "constant":
            call, args, kwargs = _constant, (info.constant,), {}
        else:
            args, kwargs = self._template(node.args), self._template(node.kwargs)
            if node.op == "call_function":
                assert callable(node.target)
                call = node.target
            else:
                lookup = _submodule(str(node.target)) if node.op == "call_module" else attrgetter(str(node.target))
        nested = any(_is_nested(x) for x in (*args, *kwargs.values()))
        free = tuple(self._slot(other) for other in ended)
        return _StageStep(
            call, lookup, tuple(args), dict(kwargs), nested, self._slot(node), free, _surround(info), node
        )

    def _checkpointed(self, steps: tuple[_StageStep, ...]) -> _Checkpointed:
        free = [slot for step in steps for slot in step.free]
        results = [step.out for step in steps]
        read = dict.fromkeys(self._slot(argument) for step in steps for argument in step.node.all_input_nodes)
        return _Checkpointed(
            steps,
            reads=tuple(slot for slot in read if slot not in results),
            results=tuple(slot for slot in results if slot not in free),
            free=tuple(slot for slot in free if slot not in results),
        )

    def _slot(self, node: fx.Node) -> int:
        return self._slots.setdefault(node, len(self._slots))

    def _template(self, x: Any) -> Any:
        """Arguments with slots in place of nodes, in plain containers (those of fx cannot be changed)."""
        if isinstance(x, fx.Node):
            return _ValueSlot(self._slot(x))
        if isinstance(x, slice):
            return slice(self._template(x.start), self._template(x.stop), self._template(x.step))
        if isinstance(x, dict):
            return {key: self._template(item) for key, item in x.items()}
        if isinstance(x, list):
            return [self._template(item) for item in x]
        if type(x) is tuple:
            return tuple(self._template(item) for item in x)
        return x


def _first_activations(plan: StagePlan) -> list[fx.Node]:
    """Results with a gradient whose arguments are no such results; none if gradients flow to the stage before."""
    if any(spec.requires_grad for spec in plan.received_specs):
        return []
    weights: set[fx.Node] = set()  # parameters, and values computed from parameters alone
    activations: dict[fx.Node, bool] = {}  # result -> whether it is a first one
    for node in plan.nodes:
        info, arguments = node.meta["info"], node.all_input_nodes
        if info.kind == "parameter" or (info.kind != "module" and arguments and weights.issuperset(arguments)):
            weights.add(node)
        elif info.spec is not None and info.spec.requires_grad:
            activations[node] = activations.keys().isdisjoint(arguments)
        elif not activations.keys().isdisjoint(arguments):
            activations[node] = False  # several tensors
    return [node for node, is_first in activations.items() if is_first]


def _history(x: torch.Tensor) -> list[GradientEdge]:
    """The gradient edge of a tensor; empty for a leaf, and for a tensor with hooks, which would run in each half."""
    return [] if x.grad_fn is None or backward_hooks(x) else [get_gradient_edge(x)]


def _submodule(name: str) -> Callable[[nn.Module], nn.Module]:
    """Returns a lookup of a module without `nn.Module.__getattr__`, which takes longer than a small layer's call."""
    path = name.split(".")

    def lookup(module: nn.Module) -> nn.Module:
        for key in path:
            child = module._modules[key]
            assert child is not None
            module = child
        return module

    return lookup


def _constant(x: torch.Tensor) -> torch.Tensor:
    return x


def _is_nested(x: Any) -> bool:
    return isinstance(x, (list, dict, slice)) or type(x) is tuple


def _fill(x: Any, values: list[Any]) -> Any:
    if type(x) is _ValueSlot:
        return values[x.number]
    if type(x) is tuple:
        return tuple([_fill(item, values) for item in x])
    if type(x) is list:
        return [_fill(item, values) for item in x]
    if type(x) is dict:
        return {key: _fill(item, values) for key, item in x.items()}
    if type(x) is slice:
        return slice(_fill(x.start, values), _fill(x.stop, values), _fill(x.step, values))
    return x


def _surround(info: Any) -> Callable[[], Any] | None:
    """Context manager with the gradient mode and the autocast of a recorded call; None: nothing was switched."""
    if info.autocast is None:
        return None if info.grad else torch.no_grad
    device, dtype, enabled = info.autocast

    @contextmanager
    def both() -> Iterator[None]:
        with nullcontext() if info.grad else torch.no_grad(), torch.autocast(device, dtype=dtype, enabled=enabled):
            yield

    return both
