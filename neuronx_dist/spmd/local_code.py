"""Scopes for code that computes on this rank's shards, with declared types of its results.

`local_map` is for users, and reports list it as trusted; `on_own_shard` is for this package's sharded functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import comm
from ..comm.context import AxisLike
from ..torch_internals.tensors import DisableTorchFunction
from .axes import atoms_of
from .boundaries import EVERY_AXIS, Infer, aligned, is_tree
from .declarations import assert_type, types_by_atom
from .errors import SpmdTypeError
from .tensor_type import TensorType, note_of, tensors_in, write
from .types import SAME, LocalType, Shard, SpmdType, V
from .watching import Watcher, active

__all__ = ["axes_along", "local_map", "on_own_shard", "stamp_rows", "stamp_types"]

Declaration = Mapping[Any, SpmdType] | SpmdType

# Types that a result may be declared as: inferred letter -> letters.
_MAY_BE_DECLARED = {
    "V": frozenset("VSP"),
    "S": frozenset("SV"),
    "R": frozenset("RV"),  # each rank may use an equal value as its own
    "I": frozenset("I"),
    "P": frozenset("P"),
    "0": frozenset("RIVSP"),
}


def local_map(
    fn: Callable[..., Any] | None = None,
    *,
    out_types: Any,
    in_types: Any = None,
) -> Callable[..., Any]:
    """Wraps `fn`, with which each rank computes its part from its shards; the type of the parts together is declared.

    For code that no rule can follow because it picks positions of a shard: a loop over the experts of this rank, blocks
    of a sharded weight, the top-k of this rank's logits. Along the axes that the declarations name, S is only
    V inside; everything else is checked as usual, gradients included. The results get `out_types`, which
    reports list as trusted, with the line of the call. Without a check it is `fn`.

    Args:
        out_types: axis -> type, for every tensor of the result; or one such declaration for each, in order; or
            declarations in the structure of the result, each in any form of `merge_types`: `PartitionSpec("dp", None)`,
            `({"tp": R}, PartitionSpec("dp", None))`.
        in_types: required types of the tensors among the positional arguments: one declaration for all, or one for each
            positional argument (None: not verified), or in their structure; `Infer`: not verified.

    Raises:
        SpmdTypeError: (by a call) an input has another type; a result cannot have the declared type: a varying one
            cannot be R or I, one that is equal on all ranks is neither S nor P.
        ValueError: (by a call) the numbers of declarations and of results, or of arguments, differ.

    Example:
        >>> @local_map(out_types={"tp": P})
        ... def experts(x, up, down):  # x R, up and down S(0) on tp
        ...     return sum(F.silu(x @ up[e]) @ down[e] for e in range(len(up)))
    """
    if fn is None:
        return functools.partial(local_map, out_types=out_types, in_types=in_types)
    name = getattr(fn, "__name__", type(fn).__name__)

    @functools.wraps(fn)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        mode = active()
        if mode is None:
            return fn(*args, **kwargs)
        trees = [types for types in (in_types, out_types) if is_tree(types)]
        if is_tree(in_types):
            for x, types in aligned(f"local_map of {name}", args, in_types):
                assert_type(x, types)
        elif in_types is not None and in_types is not Infer:
            _verify(name, args, in_types)
        plain = [
            d for types in (out_types, in_types) if types not in trees and types is not Infer for d in _listed(types)
        ]
        axes = {atom for declaration in plain for atom in _atoms(declaration, mode)}
        with mode.local_scope(
            axes if not trees else {*axes, *atoms_of("world", mode.mesh)} if mode.mesh else EVERY_AXIS
        ):
            result = fn(*args, **kwargs)
        given = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
        result = _apart(result, given)
        tensors = tensors_in(result)
        if is_tree(out_types):
            pairs = [*aligned(f"local_map of {name}", result, out_types)]
        else:
            pairs = [*zip(tensors, _for_each(name, out_types, len(tensors), "tensors in the result"))]
        for x, types in pairs:
            _declare(mode, name, x, types)
        mode.trust(f"local_map: {name} computes {out_types if is_tree(out_types) else _words(out_types)}")
        return result

    return mapped


def _is_declaration(types: Any) -> bool:
    return types is None or isinstance(types, (LocalType, Shard, Mapping))


def _listed(types: Any) -> list[Any]:
    return [types] if _is_declaration(types) else list(types)


def _for_each(name: str, types: Any, count: int, of: str) -> list[Any]:
    if _is_declaration(types):
        return [types] * count
    if len(types) != count:
        raise ValueError(f"local_map of {name}: {len(types)} declarations for {count} {of}: {list(types)}")
    return list(types)


def _atoms(types: Any, mode: Watcher) -> Sequence[str]:
    """Returns the axes that a declaration names."""
    if types is None:
        return ()
    axes = types if isinstance(types, Mapping) else ["world"]
    return [atom for axis in axes for atom in atoms_of(axis, mode.mesh)]


def _words(types: Any) -> str:
    return ", ".join(map(str, _listed(types)))


def _verify(name: str, args: Sequence[Any], in_types: Any) -> None:
    for x, types in zip(args, _for_each(name, in_types, len(args), "positional arguments")):
        if types is not None and isinstance(x, torch.Tensor):
            assert_type(x, types)


def _apart(result: Any, given: Sequence[torch.Tensor]) -> Any:
    """Returns the result with new tensors for those that are also arguments, which keep their types."""
    if isinstance(result, torch.Tensor):
        with DisableTorchFunction():
            if not any(result is x for x in given):
                return result
            note, again = note_of(result), result.view_as(result)
            if note is not None:
                write(again, note.type, note.origins, note.session)
            return again
    if type(result) in (tuple, list):
        return type(result)(_apart(item, given) for item in result)
    return result


def _same_scale(known: SpmdType, declared: SpmdType) -> bool:
    """Returns whether a declaration keeps the scale; of a varying value only the scale of a mean is a useful guess."""
    same_letter = known.letter == declared.letter or (known.letter in SAME and declared.letter in SAME)
    mean_as_sum = known.letter == "V" and declared.letter == "P" and known.scale > 0
    return known.scale == declared.scale if same_letter or mean_as_sum else True


def _declare(mode: Watcher, name: str, x: torch.Tensor, types: Declaration) -> None:
    """Sets a result's declared type.

    Raises:
        SpmdTypeError: the result cannot have that type.
    """
    with DisableTorchFunction():
        note = mode.note(x, name)
        if note is None:
            return
        declared = types_by_atom(types, mode.mesh, x.shape, mode.level)
        for axis, spmd_type in declared.items():
            known = note.type.get(axis)
            if known is None or (spmd_type.letter in _MAY_BE_DECLARED[known.letter] and _same_scale(known, spmd_type)):
                continue
            raise SpmdTypeError(
                f"local_map of {name}: its result {list(x.shape)}",
                f"it is {known} on {axis}, and cannot be declared {spmd_type}",
                repairs=[f"out_types={{{axis!r}: {known}}}", f"an operator behind it that makes {spmd_type} of it"],
                axis=axis,
                rule="local_map",
            )
        known_types = {axis: spmd_type for axis, spmd_type in note.type if axis not in declared}
        write(x, TensorType.of({**known_types, **declared}, note.type.rest), None, mode.session)


def axes_along(group: AxisLike, watcher: Watcher) -> Sequence[str]:
    """Returns the atoms of an axis or group as the checker names them; none for one rank."""
    return atoms_of(group, watcher.mesh) if comm.communicator(group).size > 1 else ()


def stamp_types(x: torch.Tensor, declared: Mapping[Any, SpmdType], watcher: Watcher) -> None:
    """Writes types by group on a tensor, but along axes on which it is known to be P or I."""
    note: Any = watcher.note(x, "shards")
    if note is None:  # in a backward pass
        return
    types = dict(note.type.types)
    for group, wanted in declared.items():
        for axis in axes_along(group, watcher):
            if types.get(axis, V).letter in "VSR0":
                types[axis] = V if wanted.letter == "S" and watcher.level != "G" else wanted
    watcher.stamp(x, TensorType.of(types, note.type.rest), note.origins)


def stamp_rows(x: torch.Tensor, like: torch.Tensor, axes: AxisLike) -> None:
    """Makes the rows of a shard `x` those of `like` in a check: as many blocks, and in the same order, along `axes`."""
    watcher = active()
    if watcher is None:
        return
    note, rows = watcher.note(x, "rows"), watcher.note(like, "rows")
    if note is None or rows is None:  # in a backward pass
        return
    types = dict(note.type.types)
    for axis in axes_along(axes, watcher):
        spmd_type = rows.type.get(axis)
        if isinstance(spmd_type, Shard) and spmd_type.dim == 0 and isinstance(types.get(axis), Shard):
            types[axis] = spmd_type.base
    watcher.stamp(x, TensorType.of(types, note.type.rest), note.origins)


def on_own_shard(function: Callable[..., Any], types: Mapping[Any, SpmdType]) -> Callable[..., Any]:
    """Wraps a function of this rank's shards, such as their maximum or a slice by position, whose results have `types`.

    It is `local_map` for this package's own code: reports do not list it as trusted, and what the checker knows to be P
    or I keeps its type, by which all that follows is judged.

    Args:
        types: group or axis -> V, P or S(dim), of every tensor that the function returns.
    """
    watcher = active()
    if not types or watcher is None:
        return function

    def checked(*args: Any) -> Any:
        with watcher.local_scope([axis for group in types for axis in axes_along(group, watcher)]):
            result = function(*args)
        for x in tensors_in(result):
            stamp_types(x, types, watcher)
        return result

    return checked
