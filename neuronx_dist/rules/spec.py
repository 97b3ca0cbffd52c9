"""Label specs of calls, rules of functions, their registry, and builders for specs.

This is pure data, without R, I, V and P. A `Spec` describes one call: every dim of every operand and result has labels,
and equal labels mean positions that belong together. A `Rule` describes a function: a builder of specs, and the
operands in which the function is linear. `RULES` maps the function objects that a `TorchFunctionMode` receives to
their rules; `rule` and `register_operator` add to it, functions of users too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

__all__ = [
    "ALL",
    "HANDLERS",
    "RULES",
    "Dims",
    "Rule",
    "Spec",
    "along",
    "contraction",
    "derive",
    "elementwise",
    "labels",
    "nonzero",
    "normal_dims",
    "operands",
    "reduction",
    "register_operator",
    "rule",
    "same",
]

Dims = tuple[tuple[int, ...], ...]
"""Per dim of a tensor its factors, outer to inner, each a label; `()`: a dim of size 1 that is broadcast, or new."""

ALL: tuple[tuple[int, ...], ...] = ((-1,),)
"""For `Rule.linear`: all operands of the call, however many there are, are one group."""


class Spec(NamedTuple):
    """Dims of the operands and results of one call.

    Positions along a label that is in two operands belong together (elementwise, batch, contraction). A label of an
    operand that is in no result is in `reduced` or `fixed`; a label that is only in results is new. A label of size 1
    that is in a result stands for dims that may also broadcast: it may be replicated on one operand and sharded on
    another, because the replicated dim has size 1 in the unsharded program too.

    Attributes:
        ins: per tensor operand, in the order of `operands`, its dims; None for an operand of which only the shape or
            the dtype is read (`x.type_as(y)`).
        outs: per tensor result its dims.
        sizes: local size of each label.
        reduced: labels that are reduced, and how: "sum", "max", "min", "mean", "mean_of_valid" (over positions that
            values decide), "weighted_mean", "prod", "any", "all".
        fixed: labels along which values mix, so that a sharded one is an error, and why: a phrase that completes
            "dim 2 is sharded, but ...".
        selected: those of `fixed` along which the call picks positions.
        looked_up: those of `fixed` that another operand indexes.
        at_any_scale: a positive factor of the operands changes nothing (`x == 0`, `isfinite`).
        infinite: the constant that makes the call affine is infinite, hence equal at any scale.
        ranges: labels along which the call takes ranges of positions; for each result the dim that holds the range,
            and the range: from, to, of how many.
        weak: factors of size 1 that an operand may lack: only a shard of extent 1 can be along them.
    """

    ins: tuple[Dims | None, ...]
    outs: tuple[Dims, ...]
    sizes: dict[int, int]
    reduced: dict[int, str] = {}
    fixed: dict[int, str] = {}
    selected: frozenset[int] = frozenset()
    looked_up: frozenset[int] = frozenset()
    weak: frozenset[int] = frozenset()
    ranges: dict[int, tuple[tuple[int, int, int, int], ...]] = {}
    at_any_scale: bool = False
    infinite: bool = False


class Rule(NamedTuple):
    """Rule of a torch function: a builder of specs, and the operands in which the function is linear.

    Attributes:
        name: name in messages, such as "add", "softmax".
        spec: builds the spec of a call from the call's arguments; None where `kind` says all.
        linear: groups of operands in which the function is jointly linear: add `((0, 1),)`, mul `((0,), (1,))`; indices
            beyond the operands of a call mean nothing. `ALL` for lists. `()`: linear in none.
        positive: groups of operands whose positive factors become factors of the result: `amax`, `relu`, norms.
        inverse: operands in the denominator, whose factors divide the result.
        affine: function of a call's arguments: True if the call is not linear after all, because it adds a constant
            (`x + 3`) or rounds (`x.to(torch.int64)`).
        adds: True if affine calls are those that add a constant to every element.
        kind: "op"; "factory"; "uniform" (ones, full); "zero"; "random"; "copy_of_meta" (only shape and dtype are
            read); "scalar" (the value leaves torch: item, bool); "pass" (nothing to type: size(), dim()); "decompose".
        inplace: the operand that is written.
        aliases: the result may share memory with operand 0.
        random: True if the function draws random numbers, or a function of a call's arguments (dropout in training).
        decompose: for kind "decompose": computes the same value by simpler torch functions.
    """

    name: str
    spec: Callable[..., Spec] | None
    linear: tuple[tuple[int, ...], ...] = ()
    positive: tuple[tuple[int, ...], ...] = ()
    inverse: tuple[int, ...] = ()
    affine: Callable[..., bool] | None = None
    adds: bool = False
    kind: str = "op"
    inplace: int | None = None
    aliases: bool = False
    random: bool | Callable[..., bool] = False
    decompose: Callable[..., Any] | None = None


RULES: dict[Callable[..., Any], Rule] = {}
"""Torch function, as a `TorchFunctionMode` receives it, to its rule."""

HANDLERS: dict[Any, Callable[..., Any]] = {}
"""Torch function to the handler that computes it of ShardTensors; a function without one is computed by its rule."""


def register_operator(*functions: Callable[..., Any], handler: Callable[..., Any] | None = None, **fields: Any) -> None:
    """Registers operators for all that know torch functions: the type checker, ShardTensor and `parallelize`.

    `spmd.register_rule`, `parallelize.register_op` and `shard_tensor.sharded` call it. A second registration replaces
    the rule or the handler of the first.

    Args:
        functions: torch functions, or functions of users that ask `torch.overrides.has_torch_function`.
        handler: `handler(func, types, args, kwargs)` computes calls with ShardTensors; None: the rule says how.
        fields: of `Rule`; without any the functions keep their rules.

    Raises:
        TypeError: no function was passed, or a field that rules do not have.
    """
    _check(functions, fields)
    for function in functions:
        if fields:
            RULES[function] = Rule(**{"name": _name(function), "spec": None, **fields})
        if handler is not None:
            HANDLERS[function] = handler


def rule(*functions: Callable[..., Any], **fields: Any) -> Callable[[Any], Any]:
    """Decorator that registers a spec builder for `functions`; `fields` are those of `Rule`.

    Example: `@rule(torch.softmax, F.softmax)` above `def softmax(x, dim, **_): return along(x.shape, dim, "...")`.
    For a kind that needs no spec: `rule(Tensor.size, kind="pass")(None)`. A second registration replaces the first.

    Raises:
        TypeError: no function was passed, or a field that rules do not have.
    """
    _check(functions, fields)  # raised at the line of the decorator

    def decorate(spec: Any) -> Any:
        register_operator(*functions, **{"spec": spec, **fields})
        return spec

    return decorate


def derive(source: Callable[..., Any], *functions: Callable[..., Any], **fields: Any) -> None:
    """Registers `functions` with the rule of `source`, changed in `fields`.

    Example: `derive(torch.add, Tensor.add_, inplace=0)`.

    Raises:
        KeyError: `source` has no rule.
    """
    for function in functions:
        register_operator(function, **{**RULES[source]._asdict(), "name": _name(function), **fields})


def _check(functions: Sequence[Any], fields: dict[str, Any]) -> None:
    if not functions:
        raise TypeError("rule() got no torch functions; pass the functions that the rule is for")
    unknown = fields.keys() - set(Rule._fields)
    if unknown:
        raise TypeError(f"rule() got {sorted(unknown)}; a rule has the fields {list(Rule._fields)}")


def _name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", str(function))
    if name == "__get__":  # the getter of a property, such as Tensor.T
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    return name


# Keyword tensors are ordered as in the signature, whatever the order in the call.
_FIRST = ("condition", "input", "self", "query", "key", "value")
_LAST = ("weight", "bias")


def operands(args: Sequence[Any], kwargs: dict[str, Any], of: type[Any] = Tensor) -> list[Any]:
    """Returns the tensor operands of a call: of `args`, one list or tuple deep, then of `kwargs`, without `out=`.

    Args:
        of: class that stands for tensors.
    """
    tensors: list[Any] = []
    for value in args:
        if isinstance(value, of):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [item for item in value if isinstance(item, of)]
    if kwargs:
        named = [(name, value) for name, value in kwargs.items() if isinstance(value, (of, list, tuple))]
        if len(named) > 1:
            named.sort(key=_position)
        for name, value in named:
            if name == "out":
                continue
            if isinstance(value, of):
                tensors.append(value)
            else:
                tensors += [item for item in value if isinstance(item, of)]
    return tensors


def _position(named: tuple[str, Any]) -> int:
    name = named[0]
    if name in _FIRST:
        return _FIRST.index(name) - len(_FIRST)
    return _LAST.index(name) + 1 if name in _LAST else 0


# --- builders ---

_LABELS: Dims = tuple((label,) for label in range(64))


def labels(count: int, start: int = 0) -> Dims:
    """Returns dims of one new label each: `((start,), (start + 1,), ...)`."""
    return _LABELS[start : start + count]


def normal_dims(dims: int | Iterable[int] | None, ndim: int) -> tuple[int, ...]:
    """Returns dims counted from the front. None, or no dim at all, means every dim, as in torch's reductions."""
    if dims is None:
        return tuple(range(ndim))
    if isinstance(dims, int):
        return (dims % ndim,) if ndim else ()
    normal = tuple(int(dim) % ndim if ndim else 0 for dim in dims)
    return (normal if ndim else ()) or tuple(range(ndim))


def same(shape: Sequence[int], outs: int = 1) -> Spec:
    """Spec of one operand and results of its shape, each element computed from the element at its place."""
    dims = labels(len(shape))
    return Spec((dims,), (dims,) * outs, dict(enumerate(shape)))


def elementwise(*shapes: Sequence[int]) -> Spec:
    """Spec of any number of operands that broadcast against each other, and one result."""
    first = shapes[0]
    if all(shape == first for shape in shapes):
        dims = labels(len(first))
        return Spec((dims,) * len(shapes), (dims,), dict(enumerate(first)))
    ndim = max(len(shape) for shape in shapes)
    sizes = [1] * ndim
    for shape in shapes:
        for dim, size in enumerate(shape, ndim - len(shape)):
            if size != 1:
                sizes[dim] = size
    ins = tuple(
        tuple((dim,) if size == sizes[dim] else () for dim, size in enumerate(shape, ndim - len(shape)))
        for shape in shapes
    )
    return Spec(ins, (labels(ndim),), dict(enumerate(sizes)))


def reduction(
    shape: Sequence[int], dims: int | Iterable[int] | None, keepdim: bool = False, kind: str = "sum", outs: int = 1
) -> Spec:
    """Spec of one operand, reduced over `dims` (None: all), as `kind` says (see `Spec.reduced`)."""
    over = normal_dims(dims, len(shape))
    out = tuple((() if dim in over else (dim,)) for dim in range(len(shape)) if keepdim or dim not in over)
    return Spec((labels(len(shape)),), (out,) * outs, dict(enumerate(shape)), dict.fromkeys(over, kind))


def along(shape: Sequence[int], dims: int | Iterable[int] | None, why: str, outs: int = 1) -> Spec:
    """Spec of one operand and results of its shape that mix values along `dims` (None: all): softmax, sort."""
    spec = same(shape, outs)
    return spec._replace(fixed=dict.fromkeys(normal_dims(dims, len(shape)), why))


def nonzero(value: Any) -> bool:
    """Returns True for a Python number other than 0: False for None, 0, False, and a tensor."""
    if isinstance(value, int):
        return int.__bool__(value)  # also of an int that records its readers
    return not isinstance(value, Tensor) and bool(value)


@cache
def _parsed(equation: str) -> tuple[tuple[str, ...], str]:
    """Returns `(terms, result)` of an einsum equation, with `.` for the ellipsis."""
    equation = equation.replace(" ", "").replace("...", ".")
    left, arrow, right = equation.partition("->")
    if not arrow:
        once = sorted(letter for letter in set(left) if letter.isalpha() and left.count(letter) == 1)
        right = ("." if "." in left else "") + "".join(once)
    return tuple(left.split(",")), right


def contraction(equation: str, *shapes: Sequence[int]) -> Spec:
    """Spec of an einsum, which sums over letters without result: `contraction("...k,nk->...n", x.shape, w.shape)`.

    The dims of an ellipsis broadcast, aligned at the right; dims of size 1 of a letter broadcast too.
    """
    terms, result = _parsed(equation)
    widths = [len(shape) - len(term) + 1 if "." in term else 0 for term, shape in zip(terms, shapes)]
    width = max(widths)
    letters: dict[str, int] = {}
    for term in terms:
        for letter in term:
            if letter != "." and letter not in letters:
                letters[letter] = width + len(letters)
    # first the label of every dim, then the size of every label, then the dims that broadcast
    named: list[list[int]] = []
    sizes = dict.fromkeys(range(width + len(letters)), 1)
    fixed: dict[int, str] = {}
    for term, shape, wide in zip(terms, shapes, widths):
        row: list[int] = []
        for letter in term:
            if letter == ".":
                row.extend(range(width - wide, width))
            elif letters[letter] in row:  # a diagonal: the other dim has another label
                why = "the diagonal of two dims is taken"
                fixed[letters[letter]] = fixed[len(sizes)] = why
                row.append(len(sizes))
                sizes[len(sizes)] = 1
            else:
                row.append(letters[letter])
        for label, size in zip(row, shape):
            if size != 1:
                sizes[label] = size
        named.append(row)
    ins = tuple(
        tuple((label,) if size == sizes[label] else () for label, size in zip(row, shape))
        for row, shape in zip(named, shapes)
    )
    out: list[tuple[int, ...]] = []
    for letter in result:
        out += labels(width) if letter == "." else [(letters[letter],)]
    in_result = {label for dim in out for label in dim}
    return Spec(
        ins,
        (tuple(out),),
        sizes,
        {label: "sum" for label in sizes if label not in in_result and label not in fixed},
        fixed,
    )
