"""Python's operators and the usual functions of torch by `parallelize` on two ranks, beside one process."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neuronx_dist import Mesh
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import ComputeConfig, parallelize
from neuronx_dist.weights.shard_spec import gather_full, spec_of

Function = Callable[[Tensor, Tensor, Tensor], Any]
# y [8, 4] depends on a weight, x [8, 4] is an input, both with gradients; i [8] are integers.
CASES: dict[str, list[Function]] = {}


def written(function: Callable[[Tensor, Any], Any], *values: Any) -> Function:
    """Returns a function that writes a clone of y by `function`, and returns the clone."""

    def wrapped(y: Tensor, x: Tensor, i: Tensor) -> Tensor:
        clone = y.clone()
        result = function(clone, *values)
        return clone if result is None else result

    return wrapped


# --- Python's operators ---

for name in ("add", "sub", "mul", "truediv", "pow"):
    op, iop = getattr(operator, name), getattr(operator, f"i{name}")
    CASES[name] = [
        lambda y, x, i, op=op: op(y.abs() + 1, x.abs() + 2),
        lambda y, x, i, op=op: op(y.abs() + 1, 2),
        lambda y, x, i, op=op: op(y.abs() + 1, 2.5),
        lambda y, x, i, op=op: op(2, y.abs() + 1),
        lambda y, x, i, op=op: op(y.abs() + 1, i[:, None] + 1),
        lambda y, x, i, iop=iop: iop(y.abs() + 1, 2),
        lambda y, x, i, iop=iop: iop(y.abs() + 1, y.abs() + 2),
    ]
CASES["pow"] += [
    lambda y, x, i: pow(y, 2),
    lambda y, x, i: y**2,
    lambda y, x, i: y.abs() ** y,
    lambda y, x, i: y ** i[0],
]
CASES["integer division"] = [
    lambda y, x, i: y % 2,
    lambda y, x, i: y % (x.abs() + 1).detach(),
    lambda y, x, i: y * (y.detach() // 0.1),
    lambda y, x, i: y * (7 // (i + 1))[:, None],
    lambda y, x, i: y * (7 % (i + 1))[:, None],
    lambda y, x, i: y * operator.ifloordiv(i.clone(), 2)[:, None],
    lambda y, x, i: y * operator.imod(i.clone(), 3)[:, None],
]
CASES["matmul"] = [lambda y, x, i: y @ x.t(), lambda y, x, i: x.t() @ y, lambda y, x, i: operator.imatmul(y[:4], x[:4])]
for name in ("lt", "le", "gt", "ge", "eq", "ne"):
    op = getattr(operator, name)
    CASES.setdefault("comparison", []).extend(
        [
            lambda y, x, i, op=op: torch.where(op(y, x), y, x),
            lambda y, x, i, op=op: y.masked_fill(op(y, 0.1), 0),
            lambda y, x, i, op=op: y * op(0.1, y),
        ]
    )
for name in ("and", "or", "xor", "lshift", "rshift"):
    op, iop = getattr(operator, f"__{name}__"), getattr(operator, f"__i{name}__")
    CASES.setdefault("bitwise", []).extend(
        [
            lambda y, x, i, op=op: y * op(i, i % 3)[:, None],
            lambda y, x, i, op=op: y * op(i, 1)[:, None],
            lambda y, x, i, op=op: y * op(1, i)[:, None],
            lambda y, x, i, iop=iop: y * iop(i.clone(), 1)[:, None],
        ]
    )
CASES["unary"] = [
    lambda y, x, i: -y,
    lambda y, x, i: +y,
    lambda y, x, i: abs(y),
    lambda y, x, i: y * ~i[:, None],
    lambda y, x, i: y.masked_fill(~(y > 0) & (x > 0), 0),
    lambda y, x, i: y * len(y),
]
CASES["indexing"] = [
    lambda y, x, i: y[0],
    lambda y, x, i: y[-1, 2:],
    lambda y, x, i: y[1:-1:2, ..., None],
    lambda y, x, i: y[:, None] * x[None],
    lambda y, x, i: y[i % 3],
    lambda y, x, i: y[[0, 2]],
    lambda y, x, i: y[i % 3, i % 2],
    lambda y, x, i: y[torch.arange(4), torch.arange(4)],
    lambda y, x, i: sum(row for row in y),
    written(operator.setitem, 0, 1.0),
    written(operator.setitem, (slice(None), 1), 0),
    lambda y, x, i: written(operator.setitem, i % 3, y[1])(y, x, i),
    lambda y, x, i: written(operator.setitem, i > 2, 0.5)(y, x, i),
    lambda y, x, i: written(lambda clone: operator.setitem(clone, 0, operator.iadd(clone[0], 1)))(y, x, i),
    lambda y, x, i: written(lambda clone: operator.setitem(clone, slice(3), clone[:3] - y[2:5]))(y, x, i),
]

# --- functions of torch, of one tensor ---

_ONE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "of any number": (
        lambda y: y,
        "abs angle asinh atan ceil cos cosh deg2rad erf erfc exp exp2 expm1 floor frac neg positive rad2deg relu round "
        "sigmoid sign sin sinc sinh square tan tanh trunc nan_to_num i0 sgn sum mean prod std var amax amin logsumexp "
        "argmax argmin cumsum median min max aminmax nanmean nansum norm std_mean var_mean sort argsort topk flip roll "
        "tril triu diag trace t squeeze flatten unbind count_nonzero isnan isfinite all any softmax log_softmax "
        "cumprod logcumsumexp cummax transpose kthvalue quantile",
    ),
    "of positive numbers": (
        lambda y: y.abs() + 0.5,
        "log log2 log10 log1p sqrt rsqrt lgamma digamma reciprocal pow",
    ),
    "of numbers from 0 to 1": (lambda y: y.sigmoid() * 0.9, "asin acos atanh erfinv logit"),
}
_MORE: dict[str, tuple[Any, ...]] = {
    "logsumexp": (-1,), "cumsum": (1,), "topk": (2,), "flip": ((0,),), "roll": (1,), "softmax": (-1,),
    "log_softmax": (-1,), "cumprod": (1,), "logcumsumexp": (1,), "cummax": (1,), "transpose": (0, 1),
    "kthvalue": (2,), "quantile": (0.5,), "pow": (-0.5,),
}  # fmt: skip


def first_of(function: Callable[..., Any], argument: Callable[[Tensor], Tensor], more: tuple[Any, ...]) -> Function:
    """Returns the call of a function of torch; of several results the first, of integers times y."""

    def called(y: Tensor, x: Tensor, i: Tensor) -> Tensor:
        result = function(argument(y), *more)
        result = result[0] if isinstance(result, tuple) else result
        return result if result.is_floating_point() else y * result.sum()

    return called


for title, (argument, names) in _ONE.items():
    CASES[title] = [first_of(getattr(torch, name), argument, _MORE.get(name, ())) for name in names.split()]

CASES["of several tensors"] = [
    *(lambda y, x, i, name=name: getattr(torch, name)(y, x) for name in "maximum minimum atan2 hypot fmax".split()),
    *(lambda y, x, i, name=name: getattr(torch, name)([y, x]) for name in "cat stack hstack vstack".split()),
    *(lambda y, x, i, name=name: getattr(torch, name)(y, x.abs() + 1) for name in ("xlogy", "logaddexp", "copysign")),
    lambda y, x, i: torch.lerp(y, x, 0.3),
    lambda y, x, i: torch.addcmul(y, y, x),
    lambda y, x, i: torch.einsum("ab,cb->ac", y, x),
    lambda y, x, i: torch.outer(y[0], x[0]),
    lambda y, x, i: torch.kron(y[:2], x[:2]),
    lambda y, x, i: torch.addmm(y[:4], y[:4], x[:4]),
    lambda y, x, i: torch.cdist(y, x),
]
CASES["of positions"] = [
    lambda y, x, i: y.gather(1, (i % 4)[:, None]),
    lambda y, x, i: y.scatter(1, (i % 4)[:, None], 0.0),
    lambda y, x, i: torch.zeros_like(y).index_add(0, i % 3, y),
    lambda y, x, i: y.index_select(0, i % 3),
    lambda y, x, i: y.repeat_interleave(2, 0),
    lambda y, x, i: F.embedding(i % 4, y),
    lambda y, x, i: y * F.one_hot(i % 4, 4),
    lambda y, x, i: F.pad(y, (1, 1)),
    lambda y, x, i: y.unfold(1, 2, 1),
    lambda y, x, i: y.chunk(2, -1)[0] + y.split([2, 2], -1)[1],
    lambda y, x, i: y.unflatten(1, (2, 2)).movedim(0, 1),
]
CASES["like another tensor"] = [
    *(lambda y, x, i, name=name: y + getattr(torch, name)(y) for name in ("zeros_like", "ones_like")),
    *(lambda y, x, i, name=name: y + getattr(y, name)(4) for name in ("new_zeros", "new_ones")),
    lambda y, x, i: y + y.new_full((4,), 2.0),
    lambda y, x, i: y + y.new_full((8, 4), 2.0),
    lambda y, x, i: y + torch.full_like(y, 2.0),
    lambda y, x, i: y + y.new_tensor([1.0, 2, 3, 4]),
    lambda y, x, i: torch.empty_like(y).copy_(y),
    lambda y, x, i: y.new_empty(8, 4).copy_(y),
]
CASES["of networks"] = [
    *(
        lambda y, x, i, name=name: getattr(F, name)(y)
        for name in "gelu silu softplus elu hardswish leaky_relu normalize".split()
    ),
    lambda y, x, i: F.layer_norm(y, (4,)),
    lambda y, x, i: F.group_norm(y[None], 2),
    lambda y, x, i: F.batch_norm(y, None, None, training=True),
    lambda y, x, i: F.glu(y),
    lambda y, x, i: F.prelu(y, x[0]),
    lambda y, x, i: F.max_pool1d(y[None], 2) + F.avg_pool1d(y[None], 2),
    lambda y, x, i: F.conv1d(y[None], x[None, :, :2]),
    lambda y, x, i: F.cross_entropy(y, i % 4),
    lambda y, x, i: F.scaled_dot_product_attention(y[None, None], x[None, None], x[None, None]),
    lambda y, x, i: torch.linalg.inv(y.t() @ y + torch.eye(4, dtype=y.dtype)),
    lambda y, x, i: torch.fft.rfft(y).abs(),
    lambda y, x, i: torch.autograd.grad((y**2).sum(), y, create_graph=True)[0],
]


class Functions(nn.Module):
    """Calls functions of a linear layer's result, of the inputs, and returns all results."""

    def __init__(self, functions: list[Function]) -> None:
        super().__init__()
        self.functions, self.layer = functions, nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor, i: Tensor) -> tuple[Any, ...]:
        return tuple(function(self.layer(x), x, i) for function in self.functions)


def differentiated(module: nn.Module, x: Tensor, i: Tensor) -> list[Tensor]:
    """Returns results, then the gradients of x and of the weights, of which all results take part in one sum."""
    x = x.clone().requires_grad_()
    results = module(x, i)
    weighted = [(result * torch.linspace(1, 2, result.numel()).view_as(result)).sum() for result in results]
    sum(weighted).backward()
    weights = [gather_full(p.grad, spec_of(p)) for p in module.parameters()]
    return [*(result.detach() for result in results), x.grad, *weights]


@pytest.fixture
def module_and_arguments(request: Any) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Functions(request.param), torch.randn(8, 4, dtype=torch.float64), torch.arange(8)


@pytest.mark.slow  # together more than the fast tier has room for
@pytest.mark.parametrize("module_and_arguments", CASES.values(), ids=CASES, indirect=True)
def test_two_ranks_compute_what_one_process_does(module_and_arguments: Any, tmp_path: Path) -> None:
    module, x, i = module_and_arguments
    config = ComputeConfig(2, 2)

    def rank() -> list[Tensor]:
        return differentiated(parallelize(module, {"x": x, "i": i}, "tp", config, gen_savedir=tmp_path), x, i)

    wanted = differentiated(module, x, i)
    for computed in threads.run(Mesh(2, tp=2), rank):
        for a, b in zip(computed, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


RANDOM: list[Function] = [
    *(lambda y, x, i, name=name: y + getattr(torch, name)(y) for name in ("rand_like", "randn_like")),
    *(lambda y, x, i, name=name: y * getattr(torch, name)(y.detach().sigmoid()) for name in ("bernoulli", "poisson")),
    *(
        lambda y, x, i, name=name: y * getattr(torch.empty_like(y), name)()
        for name in "uniform_ normal_ exponential_ cauchy_ log_normal_ bernoulli_".split()
    ),
    lambda y, x, i: y * torch.empty_like(y).geometric_(0.5),
    lambda y, x, i: y + torch.randint(0, 3, (8, 4)),
    lambda y, x, i: y[torch.randperm(8)],
    lambda y, x, i: y.gather(1, torch.multinomial(y.detach().softmax(-1), 1)),
    lambda y, x, i: torch.normal(y, 1.0),
    lambda y, x, i: F.gumbel_softmax(y),
    lambda y, x, i: F.gumbel_softmax(y, hard=True),
    lambda y, x, i: F.rrelu(y, training=True),
    lambda y, x, i: F.dropout(y) + F.alpha_dropout(y, training=True),
    lambda y, x, i: F.fractional_max_pool2d(y[None, None], 2, output_size=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("module_and_arguments", [RANDOM], ids=["all"], indirect=True)
def test_functions_that_draw_random_numbers(module_and_arguments: Any, tmp_path: Path) -> None:
    """`parallelize` compares their values with one process by equal draws, and draws anew afterwards."""
    module, x, i = module_and_arguments
    before = torch.get_rng_state()
    parallelize(module, {"x": x, "i": i}, "tp", ComputeConfig(2, 2), gen_savedir=tmp_path, load_module=False)
    (proof,) = tmp_path.rglob("proof.txt")
    assert "values: equal to one process; largest error" in proof.read_text()
    assert torch.equal(torch.get_rng_state(), before)
    parallel = parallelize(module, {"x": x, "i": i}, "tp", ComputeConfig(1, 1), gen_savedir=tmp_path / "one")
    with torch.random.fork_rng():
        for seed in (0, 1):
            torch.manual_seed(seed)
            wanted = module(x, i)
            torch.manual_seed(seed)
            for a, b in zip(parallel(x, i), wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
