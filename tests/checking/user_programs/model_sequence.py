"""Sharded sequences: Megatron's sequence parallelism over tp, context parallelism over cp."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.parallel_layers import mappings
from neuronx_dist.spmd import I, P, R, S, V
from tests.checking.user_programs.model_base import BATCH, HEADS, HIDDEN, INNER, SEQ, Model, X, model, sharded, whole

TP, CP = {"tp": 2}, {"cp": 2}
ON_CP = {"x": {"cp": S(1)}}
SP = dict(sequence_parallel_enabled=True, sequence_dimension=1)


@model(
    mesh={"dp": 2, "tp": 2},
    inputs=X,
    bugs={
        "norm_not_marked": "the norm sees a shard of the sequence, and nobody sums its gradients",
        "gradient_summed_at_the_end": "equal gradients of the last gather are summed over ranks",
    },
)
class SequenceParallelBlock(Model):
    """norm, column, row and residual on [b, s/tp, h], with the package's layers."""

    def build(self):
        norm = nn.LayerNorm(HIDDEN) if self.bug == "norm_not_marked" else None
        self.norm = norm or nxd.LayerNorm(HIDDEN, sequence_parallel_enabled=True)
        self.up = nxd.ColumnParallelLinear(HIDDEN, INNER, gather_output=False, **SP)
        self.down = nxd.RowParallelLinear(INNER, HIDDEN, input_is_parallel=True, bias=False, **SP)
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, x):
        x = mappings.scatter_to_sequence_parallel_region(x, 1)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        twice = self.bug == "gradient_summed_at_the_end"
        x = mappings.gather_from_sequence_parallel_region(x, 1, to_model_parallel=twice)
        return self.head(x).square().sum() / x.shape[0]


@model(
    mesh=TP,
    inputs=X,
    bugs={
        "rows_scattered": "the sum is scattered along the batch, where the input was gathered along the sequence",
        "gradient_not_summed": "the gather before a column-parallel product has no reduce-scatter in backward",
    },
)
class SequenceParallelByHand(Model):
    """The same with regions; the loss is a sum over shards of the sequence."""

    def build(self):
        self.norm = nxd.RMSNorm(HIDDEN, sequence_parallel_enabled=True)
        self.up, self.down = sharded(0, INNER, HIDDEN), sharded(1, HIDDEN, INNER)

    def forward(self, x):
        x = mappings.scatter_to_sequence_parallel_region(x, 1)
        h = self.norm(x)
        h = mappings.gather_from_sequence_parallel_region(h, 1, to_model_parallel=self.bug != "gradient_not_summed")
        h = F.linear(F.relu(F.linear(h, self.up)), self.down)
        h = mappings.reduce_scatter_to_sequence_parallel_region(h, 0 if self.bug == "rows_scattered" else 1)
        if self.bug == "rows_scattered":
            h = h.reshape(x.shape)
        loss = (x + h).square().sum() / (BATCH * SEQ)
        return spmd.all_reduce(loss, "tp", src=P, dst=I)


@model(mesh=TP, inputs=X, bugs={"first_positions": "each rank adds the embeddings of the first positions"})
class LearnedPositions(Model):
    """A table of positions that all ranks hold, of which a rank adds its part."""

    def build(self):
        self.positions = whole(SEQ, HIDDEN)
        self.up = nxd.ColumnParallelLinear(HIDDEN, INNER, gather_output=False, **SP)
        self.down = nxd.RowParallelLinear(INNER, HIDDEN, input_is_parallel=True, **SP)

    def forward(self, x):
        x = mappings.scatter_to_sequence_parallel_region(x, 1)
        if self.bug:
            positions = spmd.convert(self.positions, "tp", src=I, dst=R)[: x.shape[1]]
        else:
            positions = mappings.scatter_to_sequence_parallel_region(self.positions, 0)
        x = self.down(torch.sigmoid(self.up(x + positions)))
        return mappings.gather_from_sequence_parallel_region(x, 1, to_model_parallel=False).square().mean()


@model(
    mesh=TP,
    inputs=X,
    bugs={
        "mean_of_a_shard": "each rank classifies the mean of its part of the sequence",
        "means_summed": "the means of the parts are summed",
        "pieces_summed": "the parts of the sequence are added up, position by position",
    },
)
class MeanPooling(Model):
    """A classifier on the mean over a sequence that is sharded before it."""

    def build(self):
        self.up = nxd.ColumnParallelLinear(HIDDEN, INNER, gather_output=False)
        self.down = nxd.RowParallelLinear(INNER, HIDDEN, input_is_parallel=True, bias=False, **SP)
        self.head = nn.Linear(HIDDEN, 3)

    def forward(self, x):
        x = self.down(F.gelu(self.up(x)))  # [b, s/tp, h]
        if self.bug == "mean_of_a_shard":
            pooled = x.mean(1)
        elif self.bug == "pieces_summed":
            pooled = spmd.all_reduce(x, "tp", src=V, dst=I).mean(1)
        elif self.bug == "means_summed":
            pooled = spmd.all_reduce(x.mean(1), "tp", src=V, dst=I)
        else:
            pooled = spmd.all_reduce(x.sum(1), "tp", src=P, dst=I) / SEQ
        return self.head(pooled).logsumexp(-1).mean()


@model(mesh=TP, inputs=X, bugs={"first_piece": "each rank keeps the first piece of what it gathered"})
class GatherThenSlice(Model):
    """Normalises over the sequence, for which it is whole, and goes on with the own piece."""

    def build(self):
        self.scale = whole(HIDDEN)

    def forward(self, x):
        x = mappings.scatter_to_sequence_parallel_region(x * self.scale, 1)
        full = spmd.all_gather(x.tanh(), "tp", src=S(1), dst=R)
        full = full / full.square().sum(1, keepdim=True).sqrt()
        rank = 0 if self.bug else comm.rank("tp")
        piece = full.narrow(1, rank * x.shape[1], x.shape[1])
        x = spmd.all_gather(x + piece, "tp", src=S(1), dst=I)
        return x.square().mean()


class Attention(Model):
    """Weights of an attention whose sequence is sharded over cp."""

    def build(self):
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def heads(self, x):
        """[3, b, heads, s/cp, d]"""
        return self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)

    def loss(self, x, y):
        """The sum over this rank's tokens, divided by the number of tokens on a rank."""
        y = x + self.out(y.transpose(1, 2).flatten(2))
        return y.square().sum() / (y.shape[0] * y.shape[1])


@model(
    mesh=CP,
    inputs=X,
    in_types=ON_CP,
    bugs={
        "mask_without_offset": "the causal mask takes the queries for the first ones of the sequence",
        "is_causal": "is_causal aligns the mask at the first query of the rank",
        "keys_not_gathered": "each rank attends to its own part of the sequence",
        "gradient_of_own_queries": "the gather of keys and values has no reduce-scatter in backward",
    },
)
class GatheredKeys(Attention):
    """Context parallelism as Llama 3's: keys and values are gathered, queries stay sharded."""

    def forward(self, x):
        q, k, v = self.heads(x)
        if self.bug != "keys_not_gathered":
            dst = I if self.bug == "gradient_of_own_queries" else R
            k, v = (spmd.all_gather(t, "cp", src=S(2), dst=dst) for t in (k, v))
        if self.bug in ("is_causal", "keys_not_gathered"):
            return self.loss(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))
        first = 0 if self.bug == "mask_without_offset" else comm.rank("cp") * x.shape[1]
        queries = first + torch.arange(x.shape[1], device=x.device)
        mask = queries[:, None] >= torch.arange(k.shape[2], device=x.device)[None, :]
        return self.loss(x, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


@model(mesh=CP, inputs=X, in_types=ON_CP, bugs={"local_softmax": "each rank normalises over its own keys"})
class ShardedKeys(Attention):
    """Queries are gathered, keys stay: the softmax runs over a sharded dim, by hand."""

    def forward(self, x):
        q, k, v = self.heads(x)
        q = spmd.all_gather(q, "cp", src=S(2), dst=R)
        scores = q @ k.transpose(-1, -2) / k.shape[-1] ** 0.5  # [b, heads, s, s/cp]
        if self.bug == "local_softmax":
            return self.loss(x, spmd.reduce_scatter(scores.softmax(-1) @ v, "cp", src=P, dst=S(2)))
        top = comm.all_reduce(scores.detach().amax(-1, keepdim=True), "cp", op="max")
        weights = (scores - top).exp()
        total = spmd.reduce_scatter(weights.sum(-1, keepdim=True), "cp", src=P, dst=S(2))
        return self.loss(x, spmd.reduce_scatter(weights @ v, "cp", src=P, dst=S(2)) / total)


class Rotate(torch.autograd.Function):
    """Gives the next rank of the ring what this one has."""

    @staticmethod
    def forward(ctx, x, backward_too):
        ctx.backward_too, size = backward_too, comm.size("cp")
        return comm.permute(x.contiguous(), "cp", [(i, (i + 1) % size) for i in range(size)])

    @staticmethod
    def backward(ctx, grad):
        size, step = comm.size("cp"), -1 if ctx.backward_too else 1
        return comm.permute(grad.contiguous(), "cp", [(i, (i + step) % size) for i in range(size)]), None


@model(
    mesh={"cp": 4},
    inputs=X,
    in_types=ON_CP,
    bugs={
        "gradient_goes_on": "gradients go around the ring in the direction of the keys",
        "one_turn_too_few": "the keys of one rank are never seen",
    },
)
class RingAttention(Attention):
    """Keys and values go around, the softmax is put together from unnormalised parts."""

    def forward(self, x):
        q, k, v = self.heads(x)
        numerator, denominator = 0, 0
        turns = comm.size("cp")
        if self.bug == "one_turn_too_few":
            turns = max(1, turns - 1)
        for turn in range(turns):
            weights = (q @ k.transpose(-1, -2) / 4).exp()
            numerator, denominator = numerator + weights @ v, denominator + weights.sum(-1, keepdim=True)
            if turn + 1 < turns:
                k, v = (Rotate.apply(t, self.bug != "gradient_goes_on") for t in (k, v))
        return self.loss(x, numerator / denominator)


@model(
    mesh={"cp": 2, "dp": 2},
    inputs=X,
    in_types=ON_CP,
    bugs={
        "heads_not_sent_back": "the result keeps the whole sequence of local heads, and is viewed as if it did not",
        "positions_from_zero": "rotary angles are those of the first positions on every rank",
        "whole_sequences_before": "positions are counted as if each rank before had a whole sequence",
    },
)
class Ulysses(Attention):
    """Rotary positions on the sharded sequence, then heads against sequence by all_to_all."""

    def forward(self, x):
        q, k, v = self.heads(x)
        length = SEQ if self.bug == "whole_sequences_before" else x.shape[1]
        first = 0 if self.bug == "positions_from_zero" else comm.rank("cp") * length
        angle = (first + torch.arange(x.shape[1], device=x.device)).to(x)[:, None]
        q, k = (
            torch.cat(
                [
                    t[..., :1] * angle.cos() - t[..., 1:] * angle.sin(),
                    t[..., :1] * angle.sin() + t[..., 1:] * angle.cos(),
                ],
                -1,
            )
            for t in (q, k)
        )
        q, k, v = (spmd.all_to_all(t, "cp", src=S(2), dst=S(1)) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.bug == "heads_not_sent_back":
            y = y.reshape(x.shape[0], HEADS, x.shape[1], -1)
        else:
            y = spmd.all_to_all(y, "cp", src=S(1), dst=S(2))
        return self.loss(x, y)


@model(
    mesh=CP,
    inputs=X,
    in_types=ON_CP,
    bugs={
        "shifted": "windows are shifted within the rank's part: the last one wraps around there",
        "number_of_windows": "the view has the number of windows of the whole sequence, not their size",
    },
)
class LocalWindows(Attention):
    """Attention within windows of two tokens, which no rank shares."""

    def forward(self, x):
        y = torch.roll(x, 1, dims=1) if self.bug == "shifted" else x
        windows = (SEQ // 2, -1) if self.bug == "number_of_windows" else (-1, 2)
        q, k, v = self.qkv(y.unflatten(1, windows)).chunk(3, -1)  # [b, windows, 2, h]
        y = ((q @ k.transpose(-1, -2)).softmax(-1) @ v).flatten(1, 2)
        return (x + self.out(y)).square().sum() / (x.shape[0] * x.shape[1])


@model(
    mesh={"cp": 4},
    inputs=X,
    in_types=ON_CP,
    bugs={"no_halo": "the first tokens of a rank see zeros, where another rank has their past"},
)
class ShortConvolution(Model):
    """Mamba's causal depthwise convolution over a sharded sequence, with a halo from the rank before."""

    def build(self):
        self.kernel = whole(HIDDEN, 1, 2)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        x = self.out(x).transpose(1, 2)  # [b, h, s/cp]
        if self.bug:
            past = torch.zeros_like(x[..., :1])
        else:
            lasts = spmd.all_gather(x[..., -1:], "cp", src=V, dst=R)  # [cp, b, h, 1]
            past = torch.cat([torch.zeros_like(lasts[:1]), lasts])[comm.rank("cp")]
        y = F.conv1d(torch.cat([past, x], -1), self.kernel, groups=HIDDEN)
        return y.square().sum() / (y.shape[0] * y.shape[2])


@model(mesh=CP, inputs=X, in_types=ON_CP, bugs={"no_carry": "the state of each rank begins with zero"})
class LinearAttention(Attention):
    """A running sum of keys times values, with the sums of the ranks before."""

    def forward(self, x):
        q, k, v = self.heads(x)
        states = torch.cumsum(k.unsqueeze(-1) * v.unsqueeze(-2), dim=2)  # [b, heads, s/cp, d, d]
        if not self.bug:
            totals = spmd.all_gather(states[:, :, -1], "cp", src=V, dst=R)
            before = torch.cumsum(totals, 0) - totals
            states = states + before[comm.rank("cp")].unsqueeze(2)
        return self.loss(x, torch.einsum("bnsd,bnsde->bnse", q, states) / SEQ)
