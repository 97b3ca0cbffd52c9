"""`local_map`: a scope for code that works on this rank's own numbers, with declared types of its results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .axes import atoms_of
from .declarations import assert_type, types_by_atom
from .errors import SpmdTypeError
from .tensor_type import TensorType, note_of, tensors_in, write
from .types import SAME, LocalType, Shard, SpmdType
from .watching import Watcher, active

__all__ = ["local_map"]

Declaration = Mapping[Any, SpmdType] | SpmdType

# What a result may be declared as: the letter of what the checker knows it to be -> letters.
_MAY_BE_DECLARED = {
    "V": frozenset("VSP"),
    "S": frozenset("SV"),
    "R": frozenset("RV"),  # each rank may take what is equal for its own
    "I": frozenset("I"),
    "P": frozenset("P"),
    "0": frozenset("RIVSP"),
}


def local_map(
    fn: Callable[..., Any] | None = None,
    *,
    out_types: Declaration | Sequence[Declaration],
    in_types: Declaration | Sequence[Declaration | None] | None = None,
) -> Callable[..., Any]:
    """`fn`, of which each rank computes its own part from its own numbers; what the parts are together is declared.

    For code that no rule can follow because it picks positions of a shard: a loop over the experts of this rank, blocks
    of a sharded weight, the top-k of this rank's logits. Along the axes that the declarations name, what is sharded
    merely varies inside; everything else is checked as usual, gradients included. The results get `out_types`, which
    reports list as trusted, with the line of the call. Without a check it is `fn`.

    Args:
        out_types: axis -> type, for every tensor of the result; or one such declaration for each, in order.
        in_types: what the tensors among the positional arguments must be: one declaration for all, or one for each
            positional argument (None: it is not verified).

    Raises:
        SpmdTypeError: (by a call) an input has another type; a result cannot have the declared one: what varies cannot
            be R or I, what is equal on all ranks is neither S nor P.
        ValueError: (by a call) there are not as many declarations as results, or as arguments.

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
        if in_types is not None:
            _verify(name, args, in_types)
        axes = {atom for each in (*_listed(out_types), *_listed(in_types)) for atom in _atoms(each, mode)}
        with mode.local_scope(axes):
            result = fn(*args, **kwargs)
        given = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
        result = _apart(result, given)
        tensors = tensors_in(result)
        for x, types in zip(tensors, _for_each(name, out_types, len(tensors), "tensors in the result")):
            _declare(mode, name, x, types)
        mode.trust(f"local_map: {name} computes {_words(out_types)}")
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
    """The axes that a declaration names."""
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
    """The result, with new tensors for those that are arguments too: these keep their types."""
    if isinstance(result, torch.Tensor):
        with torch._C.DisableTorchFunction():
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
    """Whether a declaration keeps the scale; of what is known to vary only that of a mean is a guess worth keeping."""
    alike = known.letter == declared.letter or (known.letter in SAME and declared.letter in SAME)
    mean_as_sum = known.letter == "V" and declared.letter == "P" and known.scale > 0
    return known.scale == declared.scale if alike or mean_as_sum else True


def _declare(mode: Watcher, name: str, x: torch.Tensor, types: Declaration) -> None:
    """Gives a result its declared type.

    Raises:
        SpmdTypeError: it cannot be that.
    """
    with torch._C.DisableTorchFunction():
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
