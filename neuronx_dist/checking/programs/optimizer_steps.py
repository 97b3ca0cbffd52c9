"""An optimizer's step under the checker, torch's own as well as the user's: mixing elements of a shard is refused.

Elementwise updates keep every type; norms, means and products of matrices go by their rules. So no list of optimizers
is needed to find that Muon on a sharded weight differs from Muon on the full weight. A step begins with

    the tensors of its state    typed as their parameter, where nothing is known of them
    shards of ZeRO-1            which vary, as pieces of their parameter: S(0); they vary again after it
    foreach, fused, capturable  off: they say how a step is computed, and not what
    options that are tensors    1 in the place of each, if it is the same on all ranks (a learning rate)
    numbers that it reads       1 likewise (a step count, a norm)

Of parameters with equal types, shapes and options, torch's own optimizers update one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...call_site import USER, frames
from ...gradients.gradient import ParameterGradient, parameters_of
from ...spmd.axes import atoms_of
from ...spmd.declarations import SHARD_OF
from ...spmd.errors import SpmdTypeError
from ...spmd.tensor_type import EQUAL, Note, TensorType, note_of, type_of
from ...spmd.types import SAME, Shard, SpmdType, V
from ...torch_internals.tensors import DisableTorchFunction
from ..types.mode import SpmdTypeMode

__all__ = ["OptimizerStep", "gradient_read_by"]

_HOW = ("foreach", "fused", "capturable")
_MOST = 100_000  # numbers that one step may read: a loop may wait for one that never comes


def gradient_read_by(optimizer: Any, param: Tensor) -> Tensor | None:
    """Returns the gradient that a step reads: torch's optimizers know of no `main_grad`."""
    return param.grad if _is_torchs(optimizer) else ParameterGradient(param).tensor


def _is_torchs(optimizer: Any) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


class OptimizerStep:
    """A step in progress, from its first line to `end`.

    Raises:
        SpmdTypeError: LBFGS, which takes inner products over all parameters, has some of one pipeline stage.
    """

    def __init__(self, mode: SpmdTypeMode, optimizer: torch.optim.Optimizer) -> None:
        self.mode, self.optimizer = mode, optimizer
        self.is_torchs = _is_torchs(optimizer)
        self._options = [
            (group, key, value)
            for group in optimizer.param_groups
            for key, value in group.items()
            if key in _HOW or _is_number(value)
        ]
        self._varying: list[tuple[Tensor, TensorType]] = []
        self._params = [(group, group["params"]) for group in optimizer.param_groups]
        self._equal_params: list[tuple[Tensor, Tensor]] = []  # a parameter, and the one that is updated in its place
        self._stand_in, self._reads = mode.stand_in, 0
        if isinstance(optimizer, torch.optim.LBFGS):
            self._refuse_stages()
        for group, key, _ in self._options:
            group[key] = False if key in _HOW else 1.0
        with DisableTorchFunction():
            if self.is_torchs and not isinstance(optimizer, torch.optim.LBFGS):
                for group, params in self._params:
                    group["params"] = self._one_of_each(params)
            for param in parameters_of(optimizer):
                self._begin(param)
        mode.stand_in = self._number
        mode.unrecorded += self.is_torchs

    def end(self) -> None:
        """Restores the optimizer as it was before the step."""
        self.mode.stand_in = self._stand_in
        self.mode.unrecorded -= self.is_torchs
        for group, key, value in self._options:
            group[key] = value
        for group, params in self._params:
            group["params"] = params
        for param, other in self._equal_params:
            if other in self.optimizer.state:
                self.optimizer.state[param] = dict(self.optimizer.state[other])
        with DisableTorchFunction():
            for x, type_ in self._varying:
                self.mode.stamp(x, type_)

    def named(self, error: SpmdTypeError) -> SpmdTypeError:
        """The error with the optimizer's name, and a repair if the optimizer is not the user's own."""
        name, axis = type(self.optimizer).__name__, error.axis
        repairs = error.repairs
        if self.is_torchs:
            repairs = [
                f"{name} for parameters that are whole on {axis or 'all ranks'}, an elementwise optimizer for others",
                "gather the parameter and its gradient, take the step, and keep this rank's shard",
            ]
        what, why = f"{name}.step: {error.what}", error.why
        more = {"axis": axis, "rule": error.rule, **error.details}
        return SpmdTypeError(what, why, where_from=error.where_from, repairs=repairs, **more)

    # --- what a step begins with

    def _one_of_each(self, params: list[Tensor]) -> list[Tensor]:
        """The parameters of a group, one for each set of equal types, shapes and options."""
        first: dict[Any, Tensor] = {}
        for param in params:
            grad, (full, ranks) = gradient_read_by(self.optimizer, param), param.__dict__.get(SHARD_OF, (None, None))
            piece = (full is not None and type_of(full), id(ranks), getattr(param, "expert_model_parallel", False))
            key: Any = (type_of(param), param.shape, param.dtype, piece)
            if grad is not None:
                key = (*key, type_of(grad), grad.shape, grad.dtype, grad.layout)
            other = first.setdefault(key, param)
            if other is not param:
                self._equal_params.append((param, other))
        return [*first.values()]

    def _begin(self, param: Tensor) -> None:
        note = self.mode.note(param, "the optimizer's step")
        if note is None:
            return
        type_ = _as_piece(self.mode, param, note)
        if type_ is not note.type:
            grad = gradient_read_by(self.optimizer, param)
            for x in (param, grad):
                before = type_of(x) if x is not None else None
                if x is not None and before is not None:
                    self._varying.append((x, before))
                    self.mode.stamp(x, _as_piece(self.mode, param, note, before))
        for x in _tensors(self.optimizer.state.get(param, {})):
            known = note_of(x)
            if known is None or known.session != self.mode.session:
                self.mode.stamp(x, type_ if x.shape == param.shape else _part_of(type_, x, param))

    def _number(self, x: Tensor, function: str) -> Any:
        """A number in place of the value that a fake tensor does not have; None: there were too many."""
        self._reads += 1
        if self._reads > _MOST:
            return None
        if not _read_by_torch():  # which branches only where an update is done with
            name = type(self.optimizer).__name__
            self.mode.assume(f"{name}.step does the same whatever number it reads: it was judged with 1, or False")
        if x.dtype == torch.bool or function in ("__bool__", "is_nonzero", "__nonzero__"):
            return False
        return 1.0 if x.is_floating_point() and function not in ("__int__", "__index__") else 1

    def _refuse_stages(self) -> None:
        for param in parameters_of(self.optimizer):
            type_ = type_of(param)
            if type_ is not None and type_.get("pp") is V:
                raise SpmdTypeError(
                    "LBFGS.step: its inner products are over the parameters of this stage alone",
                    "on pp each rank has other parameters, and the whole model's are needed",
                    repairs=["an elementwise optimizer", "no pipeline"],
                    axis="pp",
                    rule="optimizer",
                )


def _read_by_torch() -> bool:
    """Returns whether torch's own optimizer reads a number, and not the user's code (a closure, say)."""
    for owner, frame in frames():
        if owner == USER:
            return False
        if frame.f_globals.get("__name__", "").startswith("torch.optim"):
            return True
    return True


def _is_number(value: Any) -> bool:
    """Returns whether an option is a tensor that holds one number, the same on all ranks."""
    if not isinstance(value, Tensor) or value.dim():
        return False
    type_ = type_of(value) or EQUAL
    return all(kind.letter in SAME for kind in (*type_.types.values(), type_.rest) if kind is not None)


def _as_piece(mode: SpmdTypeMode, param: Tensor, note: Note, type_: TensorType | None = None) -> TensorType:
    """The type of a shard that varies, or of its gradient (`type_`), as a piece of its parameter."""
    type_ = type_ or note.type
    if mode.level != "G":
        return type_
    pieces: dict[str, SpmdType] = {}
    if SHARD_OF in param.__dict__:
        full, group = param.__dict__[SHARD_OF]
        whole = type_of(full)
        pieces = {axis: kind for axis, kind in (whole or ()) if isinstance(kind, Shard)}
        pieces.update(dict.fromkeys(atoms_of(group, mode.mesh), Shard(0)))
    elif getattr(param, "expert_model_parallel", False) and param.dim() > 2:  # a stack of experts
        pieces = dict.fromkeys(mode.atoms("ep"), Shard(0))
    for axis, kind in pieces.items():
        if type_.get(axis) is V:
            type_ = type_.with_axis(axis, kind)
    return type_


def _part_of(type_: TensorType, x: Tensor, param: Tensor) -> TensorType:
    """The type of a state of another shape than its parameter: a count, or a statistic of rows or columns."""
    if x.dim() != param.dim():
        return EQUAL if x.numel() == 1 else TensorType.of({a: V if isinstance(k, Shard) else k for a, k in type_})
    types: dict[str, SpmdType] = {}
    for axis, kind in type_:
        lost = isinstance(kind, Shard) and x.shape[kind.dim] != param.shape[kind.dim]
        types[axis] = V if lost else kind
    return TensorType.of(types, type_.rest)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
