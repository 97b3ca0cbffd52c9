"""Annotation of a function: its effect on the dims of tensors, as a line of text.

    "m k+, n k+ -> m n"        a letter, or a word, is a dim; equal dims belong together
    k+                         is summed over: pieces give parts of a sum
    k^                         is not split
    *                          any number of dims, equal everywhere
    ?                          no tensor, or a tensor that every rank has whole
    (h d)                      a dim of h blocks of d positions; sizes come from arguments of these names
    3                          a dim of that size, which is not split

The inputs are the function's parameters in order; later parameters are no tensors. (nnScaler's notation.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...rules.spec import Dims, Spec

__all__ = ["Annotation", "AnnotationError", "Term"]

Term = list[tuple[str, ...]] | None
"""The dims of a tensor, each as the names of its factors; None: `?`."""

_TOKEN = re.compile(r"\(([^()]*)\)|([^\s()]+)")
_NAME = re.compile(r"[A-Za-z_]\w*$")


class AnnotationError(ValueError):
    """Raised when an annotation cannot be read, or does not fit a call."""


@dataclass(frozen=True)
class Annotation:
    """Annotation after parsing.

    Attributes:
        inputs, outputs: dims of each tensor; `*` stays `*`.
        summed, fixed: names with `+` and `^`.
    """

    text: str
    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    summed: frozenset[str]
    fixed: frozenset[str]

    @classmethod
    def read(cls, text: str) -> Annotation:
        """Parses an annotation.

        Raises:
            AnnotationError: the text cannot be read, or says nothing of a dim in the outputs.
        """
        left, arrow, right = text.partition("->")
        if not arrow or "->" in right:
            raise AnnotationError(f"annotation {text!r}: must be 'inputs -> outputs', such as 'm k+, n k+ -> m n'")
        summed: set[str] = set()
        fixed: set[str] = set()
        inputs = tuple(_term(text, part, summed, fixed) for part in left.split(","))
        outputs = tuple(_term(text, part, summed, fixed) for part in right.split(","))
        if any(term is None for term in outputs):
            raise AnnotationError(f"annotation {text!r}: `?` is for inputs only; write the dims of each output")
        read = cls(text, inputs, outputs, frozenset(summed), frozenset(fixed))
        in_outputs = _names(outputs)
        for name in _names(inputs):
            if name in summed and name in in_outputs:
                raise AnnotationError(f"annotation {text!r}: {name}+ is summed over, so it cannot be in an output")
            if not name.isdigit() and name not in in_outputs | summed | fixed:
                raise AnnotationError(
                    f"annotation {text!r}: {name} is in no output: write {name}+ where the function sums over it, or "
                    f"{name}^ where it cannot be split"
                )
        return read

    def sizes(self, shapes: Sequence[Sequence[int] | None], numbers: Mapping[str, Any]) -> tuple[dict[str, int], int]:
        """Returns the size of each name, and the number of dims of `*`, for inputs of these shapes.

        Args:
            shapes: shape of each input; None: no tensor.
            numbers: arguments of the call, by name.

        Raises:
            AnnotationError: the shapes do not fit, or do not determine all sizes.
        """
        sizes: dict[str, int] = {}
        stars: tuple[int, ...] | None = None
        groups: list[tuple[tuple[str, ...], int]] = []
        for position, (term, shape) in enumerate(zip(self.inputs, shapes)):
            if term is None or shape is None:
                continue
            run = len(shape) - len(term) + 1 if ("*",) in term else 0
            if run < 0 or (("*",) not in term and len(shape) != len(term)):
                raise AnnotationError(f"{self._at(position, shape)}: the input must have {len(term)} dims")
            dims = iter(shape)
            for factors in term:
                if factors == ("*",):
                    run_sizes = tuple(next(dims) for _ in range(run))
                    if stars is not None and run_sizes != stars:
                        raise AnnotationError(
                            f"{self._at(position, shape)}: `*` is {run_sizes} here and {stars} in an earlier input"
                        )
                    stars = run_sizes
                else:
                    groups.append((factors, next(dims)))
        for factors, size in sorted(groups, key=lambda group: len(group[0])):
            self._learn(sizes, factors, size, numbers)
        for name in _names(self.outputs):
            if name != "*" and name not in sizes:
                number = numbers.get(name, int(name) if name.isdigit() else None)
                if not isinstance(number, int):
                    raise AnnotationError(f"annotation {self.text!r}: no input or argument gives the size of {name}")
                sizes[name] = number
        sizes.update({f"*{index}": size for index, size in enumerate(stars or ())})
        return sizes, len(stars or ())

    def _learn(self, sizes: dict[str, int], factors: tuple[str, ...], size: int, numbers: Mapping[str, Any]) -> None:
        for name in factors:
            if name not in sizes:
                if name.isdigit():
                    sizes[name] = int(name)
                elif isinstance(numbers.get(name), int):
                    sizes[name] = numbers[name]
        open_names = [name for name in factors if name not in sizes]
        known = math.prod(sizes[name] for name in factors if name in sizes)
        if len(open_names) > 1:
            raise AnnotationError(
                f"annotation {self.text!r}: the sizes of {' and '.join(open_names)} in ({' '.join(factors)}) are "
                "unknown: the function needs arguments of these names"
            )
        if open_names and known and size % known == 0:
            sizes[open_names[0]] = size // known
        elif open_names or known != size:
            raise AnnotationError(
                f"annotation {self.text!r}: a dim of size {size} does not fit ({' '.join(factors)}) with "
                + ", ".join(f"{name}={sizes[name]}" for name in factors if name in sizes)
            )

    def _at(self, position: int, shape: Sequence[int]) -> str:
        return f"annotation {self.text!r}, input {position} of shape {list(shape)}"

    def spec(
        self, shapes: Sequence[Sequence[int] | None], numbers: Mapping[str, Any], function: str
    ) -> tuple[list[Dims | None], Spec]:
        """Returns the dims of each input of a call (None: no tensor), and its label spec without operands."""
        sizes, stars = self.sizes(shapes, numbers)
        label_of = {name: label for label, name in enumerate(sizes)}
        by_label = dict(enumerate(sizes.values()))
        fixed = {
            label: f"{function} is registered as {self.text!r}, which does not split it ({name})"
            for name, label in label_of.items()
            if name in self.fixed or name.isdigit()
        }
        ins: list[Dims | None] = []
        for position, shape in enumerate(shapes):
            term = self.inputs[position] if position < len(self.inputs) else None
            if shape is None:
                ins.append(None)
            elif term is None:
                whole = range(len(by_label), len(by_label) + len(shape))
                by_label.update(zip(whole, shape))
                fixed.update(dict.fromkeys(whole, f"{function} is registered as {self.text!r}: `?` is whole"))
                ins.append(tuple((label,) for label in whole))
            else:
                ins.append(_labelled(term, label_of, stars))
        outs = tuple(_labelled(term or [], label_of, stars) for term in self.outputs)
        reduced = {label_of[name]: "sum" for name in self.summed}
        return ins, Spec((), outs, by_label, reduced, fixed)


def _labelled(term: list[tuple[str, ...]], label_of: Mapping[str, int], stars: int) -> Dims:
    dims: list[tuple[int, ...]] = []
    for factors in term:
        if factors == ("*",):
            dims += [(label_of[f"*{index}"],) for index in range(stars)]
        elif factors == ("1",):
            dims.append(())
        else:
            dims.append(tuple(label_of[name] for name in factors))
    return tuple(dims)


def _names(terms: Sequence[Term]) -> set[str]:
    return {name for term in terms for factors in term or () for name in factors if name != "*"}


def _term(text: str, part: str, summed: set[str], fixed: set[str]) -> Term:
    part = part.strip()
    if part == "?":
        return None
    if re.sub(r"\s", "", _TOKEN.sub("", part)):
        raise AnnotationError(f"annotation {text!r}: {part!r} has an unmatched parenthesis")
    dims = []
    for inner, single in _TOKEN.findall(part):
        factors = []
        for word in inner.split() if inner else [single]:
            name = word.rstrip("+^")
            if word[len(name) :] not in ("", "+", "^") or not (_NAME.match(name) or name.isdigit() or word == "*"):
                raise AnnotationError(
                    f"annotation {text!r}: {word!r} is no dim; write a name, name+ (summed), name^ (not split), *, ?, "
                    "(outer inner) or a number"
                )
            (summed if word.endswith("+") else fixed if word.endswith("^") else set()).add(name)
            factors.append(name)
        if not factors or ("*" in factors and len(factors) > 1):
            raise AnnotationError(f"annotation {text!r}: ({inner}) must be names of factors, outer to inner")
        dims.append(tuple(factors))
    return dims
