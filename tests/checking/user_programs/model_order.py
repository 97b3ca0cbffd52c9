"""Order of pieces and factors: fused blocks, merged dims, masks in place, scalars."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.parallel_layers import mappings
from neuronx_dist.parallel_layers.utils import EmbeddingUtility
from neuronx_dist.spmd import I, P, R, S
from tests.checking.user_programs.model_base import (
    BATCH,
    HEADS,
    HIDDEN,
    INNER,
    SEQ,
    TOKENS,
    TP,
    VOCAB,
    Model,
    X,
    model,
    sharded,
    whole,
)


@model(
    mesh=TP,
    inputs=X,
    bugs={"gathered_fused": "gate and up are gathered together, and cut as if all of the gate came first"},
)
class GatheredGate(Model):
    """A gated layer whose halves are gathered for a whole second layer."""

    def build(self):
        self.gate_up = nxd.ColumnParallelLinear(HIDDEN, 2 * INNER, bias=False, gather_output=False, stride=2)
        self.down = nn.Linear(INNER, HIDDEN)

    def forward(self, x):
        if self.bug:
            gate, up = mappings.gather_from_tensor_model_parallel_region(self.gate_up(x)).chunk(2, -1)
            return self.down(F.silu(gate) * up).square().mean()
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(mappings.gather_from_tensor_model_parallel_region(F.silu(gate) * up)).square().mean()


@model(
    mesh={"tp": 4},
    inputs=X,
    bugs={"concatenated_first": "two shards are joined, gathered, and split as if each were whole"},
)
class TwoTowers(Model):
    """Two projections, whose features are joined."""

    def build(self):
        self.left = nxd.ColumnParallelLinear(HIDDEN, HIDDEN, gather_output=False)
        self.right = nxd.ColumnParallelLinear(HIDDEN, HIDDEN, gather_output=False)
        self.out = nn.Linear(2 * HIDDEN, 2)

    def forward(self, x):
        left, right = torch.tanh(self.left(x)), torch.sigmoid(self.right(x))
        if self.bug:
            both = spmd.all_gather(torch.cat([left, right], -1), "tp", src=S(-1), dst=I)
        else:
            both = torch.cat([spmd.all_gather(t, "tp", src=S(-1), dst=I) for t in (left, right)], -1)
        return self.out(both).square().mean()


@model(
    mesh=TP,
    inputs=X,
    bugs={"merged_before_the_gather": "positions and features are merged, and pieces put after one another"},
)
class MergedDims(Model):
    """A classifier over all positions and features at once."""

    def build(self):
        self.up = nxd.ColumnParallelLinear(HIDDEN, HIDDEN, gather_output=False)
        self.out = nn.Linear(SEQ * HIDDEN, 3)

    def forward(self, x):
        h = self.up(x).relu()
        if self.bug:
            h = spmd.all_gather(h.flatten(1), "tp", src=S(1), dst=I)
        else:
            h = spmd.all_gather(h, "tp", src=S(2), dst=I).flatten(1)
        return self.out(h).logsumexp(-1).mean()


@model(
    mesh=TP,
    inputs=TOKENS,
    bugs={
        "embedding_not_masked": "rows looked up for foreign tokens are summed too",
        "logit_not_masked": "the logit picked for a foreign label is summed too",
        "end_inclusive": "the first token after the rank's part is taken for its own",
    },
)
class MegatronLanguageModel(Model):
    """Megatron's embedding and cross entropy, with masks that are written in place."""

    def build(self):
        self.table, self.head = sharded(0, VOCAB, HIDDEN), sharded(0, VOCAB, HIDDEN)

    def forward(self, ids, labels):
        rank, size = comm.rank("tp"), self.table.shape[0]
        start, end = EmbeddingUtility.range_from_per_partition_vocab_size(size, rank, comm.size("tp"))
        outside = (ids < start) | (ids >= end)
        local = ids.clone() - start
        local[outside] = 0
        x = F.embedding(local, self.table)
        if self.bug != "embedding_not_masked":
            x[outside, :] = 0.0
        x = mappings.reduce_from_tensor_model_parallel_region(x)

        logits = F.linear(mappings.copy_to_tensor_model_parallel_region(x), self.head)
        foreign = (labels < start) | ((labels > end) if self.bug == "end_inclusive" else (labels >= end))
        target = (labels.clone() - start).clamp(max=size - 1) if self.bug == "end_inclusive" else labels.clone() - start
        target[foreign] = 0
        flat = logits.view(-1, size)
        picked = flat[torch.arange(flat.shape[0], device=flat.device), target.view(-1)].clone().view_as(target)
        if self.bug != "logit_not_masked":
            picked[foreign] = 0.0
        picked = mappings.reduce_from_tensor_model_parallel_region(picked)
        total = mappings.reduce_from_tensor_model_parallel_region(logits.exp().sum(-1))
        return (total.log() - picked).mean()


@model(
    mesh={"tp": 4},
    inputs=TOKENS,
    bugs={"columns_from_zero": "padded columns are looked for among this rank's own numbers, and never found"},
)
class PaddedVocabulary(Model):
    """Fourteen tokens, padded to sixteen; the logits of the last two are masked."""

    def build(self):
        self.embedding = nxd.ParallelEmbedding(VOCAB, HIDDEN)
        self.head = nxd.ColumnParallelLinear(HIDDEN, VOCAB, bias=False, gather_output=False)

    def forward(self, ids, labels):
        logits = self.head(self.embedding(ids))
        first = 0 if self.bug else comm.rank("tp") * logits.shape[-1]
        column = first + torch.arange(logits.shape[-1], device=logits.device)
        logits = logits.masked_fill(column >= 14, -1e4)
        return nxd.parallel_cross_entropy(logits, labels % 14).mean()


@model(
    mesh=TP,
    inputs=X,
    bugs={
        "scaled_before_the_sum": "the scale is applied to each rank's summand, and gets its part of the gradient",
        "scale_not_copied": "the gradient of the gate is that of this rank's features",
    },
)
class LayerScale(Model):
    """A learned scale of the block's result, and a gate of its inner features that all ranks have."""

    def build(self):
        self.scale, self.gate = whole(HIDDEN), whole(1)
        self.up, self.down = sharded(0, INNER, HIDDEN), sharded(1, HIDDEN, INNER)

    def forward(self, x):
        h = F.gelu(F.linear(mappings.copy_to_tensor_model_parallel_region(x), self.up))
        gate = self.gate
        if self.bug != "scale_not_copied":
            gate = mappings.copy_to_tensor_model_parallel_region(gate)
        y = F.linear(h * torch.tanh(gate), self.down)
        if self.bug == "scaled_before_the_sum":
            return (x + mappings.reduce_from_tensor_model_parallel_region(self.scale * y)).square().mean()
        return (x + self.scale * mappings.reduce_from_tensor_model_parallel_region(y)).square().mean()


@model(
    mesh=TP, inputs=X, bugs={"bias_not_marked": "the bias sees a shard of the sequence, and nobody sums its gradients"}
)
class SequenceBias(Model):
    """A row-parallel product by hand, scattered along the sequence, with a bias after it."""

    def build(self):
        self.up = nxd.ColumnParallelLinear(HIDDEN, INNER, gather_output=False)
        self.down, self.bias = sharded(1, HIDDEN, INNER), whole(HIDDEN)
        if not self.bug:
            self.bias.sequence_parallel_enabled = True

    def forward(self, x):
        y = mappings.reduce_scatter_to_sequence_parallel_region(F.linear(F.gelu(self.up(x)), self.down), 1)
        y = torch.tanh(y + self.bias)
        return mappings.gather_from_sequence_parallel_region(y, 1, to_model_parallel=False).square().mean()


@model(
    mesh=TP,
    inputs=X,
    bugs={
        "mean_of_local_heads": "the mean over heads is that of this rank's",
        "divided_by_local_heads": "the sum over all heads is divided by the number of this rank's",
    },
)
class HeadAverage(Model):
    """The mean of all heads' results, in place of a projection."""

    def build(self):
        self.qkv = nxd.ColumnParallelLinear(HIDDEN, 3 * HEADS * HIDDEN, gather_output=False, stride=3)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, HIDDEN)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)  # [b, heads/tp, s, h]
        if self.bug == "mean_of_local_heads":
            y = spmd.all_reduce(y.mean(1), "tp", src=P, dst=I)
        else:
            y = spmd.all_reduce(y.sum(1), "tp", src=P, dst=I) / (y.shape[1] if self.bug else HEADS)
        return (x + y).square().mean()


@model(
    mesh={"dp": 2, "tp": 2},
    inputs=X,
    bugs={"sum_over_rows_of_a_rank": "the batch statistics are those of this rank's rows"},
)
class BatchCentred(Model):
    """Inner features are centred over the global batch."""

    def build(self):
        self.up = nxd.ColumnParallelLinear(HIDDEN, INNER, gather_output=False)
        self.down = nxd.RowParallelLinear(INNER, HIDDEN, input_is_parallel=True)

    def forward(self, x):
        h = self.up(x)
        total = h.sum((0, 1))
        if self.bug:
            centre = total / (h.shape[0] * h.shape[1])
        else:
            centre = spmd.all_reduce(total, "dp", src=P, dst=R) / (BATCH * SEQ)
        return (x + self.down(torch.tanh(h - centre))).square().sum() / x.shape[0]
