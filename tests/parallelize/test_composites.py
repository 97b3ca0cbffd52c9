"""Functions over a dim that is cut: what the ranks make of their shards is the whole, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallelize import composites as composites_module
from neuronx_dist.parallelize.choose.strategies import candidates
from neuronx_dist.program.program import Value, operands_of
from neuronx_dist.rules.containers import substituted
from neuronx_dist.spmd import I, P, R, S
from tests.parallelize.support.mutations import running_statistics
from tests.parallelize.support.pieces import Case, wrong_pieces, wrong_types


def f(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64)


def ids(*shape: int, of: int = 8) -> Tensor:
    return torch.randint(of, shape)


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], dict[str, Any]]] = {
    # function, arguments, and the types of the composites that are offered
    "embedding": (F.embedding, (ids(3, 5), f(8, 6)), {}, {"embedding": ((R, S(0)), P)}),
    "padding": (F.embedding, (ids(3, 5), f(8, 6), -3), {}, {"embedding": ((R, S(0)), P)}),
    "cross_entropy": (F.cross_entropy, (f(6, 8), ids(6)), {}, {"cross_entropy": ((S(1), R), I)}),
    "ignored": (
        F.cross_entropy,
        (f(6, 8, 3), ids(6, 3)),
        {"ignore_index": 2, "reduction": "sum"},
        {"cross_entropy": ((S(1), R), I)},
    ),
    "smoothed": (
        F.cross_entropy,
        (f(6, 8), ids(6)),
        {"label_smoothing": 0.2, "reduction": "none"},
        {"cross_entropy": ((S(1), R), I)},
    ),
    "one sample": (F.cross_entropy, (f(8), ids()), {}, {"cross_entropy": ((S(0), R), I)}),
    "softmax": (torch.softmax, (f(3, 8), -1), {}, {"softmax": ((S(1),), S(1))}),
    "method": (Tensor.softmax, (f(8, 3), 0), {}, {"softmax": ((S(0),), S(0))}),
    "log_softmax": (F.log_softmax, (f(3, 8),), {"dim": 1}, {"log_softmax": ((S(1),), S(1))}),
    "layer_norm": (
        F.layer_norm,
        (f(3, 8), (8,), f(8), f(8)),
        {},
        {"layer_norm": ((S(1), S(0), S(0)), S(1))},
    ),
    "two dims": (
        F.layer_norm,
        (f(3, 8, 5), (8, 5), f(8, 5)),
        {"eps": 1e-3},
        {"layer_norm": ((S(1), S(0)), S(1))},
    ),
    "rms_norm": (F.rms_norm, (f(3, 8), (8,), f(8)), {}, {"rms_norm": ((S(1), S(0)), S(1))}),
    "group_norm": (
        F.group_norm,
        (f(3, 16, 8), 2, f(16), f(16)),
        {},
        {"group_norm": ((S(1, stride=2), S(0, stride=2), S(0, stride=2)), S(1, stride=2))},
    ),
    "places": (F.group_norm, (f(3, 4, 8), 2, f(4), f(4)), {}, {"group_norm": ((S(2), R, R), S(2))}),
    "one group": (F.group_norm, (f(3, 8, 5), 1), {}, {"group_norm": ((S(1),), S(1))}),
    "batch_norm": (
        F.batch_norm,
        (f(8, 3, 5), None, None, f(3), f(3), True),
        {},
        {"batch_norm": ((S(0), R, R), S(0))},
    ),
    "channels": (
        F.batch_norm,
        (f(3, 8, 5), f(8), f(8), None, None, True),
        {},
        {"batch_norm_of_channels": ((S(1), R, R), S(1))},
    ),
    "causal": (
        F.scaled_dot_product_attention,
        (f(2, 4, 8, 6), f(2, 2, 8, 6), f(2, 2, 8, 3)),
        {"is_causal": True, "enable_gqa": True},
        {"ring_attention": ((S(2), S(2), S(2)), S(2)), "causal_attention": ((S(2), R, R), S(2))},
    ),
    "other keys": (
        F.scaled_dot_product_attention,
        (f(2, 2, 4, 6), f(2, 2, 8, 6), f(2, 2, 8, 6)),
        {"scale": 0.3},
        {"ring_attention": ((S(2), S(2), S(2)), S(2))},
    ),
    "masked": (
        F.scaled_dot_product_attention,
        (f(2, 2, 8, 6), f(2, 2, 8, 6), f(2, 2, 8, 6), f(8, 8) > 0.2),
        {},
        {"ring_attention": ((S(2), S(2), S(2), S(0)), S(2))},
    ),
    "padded": (
        F.scaled_dot_product_attention,
        (f(2, 2, 4, 6), f(2, 2, 8, 6), f(2, 2, 8, 6), torch.tensor([[[[True] * 6 + [False] * 2]], [[[True] * 8]]])),
        {},
        {"ring_attention": ((S(2), S(2), S(2), R), S(2))},
    ),
}


@pytest.mark.each_value
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("size", [2, 4])
def test_pieces(name, size):
    """Forward and every gradient, float64 at 1e-10; the composite is among the strategies."""
    function, args, kwargs, composites = CALLS[name]
    case = Case(function, args, kwargs)
    offered = {
        (strategy.local.function.__name__, (strategy.operands, strategy.results[0]))
        for strategy in candidates(case.call, "tp", size)
    }
    assert set(composites.items()) <= offered
    assert wrong_pieces(case, size)[1] == []


def bytes_sent(event: Any, size: int) -> int:
    """Bytes that a rank sends for a collective of float64."""
    if event.verb == "exchange":  # a message of the ring
        return 8 * prod(event.shape)
    parts = (size - 1) * 8 * prod(event.shape)
    return 2 * parts // size if event.verb == "all_reduce" else parts


@pytest.mark.parametrize("name", CALLS)
def test_the_checker_agrees(name):
    """Types of results as the checker finds them in the local calls, the composite's included."""
    function, args, kwargs, _ = CALLS[name]
    assert wrong_types(Case(function, args, kwargs), 2) == []


@pytest.mark.parametrize("name", CALLS)
def test_bytes(name):
    """The predicted bytes of a composite are those of its collectives; the maximum is one of them."""
    function, args, kwargs, composites = CALLS[name]
    case, size = Case(function, args, kwargs), 4
    offered = [
        candidate
        for candidate in candidates(case.call, "tp", size)
        if candidate.local.function in vars(composites_module).values()
    ]
    assert offered
    for strategy in offered:
        events = case.recorded(strategy, size)
        sent = [sum(bytes_sent(event, size) for event in found) for found in events]
        assert tuple(sent) == strategy.bytes_moved, (strategy, events)


@pytest.mark.parametrize("name", ["batch_norm of S(0)", "batch_norm_of_channels of S(1)"])
def test_running_statistics(name):
    running_statistics(f"{name} of operand 0")


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (F.embedding, (ids(3, 5), f(8, 6)), {"max_norm": 1.0}),
        (F.embedding, (ids(3, 5), f(8, 6)), {"scale_grad_by_freq": True}),
        (F.cross_entropy, (f(6, 8), ids(6), f(8)), {}),
        (F.cross_entropy, (f(6, 8), f(6, 8)), {}),
        (F.softmax, (f(3, 2), 1), {}),
        (F.scaled_dot_product_attention, (f(2, 2, 1, 6), f(2, 2, 8, 6), f(2, 2, 8, 6)), {"is_causal": True}),
        (F.scaled_dot_product_attention, (f(2, 8, 6),) * 3, {"is_causal": True}),
    ],
)
def test_options_that_a_composite_does_not_have(function, args, kwargs):
    """Such calls have no composite: rows are renormalised, classes are weighted, a rank has but one position."""
    case = Case(function, args, kwargs)
    functions = {strategy.local.function for strategy in candidates(case.call, "tp", 2)}
    assert functions == {function}


def test_dropout_draws_each_shards_own_mask():
    """Masks differ between shards; on R and I they are the same; the default stream stays in step."""
    call = Case(F.dropout, (f(8, 6), 0.5, True), {}).call
    call.random = True
    strategies = {strategy.name: strategy for strategy in candidates(call, "tp", 2)}
    assert strategies["R"].local.function is F.dropout
    cut_ = strategies["S(0) of operand 0"]
    assert cut_.local.function is composites_module.dropout
    (value,) = operands_of(call)

    def run() -> Any:
        torch.manual_seed(3)
        before = torch.get_rng_state()
        args, kwargs = substituted(cut_.local[1:], Value, {value: torch.ones(4, 6)}.__getitem__)
        first, second = (cut_.local.function(*args, **kwargs) for _ in range(2))
        return first, second, torch.equal(before, torch.get_rng_state())

    (a, b, same), (c, d, also) = threads.run(Mesh(2, tp=2), run)
    assert same and also
    assert not any(torch.equal(x, y) for x, y in combinations((a, b, c, d), 2))
    assert set(a.unique().tolist()) == {0.0, 2.0}


def test_the_weight_of_an_output_that_nothing_reads_has_no_gradient():
    """A zero would let an optimizer decay the weight, which in one process stays as it is."""

    def run() -> Any:
        torch.manual_seed(0)
        x, *params = (torch.randn(shape).requires_grad_() for shape in [(3, 4), (2, 4), (5, 4), (2,), (5,)])
        outputs = composites_module.linears(x, params[:2], params[2:], axis="tp")
        (grad,) = torch.autograd.grad(outputs[1].square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        second = [param.grad is None for param in params]
        composites_module.linears(x, params[:2], params[2:], axis="tp")[0].sum().backward()
        return second, [param.grad is None for param in params]

    for second, both in threads.run(Mesh(2, tp=2), run):
        assert second == [True, False, True, False]
        assert both == [False] * 4


def test_dropout_that_draws_nothing_is_a_plain_call():
    call = Case(F.dropout, (f(8, 6), 0.5, False), {}).call
    assert {strategy.local.function for strategy in candidates(call, "tp", 2)} == {F.dropout}


def test_other_random_functions_are_not_cut():
    call = Case(torch.bernoulli, (f(8, 6),), {}).call
    call.random = True
    assert {strategy.name for strategy in candidates(call, "tp", 2)} <= {"R", "I", "P of 0"}
