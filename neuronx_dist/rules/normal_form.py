"""Comparison of label specs: a local call must have the spec of the global call with shorter labels."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from .spec import Dims, Spec

__all__ = ["normal_form", "without_ones"]


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
