"""The registry, the order of operands, the builders, and the verifier itself: it must see what is wrong."""

from __future__ import annotations

import time
import timeit
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neuronx_dist.rules import RULES, Rule, Spec, operands, rule
from neuronx_dist.rules.names import getter, in_place, out_of_place
from neuronx_dist.rules.spec import ALL, along, contraction, derive, labels, nonzero, normal_dims, reduction, same
from tests.rules.verify_rule import received, verify


@pytest.fixture
def registry(monkeypatch):
    """Rules that a test registers go when it ends."""
    before = dict(RULES)
    yield RULES
    RULES.clear()
    RULES.update(before)


def floats(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_operands_in_order():
    a, b, c, d = (torch.zeros(size) for size in (1, 2, 3, 4))
    assert operands((a, 3, [b, c], None), {}) == [a, b, c]
    assert operands((a, "x", (b, 1)), dict(other=c, dim=0, out=d)) == [a, b, c]
    assert [x.shape[0] for x in operands((), dict(bias=c, weight=b, input=a))] == [1, 2, 3]
    assert [x.shape[0] for x in operands((), dict(other=c, condition=a, input=b))] == [1, 2, 3]
    assert [x.shape[0] for x in operands((a,), dict(tensors=[b, c]))] == [1, 2, 3]


def test_registering(registry):
    def double(x):
        return x * 2

    @rule(double, linear=((0,),))
    def spec(x):
        return same(x.shape)

    assert RULES[double] == Rule("double", spec, ((0,),))
    assert spec(floats(2, 3)) == Spec((((0,), (1,)),), (((0,), (1,)),), {0: 2, 1: 3})
    derive(double, Tensor.size, inplace=0)
    assert RULES[Tensor.size] == Rule("size", spec, ((0,),), inplace=0)
    rule(double, kind="pass")(None)
    assert RULES[double].kind == "pass", "the last one counts"
    with pytest.raises(TypeError, match="got no torch functions"):
        rule()
    with pytest.raises(TypeError, match="linaer"):
        rule(double, linaer=())
    with pytest.raises(KeyError):
        derive(lambda x: x, double)


def test_names():
    assert torch.add in out_of_place("add") and Tensor.__radd__ in out_of_place("add")
    assert in_place("add") == [Tensor.add_, Tensor.__iadd__]
    assert Tensor.__float__ not in out_of_place("float")
    assert received(lambda: floats(2).real)[-1] == getter("real")
    assert RULES[Tensor.add_].name == "add_" and RULES[getter("real")].name == "real"


def test_builders():
    assert normal_dims(None, 3) == normal_dims((), 3) == (0, 1, 2)
    assert normal_dims(-1, 3) == (2,) and normal_dims([-1, 0], 3) == (2, 0) and normal_dims(0, 0) == ()
    assert labels(2, 3) == ((3,), (4,))
    assert nonzero(3) and nonzero(-0.5) and nonzero(True)
    assert not nonzero(0) and not nonzero(None) and not nonzero(0.0) and not nonzero(floats(1))
    assert reduction((2, 4), 1, True, "max") == Spec((((0,), (1,)),), (((0,), ()),), {0: 2, 1: 4}, {1: "max"})
    assert along((2, 4), -1, "it", 2).outs == (((0,), (1,)),) * 2
    assert contraction("ij,j", (2, 4), (4,)).outs == (((0,),),)
    assert contraction("...i->...", (2, 3, 4)).reduced == {2: "sum"}
    assert contraction("...i->i", (2, 3, 4)).reduced == {0: "sum", 1: "sum"}
    for size in (1, 3):
        diagonal = contraction("ii->i", (size, size))
        assert diagonal.sizes == {0: size, 1: size} and diagonal.fixed.keys() == {0, 1} and not diagonal.reduced
        assert diagonal.ins == (((0,), (1,)),) and diagonal.outs == (((0,),),)


def test_every_rule_is_whole():
    for function, known in RULES.items():
        assert callable(function) and known.name, function
        if known.kind == "op":
            assert known.spec is not None, known
        if known.kind == "decompose":
            assert known.decompose is not None, known
        assert known.inplace is None or known.inplace >= 0
        assert all(group == ALL[0] or all(number >= 0 for number in group) for group in known.linear)


X, Y, SQUARE = floats(4, 6), floats(4, 6, seed=1), floats(4, 4)

WRONG = [
    ("softmax along another dim", torch.softmax, dict(spec=lambda x, dim: along(x.shape, 0, "no")), (X, 1)),
    ("softmax of every element", torch.softmax, dict(spec=lambda x, dim: same(x.shape)), (X, 1)),
    (
        "a transpose that is none",
        torch.mm,
        dict(spec=lambda x, y: contraction("ij,jk->jk", x.shape, y.shape)),
        (SQUARE,) * 2,
    ),
    ("a sum that is a maximum", torch.sum, dict(spec=lambda x: reduction(x.shape, None, kind="max")), (X,)),
    ("a dim that ends unsaid", torch.sum, dict(spec=lambda x: Spec((labels(2),), ((),), {0: 4, 1: 6})), (X,)),
    ("a dim that is said to be fixed", torch.relu, dict(spec=lambda x: along(x.shape, 1, "no")), (X,)),
    ("relu linear", torch.relu, dict(linear=((0,),)), (X,)),
    ("neg not linear", torch.neg, dict(linear=()), (X,)),
    ("mul jointly linear", torch.mul, dict(linear=((0, 1),)), (X, Y)),
    ("add linear in each", torch.add, dict(linear=((0,), (1,))), (X, Y)),
    ("a number that is added", torch.add, dict(affine=None), (X, 3)),
    ("a zero that is said to be added", torch.add, dict(affine=lambda *args: True), (X, 0)),
    ("a write that is not said", Tensor.add_, dict(inplace=None), (X, Y)),
    ("a write of another operand", Tensor.add_, dict(inplace=1), (X, Y)),
    ("a view that is not said", Tensor.detach, dict(aliases=False), (X,)),
    ("an operand too few", torch.add, dict(spec=lambda x, y: same(x.shape)), (X, Y)),
    ("a result too few", torch.sort, dict(spec=lambda x: along(x.shape, 1, "no")), (X,)),
    ("wrong sizes", torch.relu, dict(spec=lambda x: same((4, 2))), (X,)),
    ("an unknown reduction", torch.sum, dict(spec=lambda x: reduction(x.shape, None, kind="median")), (X,)),
    ("a false decomposition", torch._foreach_neg, dict(decompose=lambda xs: [torch.abs(x) for x in xs]), ([X],)),
    ("a bias that is summed too", F.linear, dict(linear=()), (X, Y, floats(4))),
]


@pytest.mark.parametrize(("function", "fields", "args"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_the_verifier_sees_wrong_rules(registry, function, fields, args):
    verify(function, *args)
    RULES[function] = RULES[function]._replace(**fields)
    with pytest.raises(AssertionError, match=r"^rule "):
        verify(function, *args)


def test_the_verifier_refuses_results_that_agree_with_every_rule():
    """NaN is equal to NaN, and a constant to its pieces, whatever a rule says."""
    with pytest.raises(AssertionError, match="result 0 is NaN"):
        verify(torch.log, -X.abs())
    with pytest.raises(AssertionError, match="result 0 is NaN"):
        verify(F.kl_div, X, -X.abs(), reduction="batchmean")
    with pytest.raises(AssertionError, match="the same everywhere"):
        verify(torch.isnan, X)
    verify(torch.zeros_like, X, _constant=True)
    verify(torch.isnan, torch.where(X > 0, X, torch.nan))


def test_the_verifier_wants_a_rule(registry):
    del RULES[torch.relu]
    with pytest.raises(KeyError):
        verify(torch.relu, X)
    with pytest.raises(AssertionError, match="not one torch function"):
        verify(lambda x: torch.neg(torch.neg(x)), X)


def test_specs_are_cheap():
    """Built once for each function and shapes; still, a model has thousands of such combinations."""
    x, weight = floats(2, 8, 64), floats(64, 64)
    calls = {
        torch.add: (x, x),
        torch.mul: (x, weight[0]),
        F.linear: (x, weight),
        torch.matmul: (x, weight),
        torch.softmax: (x, -1),
        Tensor.mean: (x, -1),
    }
    for function, args in calls.items():
        build = partial(RULES[function].spec, *args)
        pieces = timeit.repeat(build, timer=time.thread_time, number=50, repeat=12)
        assert min(pieces) / 50 < 60e-6, function
