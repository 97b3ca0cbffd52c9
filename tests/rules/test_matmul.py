"""Rules of products and convolutions, checked with numbers: what is contracted, what is a batch, where it is linear."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neuronx_dist.rules import RULES
from neuronx_dist.rules.spec import contraction
from tests.rules.verify_rule import verify


def signed(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


PRODUCTS = [
    ("mm", (4, 6), (6, 8)),
    ("bmm", (2, 4, 6), (2, 6, 8)),
    ("mv", (4, 6), (6,)),
    ("dot", (6,), (6,)),
    ("vdot", (6,), (6,)),
    ("outer", (4,), (6,)),
    ("ger", (4,), (6,)),
    ("matmul", (6,), (6,)),
    ("matmul", (6,), (6, 8)),
    ("matmul", (4, 6), (6,)),
    ("matmul", (4, 6), (6, 8)),
    ("matmul", (2, 4, 6), (6, 8)),
    ("matmul", (2, 4, 6), (6,)),
    ("matmul", (6,), (2, 6, 8)),
    ("matmul", (4, 6), (2, 6, 8)),
    ("matmul", (10, 1, 4, 6), (2, 6, 8)),
    ("matmul", (10, 2, 4, 6), (1, 6, 8)),
    ("matmul", (2, 1, 6), (6, 1)),
    ("inner", (6,), (6,)),
    ("inner", (2, 4, 6), (8, 6)),
    ("inner", (), (8, 6)),
    ("kron", (2, 4), (6, 8)),
    ("kron", (4,), (6, 8)),
    ("kron", (2, 4, 6), (8,)),
]


@pytest.mark.parametrize(("name", "left", "right"), PRODUCTS, ids=str)
def test_products(name, left, right):
    x, y = signed(*left), signed(*right, seed=1)
    spec = verify(getattr(torch, name), x, y)
    assert verify(getattr(Tensor, name), x, y) == spec
    if name == "matmul":
        assert verify(torch.linalg.matmul, x, y) == spec
        assert verify(lambda x, y: x @ y, x, y) == spec
        assert verify(Tensor.__rmatmul__, y, x) == spec._replace(ins=spec.ins[::-1])


def test_what_is_contracted():
    assert contraction("...k,nk->...n", (2, 4, 6), (8, 6)).reduced == {2: "sum"}
    spec = verify(torch.matmul, signed(2, 4, 6), signed(2, 6, 8))
    (batch,), (row,), (inner,) = spec.ins[0]
    assert spec.ins[1][:2] == ((batch,), (inner,)) and spec.outs[0][:2] == ((batch,), (row,))
    assert spec.reduced == {inner: "sum"}
    (out,) = verify(torch.kron, signed(2, 4), signed(6, 8)).outs
    assert out == ((0, 2), (1, 3)), "the first operand is outermost"


@pytest.mark.parametrize(
    ("name", "shape", "one", "two"),
    [
        ("addmm", (4, 8), (4, 6), (6, 8)),
        ("addmm", (8,), (4, 6), (6, 8)),
        ("addmm", (4, 1), (4, 6), (6, 8)),
        ("addmm", (), (4, 6), (6, 8)),
        ("addmv", (4,), (4, 6), (6,)),
        ("addmv", (1,), (4, 6), (6,)),
        ("addr", (4, 8), (4,), (8,)),
        ("baddbmm", (2, 4, 8), (2, 4, 6), (2, 6, 8)),
        ("baddbmm", (1, 1, 8), (2, 4, 6), (2, 6, 8)),
        ("addbmm", (4, 8), (2, 4, 6), (2, 6, 8)),
    ],
    ids=str,
)
def test_sums_of_products(name, shape, one, two):
    """Operand 0 is added once for each shard of the contracted dim: the verifier gives it to one of them only."""
    operands = signed(*shape), signed(*one, seed=1), signed(*two, seed=2)
    spec = verify(getattr(torch, name), *operands)
    assert verify(getattr(Tensor, name), *operands, beta=2, alpha=-0.5) == spec
    if shape == spec_shape(spec):
        assert verify(getattr(Tensor, f"{name}_"), *operands) == spec


def spec_shape(spec):
    return tuple(spec.sizes[label] for (label,) in spec.outs[0])


def test_linear():
    x, weight, bias = signed(2, 4, 6), signed(8, 6, seed=1), signed(8, seed=2)
    spec = verify(F.linear, x, weight)
    assert spec.outs == (((0,), (1,), (3,)),) and spec.reduced == {2: "sum"}
    assert verify(F.linear, x, weight, None) == spec
    assert verify(F.linear, x, weight, bias).ins == (*spec.ins, ((3,),))
    verify(F.linear, input=x, bias=bias, weight=weight)
    verify(F.linear, x[0, 0], weight, bias)
    verify(F.linear, x, weight[0])
    scalar = torch.tensor(2.0, dtype=torch.float64)
    try:
        F.linear(x, weight[0], scalar)
    except RuntimeError:  # torch 2.9 takes no bias beside a vector, and none for each token
        return
    verify(F.linear, x, weight[0], scalar)
    assert verify(F.linear, x, weight, signed(4, 8)).ins[2] == ((1,), (3,))  # a bias for each token


def test_bilinear():
    for bias in (None, signed(8)):
        verify(F.bilinear, signed(2, 10, 4), signed(2, 10, 6), signed(8, 4, 6), bias)
    verify(F.bilinear, signed(4), signed(6), signed(8, 4, 6))


EINSUMS = [
    ("ij,jk->ik", (4, 6), (6, 8)),
    ("ij,jk", (4, 6), (6, 8)),
    ("ba,cb", (4, 6), (8, 4)),
    ("...ij,...jk->...ik", (2, 4, 6), (10, 2, 6, 8)),
    ("...ij,...jk->...ik", (1, 4, 6), (10, 2, 6, 8)),
    ("b...k,nk->b...n", (2, 4, 6, 8), (10, 8)),
    ("bthd,bshd->bhts", (2, 4, 6, 8), (2, 10, 6, 8)),
    ("i,i", (6,), (6,)),
    ("i,j->ij", (4,), (6,)),
    ("ij->ji", (4, 6)),
    ("ij->", (4, 6)),
    ("ij,k->i", (4, 6), (8,)),
    ("...ij -> ...", (2, 4, 6)),
    ("ij,jk,kl->il", (2, 4), (4, 6), (6, 8)),
    ("ij,ij,j->i", (4, 6), (4, 6), (6,)),
    ("ij,jk->ik", (4, 1), (6, 8)),
    ("Ab,bA->A", (4, 6), (6, 4)),
    ("aB,Bc", (4, 6), (6, 2)),
]


@pytest.mark.parametrize("case", EINSUMS, ids=str)
def test_einsum(case):
    equation, *shapes = case
    operands = [signed(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    spec = verify(torch.einsum, equation, *operands)
    assert verify(torch.einsum, equation, operands) == spec


def test_einsum_of_diagonals():
    """A shard of one dim does not hold the diagonal."""
    spec = verify(torch.einsum, "ii->i", signed(6, 6))
    assert len(spec.fixed) == 2
    spec = verify(torch.einsum, "bii,bij->bj", signed(2, 6, 6), signed(2, 6, 4))
    assert len(spec.fixed) == 2 and list(spec.fixed.values())[0] == "the diagonal of two dims is taken"


def test_einsum_with_lists_of_subscripts():
    x, y = signed(2, 4, 6), signed(2, 6, 8)
    assert verify(torch.einsum, x, [0, 1, 2], y, [0, 2, 3], [0, 1, 3]).reduced == {2: "sum"}
    verify(torch.einsum, x, [..., 1, 2], y, [..., 2, 3], [..., 1, 3])
    verify(torch.einsum, x, [0, 1, 2], y, [0, 2, 3])


def test_tensordot():
    x, y = signed(2, 4, 6), signed(4, 6, 8)
    spec = verify(torch.tensordot, x, y)
    assert len(spec.reduced) == 2
    assert verify(torch.tensordot, x, y, dims=2) == spec
    assert verify(torch.tensordot, x, y, dims=([1, 2], [0, 1])) == spec
    verify(torch.tensordot, x, y, dims=([-1], [1]))
    verify(torch.tensordot, x, y, dims=[[2, 1], [1, 0]])
    verify(torch.tensordot, x, signed(6, 4), dims=1)
    verify(torch.tensordot, x, y, dims=0)


@pytest.mark.filterwarnings("ignore:torch.chain_matmul", "ignore:Using torch.cross without")
def test_other_products():
    x, y = signed(2, 4, 6), signed(4, 6, seed=1)
    assert verify(torch.linalg.vecdot, x, y).reduced == {2: "sum"}
    assert verify(torch.linalg.vecdot, x, y, dim=-2).reduced == {1: "sum"}
    verify(torch.linalg.multi_dot, [signed(2, 4), signed(4, 6), signed(6, 8)])
    verify(torch.linalg.multi_dot, [signed(4), signed(4, 6), signed(6, 8)])
    verify(torch.linalg.multi_dot, [signed(4), signed(4, 6), signed(6)])
    verify(torch.chain_matmul, signed(2, 4), signed(4, 6), signed(6, 8))
    verify(torch.cross, signed(4, 3, 2), signed(4, 3, 2, seed=1), 1)
    assert list(verify(torch.cross, signed(2, 3, 4), signed(2, 3, 4, seed=1)).fixed) == [1], "the first dim of size 3"
    assert list(verify(torch.linalg.cross, signed(4, 2, 3), signed(1, 2, 3)).fixed) == [2]
    assert list(verify(torch.cdist, signed(2, 4, 6), signed(2, 8, 6)).fixed.values()) == [
        "the distance along all of it is taken"
    ]
    spec = verify(torch.linalg.inv, signed(2, 4, 4))
    assert spec.fixed.keys() == {1, 2}
    for function in (torch.det, torch.linalg.det, torch.logdet, torch.linalg.slogdet):
        assert verify(function, signed(2, 4, 4) + 3 * torch.eye(4)).fixed.keys() == {1, 2}
    verify(torch.matrix_exp, signed(2, 4, 4))
    verify(torch.linalg.matrix_power, signed(2, 4, 4), 3)


def test_decompositions_of_a_batch():
    x, wide = signed(2, 4, 4) + 3 * torch.eye(4), signed(2, 4, 6)
    positive = x @ x.mT + torch.eye(4)
    linalg = torch.linalg
    for function in (linalg.eig, linalg.eigvals, linalg.inv_ex, linalg.lu, linalg.lu_factor):
        assert verify(function, x).fixed.keys() == {1, 2}
    for function in (linalg.eigh, linalg.eigvalsh, linalg.cholesky_ex, torch.cholesky_inverse):
        assert verify(function, positive).fixed.keys() == {1, 2}
    for function in (linalg.qr, linalg.svd, linalg.svdvals, linalg.pinv, torch.pinverse):
        assert verify(function, wide).fixed.keys() == {1, 2}
    verify(linalg.svd, wide, full_matrices=False)
    if not hasattr(torch.linalg, "polar"):  # torch 2.15 has no torch.qr
        verify(torch.qr, wide)
    without_batch = RULES[linalg.qr].spec
    assert without_batch is not None and without_batch(wide, mode="r").fixed.keys() == {0, 1, 2}
    verify(torch.cholesky_solve, wide, positive)
    verify(linalg.solve_triangular, positive.tril(), wide, upper=False)
    verify(linalg.lu_solve, *linalg.lu_factor(x), wide)


@pytest.mark.filterwarnings(
    "ignore:torch.lu", "ignore:torch.triangular_solve", "ignore:torch.svd", "ignore:torch.orgqr"
)
def test_factors_of_a_batch():
    x, wide, linalg = signed(2, 4, 4) + 3 * torch.eye(4), signed(2, 4, 6), torch.linalg
    symmetric = x + x.mT
    for function in (linalg.lu_factor_ex, torch.lu, linalg.cond, torch.geqrf):
        assert verify(function, x).fixed.keys() == {1, 2}
    for function in (linalg.ldl_factor, linalg.ldl_factor_ex):
        assert verify(function, symmetric, _linear=False).fixed.keys() == {1, 2}
    verify(torch.svd, wide)
    ranks = torch.stack([x[0], x[0].clone().index_fill_(0, torch.tensor([1]), 0.0)])
    assert verify(linalg.matrix_rank, ranks, _refusals=False).fixed.keys() == {1, 2}
    tolerances = torch.tensor([1.0, 1e-9])
    assert verify(linalg.matrix_rank, ranks, atol=tolerances, _refusals=False).fixed.keys() == {1, 2}
    assert verify(linalg.pinv, ranks, rtol=tolerances, _refusals=False, _linear=False).fixed.keys() == {1, 2}
    verify(torch.lu_unpack, *linalg.lu_factor(wide))
    assert len(verify(torch.lu_solve, wide, *linalg.lu_factor(x)).fixed) == 4, "columns are independent"
    assert len(verify(linalg.ldl_solve, *linalg.ldl_factor(symmetric), wide).fixed) == 4
    reflections, factors = torch.geqrf(x)
    for function in (linalg.householder_product, torch.orgqr):
        assert verify(function, reflections, factors).fixed.keys() == {1, 2, 3}
    assert verify(torch.ormqr, reflections, factors, wide).fixed.keys() == {1, 2, 3, 4, 5}
    verify(torch.triangular_solve, wide, x.triu())


def test_solutions_of_a_batch():
    x = signed(2, 4, 4) + 3 * torch.eye(4)
    for rows in (signed(2, 4, 6), signed(1, 4, 6), signed(2, 4), signed(4)):
        spec = verify(torch.linalg.solve, x, rows)
        assert 0 not in spec.fixed and len(spec.fixed) == 3, "of several columns each is independent"
        assert len(verify(torch.linalg.solve_ex, x, rows).fixed) == (4 if rows.dim() > 2 else 3)
    verify(torch.linalg.solve, x[0], signed(4))
    verify(torch.linalg.solve, x, signed(2, 6, 4), left=False)


def halved_groups(label, spec, args, kwargs):
    """The pieces along the groups of a convolution have half the groups."""
    return args, {**kwargs, "groups": kwargs["groups"] // 2} if label == 0 else kwargs


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions(dims, transposed):
    function = getattr(F, f"conv{'_transpose' * transposed}{dims}d")
    places, window = (8, 10, 6)[:dims], (3, 2, 3)[:dims]
    x = signed(2, 4, *places)
    weight = signed(*((4, 6) if transposed else (6, 4)), *window, seed=1)
    spec = verify(function, x, weight)
    assert list(spec.reduced.values()) == ["sum"] and len(spec.fixed) == 2 * dims
    verify(function, x, weight, signed(6))
    verify(function, x[0], weight, signed(6))
    verify(function, x, weight, signed(6), stride=2, padding=1, dilation=2)
    verify(function, x, weight, None, (2,) * dims, (1,) * dims)


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_convolutions(transposed):
    function = F.conv_transpose1d if transposed else F.conv1d
    depthwise = verify(function, signed(2, 6, 8), signed(6, 1, 3), signed(6), groups=6, _adapt=halved_groups)
    assert depthwise.ins[0][1] == (0,) and depthwise.outs[0][1] == (0,) and not depthwise.reduced
    weight = signed(8, 3, 3) if transposed else signed(12, 2, 3)
    several = verify(function, signed(2, 8, 10), weight, signed(12), groups=4, padding=1, _adapt=halved_groups)
    assert several.ins[0][1] == (0, 1) and several.outs[0][1] == (0, 2), "groups are outermost"


def test_paddings():
    verify(F.conv1d, signed(2, 4, 8), signed(6, 4, 3), None, 1, "same")
    verify(F.conv2d, signed(2, 4, 8, 10), signed(6, 4, 3, 2), padding="valid")
    verify(F.conv_transpose1d, signed(2, 4, 8), signed(4, 6, 3), stride=2, output_padding=1)
