"""torch's own samples of its operators, with one sharded operand on two ranks: plain torch's values, or a refusal.

How each forward call is computed (on shards, by an exchange, by gathering, or not at all) is listed by operator in
docs/shard-tensor-operators.md, which `support/operator_table.py` writes and reads. `REFUSED` has the words of refusals.
"""

from __future__ import annotations

import os
import sys
import types
import unittest
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from neuronx_dist.comm import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor import DeviceMesh, Shard, ShardTensor, distribute_tensor, fallback, report
from tests.shard_tensor.support import operator_table
from tests.shard_tensor.support.cases import on_ranks

pytestmark = pytest.mark.slow

FULL = bool(os.environ.get("NXD_FULL"))
PARTS = 16  # a run checks the first, a full one all
MOST = 6  # samples of an operator; a run checks every second one, a full one all

REFUSED = {
    "resize_": "cannot become (25, 5) in place: use x.reshape(), or a new tensor",
    "nn.functional.multi_head_attention_forward": "remove them, or call it on full_tensor()",
    "norm.nuc": "norm of order 'nuc' is not supported: call full_tensor() first, or use a numeric order",
    "to_sparse": "a ShardTensor must be strided: call full_tensor() on the operands first",
}
# Every rank draws what the others do, as one process would.
RANDOM = """
bernoulli cauchy exponential geometric log_normal multinomial nn.functional.alpha_dropout nn.functional.dropout
nn.functional.dropout2d nn.functional.dropout3d nn.functional.feature_alpha_dropout.with_train
nn.functional.feature_alpha_dropout.without_train nn.functional.fractional_max_pool2d
nn.functional.fractional_max_pool3d nn.functional.multi_head_attention_forward nn.functional.rrelu
nn.functional.scaled_dot_product_attention normal normal.in_place normal.number_mean pca_lowrank rand_like
randint_like randn_like svd_lowrank uniform
""".split()
# Values of new memory; no strided tensors; views of larger memory; what is on a GPU alone.
OTHERS = """
empty_like new_empty new_empty_strided empty empty_strided empty_permuted sparse.sampled_addmm sparse.mm.reduce
as_strided.partial_views jiterator_2inputs_2outputs jiterator_4inputs_with_extra_args jiterator_binary
jiterator_binary_return_by_ref jiterator_unary
"""


def all_operators() -> list[Any]:
    """Torch's operators that take float64."""
    if "expecttest" not in sys.modules:  # which torch's file of them imports for its own test class
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if torch.float64 in op.dtypes]


def operators(part: int) -> list[Any]:
    """A part of those that do not draw."""
    left_out = {*RANDOM, *OTHERS.split()}
    return [op for op in all_operators() if name_of(op) not in left_out][part::PARTS]


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def sharded(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> ShardTensor:
    n = x.shape[dim]
    whole = x.detach().clone().requires_grad_(x.requires_grad)
    return distribute_tensor(whole, mesh, [Shard(dim)], sizes=[(n - n // 3, n // 3)], src=None)


def value(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, ShardTensor) else x).detach()


def computed(
    op: Any, sample: Any, position: int | None = None, dim: int = 0, mesh: Any = None
) -> tuple[list, list, str]:
    """Results, gradients, and the kind of the call; the tensor at `position` among all arguments is sharded."""
    torch.manual_seed(7)
    flat, tree = tree_flatten((sample.input, sample.args, sample.kwargs))
    for i, x in enumerate(flat):
        if isinstance(x, torch.Tensor):
            flat[i] = sharded(x, mesh, dim) if i == position else x.detach().clone().requires_grad_(x.requires_grad)
    leaves = [x for x in flat if isinstance(x, torch.Tensor) and x.requires_grad]
    first, args, kwargs = tree_unflatten(flat, tree)
    with report() as communicated:
        result = op.op(first, *args, **kwargs)
    kind = "local" if position is None else kind_of(communicated, flat[position], dim)
    result = sample.output_process_fn_grad(result)
    results = [x for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor)]
    graded = [x for x in results if x.requires_grad and x.is_floating_point()]
    if not leaves or not graded:
        return results, [], kind
    loss = sum((x * x).sum() for x in graded)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return results, [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, grads)], kind


def kind_of(communicated: Any, x: torch.Tensor, dim: int) -> str:
    """Returns how a call was computed whose operand `x` is sharded, on a rank with the smaller shard.

    A handler gathers by a collective whose result has the dtype and the size of the operand, or notes it. An operand
    with one position along `dim` is sent rather than gathered.
    """
    size = x.numel() * x.element_size()
    whole = any(
        call.verb in ("all_gather", "exchange") and call.bytes == size and call.dtype == x.dtype
        for _, call, _ in communicated.calls
    )
    whole |= any(text.startswith("gathers ") for _, text in communicated.notes)
    if communicated.gathers or (whole and x.shape[dim] > 1):
        return "gathered"
    return "exchanged" if communicated.calls else "local"


def places(sample: Any) -> list[tuple[int, int]]:
    """The first two tensors that can be sharded, along their first and last dims."""
    flat, _ = tree_flatten((sample.input, sample.args, sample.kwargs))
    fit = [
        i
        for i, x in enumerate(flat)
        if isinstance(x, torch.Tensor) and x.layout is torch.strided and x.ndim and x.numel() and x.is_leaf
    ]
    return [(i, dim) for i in fit[:2] for dim in sorted({0, flat[i].ndim - 1})]


def difference(actual: torch.Tensor, expected: torch.Tensor) -> str:
    actual, expected = value(actual), expected.detach()
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{tuple(actual.shape)} {actual.dtype} for {tuple(expected.shape)} {expected.dtype}"
    same = torch.allclose(actual, expected, rtol=1e-10, atol=1e-10, equal_nan=True)
    return "" if same else f"{actual} for {expected}"


def outcome(op: Any, sample: Any, position: int, dim: int, mesh: DeviceMesh, expected: Any) -> tuple[str, str]:
    """ "local", "exchanged", "gathered", "refused" or "wrong", and what was said."""
    try:
        with fallback("gather"):
            results, grads, kind = computed(op, sample, position, dim, mesh)
    except (ValueError, NotImplementedError) as error:
        return "refused", str(error)
    if len(results) != len(expected[0]) or len(grads) != len(expected[1]):
        return "wrong", f"{len(results)} results and {len(grads)} gradients"
    for actual, whole in zip([*results, *grads], [*expected[0], *expected[1]]):
        if told := difference(actual, whole):
            return "wrong", told
    return kind, ""


def cases(op: Any) -> list[tuple[Any, ...]]:
    """Samples of an operator, what is sharded of each, and plain torch's values."""
    samples = list(op.sample_inputs("cpu", torch.float64, requires_grad=op.supports_autograd))
    samples = samples[:: max(1, len(samples) // MOST)][:MOST]
    samples = samples if FULL else samples[::2]
    todo = []
    for sample in samples:
        if not (where := places(sample)):
            continue
        expected = computed(op, sample)
        todo += [(sample, position, dim, expected) for position, dim in where]
    return todo


def check(op: Any) -> list[tuple[str, str]]:
    todo = cases(op)

    def rank() -> list[tuple[str, str]]:
        mesh = DeviceMesh("cpu", [0, 1])
        return [outcome(op, sample, position, dim, mesh, known) for sample, position, dim, known in todo]

    first, second = threads.run(Mesh(2), rank, timeout=60.0)
    for (a, _), (b, _) in zip(first, second):  # what one rank receives another may have had
        assert a == b or {a, b} == {"gathered", "exchanged"}, f"{name_of(op)}: {a} on one rank, {b} on the other"
    return second


def checked(part: int) -> operator_table.Kinds:
    """Checks the operators of a part, and returns how many calls of each are of each kind."""
    wrong, unknown, kinds = [], [], {}
    for op in operators(part):
        try:
            outcomes = check(op)
        except Exception as error:
            error.add_note(name_of(op))
            raise
        kinds[name_of(op)] = Counter(kind for kind, _ in outcomes)
        wrong += [f"{name_of(op)}: {told}" for kind, told in outcomes if kind == "wrong"]
        refusals = {told for kind, told in outcomes if kind == "refused"}
        words = REFUSED.get(name_of(op))
        unknown += [f"{name_of(op)}: {told}" for told in refusals if words is None or words not in told]
        if words is not None and FULL:
            assert refusals or not outcomes, f"{name_of(op)} is not refused any more: take it out of the table"
    assert wrong == []
    assert unknown == [], "refused, and not in the table"
    assert sum(counts.total() for counts in kinds.values()) > 100
    return kinds


@pytest.mark.filterwarnings("ignore")
def test_samples_of_torchs_operators():
    kinds = checked(0)
    pages = operator_table.read()
    news = {name: set(counts) - set(pages.get(name, ())) for name, counts in kinds.items()}
    assert {name: new for name, new in news.items() if new} == {}, "not so on the page"


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_how_operators_are_computed():
    kinds = {name: counts for part in range(PARTS) for name, counts in checked(part).items()}
    if os.environ.get("NXD_UPDATE_TEXTS"):
        operator_table.PAGE.write_text(operator_table.text(kinds))
    assert operator_table.PAGE.read_text() == operator_table.text(kinds)
    shares = operator_table.shares(kinds)
    assert shares["gathered"] <= 0.05 and shares["refused"] <= 0.002, shares


def draw_on_this_rank(mesh: DeviceMesh) -> list[str]:
    wrong, checked = [], 0
    warnings.simplefilter("ignore")
    for op in [op for op in all_operators() if name_of(op) in RANDOM]:
        for sample, position, dim, known in cases(op):
            kind, told = outcome(op, sample, position, dim, mesh, known)
            checked += 1
            if kind in ("wrong", "refused") and REFUSED.get(name_of(op), told + ".") not in told:
                wrong.append(f"{name_of(op)} {position} {dim}: {told[:300]}")
    assert checked > 100
    return wrong


def test_samples_of_operators_that_draw():
    assert on_ranks(2, draw_on_this_rank) == [[], []]
