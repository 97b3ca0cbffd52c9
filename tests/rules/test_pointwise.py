"""Rules of elementwise functions, each checked with numbers, in every form that torch has of it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neuronx_dist.rules import RULES
from neuronx_dist.rules import pointwise as module
from neuronx_dist.rules.names import in_place, out_of_place
from neuronx_dist.rules.spec import elementwise
from tests.rules.verify_rule import received, verify


def floats(*shape, low=0.2, high=0.9, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low


def signed(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def ints(*shape, seed=0):
    return torch.randint(0, 7, shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def mask(*shape, seed=0):
    return signed(*shape, seed=seed + 5) > 0


BINARY = set(
    "pow float_power remainder fmod floor_divide maximum minimum fmax fmin hypot copysign nextafter heaviside "
    "chebyshev_polynomial_t chebyshev_polynomial_u hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l "
    "legendre_polynomial_p logaddexp logaddexp2 atan2 arctan2 polar gammainc gammaincc igamma igammac zeta eq ne lt "
    "le gt ge not_equal less less_equal greater greater_equal isclose logical_and logical_or logical_xor".split()
)
BINARY_OF_INTS = set("gcd lcm bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift".split())
OTHER_ARGUMENTS = {
    "clamp": (0.3, 0.5),
    "clip": (0.3,),
    "clamp_min": (0.3,),
    "clamp_max": (0.3,),
    "threshold": (0.5, 20.0),
    "_threshold": (0.5, 20.0),
    "mvlgamma": (2,),
    "multigammaln": (2,),
    "polygamma": (1,),
}
AGREE = set("nan_to_num nextafter eq logical_xor logical_not".split())  # linear on these values, some in place only


def holes(*shape, seed=0):
    """With zeros, which count as false."""
    return signed(*shape, seed=seed) * mask(*shape, seed=seed)


def arguments(name, function):
    x, y = signed(4, 6), floats(6, seed=1)
    if name.startswith("logical_"):
        return (holes(4, 6),) if name == "logical_not" else (holes(4, 6), holes(6, seed=1))
    if name == "isclose":
        return x, x[2]
    if name == "isreal":
        return (torch.complex(x, holes(4, 6)),)
    if name == "bitwise_right_shift":
        return ints(4, 6) * 9, ints(6, seed=3) % 4
    if name in BINARY:
        if name.endswith(("_polynomial_t", "_polynomial_u", "_polynomial_h", "_polynomial_he", "_l", "_p")):
            y = y * 4  # degrees
        if name in ("pow", "float_power", "polar", "zeta", "gammainc", "gammaincc", "igamma", "igammac"):
            x = floats(4, 6, low=1.1, high=3)
        return x, (y if name != "polar" else floats(4, 6, seed=1))
    if name in BINARY_OF_INTS:
        return ints(4, 6), ints(6, seed=3)
    if name == "bitwise_not":
        return (ints(4, 6),)
    if name in ("mvlgamma", "multigammaln"):
        x = floats(4, 6, low=1.1, high=3)
    if name == "polygamma" and function not in (Tensor.polygamma, Tensor.polygamma_):
        return 1, floats(4, 6)
    return (x, *OTHER_ARGUMENTS.get(name, ()))


def forms(names):
    """Each form of each function once, with a readable name."""
    cases = {}
    for name in names.split():
        for function in out_of_place(name) + in_place(name):
            where = getattr(function, "__qualname__", "") or getattr(function, "__name__", name)
            cases[id(function)] = pytest.param(name, function, id=where)
    return list(cases.values())


@pytest.mark.parametrize(("name", "function"), forms(module.NONLINEAR))
def test_nonlinear(name, function):
    if function in (F.sigmoid, F.tanh):  # python, and not received as such
        x = signed(2)
        assert all(form in RULES for form in received(lambda: function(x)))
        return
    try:
        function(*arguments(name, function))
    except RuntimeError as error:  # a form for other dtypes, such as the in-place form of a comparison
        pytest.skip(str(error))
    spec = verify(function, *arguments(name, function), _refusals=False)
    assert not spec.reduced and not spec.fixed
    assert RULES[function].linear == () if function in RULES else True
    if name not in AGREE:
        verify(function, *arguments(name, function))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize(("name", "function"), forms(module.LINEAR + " " + module.LINEAR_VIEWS))
def test_linear(name, function):
    if name in ("cuda", "xpu", "pin_memory") or function not in RULES or RULES[function].spec is None:
        return
    source = signed(4, 6)
    rule = RULES[function]
    assert rule.linear == ((0,),)
    if name in ("bfloat16", "half", "chalf"):  # linear up to their precision
        verify(function, source, _linear=False)
    else:
        verify(function, source, _linear=name not in ("float", "cfloat"))


@pytest.mark.parametrize("name", module.TO_INTEGERS)
def test_casts_to_integers_are_not_linear(name):
    verify(getattr(Tensor, name), holes(4, 6) * 5)
    rule = RULES[getattr(Tensor, name)]
    assert rule.affine(signed(2))
    assert not rule.affine(torch.tensor([True]))
    assert rule.affine(ints(2)) == (name == "bool")


@pytest.mark.parametrize("function", [torch.add, torch.sub, torch.subtract, torch.rsub, Tensor.__rsub__, Tensor.add_])
def test_sums(function):
    for other in (signed(4, 6, seed=1), signed(6), signed(1, 6), signed()):
        verify(function, signed(4, 6), other)
    verify(function, signed(4, 6), 3)
    verify(function, signed(4, 6), 0)
    if function not in (Tensor.__rsub__,):
        verify(function, signed(4, 6), signed(4, 1), alpha=3)
    rule = RULES[function]
    assert rule.linear == ((0, 1),)
    assert rule.affine(signed(2), 3) and rule.affine(signed(2), other=-1.5)
    assert not rule.affine(signed(2), 0) and not rule.affine(signed(2), signed(2))


@pytest.mark.parametrize("function", [torch.mul, torch.multiply, Tensor.mul, Tensor.mul_, Tensor.__mul__])
def test_products(function):
    for other in (signed(4, 6, seed=1), signed(6), signed(4, 1), signed(), 3):
        verify(function, signed(4, 6), other)
    assert RULES[function].linear == ((0,), (1,))


@pytest.mark.parametrize("function", [torch.div, torch.true_divide, torch.divide, Tensor.div, Tensor.div_])
def test_quotients(function):
    for other in (floats(4, 6, seed=1), floats(6), floats(4, 1), 3):
        verify(function, signed(4, 6), other)
    if function is not torch.true_divide:
        verify(function, signed(4, 6) * 9, floats(4, 6), rounding_mode="floor")
    verify(Tensor.__rdiv__, signed(4, 6), 2)
    assert RULES[Tensor.__rtruediv__].linear == ()


def test_sums_of_three():
    x, y, z = signed(4, 6), signed(4, 6, seed=1), floats(6)
    for function in (torch.lerp, Tensor.lerp, Tensor.lerp_):
        verify(function, x, y, 0.3)
        verify(function, x, y, z)
    for function in (torch.addcmul, Tensor.addcmul, Tensor.addcmul_, torch.addcdiv, Tensor.addcdiv, Tensor.addcdiv_):
        verify(function, x, y, z)
        verify(function, x, y, z, value=-2)
    verify(torch.complex, x, y)
    verify(torch.ldexp, x, ints(6))
    verify(torch.xlogy, x, z)
    verify(Tensor.xlogy_, x, 3)
    verify(torch.special.xlog1py, x, z)


@pytest.mark.parametrize("function", [torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_])
def test_masked_fill(function):
    x, where = signed(4, 6), mask(4, 6)
    assert where.any() and not where.all()
    verify(function, x, where, 0)
    verify(function, x, torch.tensor([[True], [False], [True], [False]]), 0)
    verify(function, x, where, 5.0)
    verify(function, x, where, value=float("-inf"), _refusals=False)
    verify(function, x, where, torch.tensor(2.0, dtype=torch.float64))
    rule = RULES[function]
    assert rule.affine(x, where, 5) and rule.affine(x, where, value=float("-inf"))
    assert not rule.affine(x, where, 0.0) and not rule.affine(x, where, torch.tensor(1.0))


def test_where():
    condition, x, y = mask(4, 6), signed(4, 6), signed(6)
    for spec in (verify(torch.where, condition, x, y), verify(Tensor.where, x, condition, y)):
        assert spec.outs == (((0,), (1,)),)
    verify(torch.where, condition[:, :1], x, 0.0)
    verify(torch.where, condition, 0, x)
    verify(torch.where, condition, x, 1.5)
    verify(torch.where, condition, True, x)
    verify(Tensor.where, x, condition, 0.0)
    verify(Tensor.where, x, condition, 3)
    verify(torch.where, condition=condition, input=x, other=y)
    assert RULES[torch.where].spec(condition).fixed.keys() == {0, 1}


def test_writing_over():
    x, y = signed(4, 6), signed(6)
    verify(Tensor.copy_, x, y)
    verify(Tensor.copy_, x, ints(4, 1))
    for value in (0, 3.0, torch.tensor(3.0, dtype=torch.float64)):
        verify(Tensor.fill_, x, value, _constant=True)
    verify(Tensor.zero_, x, _constant=True)
    verify(torch.frexp, x)


def test_casts_that_name_their_dtype():
    x, other, integers = signed(4, 6), signed(3), ints(3)
    for call in (
        lambda x: x.to(torch.float64),
        lambda x: x.to("cpu", torch.float64),
        lambda x: x.to(dtype=torch.int64),
        lambda x: x.to(other),
        lambda x: x.to(integers),
        lambda x: x.to("cpu"),
        lambda x: x.type(torch.float64),
        lambda x: x.type("torch.LongTensor"),
        lambda x: x.type_as(other),
        lambda x: x.type_as(integers),
    ):
        verify(call, x * 4)
    assert RULES[Tensor.to].affine(x, torch.int64) and RULES[Tensor.to].affine(x, dtype=torch.bool)
    assert not RULES[Tensor.to].affine(x, torch.bfloat16) and not RULES[Tensor.to].affine(ints(3), torch.int32)
    verify(lambda x: x.type(), x)
    verify(lambda x: x.real, torch.complex(x, x))
    verify(lambda x: x.imag, torch.complex(x, x + 1))
    verify(lambda x: x.real, x)
    verify(copy.deepcopy, x)


def test_channels():
    x = signed(4, 6, 8)
    assert verify(F.prelu, x, floats(6)).ins[1] == ((1,),)
    verify(F.prelu, x, floats(1))
    verify(torch.prelu, signed(4, 6), floats(6))
    for dim in (-1, 1, 0):
        spec = verify(F.glu, x, dim)
        assert list(spec.fixed) == [3] and spec.selected == {3}
        assert spec.ins[0][dim] == (3, dim % 3), "two blocks, in each its half"


@pytest.mark.parametrize(
    "name",
    sorted(name.removesuffix("_") for name in dir(torch) if name.startswith("_foreach_") and name != "_foreach_mm"),
)
def test_lists(name):
    one, two, three = ([floats(4, 6, seed=seed), floats(2, seed=seed)] for seed in (1, 2, 3))
    plain = name.removeprefix("_foreach_")
    if plain in ("ceil", "floor", "sign", "trunc"):
        one = [signed(4, 6) * 3, signed(2)]
    others = {
        **dict.fromkeys(("add", "sub", "mul", "div", "maximum", "minimum", "clamp_max", "clamp_min"), [(two,), (0.5,)]),
        **dict.fromkeys(("addcdiv", "addcmul"), [(two, three), (two, three, 0.5), (two, three, [0.5, 3.0])]),
        "pow": [(2,), ([2, 3],)],
        "lerp": [(two, 0.3), (two, three)],
        "norm": [(), (1,)],
        "powsum": [(2,)],
        "copy": [(two,)],
    }
    if plain in ("add", "mul", "div"):
        others[plain] = [*others[plain], ([0.5, 2.0],), (torch.tensor(0.5, dtype=torch.float64),)]
    for rest in others.get(plain, [()]):
        for function in (getattr(torch, name, None), getattr(torch, f"{name}_", None)):
            if function is not None:
                verify(function, one, *rest, _constant=plain == "zero")
                assert RULES[function].inplace == (0 if function.__name__.endswith("_") else None)


def test_sizes_of_one_broadcast_or_belong_together():
    spec = elementwise((4, 1), (4, 6), (6,), ())
    assert spec.ins == (((0,), ()), ((0,), (1,)), ((1,),), ())
    assert spec.outs == (((0,), (1,)),)
    assert elementwise((4, 1), (4, 1)).ins == (((0,), (1,)),) * 2, "one head on each rank is still a sharded dim"
    assert elementwise((4, 1), (1,)).ins == (((0,), (1,)), ((1,),))
    assert elementwise((0, 3), (1, 3)).sizes[0] == 0


EXPRESSIONS = """
x + y; x + 2; 2 + x; x - y; 2 - x; x * y; 2 * x; x / y; 2 / x; x // y; 2 // x; x % y; 2 % x; x ** 2; 2 ** x; -x; +x
abs(x); ~b; b & b; b | b; b ^ b; True & b; i << 1; 1 << i; i >> 1; 2 >> i; 1 | i; 1 ^ i; x < y; 2 < x; x <= 1; x > y
x >= 0; x == y; x != 2; x @ y; x.__rmatmul__(y); x.__iadd__(y); x.__isub__(1); x.__imul__(y); x.__itruediv__(2)
x.__ipow__(2); x.__imod__(2); x.__ifloordiv__(2); b.__iand__(b); b.__ior__(b); b.__ixor__(b); i.__ilshift__(1)
F.relu(x); F.relu(x, inplace=True); F.relu_(x); F.sigmoid(x); F.tanh(x); F.silu(x); F.gelu(x, approximate="tanh")
F.softmax(x, -1); F.softmax(x, dim=-1, dtype=torch.float32); F.log_softmax(x, -1); F.softmin(x, 0); F.logsigmoid(x)
F.threshold(x, 0, 1); F.threshold_(x, 0, 1); F.hardtanh(x); F.elu(x); F.softplus(x); F.leaky_relu(x); F.mish(x)
F.normalize(x); F.cosine_similarity(x, y); F.pairwise_distance(x, y); F.linear(x, y); F.glu(x, 0)
x.float(); x.type(torch.float64); x.type_as(y); x.to(torch.float64); x.cpu(); x.detach(); x.contiguous(); x.real
torch.einsum("ij,jk->ik", x, y); torch.einsum("ij,jk->ik", [x, y]); torch.tensordot(x, y, 1); torch.norm(x); x.norm()
torch.linalg.vector_norm(x); torch.linalg.norm(x); torch.linalg.matmul(x, y); torch.linalg.vecdot(x, y)
torch.special.expit(x); torch.special.logsumexp(x, 1); torch.special.softmax(x, 1); torch.outer(x[0], y[0])
x.max(); x.max(1); torch.max(x, y); x.max(dim=1, keepdim=True); x.sum(); sum([x, y]); x.std(); torch.std_mean(x)
x.cumsum(0); x.topk(1); x.sort(descending=True); x.argsort(); x.where(b, y); x.clamp(min=0); x.clamp_(max=1)
torch.equal(x, y); torch.allclose(x, y); x.copy_(y); x.fill_(0); x.zero_(); x.requires_grad_(False)
torch._foreach_add_([x], [y]); torch.chain_matmul(x, y); torch.kron(x, y); torch.cdist(x, y)
F.conv1d(x[None], y[:, :, None]); F.bilinear(x, y, w); F.gumbel_softmax(x)
"""


@pytest.mark.filterwarnings("ignore:torch.chain_matmul")
@pytest.mark.parametrize("line", [part.strip() for part in EXPRESSIONS.replace("\n", ";").split(";") if part.strip()])
def test_whatever_a_mode_receives_has_a_rule(line):
    """Operators, methods and functions reach a mode as one of many objects."""
    x, y, b, i = signed(4, 4), floats(4, 4), mask(4, 4), ints(4, 4)
    scope = dict(x=x, y=y, w=signed(2, 4, 4), b=b, i=i, F=F, torch=torch)
    code = compile(line, "<expression>", "eval")
    functions = received(lambda: eval(code, scope))
    views = {Tensor.__getitem__}  # the way to the arguments
    missing = [function for function in functions if function not in RULES and function not in views]
    assert functions and not missing
