"""Types as objects: interned, at scales, in words, copied and saved; what is written on a tensor."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from fractions import Fraction

import pytest
import torch

from neuronx_dist.spmd import I, P, R, S, V, dual
from neuronx_dist.spmd.errors import SpmdTypeError, Violation, dim_of
from neuronx_dist.spmd.tensor_type import (
    EQUAL,
    NOTE,
    UNIFORM_TYPE,
    UNTYPED,
    ZERO_TYPE,
    Foreign,
    Note,
    Offset,
    Origin,
    Segments,
    Stacked,
    TensorType,
    note_of,
    origins_of,
    tensors_in,
    type_of,
    version,
    without_shards,
    write,
)
from neuronx_dist.spmd.types import (
    DIFFERING,
    PARTIAL_AVG,
    PARTIAL_MAX,
    SAME,
    UNIFORM,
    VARYING,
    ZERO,
    Shard,
    repeated,
    scaled,
)

ALONG = repeated(frozenset({1}))
WORDS = {
    R: "R", I: "I", V: "V", P: "P", PARTIAL_MAX: 'P("max")', PARTIAL_AVG: 'P("avg")', ZERO: "0", UNIFORM: "R",
    ALONG: "R",
    scaled(R, 1): "N*R", scaled(R, -1): "R/N", scaled(R, 2): "N^2*R", scaled(V, -3): "V/N^3", scaled(P, 2): "N^2*P",
    scaled(P, -1): "P/N", S(1): "S(1)", S(-1, stride=2): "S(-1, stride=2)", Shard(0, scale=1): "N*S(0)",
    Shard(0, scale=-2): "S(0)/N^2", scaled(PARTIAL_MAX, 1): 'N*P("max")',
}  # fmt: skip


@pytest.mark.parametrize("kind", WORDS, ids=WORDS.get)
def test_a_type_in_words_and_at_scales(kind) -> None:
    assert str(kind) == WORDS[kind]
    assert pickle.loads(pickle.dumps(kind)) == kind and copy.deepcopy(kind) == kind
    if not isinstance(kind, Shard):
        assert pickle.loads(pickle.dumps(kind)) is kind is copy.copy(kind)
    assert scaled(kind, 0) is kind and scaled(ZERO, 3) is ZERO
    if kind is not ZERO:
        assert scaled(scaled(kind, 2), -2) == kind and scaled(kind, 2).scale == kind.scale + 2
        assert scaled(kind, 1).base == kind.base and scaled(kind, -kind.scale) == kind.base
        assert (scaled(kind, 5).letter, scaled(kind, 5).reduction) == (kind.letter, kind.reduction)
        assert scaled(kind, 5).meaning == kind.base.meaning


def test_what_types_are_called() -> None:
    assert [(kind.letter, kind.meaning, kind.reduction) for kind in (R, I, V, P, S(0), PARTIAL_MAX, PARTIAL_AVG)] == [
        ("R", "replicate", ""),
        ("I", "invariant", ""),
        ("V", "varying", ""),
        ("P", "partial", "sum"),
        ("S", "sharded", ""),
        ("P", "partial maximum", "max"),
        ("P", "partial mean", "sum"),
    ]
    assert (set("RI"), set("VS"), set("VSP")) == (SAME, VARYING, DIFFERING)
    assert (ZERO.letter, ZERO.meaning, UNIFORM.letter, UNIFORM.meaning) == ("0", "zero", "R", "one constant")
    assert S(1, 2, 3, (Fraction(0), Fraction(1, 2)), 0).base == S(1, 2, 3, (Fraction(0), Fraction(1, 2)))
    assert Shard(0, scale=2).base == S(0) and ALONG.along == {1} and repeated(frozenset()) is R


def test_reductions_of_partial_values() -> None:
    assert (P("sum"), P("avg"), P("max")) == (P, PARTIAL_AVG, PARTIAL_MAX)
    assert PARTIAL_AVG.base is P and PARTIAL_AVG.scale == 1 and scaled(P, 1) is PARTIAL_AVG
    for kind, reduction in ((P, "min"), (R, "sum"), (PARTIAL_MAX, "max")):
        words = f'{kind}({reduction!r}) is not a type; P("sum"), P("avg") and P("max") are'
        with pytest.raises(ValueError) as error:
            kind(reduction)
        assert str(error.value) == words


DUALS = [
    (R, P), (P, R), (I, I), (V, V), (S(1), S(1)), (scaled(R, 1), scaled(P, -1)), (PARTIAL_AVG, scaled(R, -1)),
    (Shard(0, scale=2), Shard(0, scale=-2)), (ZERO, V),
]  # fmt: skip


@pytest.mark.parametrize("kind, gradient", DUALS)
def test_types_of_gradients(kind, gradient) -> None:
    assert dual(kind) == gradient and (kind is ZERO or dual(gradient) == kind)
    type_ = TensorType.of({"tp": kind, "dp": I})
    assert type_.of_gradient() is TensorType.of({"tp": gradient, "dp": I}) is type_.of_gradient()


# --- by axis


def test_types_by_axis_are_one_object_and_say_nothing_twice() -> None:
    type_ = TensorType.of({"tp": S(0), "dp": V}, None)
    assert type_ is TensorType.of({"dp": V, "tp": S(0)}) and str(type_) == "{dp: V, tp: S(0)}"
    assert TensorType.of({"tp": R, "dp": V}, R) is TensorType.of({"dp": V}, R)
    assert str(TensorType.of({"dp": V}, R)) == "{dp: V, others: R}" and str(UNTYPED) == "{}"
    assert (type_.get("tp"), type_.get("cp"), TensorType.of({"dp": V}, R).get("cp")) == (S(0), None, R)
    assert [*type_] == [("dp", V), ("tp", S(0))]
    assert type_.with_axis("cp", P) is TensorType.of({"tp": S(0), "dp": V, "cp": P})
    assert type_.with_axis("tp", None) is TensorType.of({"dp": V})
    assert type_.with_axis("tp", R) is TensorType.of({"dp": V, "tp": R})
    assert copy.deepcopy(type_) is type_ and pickle.loads(pickle.dumps(type_)) == OrderedDict()
    assert without_shards(TensorType.of({"tp": S(0), "dp": I}, R)) is TensorType.of({"tp": V, "dp": I}, R)


@pytest.mark.parametrize(
    "type_, sharded, shaped, graded",
    [
        (UNTYPED, False, False, False),
        (EQUAL, False, False, False),
        (ZERO_TYPE, False, True, True),
        (UNIFORM_TYPE, False, True, True),
        (TensorType.of({"tp": S(0)}), True, True, False),
        (TensorType.of({"tp": I}), False, False, True),
        (TensorType.of({}, I), False, False, True),
        (TensorType.of({"tp": V, "dp": P}, R), False, False, False),
        (TensorType.of({"tp": ALONG}), False, True, False),
        (TensorType.of({"tp": V}, ALONG), False, True, False),
        (TensorType.of({"tp": V, "dp": ZERO}), False, True, True),
    ],
    ids=str,
)
def test_what_becomes_of_a_type_depends_on(type_, sharded, shaped, graded) -> None:
    assert (type_.sharded, type_.shaped, type_.graded) == (sharded, shaped, graded)


# --- on tensors


def test_what_is_written_on_a_tensor() -> None:
    x, origins = torch.ones(2), {"tp": Origin("made", "a.py:1", letter="V")}
    assert (note_of(x), type_of(x), origins_of(x)) == (None, None, {})
    write(x, EQUAL)
    assert note_of(x) == Note(EQUAL, None, 0, 0, None) and origins_of(x) == {}
    x.add_(1)
    write(x, UNTYPED, origins, 3, "extra")
    assert note_of(x) == Note(UNTYPED, origins, 3, 1, "extra") and type_of(x) is UNTYPED and origins_of(x) is origins
    x.__dict__[NOTE] = (OrderedDict(), None, 0, 0, None)  # as it comes out of a file
    assert (note_of(x), type_of(x), origins_of(x)) == (None, None, {})
    with torch.inference_mode():
        assert version(torch.ones(2)) == 0


def test_a_saved_tensor_is_read_without_types() -> None:
    x = torch.ones(2)
    write(x, EQUAL, {"tp": Origin("made", "a.py:1")}, 3, Segments(0, ((2, EQUAL, None),)))
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert torch.equal(again, x) and type_of(again) is None


def test_where_a_type_began_in_words() -> None:
    assert str(Origin("a sum", "a.py:1", "layers.0")) == "a sum (layers.0, a.py:1)"
    assert str(Origin("a sum", "a.py:1")) == "a sum (a.py:1)" and str(Origin("a sum", "")) == "a sum"
    assert Origin("a sum", "a.py:1").letter == "" == Origin("a sum", "a.py:1").module


@pytest.mark.parametrize(
    "extra",
    [
        Origin("a sum", "a.py:1", "m", "V"),
        Offset(frozenset({"tp"})),
        Foreign(frozenset({"tp"}), 1, 2),
        Stacked("tp", 0, 1),
        Segments(0, ()),
    ],
    ids=lambda extra: type(extra).__name__,
)
def test_what_is_known_beside_a_type_is_neither_copied_nor_saved(extra) -> None:
    assert copy.deepcopy(extra) is extra and pickle.loads(pickle.dumps(extra)) == OrderedDict()


def test_what_is_known_beside_a_type() -> None:
    offset, foreign, stacked = Offset(frozenset({"tp"})), Foreign(frozenset({"tp"})), Stacked("tp,dp", 1, 2)
    assert (offset.axes, offset.is_mask, offset.shift, offset.true) == ({"tp"}, False, None, None)
    assert (foreign.axes, foreign.first, foreign.count) == ({"tp"}, None, 0)
    assert (stacked.axes, stacked.ranks, stacked.dim) == ("tp,dp", 1, 2)
    segments = Segments(1, ((2, EQUAL, None),))
    assert (segments.dim, segments.parts, segments.blocks) == (1, ((2, EQUAL, None),), 1)


def test_tensors_in_results() -> None:
    x, y, z = torch.ones(1), torch.ones(2), torch.ones(3)
    assert tensors_in(x) == (x,) and tensors_in("x") == () == tensors_in({"x": x})
    found = tensors_in([x, (y, [None, z]), {"no": x}, []])
    assert len(found) == 3 and all(a is b for a, b in zip(found, (x, y, z)))


# --- errors


def test_an_error_has_its_parts_on_lines_of_their_own() -> None:
    full = SpmdTypeError(
        "add of x", "it is V", where_from=["V since a", "R since b"], repairs=["one", "two", "three"], axis="tp",
        rule="some", more=3,
    )  # fmt: skip
    assert str(full) == "add of x: it is V\n  V since a\n  R since b\n  repair: one\n      or: two\n      or: three"
    assert (full.what, full.why, full.where_from, full.repairs) == (
        "add of x", "it is V", ["V since a", "R since b"], ["one", "two", "three"],
    )  # fmt: skip
    assert (full.axis, full.rule, full.details) == ("tp", "some", {"more": 3})
    bare = SpmdTypeError("add of x")
    assert str(bare) == "add of x" and (bare.why, bare.axis, bare.rule, bare.details) == ("", None, "", {})
    violation = Violation("some", "tp", "it is V", [1, 0])
    assert (violation.rule, violation.axis, violation.why, violation.operands) == ("some", "tp", "it is V", (1, 0))
    assert str(violation) == "it is V" and Violation("some", "tp", "").operands == ()


@pytest.mark.parametrize(
    "dim, shape, words",
    [
        (2, (3, 4), "S(2) of a tensor [3, 4]: dim 2 is out of range: it has 2 dims\n  "
         "repair: S(dim) with a dim from -2 to 1"),
        (-2, (3,), "S(-2) of a tensor [3]: dim -2 is out of range: it has 1 dim\n  "
         "repair: S(dim) with a dim from -1 to 0"),
        (0, (), "S(0) of a tensor []: dim 0 is out of range: it has 0 dims\n  repair: R: it has no dim to shard"),
    ],
)  # fmt: skip
def test_a_dim_that_there_is_not(dim, shape, words) -> None:
    with pytest.raises(SpmdTypeError) as error:
        dim_of(S(dim), shape)
    assert str(error.value) == words and error.value.rule == "dim"
    assert [dim_of(S(dim), (3, 4)) for dim in (-2, -1, 0, 1)] == [0, 1, 0, 1]
