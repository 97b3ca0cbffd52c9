"""Tensor-parallel feed-forward blocks and attention, as Megatron's users write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.parallel_layers import mappings
from neuronx_dist.parallel_layers.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_size
from tests.checking.user_programs.model_base import (
    HEADS,
    HIDDEN,
    INNER,
    SEQ,
    TP,
    Model,
    X,
    model,
    sharded,
    whole,
)


@model(
    mesh=TP,
    inputs=X,
    bugs={
        "input_not_copied": "the gradient of the norm is that of this rank's columns",
        "bias_on_every_rank": "the bias is added before the sum",
        "not_reduced": "the partial products are not summed",
    },
)
class MegatronMLP(Model):
    """x + down(gelu(up(norm(x)))) with Megatron's regions."""

    def build(self):
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down, self.bias = sharded(0, INNER, HIDDEN), sharded(1, HIDDEN, INNER), whole(HIDDEN)

    def forward(self, x):
        h = self.norm(x)
        if self.bug != "input_not_copied":
            h = mappings.copy_to_tensor_model_parallel_region(h)
        h = F.gelu(F.linear(h, self.up))
        if self.bug == "bias_on_every_rank":
            return (
                (x + mappings.reduce_from_tensor_model_parallel_region(F.linear(h, self.down, self.bias)))
                .square()
                .mean()
            )
        y = F.linear(h, self.down)
        if self.bug != "not_reduced":
            y = mappings.reduce_from_tensor_model_parallel_region(y)
        return (x + y + self.bias).square().mean()


@model(mesh={"tp": 4}, inputs=X, bugs={"residual_on_every_rank": "the residual is summed, once for each rank"})
class TwoLayerMLP(Model):
    """The package's layers; the output of the first is reduced by hand, together with a skip connection."""

    def build(self):
        self.inp = nn.Linear(HIDDEN, HIDDEN)
        self.up = nxd.ColumnParallelLinear(HIDDEN, INNER, gather_output=False)
        self.down = nxd.RowParallelLinear(INNER, HIDDEN, input_is_parallel=True, bias=False, reduce_output=False)

    def forward(self, x):
        x = self.inp(x)
        y = self.down(torch.tanh(self.up(x)))
        x = spmd.convert(x, "tp", src=spmd.I, dst=spmd.R)
        share = x if self.bug == "residual_on_every_rank" else x / get_tensor_model_parallel_size()
        return spmd.all_reduce(y + share, "tp", src=spmd.P, dst=spmd.I).square().mean()


@model(mesh=TP, inputs=X, bugs={"twice": "a sum that the row layer has done is done again"})
class ReducedTwice(Model):
    """A row layer whose result is already reduced; the script was ported from one where it was not."""

    def build(self):
        self.up = nxd.ColumnParallelLinear(HIDDEN, INNER, gather_output=False)
        self.down = nxd.RowParallelLinear(INNER, HIDDEN, input_is_parallel=True)

    def forward(self, x):
        y = self.down(F.relu(self.up(x)).square())
        if self.bug:
            y = mappings.reduce_from_tensor_model_parallel_region(y)
        return (x - y).square().mean()


@model(
    mesh=TP,
    inputs=X,
    bugs={
        "pieces_interleaved": "gathered features are put together in the wrong order",
        "gradient_summed": "what follows the gather is the same on all ranks, and its gradient is summed",
    },
)
class GatheredMLP(Model):
    """Column layers only: the inner activations are gathered by hand before a whole second layer."""

    def build(self):
        self.up = nxd.ColumnParallelLinear(HIDDEN, INNER, gather_output=False)
        self.down = nn.Linear(INNER, HIDDEN)

    def forward(self, x):
        h = F.silu(self.up(x))
        if self.bug == "pieces_interleaved":
            h = spmd.all_gather(h, "tp", src=spmd.V, dst=spmd.I)  # [tp, b, s, i/tp]
            h = h.permute(1, 2, 3, 0).reshape(*x.shape[:2], -1)
        elif self.bug == "gradient_summed":
            h = mappings.all_gather_last_dim_from_tensor_parallel_region(h)
        else:
            h = spmd.all_gather(h, "tp", src=spmd.V, dst=spmd.I).permute(1, 2, 0, 3).reshape(*x.shape[:2], -1)
        return self.down(h).square().mean()


@model(mesh=TP, inputs=X, bugs={"cut_as_one_block": "gate and up are cut as one block: one rank has all of the gate"})
class FusedGate(Model):
    """Gate and up in one weight; this rank holds its part of both."""

    def build(self):
        stride = 1 if self.bug == "cut_as_one_block" else 2
        self.gate_up = nxd.ColumnParallelLinear(HIDDEN, 2 * INNER, bias=False, gather_output=False, stride=stride)
        self.down = nxd.RowParallelLinear(INNER, HIDDEN, bias=False, input_is_parallel=True)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return (x + self.down(F.silu(gate) * up)).square().mean()


@model(mesh=TP, inputs=X, bugs={"summed_in_the_loop": "the running sum is reduced in every turn"})
class ChunkedMLP(Model):
    """The inner dim in blocks, so that the activations of one block are held at a time."""

    def build(self):
        self.up, self.down = sharded(0, INNER, HIDDEN), sharded(1, HIDDEN, INNER)
        self.inp = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        x = self.inp(x)
        x_r, y = mappings.copy_to_tensor_model_parallel_region(x), 0
        for start in range(0, self.up.shape[0], 4):
            h = F.gelu(F.linear(x_r, self.up[start : start + 4]))
            y = y + F.linear(h, self.down[:, start : start + 4])
            if self.bug == "summed_in_the_loop":
                y = mappings.reduce_from_tensor_model_parallel_region(y)
        if not self.bug:
            y = mappings.reduce_from_tensor_model_parallel_region(y)
        return (x + y).square().mean()


@model(mesh={"tp": 2, "dp": 2}, inputs=X, bugs={"first_piece_everywhere": "each rank takes the features of the first"})
class SplitInput(Model):
    """A row-parallel layer by hand whose input is whole: each rank takes its own features."""

    def build(self):
        self.inp, self.weight = nn.Linear(HIDDEN, INNER), sharded(1, HIDDEN, INNER)

    def forward(self, x):
        x = mappings.copy_to_tensor_model_parallel_region(torch.tanh(self.inp(x)))
        rank = 0 if self.bug == "first_piece_everywhere" else get_tensor_model_parallel_rank()
        x = x.chunk(get_tensor_model_parallel_size(), dim=-1)[rank]
        return mappings.reduce_from_tensor_model_parallel_region(F.linear(x, self.weight)).square().mean()


def attend(q, k, v):
    """[b, heads, s, d]"""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@model(
    mesh=TP,
    inputs=X,
    bugs={
        "cut_as_one_block": "q, k and v are cut as one block",
        "heads_of_all_ranks": "a view with the heads of all ranks",
    },
)
class FusedQKV(Model):
    """One weight [3 h, h]: q, k and v one after the other, each cut by heads."""

    def build(self):
        self.qkv = sharded(0, 3 * HIDDEN, HIDDEN, stride=1 if self.bug == "cut_as_one_block" else 3)
        self.out = nxd.RowParallelLinear(HIDDEN, HIDDEN, input_is_parallel=True)

    def forward(self, x):
        heads = HEADS // comm.size("tp")
        qkv = F.linear(mappings.copy_to_tensor_model_parallel_region(x), self.qkv)
        if self.bug == "heads_of_all_ranks":
            q, k, v = qkv.view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = qkv.view(*x.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
        return (x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))).square().mean()


@model(
    mesh={"tp": 4},
    inputs=X,
    bugs={"heads_folded_into_the_sequence": "heads and positions are exchanged before they are merged"},
)
class PerHeadQKV(Model):
    """One weight, in which q, k and v of a head stand together (Megatron's own checkpoint format)."""

    def build(self):
        self.qkv = nxd.ColumnParallelLinear(HIDDEN, 3 * HIDDEN, gather_output=False)
        self.out = nxd.RowParallelLinear(HIDDEN, HIDDEN, input_is_parallel=True)

    def forward(self, x):
        b, s, _ = x.shape
        qkv, d = self.qkv(x), HIDDEN // HEADS
        q, k, v = qkv.view(b, s, -1, 3, d).permute(3, 0, 2, 1, 4)
        y = attend(q, k, v).transpose(1, 2)
        if self.bug == "heads_folded_into_the_sequence":
            y = y.transpose(1, 2)
        return (x + self.out(y.reshape(b, s, -1))).square().mean()


@model(
    mesh=TP,
    inputs=X,
    bugs={"tiled": "kv heads are tiled: with one of them on a rank it is another one for a query head"},
)
class GroupedQuery(Model):
    """Four query heads, two key/value heads, all in the package's layers."""

    def build(self):
        d = HIDDEN // HEADS
        self.q = nxd.ColumnParallelLinear(HIDDEN, HEADS * d, bias=False, gather_output=False)
        self.k = nxd.ColumnParallelLinear(HIDDEN, 2 * d, bias=False, gather_output=False)
        self.v = nxd.ColumnParallelLinear(HIDDEN, 2 * d, bias=False, gather_output=False)
        self.o = nxd.RowParallelLinear(HEADS * d, HIDDEN, bias=False, input_is_parallel=True)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.bug == "tiled":
            k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
        else:
            k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        return (x + self.o(attend(q, k, v).transpose(1, 2).flatten(2))).square().mean()


@model(mesh=TP, inputs=X, bugs={"kv_not_copied": "the gradient of the shared kv head is that of the local query heads"})
class MultiQuery(Model):
    """One key/value head that every rank holds; the query heads are sharded."""

    def build(self):
        d = HIDDEN // HEADS
        self.q = nxd.ColumnParallelLinear(HIDDEN, HIDDEN, bias=False, gather_output=False)
        self.kv = nn.Linear(HIDDEN, 2 * d, bias=False)
        self.o = nxd.RowParallelLinear(HIDDEN, HIDDEN, bias=False, input_is_parallel=True)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
        kv = self.kv(x)
        if self.bug != "kv_not_copied":
            kv = mappings.copy_to_tensor_model_parallel_region(kv)
        k, v = kv.unsqueeze(1).chunk(2, dim=-1)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return (x + self.o((scores @ v).transpose(1, 2).flatten(2))).square().mean()


@model(mesh={"tp": 4}, inputs=X, bugs={"round_robin": "kv heads are dealt to ranks in turn"})
class KvHeadOfRank(Model):
    """Fewer key/value heads than ranks: all are computed everywhere, and a rank picks the one of its query head."""

    def build(self):
        d = HIDDEN // HEADS
        self.q = nxd.ColumnParallelLinear(HIDDEN, HIDDEN, bias=False, gather_output=False)
        self.kv = nn.Linear(HIDDEN, 2 * 2 * d, bias=False)
        self.o = nxd.RowParallelLinear(HIDDEN, HIDDEN, bias=False, input_is_parallel=True)

    def forward(self, x):
        rank, tp, d = get_tensor_model_parallel_rank(), get_tensor_model_parallel_size(), HIDDEN // HEADS
        q = self.q(x).unflatten(-1, (-1, d))
        kv = mappings.copy_to_tensor_model_parallel_region(self.kv(x)).unflatten(-1, (2, 2, d))
        local = torch.arange(HEADS // tp, device=x.device) + rank * (HEADS // tp)
        heads = local % 2 if self.bug == "round_robin" and tp > 1 else local // 2
        k, v = kv[..., heads, 0, :], kv[..., heads, 1, :]
        y = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2).flatten(2)
        return (x + self.o(y)).square().mean()


@model(mesh=TP, inputs=X, bugs={"head_dim_cut": "weights are cut within heads: scores are partial sums"})
class EinsumAttention(Model):
    """Weights with a dim for heads; every product is an einsum."""

    def build(self):
        d = HIDDEN // HEADS
        cut = 2 if self.bug == "head_dim_cut" else 1
        self.qkv = sharded(cut + 1, 3, HIDDEN, HEADS, d)
        self.out = sharded(cut - 1, HEADS, d, HIDDEN)

    def forward(self, x):
        x_r = spmd.convert(x, "tp", src=spmd.I, dst=spmd.R)
        q, k, v = torch.einsum("bsh,ehnd->ebnsd", x_r, self.qkv)
        p = torch.einsum("bnqd,bnkd->bnqk", q, k).softmax(-1)
        y = torch.einsum("bnqk,bnkd,ndh->bqh", p, v, self.out)
        return (x + spmd.all_reduce(y, "tp", dst=spmd.I)).square().mean()


@model(mesh=TP, inputs=X, bugs={"not_reduced": "the partial products are not summed"})
class VmapOverHeads(Model):
    """The attention of one head, vmapped over local heads."""

    def build(self):
        self.qkv = nxd.ColumnParallelLinear(HIDDEN, 3 * HIDDEN, gather_output=False)
        self.out = sharded(1, HIDDEN, HIDDEN)

    def forward(self, x):
        def head(qkv):  # [b, s, 3 d]
            q, k, v = qkv.chunk(3, -1)
            return torch.softmax(q @ k.transpose(-1, -2), -1) @ v

        heads = self.qkv(x).unflatten(-1, (-1, 3 * HIDDEN // HEADS))
        y = F.linear(torch.vmap(head, in_dims=2, out_dims=2)(heads).flatten(2), self.out)
        if self.bug != "not_reduced":
            y = spmd.all_reduce(y, "tp", src=spmd.P, dst=spmd.I)
        return (x + y).square().mean()


@model(mesh=TP, inputs=X, bugs={"slopes_of_the_first": "each rank takes the slopes of the first heads"})
class AlibiBuffer(Model):
    """A buffer with a slope for each head of the model; a rank takes those of its heads."""

    def build(self):
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, HEADS + 1, device="cpu"))
        self.qkv = nxd.ColumnParallelLinear(HIDDEN, 3 * HIDDEN, gather_output=False, stride=3)
        self.out = nxd.RowParallelLinear(HIDDEN, HIDDEN, input_is_parallel=True)

    def forward(self, x):
        heads = HEADS // comm.size("tp")
        q, k, v = self.qkv(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        first = 0 if self.bug == "slopes_of_the_first" else comm.rank("tp") * heads
        slopes = self.slopes[first : first + heads].to(x)
        position = torch.arange(x.shape[1], device=x.device)
        bias = slopes[:, None, None] * (position[None, :] - position[:, None]).to(x)
        y = ((q @ k.transpose(-1, -2)) + bias).softmax(-1) @ v
        return (x + self.out(y.transpose(1, 2).flatten(2))).square().mean()


@model(
    mesh=TP,
    inputs=X,
    bugs={"gradient_not_gathered": "each rank has the gradient of its columns of a table that all hold"},
)
class RelativeBias(Model):
    """T5's table of biases by distance and head, which all ranks hold; a rank uses the columns of its heads."""

    def build(self):
        self.table = whole(SEQ, HEADS)
        self.qkv = nxd.ColumnParallelLinear(HIDDEN, 3 * HIDDEN, gather_output=False, stride=3)
        self.out = nxd.RowParallelLinear(HIDDEN, HIDDEN, input_is_parallel=True)

    def forward(self, x):
        heads, rank = HEADS // comm.size("tp"), comm.rank("tp")
        q, k, v = self.qkv(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        if self.bug == "gradient_not_gathered":
            table = self.table.narrow(1, rank * heads, heads)
        else:
            table = spmd.convert(self.table, "tp", src=spmd.I, dst=spmd.S(1))
        position = torch.arange(SEQ, device=x.device)
        bias = table[(position[:, None] - position[None, :]).abs()].permute(2, 0, 1)
        y = ((q @ k.transpose(-1, -2)) + bias).softmax(-1) @ v
        return (x + self.out(y.transpose(1, 2).flatten(2))).square().mean()


@model(mesh=TP, inputs=X, bugs={"first_chunk_not_reduced": "the branch of the first chunk has no sum"})
class Cached(Model):
    """The sequence in chunks, keys and values of earlier ones in a cache."""

    def build(self):
        self.qkv = nxd.ColumnParallelLinear(HIDDEN, 3 * HIDDEN, gather_output=False, stride=3)
        self.out = nxd.RowParallelLinear(HIDDEN, HIDDEN, input_is_parallel=True)

    def forward(self, x):
        keys, values, results = [], [], []
        for part in x.split(4, dim=1):
            q, k, v = self.qkv(part).unflatten(-1, (3, HEADS // comm.size("tp"), -1)).permute(2, 0, 3, 1, 4)
            keys.append(k)
            values.append(v)
            y = (q @ torch.cat(keys, 2).transpose(-1, -2)).softmax(-1) @ torch.cat(values, 2)
            y = y.transpose(1, 2).flatten(2)
            if self.bug == "first_chunk_not_reduced" and len(keys) == 1:
                results.append(F.linear(y, self.out.weight, self.out.bias))
            else:
                results.append(self.out(y))
        return torch.cat(results, 1).square().mean()
