"""The judgement: from the types of a call's operands to the types of its results, axis by axis.

A function's rule (`rules/`) has its label spec, which maps dims, and the operands in which it is linear; this file
derives the types from these, in the same way for all functions. For one axis, and types at scale 0 (scales:
`scales.py`):

    no operand varies or is partial   the result is equal on all ranks: I if the gradient is to be one, else R
    P                                 only if the call is linear: all of one group of operands P, the others R
    S, and its label stays            the result is sharded where the label went
    S, and its label is summed        the result is P: a contraction over a sharded dim; P("avg") if it is averaged
    S against another, or against R   a gather is missing
    V                                 the result is V; nothing is known about dims

I takes part with R or V only where it cannot receive a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from ...rules.names import CATS
from ...rules.spec import Dims, Rule, Spec
from ...spmd.axes import SAMPLE_ATOMS, order_of
from ...spmd.errors import Violation
from ...spmd.tensor_type import TensorType
from ...spmd.types import (
    SAME,
    UNIFORM,
    VARYING,
    ZERO,
    I,
    LocalType,
    P,
    R,
    Shard,
    SpmdType,
    V,
    repeated,
    scaled,
)
from .partial_kinds import AMONG, adds_what_stages_share, other_partial, part_of_whole
from .piece_order import Jumbled, joined_pieces
from .scales import as_summands, result_scale
from .shard_positions import ShardPosition, difference, locate, part_of, put, put_together

__all__ = ["EXPANDS", "PICKS", "Judgement", "Operand", "judge"]


EXPANDS = ("expand", "expand_as", "broadcast_to")
# Dims of size 1 do not broadcast in these.
EXACT = frozenset(
    "gather scatter scatter_add scatter_reduce index_put index_add index_copy cat concat concatenate stack hstack "
    "vstack dstack row_stack column_stack bmm baddbmm addbmm cross_entropy nll_loss kl_div".split()
)
# Functions that take positions, or ranges of positions.
PICKS = frozenset(
    "__getitem__ narrow narrow_copy select chunk split split_with_sizes unsafe_chunk unsafe_split "
    "unsafe_split_with_sizes tensor_split unbind".split()
)
FINITE = frozenset(("isfinite", "isinf", "isnan", "isneginf", "isposinf"))
LOOKUPS = ("__getitem__", "gather", "index_select", "take_along_dim")  # of operand 0, by the others


class Operand(NamedTuple):
    """Type of an operand, whether it can receive a gradient, and whether it is a parameter."""

    type: TensorType
    differentiable: bool
    is_parameter: bool = False


class Judgement(NamedTuple):
    """Types of the results; `born`: axes on which a type begins here, and how; `assumed`: assumptions."""

    types: tuple[TensorType, ...]
    born: dict[str, str]
    assumed: tuple[str, ...]


class _CallFacts(NamedTuple):
    """The facts about a call that the judgement of every axis reads; the last two are filled by it."""

    rule: Rule
    spec: Spec | None
    operands: Sequence[Operand]
    groups: Sequence[frozenset[int]]  # of operands in which the call is jointly linear
    groups_of_means: Sequence[frozenset[int]]  # the same where what is P is P("avg")
    groups_of_constants: Sequence[frozenset[int]]  # the same but for a constant
    results: int  # how many
    assumed: list[str]
    positions: dict[str, ShardPosition]  # by axis: where it shards the operands


def judge(rule: Rule, spec: Spec | None, operands: Sequence[Operand], affine: bool, count: int) -> Judgement:
    """Types of the `count` results of a call.

    Args:
        spec: of this call; None: nothing is known about dims.
        affine: the call adds a constant, or rounds, so that it is not linear.

    Raises:
        Violation: the types do not go together.
    """
    everything = frozenset(range(len(operands)))
    if rule.linear and rule.linear[0] == (-1,):
        groups: list[frozenset[int]] = [everything]
    else:
        groups = [frozenset(group) & everything for group in rule.linear]
    of_constants, of_means = groups, groups if not affine or rule.adds else []  # a constant is its own mean
    groups = [] if affine else groups
    if spec is not None and len(spec.ins) < len(operands):  # operands that are not tensors: numbers that vary
        spec = spec._replace(ins=(*spec.ins, *((),) * (len(operands) - len(spec.ins))))
    call = _CallFacts(rule, spec, operands, groups, of_means, of_constants, count, [], {})
    axes = sorted({axis for operand in operands for axis in operand.type.types})
    result_types: list[dict[str, SpmdType]] = [{} for _ in range(count)]
    born: dict[str, str] = {}
    for axis in axes:
        spmd_types = [operand.type.get(axis) for operand in operands]
        for number, spmd_type in enumerate(_on_axis(call, axis, spmd_types)):
            result_types[number][axis] = spmd_type
            if spmd_type.letter == "P" and not any(k is not None and k.letter == "P" for k in spmd_types):
                born.setdefault(axis, f"{_BORN.get(str(spmd_type), _BORN['P'])} in {rule.name}")
    _disentangle(call, result_types)
    rests = [operand.type.rest for operand in operands]
    equal: Sequence[SpmdType | None] = [None] * count
    if all(r is not None for r in rests):
        equal = _equals(call, "", rests)  # type: ignore[arg-type]
    return Judgement(tuple(map(TensorType.of, result_types, equal)), born, tuple(call.assumed))


_BORN = {
    "P": "contraction over a sharded dim", 'P("avg")': "mean over a sharded dim", 'P("max")': "maximum",
    'P("norm")': "norm of a shard",
}  # fmt: skip


def _on_axis(call: _CallFacts, axis: str, operand_types: Sequence[SpmdType | None]) -> list[SpmdType]:
    """Types of the results on one axis: first at scale 0, then with the scale."""
    spec = call.spec
    spmd_types: list[SpmdType | None] = list(operand_types)
    for index, spmd_type in enumerate(spmd_types):
        if spec is not None and spec.ins[index] is None:
            spmd_types[index] = UNIFORM  # only its shape is read
        elif spmd_type is None:
            raise Violation("no_type", axis, f"it has no type on {axis}, the others have", [index])
    known: list[SpmdType] = spmd_types  # type: ignore[assignment]
    joined = joined_pieces(spec, known) if call.rule.name in CATS else None
    if joined is not None:
        return [joined]
    if {spmd_type.scale for spmd_type in known if spmd_type.letter == "P"} == {1}:
        call = call._replace(groups=call.groups_of_means)
    while True:
        try:
            result_types = _unscaled(call, axis, [spmd_type.base for spmd_type in known])
            break
        except Violation as violation:
            changed = as_summands(violation, known)
            if changed is None:
                raise
            known = changed
    if axis == "pp" and adds_what_stages_share(call.groups, known):
        result_types = [AMONG if spmd_type is V else spmd_type for spmd_type in result_types]
    read = [None if spec is not None and spec.ins[index] is None else known[index] for index in range(len(known))]
    if spec is not None and spec.at_any_scale:
        return result_types
    groups = call.groups_of_constants if spec is not None and spec.infinite else call.groups
    scale = result_scale(axis, call.rule, groups, read)
    return [scaled(spmd_type, scale) for spmd_type in result_types] if scale else result_types


def _unscaled(call: _CallFacts, axis: str, known: list[SpmdType]) -> list[SpmdType]:
    """Types of the results of operands at scale 0."""
    spec = call.spec
    if any(isinstance(spmd_type, Jumbled) for spmd_type in known):
        return _jumbled(call, axis, known)
    letters = [spmd_type.letter for spmd_type in known]
    varying = [index for index, letter in enumerate(letters) if letter in VARYING]
    partial = [index for index, letter in enumerate(letters) if letter == "P"]
    if not varying and not partial:
        return _equals(call, axis, known)
    invariant = [index for index, letter in enumerate(letters) if letter == "I" and call.operands[index].differentiable]
    if invariant:
        other = (partial or varying)[0]
        raise Violation(
            "invariant",
            axis,
            f"an I operand that receives a gradient cannot be combined with another type, here {known[other]}: its "
            f"gradient would differ between ranks",
            [invariant[0], other],
        )
    if not varying:
        return [_partial(call, axis, known, partial)] * call.results
    sharded = [index for index in varying if letters[index] == "S"]
    if not sharded or spec is None:
        if partial:
            raise Violation("partial_varying", axis, "a partial sum times, or plus, a varying value has no type",
                            [partial[0], varying[0]])  # fmt: skip
        if spec is None:
            call.assumed.append(f"{call.rule.name}: nothing is known about its dims")
            return [V] * call.results
        return [scaled(V, _averaging(call, spec, axis))] * call.results
    return _sharded(call, spec, axis, known, sharded, varying, partial)


def _jumbled(call: _CallFacts, axis: str, known: Sequence[SpmdType]) -> list[SpmdType]:
    """Types of the results of operands that are equal on all ranks, some with pieces in the order of the ranks."""
    index, jumbled = next((i, k) for i, k in enumerate(known) if isinstance(k, Jumbled))
    plain = _unscaled(call, axis, [k.plain if isinstance(k, Jumbled) else k for k in known])
    shards = [k.shard if isinstance(k, Jumbled) else R for k in known]
    try:
        found = _unscaled(call._replace(assumed=[], positions={}), axis, shards)
    except Violation:
        found = [V]
    blocks = any(isinstance(k, Shard) and k.stride != 1 for k in found)
    if blocks or V in found or not all(k.letter in SAME or k is ZERO for k in known):
        why = (
            f"dim {jumbled.dim} was gathered in the order of the ranks, {jumbled.order}, and {call.rule.name} takes it "
            "for one in order"
        )
        raise Violation("jumbled", axis, why, [index])
    return [
        Jumbled.of(one, k.dim, k.order) if isinstance(k, Shard) and k.order and isinstance(one, LocalType) else one
        for one, k in zip(plain, found)
    ]


def _averaging(call: _CallFacts, spec: Spec, axis: str) -> int:
    """The scale, as a summand, of a mean over each rank's part; 0 for calls that are no mean."""
    if not spec.reduced or spec.outs != ((),) or not {"mean", "mean_of_valid"}.issuperset(spec.reduced.values()):
        return 0
    _assume_equal_counts(call, axis, spec.reduced.values())
    return 1


def _assume_equal_counts(call: _CallFacts, axis: str, reductions: Iterable[str]) -> None:
    if "mean_of_valid" in reductions:
        call.assumed.append(f"{call.rule.name}: that as many targets count on every rank of {axis}")


def _equals(call: _CallFacts, axis: str, spmd_types: Sequence[SpmdType]) -> list[SpmdType]:
    """Returns result types for operands equal on all ranks, with the dims along which each result repeats."""
    spmd_type, spec = _equal(call, axis, spmd_types), call.spec
    expands = call.rule.name in EXPANDS
    if (
        spmd_type.letter != "R"
        or spmd_type is UNIFORM
        or spec is None
        or not (expands or any(k is not R for k in spmd_types))
    ):
        return [spmd_type] * call.results

    # x[i, j] where x is repeated along dim 0: whatever i says.
    looked: list[int] = []
    if call.rule.name in LOOKUPS:
        looked = [d for d, labels in enumerate(spec.ins[0] or ()) if spec.looked_up.intersection(labels)]
    if len(looked) != len(spmd_types) - 1:
        looked = []
    unread = [index for index, d in enumerate(looked, 1) if d in getattr(spmd_types[0], "along", ())]

    def repeats(label: int) -> bool:
        holders = [
            (k, dim)
            for index, (k, dims) in enumerate(zip(spmd_types, spec.ins))
            for dim, labels in enumerate(dims or ())
            if label in labels and index not in unread
        ]
        same = (k is UNIFORM or k is ZERO or dim in getattr(k, "along", ()) for k, dim in holders)
        return label not in spec.fixed and all(same) and (expands or bool(holders) or bool(unread))

    result_types: list[SpmdType] = [
        repeated(frozenset(dim for dim, labels in enumerate(out) if labels and all(map(repeats, labels))))
        for out in spec.outs
    ]
    return result_types + [R] * (call.results - len(result_types))


def _equal(call: _CallFacts, axis: str, spmd_types: Sequence[SpmdType]) -> SpmdType:
    """The type of a result whose operands are all the same on all ranks of the axis."""
    if all(spmd_type is R for spmd_type in spmd_types):
        return R if spmd_types else UNIFORM
    ins: Sequence[Any] = call.spec.ins if call.spec is not None else spmd_types  # None: only its shape is read
    operands = zip(spmd_types, call.operands, ins)
    receiving = {k.letter for k, operand, dims in operands if operand.differentiable and dims is not None}
    if "I" in receiving and "R" in receiving:
        index = next(
            i for i, spmd_type in enumerate(spmd_types) if spmd_type.letter == "I" and call.operands[i].differentiable
        )
        other = next(
            i for i, spmd_type in enumerate(spmd_types) if spmd_type.letter == "R" and call.operands[i].differentiable
        )
        raise Violation("invariant", axis, "I and R do not mix: the gradient of I is a value, that of R a partial sum",
                        [index, other])  # fmt: skip
    if "I" in receiving:
        return I
    if "R" in receiving:
        return R
    constant = all(spmd_type is UNIFORM or spmd_type is ZERO for spmd_type in spmd_types)
    if constant:
        if all(spmd_type is ZERO for spmd_type in spmd_types) and call.groups:
            return ZERO
        return UNIFORM if call.spec is not None and not call.spec.fixed and not _by_position(call) else R
    return I if all(spmd_type is I or spmd_type is UNIFORM or spmd_type is ZERO for spmd_type in spmd_types) else R


def _by_position(call: _CallFacts) -> bool:
    """Returns whether a result has a dim of size > 1 that no operand has (cat, one_hot)."""
    if call.spec is None or call.rule.name in EXPANDS:
        return False
    operand_labels = {label for dims in call.spec.ins for dim in dims or () for label in dim}
    result_labels = {label for dims in call.spec.outs for dim in dims for label in dim if call.spec.sizes[label] != 1}
    return bool(result_labels - operand_labels)


def _partial(call: _CallFacts, axis: str, spmd_types: Sequence[SpmdType], partial: Sequence[int]) -> SpmdType:
    """The type of a result of which some operands are P and none varies."""
    spmd_type = spmd_types[partial[0]]
    name = call.rule.name
    if any(spmd_types[index] is not spmd_type for index in partial):
        raise Violation("partial_kinds", axis, "a partial sum and a partial maximum do not combine", partial)
    if spmd_type is not P:
        return other_partial(call.rule, call.spec, call.results, axis, spmd_types, partial)
    if name in FINITE:
        call.assumed.append(f"{name}: that a sum is finite where its summands are")
        return V
    members = frozenset(partial)
    zeros = {index for index, other in enumerate(spmd_types) if other is ZERO}
    for group in call.groups:
        if members <= group and all(index in members or index in zeros for index in group):
            return P
    if not call.groups:
        raise Violation("partial_nonlinear", axis, f"{name} is not linear: applied to partial sums it does not give "
                        "partial sums of the result", partial)  # fmt: skip
    holders = [group for group in call.groups if members <= group]
    if not holders:
        raise Violation("partial_product", axis, "the product of partial sums is not the partial sum of the products",
                        partial)  # fmt: skip
    others = [index for index in sorted(holders[0]) if index not in members and index not in zeros]
    raise Violation("partial_plus", axis, "a value that every rank adds to a partial sum is added once for each rank",
                    [partial[0], *others])  # fmt: skip


def _sharded(
    call: _CallFacts,
    spec: Spec,
    axis: str,
    spmd_types: Sequence[SpmdType],
    sharded: Sequence[int],
    varying: Sequence[int],
    partial: Sequence[int],
) -> list[SpmdType]:
    name = call.rule.name
    whole = put_together(spec, spmd_types) if name in CATS else None
    if whole is not None:
        return [whole]
    position: ShardPosition | None = None
    for index in sharded:
        dims = spec.ins[index]
        assert dims is not None
        shard = spmd_types[index]
        assert isinstance(shard, Shard)
        operand_position = locate(dims, shard, spec, axis, index, name)
        if position is None:
            position, first = operand_position, index
        elif operand_position._replace(extent=0) != position._replace(extent=0):
            # The extent, which is left out, says what was merged with what, not which rank has what.
            raise Violation(
                "shards", axis, difference(operand_position, position, shard, spmd_types[first], name), [index, first]
            )
    assert position is not None
    call.positions[axis] = position
    label = position.label
    having = [i for i, dims in enumerate(spec.ins) if dims is not None and any(label in dim for dim in dims)]
    unknown = [index for index in varying if index not in sharded]
    dim = spmd_types[first].dim  # type: ignore[union-attr]
    if label in spec.fixed:
        if label in spec.looked_up and unknown:
            call.assumed.append(
                f"{name}: a lookup in a sharded dim {dim} by positions that vary: that this rank holds all of them "
                "(numeric=True compares the values)"
            )
            return [V] * call.results
        alone_in_call = position.stride == 1 and len(call.operands) == 1
        of_weight = alone_in_call and name in PICKS and call.operands[0].is_parameter
        if of_weight and label in spec.selected and label not in spec.ranges:
            call.assumed.append(
                f"{name}: each rank takes a position of its own part of a parameter's sharded dim {dim}"
            )
            return [V] * call.results
        parts = part_of_whole(call.rule, spec.fixed[label], call.results) if len(call.operands) == 1 else None
        if parts is not None and position.part is None:
            del call.positions[axis]
            return parts
        if position.order is not None and alone_in_call and label in spec.ranges:
            cuts = [(at, position.order.cut(*bounds)) for at, *bounds in spec.ranges[label]]
            if all(order is not None for _, order in cuts):
                del call.positions[axis]
                return [Shard(at, order=order) for at, order in cuts]
        if alone_in_call and position.order is None and (axis in SAMPLE_ATOMS or of_weight) and label in spec.ranges:
            text = f"{name}: each rank takes its own part of sharded dim {dim}: that all parts are used in the same way"
            call.assumed.append(text)
            del call.positions[axis]  # it is along no label of the results
            return [
                Shard(at, part=part_of(position.part, start, stop, length))
                for at, start, stop, length in spec.ranges[label]
            ]
        raise Violation("fixed", axis, f"dim {dim} is sharded, but {spec.fixed[label]}", [first])
    # A dim of size 1 that stays may be one that broadcasts: of size 1 in one process too.
    alone = spec.sizes[label] == 1 and label not in spec.reduced and name not in EXACT
    replicated = [
        i for i in having if spmd_types[i].letter in SAME and spmd_types[i] is not UNIFORM
        and not (alone and i != call.rule.inplace and not _sharded_along(call.operands[i].type, spec.ins[i], label))
        and not _repeats(spmd_types[i], spec.ins[i], label)
    ]  # fmt: skip
    if replicated:
        raise Violation(
            "whole",
            axis,
            f"a dim of {spec.sizes[label]} is this rank's piece of one operand (dim {dim}), but the whole dim of the "
            "other, which is equal on all ranks",
            [replicated[0], first],
        )
    if label in spec.reduced:
        return [_reduced(call, spec, axis, spmd_types, position, having, unknown, partial, dim)] * call.results
    if partial:
        raise Violation("partial_varying", axis, "a partial sum times, or plus, a varying value has no type",
                        [partial[0], first])  # fmt: skip
    if unknown:
        return [V] * call.results
    return [put(out, position, spec) for out in spec.outs] + [V] * (call.results - len(spec.outs))


def _sharded_along(type_: TensorType, dims: Dims | None, label: int) -> bool:
    """Returns whether an operand is sharded along a label over any axis: its dim has another size in one process."""
    return any(isinstance(spmd_type, Shard) and label in (dims or ())[spmd_type.dim] for _, spmd_type in type_)


def _repeats(spmd_type: SpmdType, dims: Dims | None, label: int) -> bool:
    """Returns whether an operand is the same at every position of a label."""
    return all(dim in getattr(spmd_type, "along", ()) for dim, labels in enumerate(dims or ()) if label in labels)


def _reduced(
    call: _CallFacts,
    spec: Spec,
    axis: str,
    spmd_types: Sequence[SpmdType],
    position: ShardPosition,
    having: Sequence[int],
    unknown: Sequence[int],
    partial: Sequence[int],
    dim: int,
) -> SpmdType:
    """The type of a result without the sharded dim, which is summed, for example."""
    how, name = spec.reduced[position.label], call.rule.name
    if how == "max" and not partial:
        return V if unknown else P("max")
    _assume_equal_counts(call, axis, (how,))
    if how not in ("sum", "mean", "mean_of_valid"):
        advice = {
            "weighted_mean": 'the mean is divided by the weights of this rank\'s own targets: take reduction="sum" '
            "and divide by the sum of the weights on all ranks",
            "min": "there is no partial minimum: take -amax(-x)",
        }
        raise Violation("reduced", axis, f"dim {dim} is sharded: " + advice.get(how, f"{name} needs all of it"), having)
    if any(index not in having for index in unknown):
        return V
    # A sum that is not linear (count_nonzero, a summed loss) has no other summand.
    groups = [group for group in call.groups if group & set(having)]
    rest = {index for group in groups for index in group if index not in having}
    for index in sorted(rest):
        if spmd_types[index] is not P and spmd_types[index] is not ZERO:
            raise Violation(
                "bias",
                axis,
                f"the sum over sharded dim {dim} is partial, and the added operand is equal on every rank: it "
                "would be added once for each rank",
                [index, having[0]],
            )
    strange = [index for index in partial if index not in rest]
    if strange:
        raise Violation(
            "partial_varying", axis, "a partial sum times a varying value has no type", [strange[0], having[0]]
        )
    if unknown:
        call.assumed.append(f"{name}: that the varying operand is sharded on the dim which is summed over")
    return P if how == "sum" else P("avg")


def _disentangle(call: _CallFacts, result_types: Sequence[dict[str, SpmdType]]) -> None:
    """Makes the inner of two axes V where they shard one dim of a result in an order that types cannot express.

    Of two axes that shard one dim in the same way the first one of the mesh has the outer factor. Merging dims of local
    size 1 can put them the other way round.
    """
    if call.spec is None or len(call.positions) < 2:
        return
    for types, out in zip(result_types, call.spec.outs):
        for first, second in combinations(sorted(call.positions, key=order_of), 2):
            one, two = types.get(first), types.get(second)
            if isinstance(one, Shard) and isinstance(two, Shard) and (one.dim, one.stride) == (two.dim, two.stride):
                labels = out[one.dim]
                if labels.index(call.positions[first].label) > labels.index(call.positions[second].label):
                    types[first] = V
