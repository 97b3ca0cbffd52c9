"""The call that a rank makes on its shards: the same function, with the integers that its shards ask for.

A rule describes the call that it is shown. So a local call is right if its label spec is that of the whole call with
one label cut, and wrong otherwise: `view(b, s, heads, width)` of a shard of the heads names too many of them, and
`group_norm` of a shard of the channels takes groups of another size without any error. The integers among the
arguments are divided until the specs agree, and what torch gives of meta tensors has the shapes of shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from ..checking.types.rules import RULES, Rule, Spec
from ..checking.types.rules.normal_form import normal_form, without_ones
from .program import substituted

__all__ = ["Arguments", "Slot", "edited", "local_arguments", "spec_of", "tensors_of"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Path = tuple[Any, ...]


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in the arguments of a call: `number` counts all tensors of the call."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


def spec_of(rule: Rule, arguments: Arguments) -> Spec:
    """The label spec of a call on (meta) tensors, without the factors of size 1, along which nothing can be cut."""
    assert rule.spec is not None
    return without_ones(rule.spec(*arguments[0], **arguments[1]))


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors among the results of a call."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [item for item in result if isinstance(item, torch.Tensor)] if isinstance(result, (tuple, list)) else []


def local_arguments(
    function: Callable[..., Any],
    whole: Spec,
    label: int,
    size: int,
    arguments: Arguments,
    local_tensor: Callable[[Slot], torch.Tensor],
    shapes: Sequence[tuple[int, ...]],
) -> Arguments | None:
    """The arguments of the local call, as little changed as it takes; None: no change of integers makes it right.

    Args:
        whole: spec of the whole call.
        label: that is cut in `size`.
        arguments: of the whole call, with slots; so is the result.
        local_tensor: the (meta) tensor that a rank has of a slot.
        shapes: of a rank's results.
    """
    wanted = normal_form(whole, {**whole.sizes, label: whole.sizes[label] // size})
    for local in edited(arguments, lambda x: None if x % size else x // size):
        tensors = substituted(local, Slot, local_tensor)
        try:
            congruent = normal_form(spec_of(RULES[function], tensors)) == wanted
        except Exception:  # a view of a shard to the whole sizes, say: whatever the rule says of such arguments
            continue
        if congruent and _gives(function, tensors, shapes):
            return local
    return None


def _gives(function: Callable[..., Any], arguments: Arguments, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether the results of a call on meta tensors have these shapes; or nobody knows, for there is no such call."""
    try:
        results = tensors_of(function(*arguments[0], **arguments[1]))
    except NotImplementedError:  # a function without a kernel for meta tensors
        return True
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    return [tuple(x.shape) for x in results] == list(shapes)


def edited(arguments: Arguments, change: Callable[[int], int | None]) -> Iterator[Arguments]:
    """The arguments with integers changed: none, each one, those of one list, each two, all.

    Args:
        change: what becomes of an integer; None: it stays.
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
    if isinstance(x, bool):
        return
    if isinstance(x, int):
        if x and change(x) is not None:
            yield path
    elif isinstance(x, (tuple, list)):
        for index, item in enumerate(x):
            yield from _changed(item, change, (*path, index))
    elif isinstance(x, dict):
        for name, item in x.items():
            yield from _changed(item, change, (*path, name))
    elif isinstance(x, slice):
        for name in ("start", "stop", "step"):
            yield from _changed(getattr(x, name), change, (*path, name))


def _with(x: Any, paths: Sequence[Path], change: Callable[[int], int | None]) -> Any:
    """`x` with the integers at `paths` changed."""
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
        return slice(*(_with(getattr(x, n), inner.get(n, ()), change) for n in ("start", "stop", "step")))
    items = [_with(item, inner.get(index, ()), change) for index, item in enumerate(x)]
    return items if isinstance(x, list) else tuple(items)
