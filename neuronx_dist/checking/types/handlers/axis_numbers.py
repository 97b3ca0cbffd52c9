"""Numbers that are a power of the size of an axis (`axis_powers.py`), in calls of torch functions.

factors     x * n, x / n, n / x, full(size, n), tensor(n): the scale of the number goes to the result;
            add(x, y, alpha=n): it goes to the operand y
sizes       x.shape[d] of a dim sharded over tp has the exponent -1 on tp; a view with a plain number as the
            size of such a dim assumes that this is the local size. At level L shards are not known: the exponent of a
            size of a tensor that varies is UNCLEAR
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....comm.ranks.rank_values import RankValue
from ....mesh import DENSE_AXES
from ....rules import Rule
from ....rules.names import getter
from ....spmd.axes import atoms_of
from ....spmd.tensor_type import NOTE, TensorType, note_of, type_of
from ....spmd.types import SAME, P, Shard, V, scaled
from ....torch_internals.fake_tensors import FakeTensor
from ..axis_powers import UNCLEAR, AxisNumber, AxisSize, exponents_of
from ..declared import parameter_type
from ..judge import Judgement, Operand
from ..session import Session

__all__ = [
    "Powers",
    "factor",
    "handlers",
    "install",
    "remove",
    "scaled_by",
    "takes_factor",
    "with_factors",
    "with_numbers",
]

# The number that is a factor of the result: its position, its name, and whether it multiplies or divides.
_FACTORS: dict[str, tuple[int, str, int]] = {
    **dict.fromkeys(("mul", "multiply"), (1, "other", 1)),
    **dict.fromkeys(("div", "divide", "true_divide", "floor_divide"), (1, "other", -1)),
    **dict.fromkeys(("__rdiv__", "__rtruediv__", "__rfloordiv__"), (1, "other", 1)),
    **dict.fromkeys(("tensor", "as_tensor"), (0, "data", 1)),
    "asarray": (0, "obj", 1),
    "scalar_tensor": (0, "s", 1),
    "new_tensor": (1, "data", 1),
    **dict.fromkeys(("full", "full_like"), (1, "fill_value", 1)),
    "new_full": (2, "fill_value", 1),
    "fill": (1, "value", 1),
    "constant": (1, "val", 1),
}
# Numbers that are factors of one operand: its index.
_COEFFICIENTS: dict[str, dict[str, int]] = {
    **dict.fromkeys(("add", "sub", "subtract"), {"alpha": 1}),
    "rsub": {"alpha": 0},
    **dict.fromkeys(("addmm", "addmv", "addr", "addbmm", "baddbmm"), {"alpha": 1, "beta": 0}),
    **dict.fromkeys(("addcmul", "addcdiv"), {"value": 1}),
}

Powers = Mapping[str, int]  # by atom
_NAMED_AXES = frozenset((*DENSE_AXES, "ep"))
_TENSORS = frozenset((Tensor, nn.Parameter, FakeTensor))


def with_numbers(
    mode: Session, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any], judgement: Judgement
) -> Judgement:
    """The judgement of a call's tensors, completed by the meaning of its numbers."""
    powers = factor(mode, rule, args, kwargs)
    if powers is None:
        text = f"{rule.name}: numbers that grow in different ways with the sizes of axes are taken for constants"
        return judgement._replace(assumed=(*judgement.assumed, text))
    types = tuple(scaled_by(type_, powers) for type_ in judgement.types)
    assumed = [*_literal_sizes(mode, rule, args, kwargs, types), *_literal_factors(mode, rule, args, kwargs, types)]
    return judgement._replace(types=types, assumed=(*judgement.assumed, *assumed))


def factor(mode: Session, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Powers | None:
    """The powers of the sizes of axes by which a call multiplies its result; an empty dict for most calls.

    None if the elements of the result have different factors.
    """
    where = _FACTORS.get(rule.name.rstrip("_") if not rule.name.endswith("__") else rule.name)
    if where is None:
        return {}
    index, name, sign = where
    number = args[index] if len(args) > index else kwargs.get(name)
    if isinstance(number, (list, tuple)):
        numbers = list(_leaves(number))
        if len({tuple(exponents_of(number).items()) for number in numbers}) > 1:
            return None
        number = numbers[0] if numbers else None
    if not isinstance(number, AxisNumber):
        return {}
    powers = {atom: sign * power for atom, power in _powers(mode, number).items()}
    local = any(power < 0 for power in number.exponents.values())
    if local and rule.kind == "op" and not any(_scales(x, powers) for x in args if isinstance(x, Tensor)):
        return {}  # of integers: positions are counted in local sizes
    return powers


def _scales(x: Tensor, powers: Powers) -> bool:
    """Returns whether a local size is a factor of a tensor: of floats, or of counts that are not summed yet."""
    type_ = type_of(x)
    return x.is_floating_point() or (
        type_ is not None and any(getattr(type_.get(atom), "base", None) is P for atom in powers)
    )


def takes_factor(name: str) -> bool:
    """Returns whether a function of this name has a number that is a factor of its result."""
    return name.rstrip("_") in _FACTORS or name in _FACTORS


def _literal_factors(
    mode: Session, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any], types: Sequence[TensorType]
) -> Iterator[str]:
    """Assumptions of a plain number equal to the size of an axis, by which a part of a sum or of a mean is scaled."""
    where = _FACTORS.get(rule.name.rstrip("_") if not rule.name.endswith("__") else rule.name)
    number = None if where is None else args[where[0]] if len(args) > where[0] else kwargs.get(where[1])
    if number.__class__ not in (int, float) or mode.mesh is None or not types:
        return
    for axis, spmd_type in types[0]:
        size = mode.mesh.size(axis) if (spmd_type.letter == "P" or spmd_type.scale) and axis in _NAMED_AXES else 1
        if size > 1 and number in (size, 1 / size):
            yield (
                f"{rule.name}: that {number:.6g} is a number of the program, and does not stand for "
                f'{"" if number == size else "1 / "}comm.size("{axis}"), to which it is equal'
            )


def _leaves(data: Sequence[Any]) -> Iterator[Any]:
    for item in data:
        if isinstance(item, (list, tuple)):
            yield from _leaves(item)
        else:
            yield item


def _powers(mode: Session, number: Any) -> dict[str, int]:
    """The exponents of a number, by atom."""
    powers: dict[str, int] = {}
    for axis, exponent in exponents_of(number).items():
        for atom in _atoms(mode, axis):
            powers[atom] = powers.get(atom, 0) + exponent
    return powers


def _atoms(mode: Session, axis: str) -> tuple[str, ...]:
    try:
        return atoms_of(axis, mode.mesh)
    except ValueError:  # the atom of a group that is no axis
        return (axis,)


def scaled_by(type_: TensorType, powers: Powers) -> TensorType:
    """The type of a tensor of `type_` times powers of the sizes of axes; unknown types stay unknown."""
    if not powers:
        return type_
    types = dict(type_.types)
    for atom, power in powers.items():
        spmd_type = type_.get(atom)
        if spmd_type is not None:
            types[atom] = scaled(spmd_type, power)
    return TensorType.of(types, type_.rest)


def with_factors(mode: Session, rule: Rule, kwargs: Mapping[str, Any], operands: list[Operand]) -> list[Operand]:
    """The operands of a call, each multiplied by the numbers that are factors of it."""
    named = _COEFFICIENTS.get(rule.name.rstrip("_"))
    if named is None or not kwargs:
        return operands
    for name, index in named.items():
        number = kwargs.get(name)
        if isinstance(number, AxisNumber) and index < len(operands):
            type_ = scaled_by(operands[index].type, _powers(mode, number))
            operands[index] = operands[index]._replace(type=type_)
    return operands


# --- sizes of sharded dims, and of what varies at level L


_known: dict[tuple[TensorType, torch.Size], tuple[torch.Size, int]] = {}


def _sizes(type_: TensorType, shape: torch.Size) -> tuple[torch.Size, int]:
    """The shape of a sharded tensor, and its number of elements, as AxisSizes.

    For a type without shards, at level L, the exponents are UNCLEAR.
    """
    known = _known.get((type_, shape))
    if known is None:
        exponents: list[dict[str, int | None]] = [{} for _ in shape]
        everything: dict[str, int | None] = {}
        for axis, spmd_type in type_:
            if isinstance(spmd_type, Shard) and -len(shape) <= spmd_type.dim < len(shape):
                exponents[spmd_type.dim][axis] = everything[axis] = -1
            elif spmd_type.base is V and not type_.sharded:
                for powers in (*exponents, everything):
                    powers[axis] = UNCLEAR
        sizes = torch.Size([AxisSize(size, of) for size, of in zip(shape, exponents)])
        if len(_known) > 10_000:
            _known.clear()
        known = _known[type_, shape] = sizes, AxisSize(shape.numel(), everything)
    return known


def _sharded_type(mode: Session, x: Tensor) -> TensorType | None:
    """The type of a tensor that is known to be sharded (at level L the type of any tensor); else None."""
    fields = x.__dict__.get(NOTE)
    type_: Any = fields[0] if fields is not None else None
    if fields is None and isinstance(x, nn.Parameter) and mode.mesh is not None:
        type_ = parameter_type(x, mode.mesh, mode.tied.get(id(x)), mode.level)
    return type_ if type_.__class__ is TensorType and (type_.sharded or mode.level == "L") else None


def _shape(mode: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = func(*args, **kwargs)
    type_ = _sharded_type(mode, args[0])
    if type_ is None:
        return result
    if result.__class__ is torch.Size:
        return _sizes(type_, result)[0]
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    return _sizes(type_, args[0].shape)[0][dim] if isinstance(dim, int) else result


def _numel(mode: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = func(*args, **kwargs)
    type_ = _sharded_type(mode, args[0] if args else kwargs["input"])
    return result if type_ is None else _sizes(type_, (args[0] if args else kwargs["input"]).shape)[1]


handlers: dict[Callable[..., Any], Callable[..., Any]] = {
    getter("shape"): _shape,
    Tensor.size: _shape,
    Tensor.numel: _numel,
    Tensor.nelement: _numel,
    torch.numel: _numel,
}


_len = builtins.len


def _sized_len(x: Any, /) -> int:
    """A `len` that returns `x.shape[0]` of a tensor; Python's own makes a plain int of it."""
    return x.shape[0] if x.__class__ in _TENSORS and x.dim() else _len(x)


def install() -> None:
    """Replaces `len`."""
    builtins.len = _sized_len


def remove() -> None:
    """Restores `len`."""
    builtins.len = _len


# --- sizes that a call states


def _literal_sizes(
    mode: Session, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[TensorType]
) -> list[str]:
    """Assumptions of a call that states the local size of a sharded dim by a plain number."""
    stated = _STATED.get(rule.name)
    if stated is None:
        return []
    assumed = _shares(mode, rule, args) if rule.name == "__getitem__" else []
    for index, type_ in enumerate(results):
        if not type_.sharded:
            continue
        sizes = stated(index, args, kwargs)
        for axis, spmd_type in type_:
            if not isinstance(spmd_type, Shard):
                continue
            size = sizes.get(spmd_type.dim)
            if size is not None and _powers(mode, size).get(axis, 0) >= 0:
                assumed.append(
                    f"{rule.name}: that {int(size)} is the local size of dim {spmd_type.dim}, which is sharded over "
                    f'{axis}: write the whole size // comm.size("{axis}"), or take it from a shape'
                )
    return list(dict.fromkeys(assumed))


def _listed(values: Sequence[Any], named: Any) -> Sequence[Any]:
    """The sizes that a call passes one by one, as a sequence, or by name."""
    if not values:
        values = (named,)
    return values[0] if len(values) == 1 and isinstance(values[0], (tuple, list)) else values


def _by_dim(sizes: Sequence[Any], first: int = 0) -> dict[int, Any]:
    return {dim: size for dim, size in enumerate(sizes, first) if isinstance(size, int) and int.__ne__(size, -1)}


def _viewed(index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, Any]:
    return _by_dim(_listed(args[1:], kwargs.get("size", kwargs.get("shape"))))


def _unflattened(index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, Any]:
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    sizes = args[2] if len(args) > 2 else kwargs["sizes"]
    return _by_dim(sizes, dim % (args[0] if args else kwargs["input"]).dim())


def _split(index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, Any]:
    options = dict(kwargs)
    dim = options.pop("dim", args[2] if len(args) > 2 else 0)
    x, sizes = (*args[:2], *options.values())[:2]
    return _by_dim((sizes if isinstance(sizes, int) else sizes[index],), dim % x.dim())


def _narrowed(index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, Any]:
    named = {**dict(zip(("input", "dim", "start", "length"), args)), **kwargs}
    return _by_dim((named["length"],), named["dim"] % args[0].dim())


def _indexed(index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, Any]:
    """The bounds of slices, by dim of the result; none where tensors or lists are among the indices."""
    x, key = args
    indices = key if isinstance(key, tuple) else (key,)
    if not all(item is None or item is ... or isinstance(item, (int, slice)) for item in indices):
        return {}
    num_indexed = sum(item is not None and item is not ... for item in indices)
    sizes: dict[int, Any] = {}
    dim = 0
    for item in indices:
        if isinstance(item, slice):
            bounds = [bound for bound in (item.start, item.stop) if isinstance(bound, int) and int.__bool__(bound)]
            if bounds:
                sizes[dim] = bounds[-1]
        dim += x.dim() - num_indexed if item is ... else not isinstance(item, int) or isinstance(item, bool)
    return sizes


def _shares(mode: Session, rule: Rule, args: Sequence[Any]) -> list[str]:
    """Assumptions of `x[:n]`, where n is one rank's share of a dim and no rank number selects the share."""
    indices = args[1] if isinstance(args[1], tuple) else (args[1],)
    assumed = []
    for item in indices:
        bounds = (item.start, item.stop) if isinstance(item, slice) else ()
        if any(isinstance(bound, RankValue) for bound in bounds):
            continue
        axes = {axis for bound in bounds for axis, power in _powers(mode, bound).items() if power < 0}
        held = note_of(args[0])
        for axis in sorted(axes):
            spmd_type = held.type.get(axis) if held is not None else None
            if spmd_type is not None and spmd_type.letter in SAME:
                assumed.append(f"{rule.name}: that every rank of {axis} is to take the same part of what all have")
    return assumed


def _grouped(index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, Any]:
    return {1: args[1] if len(args) > 1 else kwargs["num_groups"]}


_STATED: dict[str, Callable[[int, Sequence[Any], Mapping[str, Any]], dict[int, Any]]] = {
    **dict.fromkeys(("view", "reshape", "expand", "broadcast_to"), _viewed),
    "unflatten": _unflattened,
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"), _split),
    **dict.fromkeys(("narrow", "narrow_copy"), _narrowed),
    "__getitem__": _indexed,
    "group_norm": _grouped,
}
