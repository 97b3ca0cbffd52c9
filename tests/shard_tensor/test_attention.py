"""Attention: what is computed where, what travels, and what is refused. `test_ops.py` has values at all layouts."""

from __future__ import annotations

from math import inf
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist import attention, comm, spmd
from neuronx_dist.attention import blocks, ring
from neuronx_dist.attention.positions import visible
from neuronx_dist.comm import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor import DeviceMesh, distribute_module, distribute_tensor, fallback
from neuronx_dist.shard_tensor.attention_method import (
    attention_choices,
    attention_method,
    predicted,
    set_attention_method,
    zigzag,
)
from neuronx_dist.shard_tensor.placements import Shard
from neuronx_dist.spmd import I, S
from tests.shard_tensor.support.cases import assert_close, distributed, on_ranks, sizes, verbs

SHAPE = (2, 4, 16, 3)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def triple(shape: tuple[int, ...] = SHAPE) -> list[torch.Tensor]:
    return [normal(*shape, seed=seed).requires_grad_() for seed in range(3)]


def attend(mesh, dims, split="uneven", shape=SHAPE, **options):
    """The result and the operands, each sharded along its dim of `dims`."""
    given = [distributed(x, mesh, [dim], split) for x, dim in zip(triple(shape), dims)]
    return F.scaled_dot_product_attention(*given, **options), given


# --- what travels


@pytest.mark.parametrize("count, split", [(2, "uneven"), (3, "uneven"), (4, "uneven"), (4, "one")])
def test_the_ring_moves_keys_and_values_once_forward_and_twice_backward(count, split):
    along = sizes(16, count, split)
    row = 2 * 4 * (3 + 3)

    def rank(mesh):
        with attention_method("ring"), comm.record() as calls:
            y, _ = attend(mesh, (2, 2, 2), split, is_causal=True)
        own = mesh.get_local_rank()
        assert verbs(calls) == ["exchange"] * (count - 1)
        assert sum(call.bytes for call in calls) == 8 * attention.ring_elements(along, own, row)
        loss = y.sum()
        with comm.record() as calls:
            loss.backward()
        assert verbs(calls) == ["exchange"] * 2 * (count - 1)
        assert sum(call.bytes for call in calls) == 8 * attention.ring_elements(along, own, row, backward=True)

    on_ranks(count, rank)


@pytest.mark.parametrize(
    "dims, forward, backward",
    [
        ((0, 0, 0), [], []),
        ((1, 1, 1), [], []),
        ((2, None, None), [], ["all_reduce", "all_reduce"]),
        ((None, 2, 2), ["all_gather", "all_reduce"], ["all_reduce"]),
    ],
)
def test_what_other_layouts_move(dims, forward, backward):
    def rank(mesh):
        with comm.record() as calls:
            y, _ = attend(mesh, dims, "chunk")
        assert verbs(calls) == forward
        if forward:
            assert [call.bytes for call in calls] == [2 * 8 * 2 * 4 * 16, 8 * 2 * 4 * 16 * 3]
        loss = y.to_local().sum()
        with comm.record() as calls:
            loss.backward()
        assert verbs(calls) == backward

    on_ranks(2, rank)


def test_the_next_block_is_under_way_while_one_is_computed():
    events = {rank: [] for rank in range(3)}

    def watched(function, name):
        def call(*args, **kwargs):
            events[comm.rank("world")].append(name)
            return function(*args, **kwargs)

        return call

    def rank(mesh):
        with attention_method("ring"):
            attend(mesh, (2, 2, 2), "chunk")

    with (
        mock.patch.object(blocks, "forward", watched(blocks.forward, "compute")),
        mock.patch.object(comm, "exchange", watched(comm.exchange, "send"), create=True),
        mock.patch.object(ring._Passing, "wait", watched(ring._Passing.wait, "wait")),
    ):
        on_ranks(3, rank)
    assert list(events.values()) == [["send", "compute", "wait", "send", "compute", "wait", "compute"]] * 3


# --- methods


def test_the_cheapest_method_is_used_and_noted():
    def rank(mesh):
        with attention_choices() as choices:
            attend(mesh, (2, 2, 2), "chunk")
            attend(mesh, (2, 2, 2), "chunk", (2, 3, 16, 3))  # heads that cannot be divided
            with torch.no_grad():
                attend(mesh, (2, 2, 2), "chunk", (2, 3, 16, 3))
            attend(mesh, (1, 1, 1), "chunk")
        assert [(choice.method, choice.forced) for choice in choices] == [
            ("all_to_all", False),
            ("gather", False),
            ("ring", False),
        ]
        return choices[0]

    first, _ = on_ranks(2, rank)
    half = 8 * 2 * 4 * 8 * 3  # bytes of a shard
    assert first.costs["ring"].bytes == 3 * 2 * half
    assert first.costs["gather"].bytes == 2 * 2 * half
    assert first.costs["all_to_all"].bytes == 2 * 4 * half // 2
    assert first.shapes == (SHAPE, SHAPE)


def test_a_method_may_take_twice_the_memory_of_the_ring():
    costs = predicted((4,) * 8, (4,) * 8, 6, 6, 8, grad=True, heads_divide=False)
    assert costs["gather"].bytes < costs["ring"].bytes
    assert costs["gather"].memory == 4 * costs["ring"].memory

    def rank(mesh):
        with attention_choices() as choices:
            attend(mesh, (2, 2, 2), "chunk", (1, 1, 16, 3))
        return choices[0].method

    assert on_ranks(4, rank) == ["gather"] * 4
    assert on_ranks(8, rank) == ["ring"] * 8


@pytest.mark.parametrize("method", ["ring", "gather", "all_to_all"])
def test_a_method_can_be_forced(method):
    def rank(mesh):
        with attention_method(method), attention_choices() as choices, comm.record() as calls:
            y, _ = attend(mesh, (2, 2, 2))
        assert [(choice.method, choice.forced) for choice in choices] == [(method, True)]
        assert y.placements == (Shard(2),) and "all_gather" not in verbs(calls)
        return len([call for call in calls if call.verb == "exchange"])

    assert on_ranks(2, rank) == [{"ring": 1, "gather": 2, "all_to_all": 4}[method]] * 2


def test_a_method_for_all_that_follows():
    set_attention_method("ring")
    try:

        def rank(mesh):
            with attention_choices() as choices:
                attend(mesh, (2, 2, 2))
                with attention_method("gather"):
                    attend(mesh, (2, 2, 2))
            return [choice.method for choice in choices]

        assert on_ranks(2, rank) == [["ring", "gather"]] * 2
    finally:
        set_attention_method("auto")


# --- zig-zag order


@pytest.mark.parametrize("dims", [(2, 2, 2), (2, None, None), (None, 2, 2), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("method", ["ring", "gather", "all_to_all"])
def test_causal_attention_of_tokens_in_zigzag_order(method, dims):
    count = 2
    order = attention.zigzag_order(16, count)
    plain = triple()
    expected = F.scaled_dot_product_attention(*plain, is_causal=True)
    weights = normal(*SHAPE, seed=9)
    expected.backward(weights)

    def rank(mesh):
        given = [
            distributed(x[:, :, order].detach().requires_grad_(), mesh, [d], "uneven") for x, d in zip(plain, dims)
        ]
        with zigzag(count), attention_method(method):
            y = F.scaled_dot_product_attention(*given, is_causal=True)
        assert_close(y.full_tensor().detach(), expected.detach()[:, :, order], "output")
        y.backward(weights[:, :, order])
        for x, own in zip(plain, given):
            assert_close(own.grad.full_tensor(), x.grad[:, :, order], "gradient")

    on_ranks(count, rank)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_zigzag_order_balances_the_work(count):
    length = 8 * count
    runs = attention.zigzag_runs(length, count)
    shards = [attention.cut(runs, 8 * rank, 8 * rank + 8) for rank in range(count)]

    def scores(piece):
        rows, keys = (stop - start for start, stop in piece[:2])
        return keys * (keys + 1) // 2 + (rows - keys) * keys if piece.diagonal else rows * keys

    work = [sum(scores(piece) for keys in shards for piece in visible(own, keys)) for own in shards]
    assert work == [length * (length + 1) // 2 // count] * count
    contiguous = [((8 * rank, 8 * rank + 8),) for rank in range(count)]
    assert sum(scores(piece) for own in contiguous for keys in contiguous for piece in visible(own, keys)) == sum(work)


# --- values


def test_rows_that_see_nothing_are_zero_with_gradients_of_zero():
    mask = torch.zeros(16, 16, dtype=torch.float64)
    mask[5], mask[6, :8] = -inf, -inf
    plain = [*triple(), mask.requires_grad_()]
    expected = F.scaled_dot_product_attention(*plain)
    expected.backward(torch.ones_like(expected))

    def rank(mesh):
        for dims in ((2, 2, 2, 0), (None, 2, 2, 1)):
            given = [distributed(x, mesh, [dim], "uneven") for x, dim in zip(plain, dims)]
            with attention_method("ring"):
                y = F.scaled_dot_product_attention(*given)
            whole = y.full_tensor().detach()
            assert not whole[:, :, 5].any() and whole[:, :, 6].any()
            y.backward(torch.ones_like(expected))
            for x, own in zip(plain, given):
                assert_close(own.grad.full_tensor(), x.grad, "gradient")

    on_ranks(3, rank)


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_formula_equals_the_kernel(diagonal, masked):
    q, k, v = (x.detach() for x in triple())
    mask = normal(1, 4, 16, 16, seed=5) > 0 if masked else None
    kernel = blocks.Block(q, k[:, :2], v[:, :2], mask, None, diagonal, 0.7)
    formula = kernel._replace(noise=torch.ones(2, 4, 16, 16, dtype=torch.float64))
    assert kernel.fused == (not (diagonal and masked)) and not formula.fused
    out, lse = blocks.forward(kernel)
    for actual, other in zip(blocks.forward(formula), (out, lse)):
        assert_close(actual, other, "forward")
    arguments = normal(*SHAPE, seed=7), out, blocks.without_infinity(lse), False
    for actual, other in zip(blocks.backward(formula, *arguments)[:3], blocks.backward(kernel, *arguments)[:3]):
        assert_close(actual, other, "backward")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shorter_types(dtype):
    """The error against float64 is at most twice that of torch's own function; measured 0.9 to 1.3 of it."""
    plain = [x.detach().to(dtype).requires_grad_() for x in triple()]
    precise = [x.detach().double().requires_grad_() for x in plain]

    def error(actual, expected):
        return (actual.detach().double() - expected.detach()).norm() / expected.norm()

    def attend(operands):
        y = F.scaled_dot_product_attention(*operands, is_causal=True)
        assert y.dtype == operands[0].dtype
        return [y, *torch.autograd.grad(y, operands, torch.ones(y.shape, dtype=y.dtype))]

    expected = attend(precise)
    own = [error(*pair) for pair in zip(attend(plain), expected)]

    def rank(mesh):
        with attention_method("ring"):
            actual = attend([distributed(x, mesh, [2], "uneven") for x in plain])
        for x, wanted, limit in zip(actual, expected, own):
            assert x.dtype == dtype
            assert error(x.full_tensor(), wanted) < 2 * limit

    on_ranks(3, rank)


def test_autocast():
    plain = [x.detach().float().requires_grad_() for x in triple()]
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.scaled_dot_product_attention(*plain, is_causal=True)
    expected.sum().backward()

    def rank(mesh):
        given = [distributed(x, mesh, [2], "uneven") for x in plain]
        with attention_method("ring"), torch.autocast("cpu", torch.bfloat16):
            y = F.scaled_dot_product_attention(*given, is_causal=True)
        assert y.dtype == expected.dtype == torch.bfloat16
        y.backward(torch.ones_like(expected))
        for actual, other in ((y, expected), *zip((x.grad for x in given), (x.grad for x in plain))):
            assert actual.dtype == other.dtype
            assert (actual.full_tensor().detach() - other.detach()).norm() / other.norm() < 2e-2

    on_ranks(2, rank)


@pytest.mark.parametrize("heads", [1, 2])
def test_key_heads_travel_as_they_are(heads):
    """Not once for each head of the queries."""
    plain = [normal(2, 4, 16, 3), normal(2, heads, 16, 3), normal(2, heads, 16, 3)]
    expected = F.scaled_dot_product_attention(*plain, enable_gqa=True)

    def rank(mesh):
        given = [distributed(x, mesh, [2], "chunk") for x in plain]
        with attention_method("ring"), attention_choices() as choices, comm.record() as calls, torch.no_grad():
            y = F.scaled_dot_product_attention(*given, enable_gqa=True)
        assert [call.bytes for call in calls] == [8 * 2 * heads * 8 * 6] == [choices[0].costs["ring"].bytes]
        assert_close(y.full_tensor(), expected, "output")

    on_ranks(2, rank)


def test_more_dims_and_fewer():
    for shapes in ([(16, 3), (16, 3), (16, 3)], [(2, 2, 2, 16, 3), (2, 1, 2, 16, 3), (1, 2, 1, 16, 3)]):
        plain = [normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
        mask = normal(16, 16) > 0
        expected = F.scaled_dot_product_attention(*plain, mask)
        expected.backward(torch.ones_like(expected))

        def rank(mesh, plain=plain, mask=mask, expected=expected):
            given = [distributed(x, mesh, [x.dim() - 2], "uneven") for x in plain]
            with attention_method("ring"):
                y = F.scaled_dot_product_attention(*given, mask)
            assert_close(y.full_tensor().detach(), expected.detach(), "output")
            y.backward(torch.ones_like(expected))
            for x, own in zip(plain, given):
                assert_close(own.grad.full_tensor(), x.grad, "gradient")

        on_ranks(2, rank)


def test_a_block_on_a_device_without_a_fused_kernel_is_computed_by_its_formula():
    q, k, v = (torch.empty(1, 4, 5, 3, device="meta") for _ in range(3))
    block = blocks.Block(q, k[:, :2], v[:, :2], None, None, True, 0.5)
    out, lse = blocks.forward(block)
    assert not block.fused and out.shape == q.shape and lse.shape == (1, 4, 5)
    grads = blocks.backward(block, out, out, lse, False)
    assert [x.shape for x in grads[:3]] == [block.q.shape, block.k.shape, block.v.shape]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("masks", ["none", "causal", "both"])
def test_multihead_attention(batch_first, masks):
    plain = nn.MultiheadAttention(8, 2, batch_first=batch_first).double()
    x = normal(3, 16, 8) if batch_first else normal(16, 3, 8)
    options = {"need_weights": False}
    if masks != "none":
        options |= {"attn_mask": nn.Transformer.generate_square_subsequent_mask(16, dtype=x.dtype), "is_causal": True}
    if masks == "both":
        options["key_padding_mask"] = torch.arange(16) > torch.tensor([[15], [12], [9]])
        options["attn_mask"] = options["attn_mask"] < 0
    x.requires_grad_()
    expected, _ = plain(x, x, x, **options)
    expected.backward(normal(*x.shape, seed=4))

    def rank(mesh):
        module = nn.MultiheadAttention(8, 2, batch_first=batch_first).double()
        module.load_state_dict(plain.state_dict())
        distribute_module(module, mesh)
        for dim in (0, 1):
            module.zero_grad()
            own = distributed(x, mesh, [dim], "uneven")
            with fallback("error"):
                y, weights = module(own, own, own, **options)
            assert weights is None and y.placements == (Shard(dim),)
            assert_close(y.full_tensor().detach(), expected.detach(), "output")
            y.backward(normal(*x.shape, seed=4))
            assert_close(own.grad.full_tensor(), x.grad, "gradient of the input")
            for ours, other in zip(module.parameters(), plain.parameters()):
                assert_close(ours.grad.full_tensor(), other.grad, "gradient of a weight")

    on_ranks(3, rank)


@pytest.mark.parametrize("average", [False, True])
def test_weights_of_multihead_attention(average):
    plain = nn.MultiheadAttention(8, 2, batch_first=True).double()
    x = normal(2, 16, 8)
    options = {"average_attn_weights": average, "key_padding_mask": torch.arange(16) > torch.tensor([[15], [9]])}
    expected, expected_weights = plain(x, x, x, **options)

    def rank(mesh):
        module = nn.MultiheadAttention(8, 2, batch_first=True).double()
        module.load_state_dict(plain.state_dict())
        distribute_module(module, mesh)
        for dim in (0, 1):
            own = distributed(x, mesh, [dim], "uneven")
            with fallback("gather"):
                y, weights = module(own, own, own, **options)
            assert_close(y.full_tensor().detach(), expected.detach(), "output")
            assert_close(weights.full_tensor().detach(), expected_weights.detach(), "weights")

    on_ranks(2, rank)


# --- types


@pytest.mark.parametrize(
    "dims, types", [((2, 2, 2), [S(2), S(2), S(2)]), ((None, 2, 2), [I, I, S(2)]), ((1, 1, 1), [S(1), S(1), S(1)])]
)
@pytest.mark.parametrize("method", ["ring", "gather", "all_to_all"])
def test_the_checker_steps_in(method, dims, types):
    def rank():
        mesh = DeviceMesh.from_axes("dp")
        with spmd.SpmdTypeMode(), attention_method(method):
            given = [
                distribute_tensor(
                    torch.ones(SHAPE, dtype=torch.float64, requires_grad=True),
                    mesh,
                    None if dim is None else [Shard(dim)],
                    sizes=None if dim is None else [sizes(SHAPE[dim], 2, "uneven")],
                    src=None,
                )
                for dim in dims
            ]
            y = F.scaled_dot_product_attention(*given, is_causal=True)
            y.square().sum().backward()
            return [spmd.get_local_type(x.to_local())["dp"] for x in (y, given[0].grad, given[1].grad)]

    assert threads.run(Mesh(2), rank) == [types] * 2


# --- refusals


def test_refusals():
    def rank(mesh):
        y, given = attend(mesh, (2, 2, 2), "chunk", (2, 3, 16, 3))
        q, k, v = given
        for call, error, words in [
            (lambda: F.scaled_dot_product_attention(q, k, v, q, is_causal=True), ValueError, "pass only one"),
            (lambda: F.scaled_dot_product_attention(q, k[..., :2], v), ValueError, r"k \[2, 3, 16, 2\].*must be"),
            (lambda: F.scaled_dot_product_attention(q, k, v, torch.ones(5, 16)), ValueError, r"attn_mask \[5, 16\]"),
            (lambda: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True), ValueError, "multiple"),
            (lambda: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2]), ValueError, "broadcast"),
        ]:
            with pytest.raises(error, match=words):
                call()
        with attention_method("all_to_all"), pytest.raises(ValueError, match=r"q \[2, 3, 16, 3\].*use one of ring, ga"):
            F.scaled_dot_product_attention(*given)
        added = nn.MultiheadAttention(4, 2, add_zero_attn=True, batch_first=True)
        x = distributed(torch.ones(2, 16, 4), mesh, [1], "chunk")
        with pytest.raises(
            NotImplementedError, match="does not support add_bias_kv, add_zero_attn, static_k and static_v"
        ):
            added(x, x, x)
        with attention_method("ring"):
            y = F.scaled_dot_product_attention(*given)
        with pytest.raises(NotImplementedError, match="first derivatives only"):
            torch.autograd.grad(y.sum(), q, create_graph=True)
        other = DeviceMesh("cpu", [0, 1], mesh_dim_names=["other"])
        with pytest.raises(ValueError, match="operands are on"):
            F.scaled_dot_product_attention(q, k, distributed(v.full_tensor(), other, [2], "chunk"))

    on_ranks(2, rank)
    with pytest.raises(ValueError, match="attention_method 'rign' is not one of auto, ring, gather, all_to_all"):
        attention_method("rign").__enter__()
    with pytest.raises(ValueError, match=r"zigzag\(0\)"):
        zigzag(0).__enter__()


def test_keys_that_are_not_as_declared_are_refused():
    q, k, v = triple()
    with pytest.raises(ValueError, match=r"k has 16 keys and v 16, but this rank's part of \[4\].* is 4"):
        attention.attention(q, k, v, attention.Keys((4,)), scale=1.0)
