"""Layers in compiled code, on real processes: training steps of blocks are those of eager code, in one graph."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist import comm
from neuronx_dist.parallel_layers import (
    ColumnParallelLinear,
    LayerNorm,
    ParallelEmbedding,
    RMSNorm,
    RowParallelLinear,
    fuse_columns,
    parallel_cross_entropy,
)
from neuronx_dist.parallel_layers.grads import reduce_gradients
from tests.support.pool import processes

HIDDEN, HEADS, VOCAB, BATCH, SEQ = 16, 4, 32, 2, 6


class Block(nn.Module):
    """A transformer block: `[seq, batch, hidden]` (of the sequence this rank's part) to the same."""

    def __init__(self, sequence_parallel, **options):
        super().__init__()
        options |= dict(sequence_parallel_enabled=sequence_parallel)
        column = dict(gather_output=False, **options)
        self.norm1 = RMSNorm(HIDDEN, sequence_parallel_enabled=sequence_parallel, dtype=options["dtype"])
        self.norm2 = LayerNorm(HIDDEN, sequence_parallel_enabled=sequence_parallel, dtype=options["dtype"])
        self.q, self.k, self.v = (ColumnParallelLinear(HIDDEN, HIDDEN, bias=False, **column) for _ in range(3))
        self.o = RowParallelLinear(HIDDEN, HIDDEN, input_is_parallel=True, **options)
        self.gate, self.up = (ColumnParallelLinear(HIDDEN, 2 * HIDDEN, **column) for _ in range(2))
        self.down = RowParallelLinear(2 * HIDDEN, HIDDEN, input_is_parallel=True, **options)
        fuse_columns([self.q, self.k, self.v])
        fuse_columns([self.gate, self.up])

    def forward(self, x):
        y = self.norm1(x)
        heads = HEADS // comm.size("tp")
        q, k, v = (z.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for z in (self.q(y), self.k(y), self.v(y)))
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attention.permute(2, 0, 1, 3).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LanguageModel(nn.Module):
    """`ids [batch, seq] -> loss []`."""

    def __init__(self, dtype, sequence_parallel=False, smoothing=0.0, blocks=2, **embedding):
        super().__init__()
        options = dict(dtype=dtype, sequence_parallel_enabled=sequence_parallel)
        self.smoothing = smoothing
        self.embedding = ParallelEmbedding(VOCAB, HIDDEN, **options, **embedding)
        self.blocks = nn.ModuleList(Block(sequence_parallel, dtype=dtype) for _ in range(blocks))
        self.head = ColumnParallelLinear(HIDDEN, VOCAB, bias=False, gather_output=False, **options)
        self.sequence_first = sequence_parallel

    def forward(self, ids, labels):
        x = self.embedding(ids)
        if not self.sequence_first:
            x = x.transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return parallel_cross_entropy(self.head(x), labels.t(), self.smoothing, ignore_index=-1).mean()


class Layers(nn.Module):
    """Options that the language model does not use: whole inputs and outputs, partial outputs, strides."""

    def __init__(self, dtype):
        super().__init__()
        self.embedding = ParallelEmbedding(VOCAB, HIDDEN, dtype=dtype, shard_across_embedding=True)
        self.whole = ColumnParallelLinear(HIDDEN, HIDDEN, dtype=dtype, stride=2)
        self.split = RowParallelLinear(HIDDEN, HIDDEN, dtype=dtype)
        self.added_later = ColumnParallelLinear(HIDDEN, HIDDEN, dtype=dtype, gather_output=False, skip_bias_add=True)
        self.partial = RowParallelLinear(HIDDEN, HIDDEN, dtype=dtype, input_is_parallel=True, reduce_output=False)

    def forward(self, ids, labels):
        x = self.split(torch.tanh(self.whole(self.embedding(ids))))
        y, bias = self.added_later(x)
        return self.partial(y + bias).sum()


class ColumnAndRow(nn.Module):
    """The least that a C++ compiler is called for: it takes seconds for each kernel."""

    def __init__(self, dtype):
        super().__init__()
        self.up = ColumnParallelLinear(HIDDEN, HIDDEN, dtype=dtype, gather_output=False)
        self.down = RowParallelLinear(HIDDEN, 1, dtype=dtype, input_is_parallel=True)

    def forward(self, ids, labels):
        return self.down(
            torch.tanh(self.up(((ids + labels) / VOCAB).to(self.up.weight.dtype)[:, :1].expand(-1, HIDDEN)))
        ).sum()


MODELS = {
    "column and row": ColumnAndRow,
    "one block": lambda dtype: LanguageModel(dtype, blocks=1),
    "block": lambda dtype: LanguageModel(dtype, smoothing=0.1),
    "sequence parallel": lambda dtype: LanguageModel(dtype, sequence_parallel=True, blocks=1, padding_idx=3),
    "options": Layers,
}


def steps(model, call, count=3):
    """Losses and all gradients of some steps of SGD."""
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(5))
    labels = ids.roll(1, 0).masked_fill(ids == 7, -1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = []
    for _ in range(count):
        optimizer.zero_grad()
        with comm.record() as calls:
            loss = call(ids, labels)
            loss.backward()
        reduce_gradients(model)
        optimizer.step()
        values += [loss.detach(), *(param.grad.clone() for param in model.parameters())]
    return values, calls


def training(name, dtype, backend):
    torch.compiler.reset()
    model = MODELS[name](dtype)
    twin = copy.deepcopy(model)
    eager, calls = steps(model, model)
    compiled, compiled_calls = steps(twin, torch.compile(twin, backend=backend, fullgraph=True))
    assert compiled_calls == calls
    for mine, theirs in zip(compiled, eager, strict=True):
        assert mine.dtype == theirs.dtype
    return max(((a - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in zip(compiled, eager))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["block", "sequence parallel", "options"])
def test_training_is_that_of_eager_code(name):
    assert max(processes(2).run(training, name, torch.float64, "aot_eager", mesh=dict(tp=2))) <= 1e-12


@pytest.mark.slow
def test_low_precision_sums_in_float32():
    errors = processes(2).run(training, "one block", torch.bfloat16, "aot_eager", mesh=dict(tp=2))
    assert errors == [0.0, 0.0]


@pytest.mark.slow  # it calls a C++ compiler
@pytest.mark.parametrize("name", ["column and row", pytest.param("one block", marks=pytest.mark.full)])
def test_inductor(name):
    errors = processes(2).run(training, name, torch.float32, "inductor", mesh=dict(tp=2), timeout=200)
    assert max(errors) <= 1e-5


def wrong_ids():
    torch.compiler.reset()
    embedding = ParallelEmbedding(VOCAB, VOCAB // 2)

    def function(ids, labels):
        return parallel_cross_entropy(embedding(ids), labels, ignore_index=-1)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
    compiled(ids, ids)
    wrong = ids.clone()
    wrong[1, 2] = VOCAB
    with pytest.raises(IndexError, match="ParallelEmbedding: id 32 is outside the vocabulary of 32"):
        compiled(wrong, ids)
    with pytest.raises(IndexError, match="label 32 is outside the vocabulary of 32 and is not ignore_index=-1"):
        compiled(ids, wrong)


def test_ids_are_checked():
    processes(2).run(wrong_ids, mesh=dict(tp=2))
