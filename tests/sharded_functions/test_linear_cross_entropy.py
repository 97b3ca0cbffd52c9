"""`parallel_linear_cross_entropy` is the linear layer and `F.cross_entropy` of one process, whatever the chunks."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends import threads
from neuronx_dist.modules.lora import LoraConfig, get_lora_model
from neuronx_dist.planning.meter import measure_peak
from neuronx_dist.sharded_functions import linear_cross_entropy as kernel
from tests.parallel_layers.layer_parity import close, draw, tp_mesh
from tests.support.pool import processes

BATCH, SEQ, WIDTH = 2, 12, 8


def operands(vocab: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    labels = torch.randint(0, vocab, (BATCH, SEQ), generator=torch.Generator().manual_seed(3))
    labels[0, 3] = labels[1, 7] = -100
    x, weight, bias = draw(BATCH, SEQ, WIDTH, seed=1), draw(vocab, WIDTH, seed=2), draw(vocab, seed=4)
    return x.to(dtype), weight.to(dtype), bias.to(dtype), labels


def reference(vocab: int, reduction: str, smoothing: float, z_loss: float, g: torch.Tensor) -> list[torch.Tensor]:
    """Loss and gradients of one process."""
    *leaves, labels = operands(vocab)
    x, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    logits = F.linear(x, weight, bias).flatten(0, 1)
    share = smoothing * vocab / (vocab - 1)
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none", label_smoothing=share)
    losses = (losses + z_loss * logits.logsumexp(-1).square() * (labels.flatten() >= 0)).view(labels.shape)
    total = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / (labels >= 0).sum()}[reduction]
    total.backward(g.expand(total.shape))
    return [total.detach(), *(leaf.grad for leaf in (x, weight, bias) if leaf.grad is not None)]


def local_operands(vocab: int, sequence: bool) -> tuple[torch.Tensor, ...]:
    """This rank's leaves; padding of the vocabulary has weights that must not count."""
    x, weight, bias, labels = operands(vocab)
    size, rank = comm.size("tp"), comm.rank("tp")
    weight, bias = F.pad(weight, (0, 0, 0, -vocab % size), value=3.0), F.pad(bias, (0, -vocab % size), value=5.0)
    local = (x.chunk(size, 1)[rank] if sequence else x, weight.chunk(size)[rank], bias.chunk(size)[rank])
    return *(leaf.clone().requires_grad_() for leaf in local), labels


def ours(vocab: int, sequence: bool, g: torch.Tensor, options: dict[str, Any]) -> list[torch.Tensor]:
    """Loss and this rank's gradients: of backward, of a second one, and of one that can be differentiated again."""
    *leaves, bias, labels = local_operands(vocab, sequence)
    x, weight = leaves

    def loss() -> torch.Tensor:
        options["sequence_dimension"] = 1 if sequence else None
        return nxd.parallel_linear_cross_entropy(x, weight, labels, bias=bias, vocab_size=vocab, **options)

    total = loss()
    g = g.expand(total.shape)
    first, second = (torch.autograd.grad(total, (x, weight, bias), g, retain_graph=True) for _ in range(2))
    third = torch.autograd.grad(loss(), (x, weight, bias), g, create_graph=True)
    for others in (second, third):
        for grad, other in zip(first, others, strict=True):
            close(other.detach(), grad, "a later gradient", 1e-12)
    return [total.detach(), *first]


def whole(results: list[list[torch.Tensor]], vocab: int, sequence: bool) -> list[torch.Tensor]:
    """Loss and gradients of all ranks, put together."""
    totals, inputs, weights, biases = zip(*results)
    for total in totals:
        assert torch.equal(total, totals[0])
    for grad in inputs if not sequence else ():
        assert torch.equal(grad, inputs[0])
    grad_x = torch.cat(inputs, 1) if sequence else inputs[0]
    return [totals[0], grad_x, torch.cat(weights)[:vocab], torch.cat(biases)[:vocab]]


def compare(results: list[list[torch.Tensor]], expected: list[torch.Tensor], vocab: int, sequence: bool) -> None:
    for found, wanted, name in zip(whole(results, vocab, sequence), expected, ("loss", "x", "weight", "bias")):
        close(found, wanted, name, 1e-12)


@pytest.mark.each_pair
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("vocab", [16, 13])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 5, 1])
@pytest.mark.parametrize("smoothing, z_loss", [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01), (0.2, 0.02)])
def test_loss_and_gradients_are_those_of_one_process(
    tp: int, vocab: int, reduction: str, sequence: bool, chunk_size: int | None, smoothing: float, z_loss: float
) -> None:
    g = draw(BATCH, SEQ, seed=7) if reduction == "none" else torch.tensor(0.7, dtype=torch.float64)
    options = dict(reduction=reduction, label_smoothing=smoothing, z_loss=z_loss, chunk_size=chunk_size)
    results = threads.run(tp_mesh(tp), ours, vocab, sequence, g, options)
    compare(results, reference(vocab, reduction, smoothing, z_loss, g), vocab, sequence)


@pytest.mark.each_pair
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("vocab", [16, 13])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("chunk_size, temperature", [(None, 1.0), (5, 0.7)])
def test_log_probabilities_and_entropy_are_those_of_whole_logits(
    tp: int, vocab: int, sequence: bool, chunk_size: int | None, temperature: float
) -> None:
    """A policy loss has a weight for each token; an ignored label has log-probability 0, and its token an entropy."""
    policy, regular = draw(BATCH, SEQ, seed=7), draw(BATCH, SEQ, seed=8)

    def results(log_p: torch.Tensor, entropy: torch.Tensor, leaves: Any) -> list[torch.Tensor]:
        loss = (log_p.exp() * policy - 0.1 * regular * entropy).sum()
        return [torch.cat([log_p, entropy]).detach(), *torch.autograd.grad(loss, leaves)]

    def rank_main() -> list[list[torch.Tensor]]:
        *leaves, labels = local_operands(vocab, sequence)
        options = dict(sequence_dimension=1 if sequence else None, vocab_size=vocab, chunk_size=chunk_size)
        x, weight, bias = leaves
        both = nxd.parallel_linear_logprobs(x, weight, labels, bias=bias, temperature=temperature, **options)
        return results(*both, leaves)

    *leaves, labels = operands(vocab)
    x, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    all_log_p = (F.linear(x, weight, bias) / temperature).log_softmax(-1)
    log_p = all_log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(labels < 0, 0.0)
    expected = results(log_p, -(all_log_p.exp() * all_log_p).sum(-1), (x, weight, bias))
    compare(threads.run(tp_mesh(tp), rank_main), expected, vocab, sequence)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("factor", [2.0, 65536.0])
def test_columns_of_minus_infinity_have_no_gradient_of_the_entropy(tp: int, factor: float) -> None:
    """A padded vocabulary, and one whose bias is -inf; a loss scale is such a factor."""
    x, weight, bias, labels = operands(97, torch.float32)
    bias[3] = -torch.inf
    present = torch.arange(97) != 3
    x.requires_grad_()
    p = F.linear(x, weight[present], bias[present]).softmax(-1)
    (wanted,) = torch.autograd.grad(-factor * (p * p.log()).sum(), x)

    def rank() -> None:
        part = slice(comm.rank("tp") * (98 // tp), (comm.rank("tp") + 1) * (98 // tp)) if tp > 1 else slice(0, 97)
        pad = (0, 98 - 97) if tp > 1 else (0, 0)
        local = F.pad(weight, (0, 0, *pad))[part], F.pad(bias, pad, value=-torch.inf)[part]
        leaf = x.detach().clone().requires_grad_()
        _, fused = nxd.parallel_linear_logprobs(leaf, local[0], labels, bias=local[1], vocab_size=97)
        of_logits = nxd.parallel_entropy(spmd.convert(leaf, "tp", src=spmd.I, dst=spmd.R) @ local[0].T + local[1])
        for entropy in (fused, of_logits):
            (grad,) = torch.autograd.grad(factor * entropy.sum(), leaf)
            torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-5 * factor)

    threads.run(tp_mesh(tp), rank)


def test_log_probabilities_differentiated_twice() -> None:
    x, weight, _, labels = operands(13)
    x.requires_grad_()
    with comm.as_rank(tp_mesh(1), 0):

        def curvature(both: Any) -> torch.Tensor:
            log_p, entropy = both
            (first,) = torch.autograd.grad((log_p + entropy.square()).sum(), x, create_graph=True)
            return torch.autograd.grad(first.square().sum(), x)[0]

        found = curvature(nxd.parallel_linear_logprobs(x, weight, labels))
        logits = F.linear(x, weight)
        whole = -nxd.parallel_cross_entropy(logits, labels), nxd.parallel_entropy(logits)
        close(found, curvature(whole), "second derivative", 1e-12)
        with pytest.raises(ValueError, match="temperature must be above 0, got 0"):
            nxd.parallel_linear_logprobs(x, weight, labels, temperature=0)
        learnable: Any = nn.Parameter(torch.ones(()))
        with pytest.raises(TypeError, match=r"parallel_linear_logprobs: temperature is a tensor \[\]"):
            nxd.parallel_linear_logprobs(x, weight, labels, temperature=learnable)


@pytest.mark.process
@pytest.mark.parametrize("sequence", [False, True])
def test_on_processes(sequence: bool) -> None:
    g = torch.tensor(1.5, dtype=torch.float64)
    results = processes(2).run(ours, 13, sequence, g, dict(reduction="mean", chunk_size=5), mesh={"tp": 2})
    compare(results, reference(13, "mean", 0.0, 0.0, g), 13, sequence)


def counted(sequence: bool, reduction: str, tokens: int) -> tuple[list[Any], list[Any]]:
    x, weight, bias, labels = local_operands(16, sequence)
    options = dict(reduction=reduction, sequence_dimension=1 if sequence else None, chunk_size=tokens)
    with comm.record() as forward:
        loss = nxd.parallel_linear_cross_entropy(x, weight, labels, bias=bias, **options).sum()
    with comm.record() as backward:
        loss.backward()
    return [(call.verb, call.shape) for call in forward], [(call.verb, call.shape) for call in backward]


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_collectives(reduction: str) -> None:
    """Two for each chunk, of its tokens' numbers; of the input one in backward, and a gather of a sharded sequence."""
    tokens, rows, local = BATCH * SEQ, (BATCH, SEQ, WIDTH), (BATCH, SEQ // 2, WIDTH)
    chunk = [("all_reduce", (8,)), ("all_reduce", (2, 8))]
    for forward, backward in threads.run(tp_mesh(2), counted, False, reduction, 8):
        assert forward == chunk * (tokens // 8) and backward == [("all_reduce", rows)]
    for forward, backward in threads.run(tp_mesh(2), counted, True, reduction, tokens):
        assert forward[0] == ("all_gather", local) and len(forward) == 3
        assert backward == [("all_gather", local)] * (reduction == "none") + [("reduce_scatter", rows)]


def test_memory_is_that_of_a_chunk() -> None:
    """At most a quarter of the logits, the weight's gradient and the input's aside; without chunks it is twice them."""
    tokens, width, vocab = 4096, 8, 1024
    x, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(vocab, width, requires_grad=True)
    labels, peaks = torch.randint(0, vocab, (tokens,)), []
    with comm.as_rank(tp_mesh(1), 0):
        for fused in (True, False):
            with measure_peak() as meter:
                if fused:
                    loss = nxd.parallel_linear_cross_entropy(x, weight, labels)
                else:
                    loss = nxd.parallel_cross_entropy(F.linear(x, weight), labels).mean()
                loss.backward()
            peaks.append(meter.peak)
            x.grad = weight.grad = None
    assert peaks[0] < 0.25 * tokens * vocab * 4 and peaks[1] > 1.9 * tokens * vocab * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_that_of_the_two_functions(dtype: torch.dtype) -> None:
    """With the logits in half precision too, and the sum of the weight's gradient over chunks in float32."""

    def run() -> list[torch.Tensor]:
        errors = []
        x, weight, _, labels = (t.to(dtype) if t.is_floating_point() else t for t in operands(64))
        exact = [t.double().requires_grad_() for t in (x, weight)]
        F.cross_entropy(F.linear(*exact).flatten(0, 1), labels.flatten()).backward()
        for fused in (True, False):
            leaves = [t.clone().requires_grad_() for t in (x, weight)]
            if fused:
                loss = nxd.parallel_linear_cross_entropy(*leaves, labels, chunk_size=4)
            else:
                loss = nxd.parallel_cross_entropy(F.linear(*leaves), labels).sum() / (labels >= 0).sum()
            loss.backward()
            assert loss.dtype == torch.float32 and all(leaf.grad.dtype == dtype for leaf in leaves)
            errors.append(torch.stack([(leaf.grad - e.grad).norm() / e.grad.norm() for leaf, e in zip(leaves, exact)]))
        return errors

    with comm.as_rank(tp_mesh(1), 0):
        fused, separate = run()
    assert (fused < 1.2 * separate + 1e-4).all(), (fused, separate)


def test_autocast_computes_the_products_in_its_dtype() -> None:
    x, weight, _, labels = (t.float() if t.is_floating_point() else t for t in operands(16))
    x.requires_grad_(), weight.requires_grad_()
    with comm.as_rank(tp_mesh(1), 0), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nxd.parallel_linear_cross_entropy(x, weight, labels)
        wanted = F.cross_entropy(F.linear(x, weight).float().flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    loss.backward()
    assert x.grad is not None and x.grad.dtype == weight.grad.dtype == torch.float32


def test_without_gradients_and_without_labels() -> None:
    x, weight, _, labels = operands(16)
    with comm.as_rank(tp_mesh(1), 0):
        with torch.no_grad():
            assert not nxd.parallel_linear_cross_entropy(x, weight, labels).requires_grad
        x.requires_grad_()
        loss = nxd.parallel_linear_cross_entropy(x, weight, torch.full_like(labels, -100))
        loss.backward()
    assert loss == 0.0 and x.grad is not None and not x.grad.any()


def test_a_tied_embedding_gets_both_gradients() -> None:
    _, table, _, labels = operands(16)
    ids = labels.clamp(min=0)

    def run(linear_loss: Any) -> torch.Tensor:
        weight = table.clone().requires_grad_()
        linear_loss(weight[ids], weight).backward()
        assert weight.grad is not None
        return weight.grad

    with comm.as_rank(tp_mesh(1), 0):
        found = run(lambda x, weight: nxd.parallel_linear_cross_entropy(x, weight, labels, chunk_size=5))
    close(found, run(lambda x, w: F.cross_entropy(F.linear(x, w).flatten(0, 1), labels.flatten())), "weight", 1e-12)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_tied_weight_differentiated_twice(reduction: str) -> None:
    """The gradient that can be differentiated again has no path from the input to the weight in it."""
    _, table, _, labels = operands(16)
    ids = labels.clamp(min=0)

    def second(loss: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weight = table.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(weight[ids].tanh(), weight), weight, create_graph=True)
        return first.detach(), torch.autograd.grad(first.square().sum(), weight)[0]

    with comm.as_rank(tp_mesh(1), 0):
        fused = nxd.parallel_linear_cross_entropy
        found = second(lambda x, w: fused(x, w, labels, reduction=reduction, chunk_size=5).sum())
    wanted = second(lambda x, w: F.cross_entropy(F.linear(x, w).flatten(0, 1), labels.flatten(), reduction="sum"))
    for grad, expected, name in zip(found, wanted, ("first", "second"), strict=True):
        close(grad, expected, name, 1e-12)


def test_a_frequent_label_is_finite_in_float16() -> None:
    """The label's row of the weight's gradient is a sum over all tokens, which the mean divides afterwards."""
    x, weight = 100 * torch.ones(2048, 4, dtype=torch.float16), torch.zeros(8, 4, dtype=torch.float16)
    x.requires_grad_(), weight.requires_grad_()
    with comm.as_rank(tp_mesh(1), 0):
        nxd.parallel_linear_cross_entropy(x, weight, torch.zeros(2048, dtype=torch.long)).backward()
    torch.testing.assert_close(weight.grad[0], torch.full((4,), -87.5, dtype=torch.float16), rtol=2e-3, atol=0)


def test_evaluation_computes_no_gradients() -> None:
    x, weight, _, labels = operands(16)
    weight.requires_grad_()
    with comm.as_rank(tp_mesh(1), 0), mock.patch.object(kernel._Gradients, "add") as add:
        with torch.no_grad():
            nxd.parallel_linear_cross_entropy(x, weight, labels)
        assert not add.called


def test_padding_of_a_layers_vocabulary_does_not_count() -> None:
    def rank_main() -> tuple[torch.Tensor, torch.Tensor]:
        head = nxd.ColumnParallelLinear(WIDTH, 13, bias=False, gather_output=False, pad=True, dtype=torch.float64)
        x, _, _, labels = operands(13)
        logits = head(x)
        return (
            nxd.parallel_linear_cross_entropy(x, head.weight, labels, reduction="none").detach(),
            nxd.parallel_cross_entropy(logits, labels, vocab_size=13).detach(),
        )

    for found, wanted in threads.run(tp_mesh(2), rank_main):
        close(found, wanted, "loss", 1e-12)


def test_a_layer_with_an_adapter_is_refused() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16, bias=False)).double()
    x, _, _, labels = operands(16)
    with comm.as_rank(tp_mesh(1), 0):
        adapted = get_lora_model(model, LoraConfig(target_modules=["1"]))
        head = adapted.get_submodule("1") if hasattr(adapted, "1") else model[1]
        copied = copy.deepcopy(adapted)
        for weight in (head.weight, [layer for layer in copied.modules() if hasattr(layer, "lora_A")][0].weight):
            with pytest.raises(ValueError, match="has an adapter"):
                nxd.parallel_linear_cross_entropy(x, weight, labels)
        head.merge()
        nxd.parallel_linear_cross_entropy(x, head.weight, labels)


@pytest.mark.slow
def test_under_torch_func_and_the_compiler() -> None:
    x, weight, _, labels = operands(16)

    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nxd.parallel_linear_cross_entropy(x, weight, labels, z_loss=0.01)

    with comm.as_rank(tp_mesh(1), 0):
        expected = [leaf.clone().requires_grad_() for leaf in (x, weight)]
        loss(*expected).backward()
        found = torch.func.grad(loss, argnums=(0, 1))(x, weight)
        leaves = [leaf.clone().requires_grad_() for leaf in (x, weight)]
        torch.compile(loss, backend="aot_eager")(*leaves).backward()
    for leaf, grad, compiled in zip(expected, found, leaves):
        close(grad, leaf.grad, "torch.func", 1e-12)
        close(compiled.grad, leaf.grad, "compiled", 1e-12)


class Model(nn.Module):
    """Embedding, layer and fused loss; `wrong`: the input's gradient is summed a second time."""

    def __init__(self, sequence: bool, reduction: str, wrong: bool = False) -> None:
        super().__init__()
        self.sequence, self.reduction, self.wrong = sequence, reduction, wrong
        options = dict(sequence_parallel_enabled=sequence, sequence_dimension=1 if sequence else None, bias=False)
        self.embedding = nxd.ParallelEmbedding(16, 8)
        self.up = nxd.ColumnParallelLinear(8, 16, gather_output=False, **options)
        self.down = nxd.RowParallelLinear(16, 8, input_is_parallel=True, **options)
        self.head = nxd.ColumnParallelLinear(8, 16, gather_output=False, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        if self.sequence:
            x = nxd.parallel_layers.mappings.scatter_to_sequence_parallel_region(x, 1)
        x = self.down(torch.relu(self.up(x)))
        if self.wrong:
            x = spmd.convert(x, "tp", src=spmd.I, dst=spmd.R)
        dim = 1 if self.sequence else None
        weight = self.head.weight
        loss = nxd.parallel_linear_cross_entropy(x, weight, labels, reduction=self.reduction, sequence_dimension=dim)
        return loss.mean()


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_checker_follows_it(sequence: bool, reduction: str) -> None:
    ids = torch.randint(0, 16, (4, 6))
    report = spmd.check(lambda: Model(sequence, reduction), (ids, ids), mesh={"tp": 2, "dp": 2})
    assert report.ok, str(report)


def test_the_checker_refuses_an_input_whose_gradient_is_summed_twice() -> None:
    ids = torch.randint(0, 16, (4, 6))
    report = spmd.check(lambda: Model(False, "mean", wrong=True), (ids, ids), mesh={"tp": 2})
    assert not report.ok and "gradient" in str(report)


BAD = {
    "weight is a Linear, a module: pass its weight": dict(weight=nn.Linear(16, 8)),
    "labels of shape (2, 3) do not match": dict(labels=torch.zeros(2, 3, dtype=torch.long)),
    "labels are torch.uint8": dict(labels=torch.zeros(2, 12, dtype=torch.uint8)),
    "labels are torch.float32": dict(labels=torch.zeros(2, 12)),
    "does not match the weight": dict(weight=torch.zeros(16, 7)),
    "'average' is none of none, sum, mean": dict(reduction="average"),
    "label_smoothing must be in [0, 1], got 1.5": dict(label_smoothing=1.5),
    "chunk_size must be a number of tokens, got 0": dict(chunk_size=0),
    "sequence_dimension=2 is no dim of tokens": dict(sequence_dimension=2),
    "of a vocabulary of 20": dict(vocab_size=20),
    "label 16 is outside the vocabulary of 16": dict(labels=torch.full((2, 12), 16)),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input(words: str) -> None:
    x, weight, _, labels = operands(16, torch.float32)
    arguments = {"input": x, "weight": weight, "labels": labels, **BAD[words]}
    with comm.as_rank(tp_mesh(1), 0), pytest.raises((ValueError, TypeError, IndexError)) as error:
        nxd.parallel_linear_cross_entropy(**arguments)
    assert str(error.value).startswith("parallel_linear_cross_entropy: ") and words in str(error.value)


def test_a_shard_of_the_sequence_needs_its_dim() -> None:
    x, weight, _, labels = operands(16, torch.float32)
    with comm.as_rank(tp_mesh(2), 0), pytest.raises(ValueError, match=r"parallelism\), pass sequence_dimension=1"):
        nxd.parallel_linear_cross_entropy(x[:, : x.shape[1] // 2], weight[:8], labels)
