"""Arguments of a call as nested containers: replaces items of one class, and edits integers at their paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import torch

from ..torch_internals.tensors import pytree

__all__ = ["Arguments", "edited", "substituted"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Path = tuple[Any, ...]

_BOUNDS = ("start", "stop", "step")


def substituted(x: Any, of: type[Any] | tuple[type[Any], ...], convert: Callable[[Any], Any]) -> Any:
    """Returns a copy of containers, slices included, with `convert(item)` in the place of each item of class `of`."""
    if isinstance(x, of):
        return convert(x)
    if isinstance(x, slice):
        return slice(*(substituted(bound, of, convert) for bound in (x.start, x.stop, x.step)))
    if type(x) in (tuple, torch.Size):
        return tuple([substituted(item, of, convert) for item in x])
    if type(x) is list:
        return [substituted(item, of, convert) for item in x]
    if type(x) is dict:
        return {key: substituted(item, of, convert) for key, item in x.items()}
    if x is None or isinstance(x, (int, float, str, torch.dtype)):
        return x
    leaves, structure = pytree.tree_flatten(x)
    return x if structure.is_leaf() else structure.unflatten([substituted(leaf, of, convert) for leaf in leaves])


def edited(arguments: Arguments, change: Callable[[int], int | None]) -> Iterator[Arguments]:
    """Yields copies of the arguments with integers changed: none, each one, those of one list, each two, all.

    Args:
        change: returns the new value of an integer; None: the integer stays.
    """
    paths = list(_changed(arguments, change, ()))
    yield arguments
    groups: list[Sequence[Path]] = [(path,) for path in paths]
    lists: dict[Path, list[Path]] = {}
    for path in paths:
        lists.setdefault(path[:-1], []).append(path)
    groups += [group for group in lists.values() if len(group) > 1]
    groups += combinations(paths, 2)
    if len(paths) > 2:
        groups.append(paths)
    for group in groups:
        yield _with(arguments, group, change)


def _changed(x: Any, change: Callable[[int], int | None], path: Path) -> Iterator[Path]:
    """Yields the paths of the integers that `change` gives another value."""
    if isinstance(x, bool):
        return
    if isinstance(x, int):
        if x and change(x) not in (None, x):
            yield path
    elif type(x) in (tuple, list, torch.Size):
        for index, item in enumerate(x):
            yield from _changed(item, change, (*path, index))
    elif type(x) is dict:
        for name, item in x.items():
            yield from _changed(item, change, (*path, name))
    elif isinstance(x, slice):
        for name in _BOUNDS:
            yield from _changed(getattr(x, name), change, (*path, name))


def _with(x: Any, paths: Sequence[Path], change: Callable[[int], int | None]) -> Any:
    """Returns a copy of `x` with the integers at `paths` changed."""
    if not paths:
        return x
    if isinstance(x, int):
        return change(x)
    inner: dict[Any, list[Path]] = {}
    for path in paths:
        inner.setdefault(path[0], []).append(path[1:])
    if isinstance(x, dict):
        return {name: _with(item, inner.get(name, ()), change) for name, item in x.items()}
    if isinstance(x, slice):
        return slice(*(_with(getattr(x, name), inner.get(name, ()), change) for name in _BOUNDS))
    items = [_with(item, inner.get(index, ()), change) for index, item in enumerate(x)]
    return items if isinstance(x, list) else tuple(items)
