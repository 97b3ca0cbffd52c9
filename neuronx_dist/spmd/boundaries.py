"""Boundaries of code that the checker does not follow, or follows locally, and declarations in trees at them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..torch_internals.tensors import DisableTorchFunction
from .axes import atoms_of
from .declarations import assert_type
from .errors import SpmdTypeError
from .partition_spec import PartitionSpec, SpmdType, by_axis
from .tensor_type import note_of, tensors_in
from .types import LocalType, Shard
from .watching import active, no_typecheck

__all__ = ["EVERY_AXIS", "Infer", "aligned", "is_tree", "local_code", "register_no_typecheck", "unchecked"]


class _Infer:
    def __repr__(self) -> str:
        return "Infer"


class _Every(frozenset[str]):
    """All names: axes of a mode without a mesh."""

    def __contains__(self, axis: object) -> bool:
        return True


EVERY_AXIS = _Every()
#: In place of `in_types`: inputs have the types that they have.
Infer = _Infer()


def _is_leaf(types: Any) -> bool:
    """Returns whether this is the declaration of one tensor."""
    if types is None or isinstance(types, (LocalType, Shard, SpmdType, PartitionSpec)):
        return True
    if isinstance(types, Mapping):
        return all(isinstance(t, (LocalType, Shard)) for t in types.values())
    pair = type(types) is tuple and len(types) == 2 and (types[1] is None or isinstance(types[1], PartitionSpec))
    return pair and isinstance(types[0], Mapping) and _is_leaf(types[0])


def is_tree(types: Any) -> bool:
    """Returns whether declarations are in a form other than mappings, one by one: specs, or nested."""
    if types is None or types is Infer or isinstance(types, (LocalType, Shard)):
        return False
    if isinstance(types, Mapping):
        return not _is_leaf(types)
    if isinstance(types, (PartitionSpec, SpmdType)):
        return True
    return any(item is Infer or isinstance(item, (list, tuple, SpmdType)) or is_tree(item) for item in types)


def aligned(name: str, values: Any, types: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    """Pairs each tensor of nested lists, tuples and mappings with its declaration, as axis -> type.

    Raises:
        ValueError: the structures differ.
        SpmdTypeError: `Infer` inside of a structure.
    """
    if types is Infer:
        raise SpmdTypeError(f"{name}: Infer stands in place of all of in_types; None leaves one argument out")
    if isinstance(values, torch.Tensor):
        if not _is_leaf(types):
            raise ValueError(f"{name}: a tensor {list(values.shape)}, and the declarations {types!r}")
        if types is not None:
            yield values, by_axis(types)
        return
    if isinstance(values, Mapping) and isinstance(types, Mapping) and set(values) == set(types):
        for key, value in values.items():
            yield from aligned(name, value, types[key])
        return
    if isinstance(values, (list, tuple)) and not _is_leaf(types):
        if not isinstance(types, (list, tuple)) or len(types) != len(values):
            raise ValueError(f"{name}: {len(values)} values, and the declarations {types!r}")
        for value, declaration in zip(values, types):
            yield from aligned(name, value, declaration)
        return
    if isinstance(values, (list, tuple)) and types is not None and not isinstance(types, PartitionSpec):
        for x in tensors_in(values):  # one declaration for all
            yield x, by_axis(types)
        return
    if isinstance(values, (list, tuple, Mapping)) and types is not None:
        raise ValueError(f"{name}: values {type(values).__name__}, and the declarations {types!r}")


@contextmanager
def local_code() -> Iterator[None]:
    """Makes S this rank's own part, V, in the `with`, for code on parts: `local_map` without declarations."""
    mode = active()
    if mode is None:
        yield
        return
    mode.trust("local: sharding is not followed in this code")
    with mode.local_scope(EVERY_AXIS if mode.mesh is None else set(atoms_of("world", mode.mesh))):
        yield


def unchecked(fn: Callable[..., Any] | None = None, *, in_types: Any = Infer, out_types: Any = None) -> Any:
    """Wraps a function whose body is not checked; the types of its results are declared, and trusted.

    Args:
        in_types: required types of the positional arguments, in their structure; `Infer`: not verified.
        out_types: types of the results, in their structure; None: the results have no types.
    """
    if fn is None:
        return functools.partial(unchecked, in_types=in_types, out_types=out_types)
    name = f"no_typecheck of {getattr(fn, '__name__', type(fn).__name__)}"

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        mode = active()
        if mode is None:
            return fn(*args, **kwargs)
        if in_types is not Infer:
            for x, types in aligned(name, args, in_types):
                assert_type(x, types)
        with no_typecheck():
            result = fn(*args, **kwargs)
        if out_types is None:
            return result
        arguments: Sequence[torch.Tensor] = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
        with DisableTorchFunction():
            result = _fresh(result, arguments)
        for x, types in aligned(name, result, out_types):
            assert_type(x, types)
        mode.trust(f"{name}: its results are {out_types}")
        return result

    return wrapped


def _fresh(result: Any, arguments: Sequence[torch.Tensor]) -> Any:
    """Returns the result with a new view of each tensor that is an argument, which keeps its type."""
    if isinstance(result, torch.Tensor):
        return result.view_as(result) if any(result is x for x in arguments) or note_of(result) else result
    if type(result) in (tuple, list):
        return type(result)(_fresh(item, arguments) for item in result)
    return result


def register_no_typecheck(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with the checker switched off inside: as a decorator, or `f = register_no_typecheck(f)`."""
    wrapped: Callable[..., Any] = unchecked(fn)
    return wrapped
