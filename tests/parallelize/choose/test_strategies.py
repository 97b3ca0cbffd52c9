"""Strategies of a call, and the calls of its ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from neuronx_dist.parallelize.choose.strategies import candidates, refusals
from neuronx_dist.program.program import Call, values_in
from neuronx_dist.rules import RULES, Spec
from neuronx_dist.spmd import I, P, R, S, register_rule
from tests.parallelize.support.calls import by_name, call_of, parameter, value_of


def test_linear():
    call = call_of(F.linear, parameter(4, 6, 8), parameter(12, 8), parameter(12))
    assert by_name(call) == {
        "R": ((R, R, R), (R,)),
        "I": ((I, I, I), (I,)),
        "P of 0, 2": ((P, R, P), (P,)),
        "P of 1, 2": ((R, P, P), (P,)),
        "S(0) of operand 0": ((S(0), R, R), (S(0),)),
        "S(1) of operand 0": ((S(1), R, R), (S(1),)),
        "S(2) of operand 0, P of 2": ((S(2), S(1), P), (P,)),
        "S(0) of operand 1": ((R, S(0), S(0)), (S(2),)),
    }
    assert [refusal.name for refusal in refusals(call, "tp", 2)] == ["S(2) of operand 0"]
    shares = {strategy.name: strategy.share for strategy in candidates(call, "tp", 2)}
    assert (shares["R"], shares["P of 0, 2"], shares["S(0) of operand 1"]) == (1, 1, 0.5)


def test_labels_that_do_not_divide_are_not_cut():
    call = call_of(F.linear, parameter(4, 6, 8), parameter(12, 8))
    assert "S(1) of operand 0" in by_name(call, 2)
    assert "S(1) of operand 0" not in by_name(call, 4)


def test_a_softmax_over_one_position_is_cut_along_other_dims():
    assert by_name(call_of(F.softmax, parameter(4, 1), -1))["S(0) of operand 0"] == ((S(0),), (S(0),))


def test_experts_are_cut_in_every_dtype_of_the_grouped_product():
    """Columns and rows of the weights: torch's form for meta tensors takes bfloat16 alone."""
    offsets = torch.tensor([8, 16], dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        tokens, weights = parameter(16, 32).detach().to(dtype), parameter(2, 32, 64).detach().to(dtype)
        found = by_name(call_of(F.grouped_mm, tokens.requires_grad_(), weights.requires_grad_(), offs=offsets))
        assert found["S(2) of operand 1"] == ((R, S(2), R), (S(1),))
        assert found["S(1) of operand 0"] == ((S(1), S(1), R), (P,))
        assert "S(2) of operand 1" not in by_name(call_of(F.grouped_mm, tokens, weights, offs=offsets), 32)


def test_blocks_of_a_fused_projection():
    """qkv in one weight: `chunk(3)` keeps a cut of each third, and the linear layer before it offers that cut."""
    linear = call_of(F.linear, parameter(4, 8), parameter(12, 8))
    chunk = call_of(torch.chunk, parameter(4, 12), 3, -1)
    blocks = S(1, stride=3)
    assert by_name(linear, strides=[3])["S(0, stride=3) of operand 1"] == ((R, S(0, stride=3)), (blocks,))
    assert by_name(chunk)["S(1, stride=3) of operand 0"] == ((blocks,), (S(1),) * 3)


def test_no_gradient_no_invariant():
    """A tensor without a gradient is R where the others are I, and a call without gradients has no I strategy."""
    call = call_of(F.embedding, torch.zeros(4, 6, dtype=torch.int64), parameter(10, 8))
    assert by_name(call)["I"] == ((R, I), (I,))
    call.grad = False
    assert "I" not in by_name(call)


def test_what_depends_on_nothing_stays_whole():
    call = call_of(torch.exp, torch.rand(4, 6))
    assert len(by_name(call)) == 3
    for value in (*values_in(call.args), *call.results):
        value.varies = False
    assert list(by_name(call)) == ["R"]


def test_a_written_buffer_stays_whole():
    x, mean, var = parameter(4, 6, 2), torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    call = call_of(F.batch_norm, x, mean, var)
    assert by_name(call)["S(1) of operand 0"] == ((S(1), S(0), S(0)), (S(1),))
    call.writes = (1, 2)
    assert list(by_name(call)) == ["R", "I", "S(0) of operand 0", "S(2) of operand 0"]


def test_a_function_without_a_rule_is_computed_by_all_ranks():
    def opaque(x: Tensor) -> Tensor:
        return x.flip(0)

    x = value_of(parameter(4, 6))
    call = Call(opaque, (x,), {}, [x])
    assert by_name(call) == {"R": ((R,), (R,)), "I": ((I,), (I,))}
    (refusal,) = refusals(call, "tp", 2)
    assert "register_op" in refusal.why


def test_nothing_is_assumed():
    """A mean over the labels that are not ignored: as many on each rank, the checker would have to assume."""
    scores, labels = parameter(4, 6), torch.tensor([1, 2, -100, -100])
    mean, total = (call_of(F.cross_entropy, scores, labels, reduction=how) for how in ("mean", "sum"))
    assert by_name(total)["S(0) of operand 0"] == ((S(0), S(0)), (P,))
    assert "S(0) of operand 0" not in by_name(mean)
    assert any("assumption" in refusal.why for refusal in refusals(mean, "tp", 2))


def test_a_rule_that_is_registered_later_counts():
    def opaque(x: Tensor) -> Tensor:
        return x.exp()

    x = value_of(parameter(4, 6))
    call = Call(opaque, (x,), {}, [x])
    assert list(by_name(call)) == ["R", "I"]
    register_rule(opaque)(lambda x: Spec((((0,), (1,)),), (((0,), (1,)),), dict(enumerate(x.shape))))
    try:
        assert list(by_name(call)) == ["R", "I", "S(0) of operand 0", "S(1) of operand 0"]
    finally:
        del RULES[opaque]  # registered rules are part of the key of generated files


def test_constants_like_an_operand():
    """Nothing is gathered for its shape or dtype alone."""
    x = parameter(4, 6)
    like_both = {"S(0) of operand 0": ((S(0),), (S(0),)), "S(1) of operand 0": ((S(1),), (S(1),))}
    others = {"R": ((R,), (R,)), "I": ((I,), (I,)), "P of operand 0": ((P,), (R,))}
    found = by_name(call_of(torch.zeros_like, x))
    assert found == {**others, "I of operand 0": ((I,), (R,)), **like_both}
    found = by_name(call_of(Tensor.new_ones, x, (3, 2)))
    assert found["S(1) of operand 0"] == ((S(1),), (R,)) and found["P of operand 0"] == ((P,), (R,))


def test_an_operand_of_which_the_dtype_is_read():
    found = by_name(call_of(Tensor.type_as, parameter(4, 6), parameter(8)))
    types = {types for types, _ in found.values() if types[0] == S(1)}
    assert types == {(S(1), R), (S(1), I), (S(1), P), (S(1), S(0))}


def test_values_that_look_alike_keep_their_places():
    """Strategies are derived once for all calls that look alike, and each has its own values."""
    first, second = (
        call_of(torch.matmul, *2 * [parameter(4, 4)]),
        call_of(torch.matmul, parameter(4, 4), parameter(4, 4)),
    )
    for call in (first, second):
        strategies = candidates(call, "tp", 2)
        assert len(strategies) > 1
        for strategy in strategies:
            assert list(values_in(strategy.local.args)) == list(values_in(call.args))


def local_sizes(call: Call, name: str, **options: int) -> tuple:
    (strategy,) = [one for one in candidates(call, "tp", options.pop("size", 2)) if one.name == name]
    args = tuple(arg for arg in strategy.local.args if not list(values_in(arg)))
    return args, {name: arg for name, arg in strategy.local.kwargs.items() if not list(values_in(arg))}


def test_integers_of_the_local_call():
    view = call_of(Tensor.view, parameter(4, 6, 8), 4, 6, 2, 4)
    assert local_sizes(view, "S(2) of operand 0") == ((4, 6, 1, 4), {})
    assert local_sizes(view, "S(2, stride=2) of operand 0") == ((4, 6, 2, 2), {})
    assert local_sizes(call_of(Tensor.view, parameter(4, 6, 8), -1, 8), "S(2) of operand 0") == ((-1, 4), {})
    split = call_of(torch.split, parameter(4, 16), (8, 4, 4), dim=1)
    assert local_sizes(split, "S(1, stride=4) of operand 0") == (((4, 2, 2),), {"dim": 1})
    norm = call_of(F.group_norm, parameter(2, 8, 3), 4, parameter(8), parameter(8))
    assert local_sizes(norm, "S(1) of operand 0")[0][0] == 2
    conv = call_of(F.conv1d, parameter(2, 8, 5), parameter(8, 2, 3), groups=4)
    assert local_sizes(conv, "S(1) of operand 0") == ((), {"groups": 2})
    half = call_of(lambda x: x[..., :4], parameter(4, 8))
    assert local_sizes(half, "S(1, stride=2) of operand 0") == (((..., slice(None, 2, None)),), {})


def test_a_cut_that_no_local_call_gives_is_dropped():
    """Two groups on four ranks: types would allow a cut of the groups, sizes do not."""
    norm = call_of(F.group_norm, parameter(2, 8, 3), 2, parameter(8), parameter(8))
    assert "S(1) of operand 0" in by_name(norm, 2)
    assert "S(1) of operand 0" not in by_name(norm, 4)
