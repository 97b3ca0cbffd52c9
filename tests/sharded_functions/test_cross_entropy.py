"""Cross entropy of vocabulary-sharded logits is `F.cross_entropy` of the whole ones, through NxD's function."""

from __future__ import annotations

import math
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.parallel_layers import parallel_cross_entropy
from neuronx_dist.parallelize import composites
from neuronx_dist.planning.meter import measure_peak
from neuronx_dist.sharded_functions import cross_entropy as kernel
from neuronx_dist.sharded_functions import fused_cross_entropy as fused
from tests.parallel_layers.layer_parity import close, draw, tp_mesh
from tests.support.pool import processes

K = 16


def ours(logits, labels, g, options):
    """Loss per token, and the gradient of this rank's logits; the logits are left alone."""
    tp, rank = comm.size("tp"), comm.rank("tp")
    mine = logits.chunk(tp, -1)[rank].clone().requires_grad_()
    before = mine.detach().clone()
    with comm.record() as forward:
        loss = parallel_cross_entropy(mine, labels, **options)
    with comm.record() as backward:
        loss.backward(g)
    assert torch.equal(mine.detach(), before), "the logits were modified"
    return loss.detach(), mine.grad, [(c.verb, c.op, c.shape) for c in forward], len(backward)


def reference(logits, labels, g, smoothing=0.0, ignore_index=-100):
    logits = logits.clone().requires_grad_()
    s = smoothing * K / (K - 1)
    loss = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), reduction="none", label_smoothing=s, ignore_index=ignore_index
    ).view(labels.shape)
    loss.backward(g)
    return loss.detach(), logits.grad


def compare(tp, lead, labels, tolerance=1e-12, **options):
    logits, g = 4 * draw(*lead, K, seed=1), draw(*lead, seed=2)
    want, want_grad = reference(
        logits, labels, g, options.get("label_smoothing", 0.0), options.get("ignore_index", -100)
    )
    losses, grads, forward, backward = zip(*threads.run(tp_mesh(tp), ours, logits, labels, g, options))
    for loss in losses:
        assert torch.equal(loss, losses[0])
        close(loss, want, "loss", tolerance)
    close(torch.cat(grads, -1), want_grad, "gradient", tolerance)
    return forward, backward


def random_labels(*lead, ignored=(), value=-100):
    labels = torch.randint(0, K, lead, generator=torch.Generator().manual_seed(4))
    for index in ignored:
        labels.view(-1)[index] = value
    return labels


@pytest.mark.each_pair
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("lead", [(5,), (3, 4), (2, 3, 2)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_it_is_torchs_cross_entropy(tp, lead, smoothing):
    compare(tp, lead, random_labels(*lead), label_smoothing=smoothing)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("value", [-100, -1, 3])
def test_ignored_labels_have_no_loss_and_no_gradient(tp, smoothing, value):
    labels = random_labels(3, 4, ignored=(0, 5, 6), value=value)
    compare(tp, (3, 4), labels, label_smoothing=smoothing, ignore_index=value)


@pytest.mark.parametrize("tp", [1, 2])
def test_nothing_but_ignored_labels(tp):
    labels = torch.full((2, 3), -100)
    logits, g = draw(2, 3, K), torch.ones(2, 3, dtype=torch.float64)
    for loss, grad, *_ in threads.run(tp_mesh(tp), ours, logits, labels, g, dict(label_smoothing=0.1)):
        assert not loss.any() and not grad.any() and not grad.isnan().any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_two_all_reduces_forward_and_none_backward(smoothing):
    rows = 4 if smoothing else 2
    expected = [("all_reduce", "max", (3, 4)), ("all_reduce", "sum", (rows, 3, 4))]
    forward, backward = compare(2, (3, 4), random_labels(3, 4), label_smoothing=smoothing)
    assert forward == (expected, expected) and backward == (0, 0)
    forward, _ = compare(1, (3, 4), random_labels(3, 4), label_smoothing=smoothing)
    assert forward == ([],)


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, -1e4] * (K // 2), [-1e4] * K], dtype=torch.float32)
    labels, g = torch.tensor([1, 3]), torch.ones(2)
    for loss, grad, *_ in threads.run(tp_mesh(2), ours, logits, labels, g, {}):
        assert loss.tolist() == pytest.approx([20000 + math.log(8), math.log(K)], rel=1e-6) and grad.isfinite().all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from([1, 2, 4]), st.floats(0.0, 0.9), st.integers(1, 6))
def test_any_logits(seed, tp, smoothing, tokens):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, K, generator=generator, dtype=torch.float64) * 10 ** (seed % 3)
    labels = torch.randint(-1, K, (tokens,), generator=generator)
    g = torch.randn(tokens, generator=generator, dtype=torch.float64)
    want, want_grad = reference(logits, labels, g, smoothing, ignore_index=-1)
    ranks = threads.run(tp_mesh(tp), ours, logits, labels, g, dict(label_smoothing=smoothing, ignore_index=-1))
    torch.testing.assert_close(ranks[0][0], want, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(torch.cat([rank[1] for rank in ranks], -1), want_grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_give_a_loss_in_fp32(dtype):
    logits, labels = (4 * draw(6, K, seed=1)).to(dtype), random_labels(6)
    want, want_grad = reference(logits.float(), labels, torch.ones(6))
    losses, grads, *_ = zip(*threads.run(tp_mesh(2), ours, logits, labels, torch.ones(6), {}))
    assert losses[0].dtype == torch.float32 and grads[0].dtype == dtype
    close(losses[0], want, tolerance=1e-6)
    close(torch.cat(grads, -1), want_grad, tolerance=1e-2)


def test_on_real_processes():
    logits, labels, g = draw(3, 4, K), random_labels(3, 4, ignored=(2,)), draw(3, 4, seed=1)
    want, want_grad = reference(logits, labels, g, 0.1)
    ranks = processes(2).run(ours, logits, labels, g, dict(label_smoothing=0.1), mesh=dict(tp=2))
    for loss, *_ in ranks:
        close(loss, want)
    close(torch.cat([rank[1] for rank in ranks], -1), want_grad)


def test_b1_label_smoothing_is_the_documented_formula_on_every_rank():
    """Upstream B1: the partition's vocabulary as K, a local mean of log-probabilities, an inverted mask in backward."""
    logits, labels, smoothing = 3 * draw(4, K), random_labels(4), 0.2
    s = smoothing * K / (K - 1)
    whole = logits.clone().requires_grad_()
    log_p = F.log_softmax(whole, -1)
    nll = -log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    want = (1 - s) * nll - s * log_p.mean(-1)  # NeMo's, as NxD documents it
    want.sum().backward()
    ranks = threads.run(
        tp_mesh(2), ours, logits, labels, torch.ones(4, dtype=torch.float64), dict(label_smoothing=smoothing)
    )
    assert torch.equal(ranks[0][0], ranks[1][0])
    close(ranks[0][0], want)
    close(torch.cat([rank[1] for rank in ranks], -1), whole.grad)


# --- pieces of the logits, and the gradient in their memory ---


def pieces_of(size):
    """Pieces of `size` logits, so that small logits come in several."""
    return mock.patch.multiple(kernel, _IN_CACHE=size, _IN_MEMORY=size)


@pytest.mark.each_pair
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("lead", [(7,), (3, 5), (2, 1, 3)])
@pytest.mark.parametrize("size", [1, 9, 40])
def test_pieces_are_the_whole(size, lead, smoothing):
    with pieces_of(size):
        compare(2, lead, random_labels(*lead), label_smoothing=smoothing)


def in_place(logits, labels, g, options):
    """Like `ours`, of logits that a layer computed; also returns whether the gradient is in the logits' memory."""
    tp, rank = comm.size("tp"), comm.rank("tp")
    source = logits.chunk(tp, -1)[rank].clone().requires_grad_()
    product = source * 1
    gradients = []
    product.register_hook(gradients.append)
    loss = parallel_cross_entropy(product, labels, inplace_logits=True, **options)
    loss.backward(g)
    (gradient,) = gradients
    return loss.detach(), source.grad, gradient.data_ptr() == product.data_ptr() and torch.equal(gradient, product)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [9, 1 << 17])
def test_in_place_is_the_same(size, dtype, smoothing):
    logits, labels = (4 * draw(3, 5, K, seed=1)).to(dtype), random_labels(3, 5, ignored=(2, 8))
    g = draw(3, 5, seed=2).to(torch.promote_types(dtype, torch.float32))
    for tp in (1, 2):
        expected = threads.run(tp_mesh(tp), ours, logits, labels, g, dict(label_smoothing=smoothing))
        with pieces_of(size):
            ranks = threads.run(tp_mesh(tp), in_place, logits, labels, g, dict(label_smoothing=smoothing))
        for (loss, gradient, there), (expected_loss, expected_gradient, *_) in zip(ranks, expected):
            assert there, "the gradient is elsewhere"
            tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 0}[dtype]
            close(loss, expected_loss, tolerance=tolerance)
            close(gradient, expected_gradient, tolerance=tolerance)


@contextmanager
def as_kernels(compiler=lambda function: function):
    """Logits on the CPU take the way of those on a GPU; `compiler` stands for `torch.compile`."""
    calls = []

    def compiled(function):
        return lambda *tensors: calls.append(function.__name__) or compiler(function)(*tensors)

    on_gpu = mock.patch.object(kernel, "_on", lambda device_type, logits: True)
    with on_gpu, mock.patch.multiple(fused, _WORTH=1, _has_triton=lambda: True, _compiled=compiled):
        try:
            yield calls
        finally:
            fused._failed.clear()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp", [1, 2])
def test_what_kernels_compute_is_the_same(tp, dtype):
    logits, labels = (4 * draw(3, 5, K, seed=1)).to(dtype), random_labels(3, 5, ignored=(2, 8))
    logits[0, 1, K // 2 :] = -math.inf  # a row of which another rank has nothing
    labels[0, 1] = 1
    g = draw(3, 5, seed=2).to(torch.promote_types(dtype, torch.float32))
    expected = threads.run(tp_mesh(tp), ours, logits, labels, g, {})
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    for run in (ours, in_place):
        with as_kernels() as calls:
            ranks = threads.run(tp_mesh(tp), run, logits, labels, g, {})
        assert sorted(calls) == ["_exp_sums"] * tp + ["_write_gradient"] * tp
        for (loss, gradient, *others), (expected_loss, expected_gradient, *_) in zip(ranks, expected):
            assert run is ours or others == [True], "the gradient is elsewhere"
            close(loss, expected_loss, tolerance=tolerance)
            close(gradient, expected_gradient, tolerance=tolerance)


def test_without_a_compiler_the_operators_are_used():
    def broken(function):
        raise RuntimeError("no C compiler")

    logits, labels, g = draw(6, K), random_labels(6), draw(6, seed=2)
    expected = threads.run(tp_mesh(2), ours, logits, labels, g, {})
    with as_kernels(broken) as calls, pytest.warns(UserWarning, match="is slower without .*no C compiler"):
        ranks = threads.run(tp_mesh(2), ours, logits, labels, g, {})
    assert len(calls) == 1
    for (loss, gradient, *_), (expected_loss, expected_gradient, *_) in zip(ranks, expected):
        assert torch.equal(loss, expected_loss) and torch.equal(gradient, expected_gradient)


def test_in_place_in_logits_that_are_no_whole_memory():
    """A slice of the sequence, and logits that are kept transposed: their rows are apart."""
    logits, labels = draw(3, 6, K, seed=1), random_labels(3, 5)
    whole = logits.clone().requires_grad_()
    F.cross_entropy(whole[:, :-1].flatten(0, 1), labels.flatten(), reduction="none").sum().backward()

    def rank_main(change):
        leaf = logits.chunk(2, -1)[comm.rank("tp")].clone().requires_grad_()
        parallel_cross_entropy(change(leaf * 1), labels, inplace_logits=True).sum().backward()
        return leaf.grad

    for change in (lambda z: z[:, :-1], lambda z: z.transpose(0, 2).contiguous().transpose(0, 2)[:, :-1]):
        with pieces_of(9):
            close(torch.cat(threads.run(tp_mesh(2), rank_main, change), -1), whole.grad)


def _twice(z, loss):
    value = loss(z)
    value.backward(retain_graph=True)
    value.backward()


USED_AFTERWARDS = {
    "a second backward": _twice,
    "a second loss": lambda z, loss: (loss(z) + loss(z)).backward(),
    "a use before": lambda z, loss: (z.square().sum() + loss(z)).backward(),
    "a use after": lambda z, loss: (loss(z) + z.square().sum()).backward(),
    "another loss alone": lambda z, loss: (loss(z), z.square().sum())[1].backward(),
    "a producer": lambda z, loss: loss(torch.tanh(z)).backward(),
}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])  # forward writes exp(z - m) over the logits, or only backward writes
@pytest.mark.parametrize("name", USED_AFTERWARDS)
def test_logits_that_are_needed_afterwards_are_missed(name, smoothing):
    """Or they were still there when they were used."""
    logits, labels, gradients = draw(3, K, seed=1), random_labels(3), []
    with comm.as_rank(tp_mesh(1), 0):
        for options in ({}, {"inplace_logits": True}):
            leaf = logits.clone().requires_grad_()
            try:
                USED_AFTERWARDS[name](
                    leaf * 1, lambda z, o=options: parallel_cross_entropy(z, labels, smoothing, **o).sum()
                )
            except RuntimeError as error:
                words = ["used after the loss, but inplace_logits", "modified by an inplace operation"]
                if name == "a second backward":
                    words = ["a second backward, but inplace_logits"]
                assert options and any(word in str(error) for word in words), error
                return
            gradients.append(leaf.grad)
    assert smoothing and name in ("a use after", "another loss alone")
    close(*gradients)


def test_a_leaf_is_left_as_it_is():
    logits, labels = draw(3, 5, K, seed=1), random_labels(3, 5)
    # `ours` compares the logits with what they were.
    threads.run(tp_mesh(2), ours, logits, labels, draw(3, 5, seed=2), dict(inplace_logits=True))


def test_without_gradients_logits_are_left_as_they_are():
    """Reentrant checkpoints read such logits again."""
    logits, labels = draw(3, K, seed=1), random_labels(3)

    def gradient(inplace, checkpointed):
        source = logits.clone().requires_grad_()
        product = source * 1
        options = dict(inplace_logits=inplace)
        if checkpointed:
            loss = checkpoint(partial(parallel_cross_entropy, **options), product, labels, use_reentrant=True)
        else:
            with torch.no_grad():
                parallel_cross_entropy(product, labels, **options)
            assert torch.equal(product, source)
            loss = parallel_cross_entropy(product, labels, **options)
        loss.sum().backward()
        return source.grad

    with comm.as_rank(tp_mesh(1), 0):
        for checkpointed in (True, False):
            close(gradient(True, checkpointed), gradient(False, False))


def test_backward_out_of_place_can_be_repeated():
    logits, labels = draw(3, K, seed=1).requires_grad_(), random_labels(3)
    with comm.as_rank(tp_mesh(1), 0):
        loss = parallel_cross_entropy(logits, labels).sum()
        first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def measured(dtype, tokens, inplace):
    """The most bytes that are alive at one time, the logits among them, over those of the logits."""
    logits = torch.zeros(tokens, 64, dtype=dtype, requires_grad=True) * 1
    labels = torch.zeros(tokens, dtype=torch.int64)
    edge = get_gradient_edge(logits)
    with measure_peak() as memory:
        torch.autograd.grad(parallel_cross_entropy(logits, labels, inplace_logits=inplace).sum(), edge)
    return memory.peak / (logits.numel() * logits.itemsize)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_that_of_a_few_rows(dtype):
    with comm.as_rank(tp_mesh(1), 0), pieces_of(640):
        assert 1.0 <= measured(dtype, 1000, True) < 1.4  # a piece, and a few numbers per token
        assert 2.0 <= measured(dtype, 1000, False) < 2.4  # the gradient too


# --- torch's function of shards; shards of other sizes; second derivatives ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mean_in_sixteen_bits_is_finite(dtype):
    """The sum of so many losses is above 65504."""
    logits, target = (8 * draw(2**16, 8)).to(dtype), torch.arange(2**16) % 8

    def rank():
        return composites.cross_entropy(logits.chunk(2, 1)[comm.rank("tp")], target, axis="tp", classes=8)

    expected = F.cross_entropy(logits.float(), target).to(dtype)
    for computed in threads.run(tp_mesh(2), rank):
        torch.testing.assert_close(computed, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_options_are_torchs(size, reduction):
    target = torch.randint(8, (5, 3), generator=torch.Generator().manual_seed(0))
    options = dict(ignore_index=2, reduction=reduction, label_smoothing=0.2)
    whole, g = draw(5, 8, 3).requires_grad_(), draw(5, 3, seed=1) if reduction == "none" else draw(1, seed=1)[0]
    expected = F.cross_entropy(whole, target, **options)
    expected.backward(g)

    def rank():
        part = whole.detach().chunk(size, 1)[comm.rank("tp")].clone().requires_grad_()
        loss = composites.cross_entropy(part, target, axis="tp", classes=8, **options)
        loss.backward(g)
        return loss.detach(), part.grad

    losses, gradients = zip(*threads.run(tp_mesh(size), rank))
    for loss in losses:
        close(loss, expected.detach())
    close(torch.cat(gradients, 1), whole.grad)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("sizes", [(16,), (8, 8), (11, 5), (0, 16), (4, 4, 4, 4), (3, 6, 0, 7)], ids=str)
def test_shards_of_any_sizes_and_second_derivatives(sizes, smoothing):
    logits, labels, g = draw(5, K, seed=1), random_labels(5, ignored=(3,)), draw(5, seed=2)

    def derivatives(logits, loss, g):
        leaf = logits.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(leaf), leaf, g, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaf)
        return first.detach(), second

    s = smoothing * K / (K - 1)
    wanted = derivatives(logits, lambda z: F.cross_entropy(z, labels, reduction="none", label_smoothing=s), g)

    def rank():
        index = comm.rank("tp")
        part, first = logits.split(sizes, -1)[index], sum(sizes[:index])
        return derivatives(part, lambda z: kernel.cross_entropy_of_shard(z, labels, "tp", smoothing, first=first), g)

    for computed, expected in zip(zip(*threads.run(tp_mesh(len(sizes)), rank)), wanted):
        close(torch.cat(computed, -1), expected)


# --- columns that are no part of the vocabulary ---


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("tp, real", [(1, 11), (2, 11), (4, 11), (4, 8), (2, 16)])
def test_columns_of_minus_infinity_are_no_part_of_the_vocabulary(tp, real, smoothing):
    """The last rank may hold nothing else (4, 11), or the last two (4, 8)."""
    logits, labels, g = 4 * draw(5, K, seed=1), random_labels(5) % real, draw(5, seed=2)
    logits[:, real:] = -math.inf
    whole = logits[:, :real].clone().requires_grad_()
    s = smoothing * real / (real - 1)
    want = F.cross_entropy(whole, labels, reduction="none", label_smoothing=s)
    want.backward(g)
    losses, grads, *_ = zip(*threads.run(tp_mesh(tp), ours, logits, labels, g, dict(label_smoothing=smoothing)))
    for loss in losses:
        close(loss, want.detach())
    close(torch.cat(grads, -1)[:, :real], whole.grad)
    assert not torch.cat(grads, -1)[:, real:].any()


def test_minus_infinity_in_some_rows():
    """Pieces of one row, some with such columns and some without."""
    logits, labels, g = 4 * draw(6, K, seed=1), random_labels(6) % 8, draw(6, seed=2)
    logits[::2, 8:] = -math.inf
    options = dict(label_smoothing=0.3)
    rows = [threads.run(tp_mesh(2), ours, *(x[i : i + 1] for x in (logits, labels, g)), options) for i in range(6)]
    with pieces_of(1):
        for ranks in zip(threads.run(tp_mesh(2), ours, logits, labels, g, options), *rows):
            (loss, gradient, *_), *alone = ranks
            close(loss, torch.cat([x[0] for x in alone]))
            close(gradient, torch.cat([x[1] for x in alone]))
    assert gradient[1::2].all() and not gradient[::2].any()  # of rank 1, whose columns these are


def test_on_meta_and_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with comm.as_rank(tp_mesh(2), 0):
        labels = torch.zeros(3, dtype=torch.int64)
        meta = parallel_cross_entropy(torch.zeros(3, 8, device="meta"), labels.to("meta"))
        assert meta.shape == (3,) and meta.is_meta
        with FakeTensorMode():
            logits = torch.zeros(3, 8, requires_grad=True)
            parallel_cross_entropy(logits, torch.zeros(3, dtype=torch.int64)).sum().backward()
            assert logits.grad.shape == (3, 8)
