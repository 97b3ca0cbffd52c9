"""The call that a rank makes on its shards: the same function, with the integers that fit the shards.

A rule describes one call. So a local call is right if its label spec equals that of the global call with shorter
labels: `view(b, s, heads, width)` of a shard of the heads names too many heads, and `group_norm` of a shard of the
channels takes groups of another size without any error. The integers among the arguments are scaled as labels are,
until the specs agree and torch's results on meta tensors have the shapes of shards. Shards have any sizes; even ones
are a special case.

`parallelize` asks for the local call of each strategy that the type checker accepts, ShardTensor for the local call of
a call whose sharded labels are free (`free_cuts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any, NamedTuple

import torch

from .containers import Arguments, edited, substituted
from .others import GROUPED_PRODUCTS
from .spec import Dims, Rule, Spec

__all__ = [
    "Arguments",
    "Cut",
    "TensorSlot",
    "free_cuts",
    "free_labels",
    "local_arguments",
    "normal_form",
    "spec_of",
    "tensors_of",
    "without_ones",
]

_ENDS = ("sum", "mean")  # kinds of `Spec.reduced` in which shards give summands


@dataclass(frozen=True)
class TensorSlot:
    """Placeholder of a tensor in the arguments of a call; `number` counts the tensors of the call."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = False


class Cut(NamedTuple):
    """A label in shards of these sizes, one for each rank of a mesh dim."""

    label: int
    sizes: tuple[int, ...]


def spec_of(rule: Rule, arguments: Arguments) -> Spec:
    """Returns the label spec of a call on (meta) tensors without factors of size 1, which cannot be cut."""
    assert rule.spec is not None
    return without_ones(rule.spec(*arguments[0], **arguments[1]))


def tensors_of(result: Any) -> list[torch.Tensor]:
    """Returns the tensors among the results of a call, in order."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [x for item in result for x in tensors_of(item)] if isinstance(result, (tuple, list)) else []


# --- labels that a rank may have a part of


def free_cuts(spec: Spec, affine: bool, shards: Sequence[Mapping[int, tuple[int, Sequence[int]]]]) -> dict[int, Cut]:
    """Returns the label that each mesh dim cuts; empty if a label is not free or operands are sharded differently.

    Values neither mix along a free label nor are picked from it: the function of a shard is the shard of the function.
    A free label is the outermost one of a dim in every operand and result that has it. A free label that is summed or
    averaged over is in all operands.

    Args:
        affine: True if the call adds a constant to a sum, or rounds it.
        shards: for each operand, by mesh dim, the sharded tensor dim and the sizes of all ranks' shards.
    """
    cuts: dict[int, Cut] = {}
    for dims, operand in zip(spec.ins, shards, strict=True):
        for mesh_dim, (dim, sizes) in operand.items():
            if dims is None or not dims[dim]:
                return {}
            label, *inner = dims[dim]
            count = prod(spec.sizes[factor] for factor in inner)
            if any(size % count for size in sizes):
                return {}
            cut = Cut(label, tuple(size // count for size in sizes))
            if cuts.setdefault(mesh_dim, cut) != cut:
                return {}
    labels = [cut.label for cut in cuts.values()]
    free = len(set(labels)) == len(labels) and all(_is_free(spec, label, affine) for label in labels)
    return cuts if free else {}


def free_labels(spec: Spec, affine: bool) -> list[int]:
    """Returns the labels that may be cut: see `free_cuts`."""
    return [label for label in spec.sizes if _is_free(spec, label, affine)]


def _is_free(spec: Spec, label: int, affine: bool) -> bool:
    if label in spec.fixed or label in spec.weak or label in spec.ranges or label in spec.looked_up:
        return False
    holders = [[dim for dim in dims or () if label in dim] for dims in spec.ins]
    if any(len(held) > 1 or any(dim[0] != label for dim in held) for held in holders):
        return False
    results = [[dim for dim in dims if label in dim] for dims in spec.outs]
    if label not in spec.reduced:
        return all(len(held) == 1 and held[0][0] == label for held in results)
    return spec.reduced[label] in _ENDS and all(holders) and not any(results) and not affine


# --- the call of one rank


def local_arguments(
    function: Callable[..., Any],
    rule: Rule,
    spec: Spec,
    sizes: Mapping[int, int],
    arguments: Arguments,
    local_tensor: Callable[[TensorSlot], torch.Tensor],
) -> Arguments | None:
    """Returns the arguments of the local call, changed as little as possible; None if no change of integers is right.

    Args:
        spec: label spec of the global call, by `spec_of`.
        sizes: local size of each label that is cut.
        arguments: arguments of the global call, with slots; so are the returned ones.
        local_tensor: returns the rank's (meta) tensor for a slot.
    """
    lengths = {**spec.sizes, **sizes}
    wanted = normal_form(spec, lengths)
    shapes = [tuple(prod(lengths[label] for label in dim) for dim in dims) for dims in spec.outs]
    for local in _scaled(arguments, [(spec.sizes[label], size) for label, size in sizes.items()]):
        tensors = substituted(local, TensorSlot, local_tensor)
        try:
            congruent = normal_form(spec_of(rule, tensors)) == wanted
        except Exception:  # such as a view of a shard to the global sizes: rules raise anything
            continue
        if congruent and _returns(function, tensors, shapes):
            return local
    return None


def _scaled(arguments: Arguments, cuts: Sequence[tuple[int, int]]) -> Iterator[Arguments]:
    """Yields the arguments with integers scaled as labels are: from the global size of a label to the local one."""
    if not cuts:
        yield arguments
        return
    (whole, size), *others = cuts
    for scaled in edited(arguments, lambda x: None if x * size % whole else x * size // whole):
        yield from _scaled(scaled, others)


def _returns(function: Callable[..., Any], arguments: Arguments, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Returns True if a call on meta tensors has results of these shapes, or torch has no kernel for it."""
    if function in GROUPED_PRODUCTS:  # rows of 16 bytes; the kernel for meta tensors takes bfloat16 alone
        return all(x.shape[-1] * x.itemsize % 16 == 0 for x in tensors_of(arguments[0]) if x.is_floating_point())
    try:
        results = tensors_of(function(*arguments[0], **arguments[1]))
    except NotImplementedError:  # a function without a kernel for meta tensors
        return True
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    return [tuple(x.shape) for x in results] == shapes


def without_ones(spec: Spec) -> Spec:
    """Returns a spec without factors of size 1, which cannot be cut."""
    if 1 not in spec.sizes.values():
        return spec

    def dims(of: Dims | None) -> Any:
        return None if of is None else tuple(tuple(label for label in dim if spec.sizes[label] != 1) for dim in of)

    return spec._replace(ins=tuple(map(dims, spec.ins)), outs=tuple(map(dims, spec.outs)))


def normal_form(spec: Spec, sizes: Mapping[int, int] | None = None) -> Any:
    """Returns a spec with labels numbered in order of appearance: equal forms describe equivalent calls.

    Args:
        sizes: sizes of the labels in place of the spec's.
    """
    lengths = spec.sizes if sizes is None else sizes
    numbers: dict[int, int] = {}

    def dims(of: Dims | None) -> Any:
        if of is None:
            return None
        return tuple(tuple(numbers.setdefault(x, len(numbers)) for x in dim if lengths[x] != 1) for dim in of)

    ins, outs = tuple(map(dims, spec.ins)), tuple(map(dims, spec.outs))
    fixed = frozenset(numbers[x] for x in spec.fixed if x in numbers)
    reduced = frozenset((numbers[x], how) for x, how in spec.reduced.items() if x in numbers)
    ranges = frozenset(
        (numbers[x], dim, Fraction(start, length), Fraction(stop, length))
        for x, pieces in spec.ranges.items()
        for dim, start, stop, length in pieces
        if x in numbers
    )
    return ins, outs, tuple(lengths[x] for x in numbers), fixed, reduced, ranges
