"""The functions that have a composite for a dim that they need complete, and the arguments of its call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...program import experts
from ...program.program import LocalCall
from ...rules import Spec
from ...rules.local_call import Arguments, TensorSlot
from ...spmd.types import I, P, R, Shard, SpmdType
from .. import composites
from .conversions import RowsOfExperts

__all__ = ["DRAWING", "EXPERTS", "TOKENS", "Template", "Composite", "composite_of", "expert_composites", "over_units"]

DRAWING: dict[Callable[..., Any], Callable[..., Any]] = {
    F.dropout: composites.dropout,
    torch.dropout: composites.dropout,
    F.scaled_dot_product_attention: composites.scaled_dot_product_attention,
}
"""Functions that draw random numbers, and their composites for a shard."""


class Composite(NamedTuple):
    """The call of a rank where a label is cut that the function needs complete.

    Attributes:
        function, arguments: with slots.
        ended: type of a result that does not have the label.
        reduced: elements of what the ranks reduce, forward and backward.
        gathered: elements of this rank that all others receive, forward.
        whole: operands that stay R although they have the label.
        also: a label that is cut beside; None: there is none.
        ring: elements of all keys and values, of which each rank's go around the ranks; 0: there is no ring.
        causal: the last rank has nearly twice as many visible scores as all ranks have on average.
    """

    function: Callable[..., Any]
    arguments: Arguments
    ended: SpmdType = R
    reduced: tuple[int, int] = (0, 0)
    gathered: int = 0
    whole: frozenset[int] = frozenset()
    also: int | None = None
    ring: int = 0
    causal: bool = False


Named = dict[str, Any]
Builder = Callable[[Named, Spec, int, str], Composite | None]


def composite_of(
    function: Callable[..., Any], arguments: Arguments, spec: Spec, label: int, axis: str
) -> Composite | None:
    """The composite of a call for a cut of one of its labels; None: there is none, or not with these options."""
    names, build = _BUILDERS.get(function, ([], None))
    named = {**dict(zip(names, arguments[0])), **arguments[1]}
    if build is None or len(arguments[0]) > len(names) or not named.keys() <= set(names):
        return None
    return build(named, spec, label, axis)


def _given(named: Named, names: str) -> dict[str, Any]:
    return {name: named[name] for name in names.split() if name in named}


def _rest(spec: Spec, *labels: int) -> int:
    """Elements of the first operand without some of its labels."""
    return prod(spec.sizes[x] for dim in spec.ins[0] or () for x in dim if x not in labels)


def _embedding(named: Named, spec: Spec, label: int, axis: str) -> Composite | None:
    strange = named.get("max_norm") is not None or named.get("scale_grad_by_freq") or named.get("sparse")
    if label not in spec.looked_up or strange:
        return None
    input, weight, padding = named["input"], named["weight"], named.get("padding_idx")
    kwargs: dict[str, Any] = {"axis": axis}
    if padding is not None:
        kwargs["padding_idx"] = padding % weight.shape[0]
    return Composite(composites.embedding, ((input, weight), kwargs), P)


def _cross_entropy(named: Named, spec: Spec, label: int, axis: str) -> Composite | None:
    input, target = named["input"], named["target"]
    old = named.get("size_average") is not None or named.get("reduce") is not None
    if named.get("weight") is not None or old or target.dtype.is_floating_point or label not in spec.fixed:
        return None
    kwargs = _given(named, "ignore_index reduction label_smoothing")
    kwargs |= {"axis": axis, "classes": spec.sizes[label]}
    # the maximum, then the logit of the label and the sum; with smoothing two sums more
    count = (5 if named.get("label_smoothing") else 3) * _rest(spec, label)
    return Composite(composites.cross_entropy, ((input, target), kwargs), I, (count, 0))


def _softmax(function: Callable[..., Any]) -> Builder:
    def build(named: Named, spec: Spec, label: int, axis: str) -> Composite | None:
        if label not in spec.fixed:
            return None
        (dim,) = (number for number, factors in enumerate(spec.ins[0] or ()) if label in factors)
        rest = _rest(spec, label)
        kwargs = _given(named, "dtype") | {"axis": axis}
        return Composite(function, ((named["input"], dim), kwargs), reduced=(0, rest), gathered=2 * rest)

    return build


def _last(named: Named) -> int:
    shape = named["normalized_shape"]
    return 1 if isinstance(shape, int) else len(shape)


def _last_dims_norm(function: Callable[..., Any], moments: bool) -> Builder:
    def build(named: Named, spec: Spec, label: int, axis: str) -> Composite | None:
        if label not in spec.fixed:
            return None
        count = prod(spec.sizes[x] for x in spec.fixed)
        rest = _rest(spec, *spec.fixed)
        kwargs = _given(named, "weight bias eps") | {"axis": axis, "count": count}
        composite = Composite(function, ((named["input"], _last(named)), kwargs), reduced=(rest, rest))
        return composite._replace(reduced=(0, 2 * rest), gathered=2 * rest) if moments else composite

    return build


def _group_norm(named: Named, spec: Spec, label: int, axis: str) -> Composite | None:
    if label not in spec.fixed:
        return None
    count = prod(spec.sizes[x] for x in spec.fixed)
    rest = 2 * _rest(spec, *spec.fixed)
    kwargs = _given(named, "weight bias eps") | {"axis": axis, "count": count}
    arguments = (named["input"], named["num_groups"]), kwargs
    return Composite(composites.group_norm, arguments, reduced=(0, rest), gathered=rest)


def _batch_norm(named: Named, spec: Spec, label: int, axis: str) -> Composite | None:
    if not spec.fixed:  # in evaluation
        return None
    args = named["input"], named.get("running_mean"), named.get("running_var")
    kwargs = _given(named, "weight bias momentum eps") | {"axis": axis}
    rest = 2 * _rest(spec, *spec.fixed)
    if label in spec.fixed:
        kwargs["count"] = prod(spec.sizes[x] for x in spec.fixed)
        return Composite(composites.batch_norm, (args, kwargs), reduced=(0, rest), gathered=rest)
    if args[1] is None:
        return None
    gathered = rest // 2  # an all-gather sends half of what an all-reduce does
    return Composite(composites.batch_norm_of_channels, (args, kwargs), reduced=(gathered, 0), whole=frozenset((1, 2)))


def _attention(named: Named, spec: Spec, label: int, axis: str) -> Composite | None:
    """Cuts the keys with the queries, so that keys go around; or the queries of a causal attention alone."""
    query, key, value = tensors = [named[name] for name in ("query", "key", "value")]
    mask, causal = named.get("attn_mask"), bool(named.get("is_causal"))
    batches = {x.shape[: 1 if named.get("enable_gqa") else 2] for x in tensors}
    if named.get("dropout_p") or len(batches) > 1 or {len(x.shape) for x in tensors} != {4}:
        return None
    of_query, of_key, *of_mask = ([*dims] for dims in spec.ins if dims is not None)
    queries, kwargs = of_query[2], _given(named, "scale") | {"axis": axis}
    if (label,) == queries and causal and mask is None:
        return Composite(composites.causal_attention, ((query, key, value), kwargs), causal=True)
    if (label,) != of_key[2] or not queries or (causal and mask is not None):
        return None
    operands: tuple[Any, ...] = query, key, value
    whole: frozenset[int] = frozenset()
    if mask is not None:
        if mask.differentiable or mask.shape[-1:] != key.shape[2:3] or len(mask.shape) > 4:
            return None
        operands = (*operands, mask)
        whole = whole if queries in of_mask[-1] else frozenset((3,))
    kwargs |= _given(named, "is_causal")
    ring = prod(key.shape) + prod(value.shape)
    function = composites.ring_attention
    return Composite(function, (operands, kwargs), whole=whole, also=queries[0], ring=ring, causal=causal)


def over_units(local: LocalCall) -> LocalCall:
    """Returns a rank's call of batch norm with statistics over all units, or the call, if it takes no statistics."""
    function, args, kwargs = local
    if function is F.batch_norm:
        named = {**dict(zip(_BUILDERS[function][0], args)), **kwargs}
        if not named.get("training"):
            return local
        input = named["input"]
        count = prod(input.shape) // input.shape[1]
        function, args = composites.batch_norm, (input, named["running_mean"], named["running_var"])
        kwargs = {**_given(named, "weight bias momentum eps"), "axis": None, "count": count}
    elif function not in (composites.batch_norm, composites.batch_norm_of_channels):
        return local
    return LocalCall(function, args, {**kwargs, "units": "dp"})


_NORMS = "input normalized_shape weight bias eps"
_TABLE: list[tuple[tuple[Any, ...], str, Builder]] = [
    ((F.embedding,), "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse", _embedding),
    (
        (F.cross_entropy,),
        "input target weight size_average ignore_index reduce reduction label_smoothing",
        _cross_entropy,
    ),
    ((F.softmax,), "input dim _stacklevel dtype", _softmax(composites.softmax)),
    ((torch.softmax, Tensor.softmax), "input dim dtype", _softmax(composites.softmax)),
    ((F.log_softmax,), "input dim _stacklevel dtype", _softmax(composites.log_softmax)),
    ((torch.log_softmax, Tensor.log_softmax), "input dim dtype", _softmax(composites.log_softmax)),
    ((F.layer_norm, torch.layer_norm), _NORMS, _last_dims_norm(composites.layer_norm, True)),
    ((F.rms_norm, torch.rms_norm), "input normalized_shape weight eps", _last_dims_norm(composites.rms_norm, False)),
    ((F.group_norm, torch.group_norm), "input num_groups weight bias eps", _group_norm),
    (
        (F.scaled_dot_product_attention,),
        "query key value attn_mask dropout_p is_causal scale enable_gqa",
        _attention,
    ),
    ((F.batch_norm,), "input running_mean running_var weight bias training momentum eps", _batch_norm),
]
# of each function the names of its arguments in order, and what makes its composites
_BUILDERS = {function: (names.split(), build) for functions, names, build in _TABLE for function in functions}

# Functions of which a rank computes those of its experts. The routing decides how many rows a rank has: bytes and
# seconds are those of equally many.
EXPERTS = {getattr(experts, name): getattr(composites, name) for name in ("to_experts", "expert_product", "to_tokens")}


class Template(NamedTuple):
    """A strategy of all calls with the same facts.

    `arguments`: with slots; None: the arguments of the call. `function`: a composite; None: the call's function.
    `share`: of the call's computation; None: 1 / size if a label is cut. The others as in `Strategy`.
    """

    name: str
    operands: tuple[SpmdType, ...]
    results: tuple[SpmdType, ...]
    arguments: Arguments | None
    function: Callable[..., Any] | None = None
    bytes_moved: tuple[int, int] = (0, 0)
    steps: int = 0
    share: float | None = None


def expert_composites(
    function: Callable[..., Any], arguments: Arguments, slots: Sequence[TensorSlot], axis: str, size: int
) -> Iterator[Template]:
    """Yields the strategies of a function of `EXPERTS` that divide the experts, of all tokens and of S(0) tokens."""
    args, kwargs = arguments
    product = function is experts.expert_product
    count = slots[1].shape[0] if product else args[-1]
    choices = slots[0].shape[0] if product else slots[-1].shape[0] * slots[-1].shape[1]
    if count % size or choices % size:
        return
    for exchanged in (False, True):
        if exchanged and not product and (choices % size**2 or slots[-1].shape[0] % size):
            continue
        rows, tokens = RowsOfExperts(0, exchanged=exchanged), Shard(0) if exchanged else R
        options = {} if product or not exchanged else {"exchanged": True}
        sent = 0
        operands: tuple[SpmdType, ...] = (tokens, tokens)
        results: tuple[SpmdType, ...] = (rows, rows)
        if product:
            operands, results = (rows, Shard(0), rows, Shard(0))[: len(slots)], (rows,)
        elif function is experts.to_tokens:
            operands, results = (rows, tokens, tokens), (Shard(0) if exchanged else P,)
        if options:  # a row for each choice, and first a number for each expert
            sent = choices // size * slots[0].shape[-1] * slots[0].dtype.itemsize * (size - 1) // size
        counted = count * 8 * (size - 1) // size if options and function is experts.to_experts else 0
        local = args, {**kwargs, **options, "axis": axis}
        name = f"experts, {TOKENS[exchanged]}"
        yield Template(name, operands, results, local, EXPERTS[function], (sent + counted, sent))


TOKENS = {False: "all tokens on each rank", True: "tokens exchanged"}
