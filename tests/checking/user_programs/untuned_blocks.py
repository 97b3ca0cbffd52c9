"""Layers and blocks under tensor parallelism. No rule was written or tuned for these programs."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.parallel_layers import mappings
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
from tests.checking.user_programs.support import integers, normal

SP = dict(sequence_parallel_enabled=True, sequence_dimension=1)


def column(inputs, outputs, **options):
    return nxd.ColumnParallelLinear(inputs, outputs, bias=False, gather_output=False, **options)


def row(inputs, outputs, **options):
    return nxd.RowParallelLinear(inputs, outputs, bias=False, input_is_parallel=True, **options)


@model(
    mesh=TP,
    inputs=X,
    bugs={
        "attention_reduced_alone": "the attention's output is reduced, and reduced again together with the MLP's",
        "norm_after_the_copy": "the norm works on the copied input: its weights get this rank's part of the gradient",
    },
)
class ParallelResidual(Model):
    """GPT-J: attention and MLP side by side, with one norm and one reduction."""

    def build(self):
        self.norm = nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v = (sharded(0, HIDDEN, HIDDEN) for _ in range(3))
        self.o, self.up, self.down = sharded(1, HIDDEN, HIDDEN), sharded(0, INNER, HIDDEN), sharded(1, HIDDEN, INNER)

    def forward(self, x):
        if self.bug == "norm_after_the_copy":
            h = self.norm(mappings.copy_to_tensor_model_parallel_region(x))
        else:
            h = mappings.copy_to_tensor_model_parallel_region(self.norm(x))
        b, s, _ = h.shape
        heads = HEADS // comm.size("tp")
        q, k, v = (F.linear(h, w).view(b, s, heads, -1).transpose(1, 2) for w in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1)
        attended = F.linear(attended, self.o)
        if self.bug == "attention_reduced_alone":
            attended = mappings.reduce_from_tensor_model_parallel_region(attended)
        fed = F.linear(F.gelu(F.linear(h, self.up)), self.down)
        return (x + mappings.reduce_from_tensor_model_parallel_region(attended + fed)).square().mean()


def rotate(x, angle):
    first, second = x.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1)


@model(
    mesh={"dp": 2, "tp": 2},
    inputs=X,
    bugs={
        "scaled_by_local_width": "the scale of the scores is the root of this rank's width",
        "width_over_all_heads": "the width of a head is this rank's width divided by the heads of all ranks",
    },
)
class RotaryGroupedQuery(Model):
    """Grouped queries with rotary positions, and muP's scale of the scores: 1 / width."""

    def build(self):
        self.q, self.k, self.v = column(HIDDEN, 16), column(HIDDEN, 8), column(HIDDEN, 8)
        self.o = row(16, HIDDEN)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        width = q.shape[-1] if self.bug == "scaled_by_local_width" else 16
        heads = HEADS if self.bug == "width_over_all_heads" else HEADS // comm.size("tp")
        dim = q.shape[-1] // heads
        q, k, v = (t.unflatten(-1, (-1, dim)).transpose(1, 2) for t in (q, k, v))  # [b, heads, s, dim]
        frequency = 0.1 ** torch.arange(dim // 2, device=x.device, dtype=x.dtype)
        angle = torch.arange(SEQ, device=x.device, dtype=x.dtype)[:, None] * frequency
        q, k = rotate(q, angle), rotate(k, angle)
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2)) * (4 / math.sqrt(width))
        scores = scores.masked_fill(torch.ones(SEQ, SEQ, dtype=torch.bool, device=x.device).triu(1), float("-inf"))
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return (x + self.o(y)).square().mean()


@model(
    mesh=TP,
    inputs=X,
    bugs={"adapter_not_marked": "the adapter works on a part of the sequence, and nobody sums its gradients"},
)
class AdapterOnSequenceShards(Model):
    """A frozen sequence-parallel block with a bottleneck adapter behind it, which all ranks have whole."""

    def build(self):
        self.up, self.down = column(HIDDEN, INNER, **SP), row(INNER, HIDDEN, **SP)
        for p in (*self.up.parameters(), *self.down.parameters()):
            p.requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(HIDDEN, 2), nn.GELU(), nn.Linear(2, HIDDEN))
        if not self.bug:
            for p in self.adapter.parameters():
                p.sequence_parallel_enabled = True

    def forward(self, x):
        x = mappings.scatter_to_sequence_parallel_region(x, 1)
        y = self.down(F.silu(self.up(x)))
        y = x + y + self.adapter(y)
        return mappings.gather_from_sequence_parallel_region(y, 1, to_model_parallel=False).square().mean()


@model(
    mesh=TP,
    inputs=X,
    bugs={"sliced_by_hand": "each rank cuts its heads out of the prefix: no rank gets the gradient of the others'"},
)
class PrefixTuning(Model):
    """Learned keys and values before the others; every rank holds the whole prefix."""

    def build(self):
        self.q, self.k, self.v = (column(HIDDEN, HIDDEN) for _ in range(3))
        self.o = row(HIDDEN, HIDDEN)
        self.prefix_k, self.prefix_v = whole(3, HIDDEN), whole(3, HIDDEN)

    def own(self, prefix):
        if self.bug:
            width = HIDDEN // comm.size("tp")
            return prefix[:, comm.rank("tp") * width : (comm.rank("tp") + 1) * width]
        return spmd.convert(prefix, "tp", src=I, dst=S(-1))

    def forward(self, x):
        b, heads = x.shape[0], HEADS // comm.size("tp")
        k = torch.cat([self.own(self.prefix_k).expand(b, -1, -1), self.k(x)], 1)
        v = torch.cat([self.own(self.prefix_v).expand(b, -1, -1), self.v(x)], 1)
        q, k, v = (t.view(b, t.shape[1], heads, -1).transpose(1, 2) for t in (self.q(x), k, v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return (x + self.o(y)).square().mean()


@model(
    mesh={"tp": 4},
    inputs=X,
    bugs={
        "divided_by_local_width": "the sum of all squares is divided by this rank's number of channels",
        "weight_of_the_first": "each rank scales its channels by the norm's first weights",
    },
)
class GatedNorm(Model):
    """Mamba-2's end: a causal convolution per channel, a gate, and an RMS norm over all channels."""

    def build(self):
        self.inner = column(HIDDEN, 2 * INNER, stride=2)
        self.taps, self.weight = sharded(0, INNER, 1, 3), sharded(0, INNER)
        self.out = row(INNER, HIDDEN)

    def forward(self, x):
        h, gate = self.inner(x).chunk(2, -1)
        h = F.conv1d(F.pad(h.transpose(1, 2), (2, 0)), self.taps, groups=h.shape[-1]).transpose(1, 2)
        h = F.silu(h) * F.silu(gate)
        squares = spmd.all_reduce(h.square().sum(-1, keepdim=True), "tp", src=P, dst=R)
        width = h.shape[-1] if self.bug == "divided_by_local_width" else INNER
        weight = self.weight
        if self.bug == "weight_of_the_first":
            weight = spmd.all_gather(weight, "tp", src=S(0), dst=R)[: h.shape[-1]]
        h = h * torch.rsqrt(squares / width + 1e-5) * weight
        return (x + self.out(h)).square().mean()


@model(
    mesh=TP,
    inputs=X,
    bugs={
        "norm_of_columns": "the norm of a row of the weight is that of this rank's columns",
        "magnitude_inside": "the bias of the magnitudes is added before the sum over ranks",
    },
)
class RowDora(Model):
    """DoRA on a row-parallel weight: the direction is normalised over all columns, of which a rank has some."""

    def build(self):
        self.up = column(HIDDEN, INNER)
        self.weight, self.a, self.b = sharded(1, HIDDEN, INNER), sharded(1, 2, INNER), whole(HIDDEN, 2)
        self.magnitude, self.bias = whole(HIDDEN), whole(HIDDEN)
        self.weight.requires_grad_(False)

    def forward(self, x):
        b = mappings.copy_to_tensor_model_parallel_region(self.b)
        adapted = self.weight + b @ self.a
        squares = adapted.square().sum(1)
        if self.bug != "norm_of_columns":
            squares = spmd.all_reduce(squares, "tp", src=P, dst=R)
        product = F.linear(F.gelu(self.up(x)), adapted / squares.sqrt().unsqueeze(1))
        if self.bug == "magnitude_inside":
            product = product + self.bias
            return (mappings.reduce_from_tensor_model_parallel_region(product) * self.magnitude).square().mean()
        y = mappings.reduce_from_tensor_model_parallel_region(product) + self.bias
        return (y * self.magnitude).square().mean()


@model(
    mesh=TP,
    inputs=X,
    bugs={"own_scale": "a matrix is quantised by the largest entry of this rank's shard"},
)
class QuantisedWeights(Model):
    """Training aware of quantisation: weights are rounded by a scale per matrix, gradients go straight through."""

    def build(self):
        self.up, self.down = sharded(0, INNER, HIDDEN), sharded(1, HIDDEN, INNER)

    def rounded(self, weight):
        with torch.no_grad():
            scale = weight.abs().amax()
            if not self.bug:
                scale = comm.all_reduce(scale, "tp", op="max")
            scale = scale / 7
            error = (weight / scale).round() * scale - weight
        return weight + error

    def forward(self, x):
        h = F.relu(F.linear(mappings.copy_to_tensor_model_parallel_region(x), self.rounded(self.up)))
        y = mappings.reduce_from_tensor_model_parallel_region(F.linear(h, self.rounded(self.down)))
        return (x + y).square().mean()


@model(
    mesh=TP,
    inputs=X,
    bugs={"other_blocks": "channels are dealt to the blocks in turn, on each rank among its own"},
)
class BlockDiagonal(Model):
    """Two block-diagonal matrices (Monarch's), the blocks of which lie on the ranks."""

    def build(self):
        self.first, self.second = sharded(0, 4, 4, 4), sharded(0, 4, 4, 4)
        self.lift, self.out = column(HIDDEN, 16), row(16, HIDDEN)

    def forward(self, x):
        h = self.lift(x)
        blocks = self.first.shape[0]
        if self.bug:
            h = h.unflatten(-1, (4, blocks)).transpose(-1, -2)
        else:
            h = h.unflatten(-1, (blocks, 4))
        h = F.gelu(torch.einsum("bsgi,gij->bsgj", h, self.first))
        h = torch.einsum("bsgi,gij->bsgj", h, self.second).flatten(-2)
        return self.out(h).square().mean()


@model(
    mesh={"dp": 2, "tp": 2},
    inputs=X,
    bugs={"own_features": "the penalty is the mean over this rank's features, and is added to the loss as it is"},
)
class PenaltyByForwardHook(Model):
    """A forward hook takes the mean square of the hidden features, which are sharded, for the loss."""

    def build(self):
        self.up, self.down = column(HIDDEN, INNER), row(INNER, HIDDEN)
        self.up.register_forward_hook(self.collect)

    def collect(self, module, args, output):
        penalty = output.square().mean()
        self.penalty = penalty if self.bug else spmd.all_reduce(penalty, "tp", src=P("avg"), dst=I)

    def forward(self, x):
        loss = (x - self.down(F.elu(self.up(x)))).square().mean()
        return loss + 0.1 * self.penalty


class Reverse(torch.autograd.Function):
    """The identity, with the gradient reversed."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -0.3 * grad


class ReverseAndSum(torch.autograd.Function):
    """The same in front of sharded columns: the reversed gradient is summed."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return comm.all_reduce(-0.3 * grad, "tp")


@model(
    mesh=TP,
    inputs=X,
    bugs={"reversed_not_summed": "the reversed gradient is that of this rank's columns of the discriminator"},
)
class DomainAdversarial(Model):
    def build(self):
        self.features = nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = sharded(0, INNER, HIDDEN), sharded(1, 1, INNER)

    def forward(self, x):
        h = torch.tanh(self.features(x))
        into = Reverse.apply(h) if self.bug else ReverseAndSum.apply(h)
        score = mappings.reduce_from_tensor_model_parallel_region(F.linear(F.relu(F.linear(into, self.up)), self.down))
        return F.softplus(score).mean() + h.square().mean()


@model(
    mesh=TP,
    inputs=TOKENS,
    bugs={"declared_replicated": "the head is told that its input is R, and leaves out the sum of its gradient"},
)
class ChunkedHead(Model):
    """The loss in pieces of the sequence, so that the logits of all of it never exist at once."""

    def build(self):
        self.embedding = nxd.ParallelEmbedding(VOCAB, HIDDEN)
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.head = column(HIDDEN, VOCAB, input_is_replicated=bool(self.bug))

    def forward(self, ids, labels):
        h = torch.tanh(self.mix(self.embedding(ids)))
        total = 0.0
        for piece, wanted in zip(h.split(3, 1), labels.split(3, 1)):
            total = total + nxd.parallel_cross_entropy(self.head(piece), wanted).sum()
        return total / labels.numel()


@model(
    mesh={"dp": 2, "tp": 2},
    inputs=dict(x=normal(BATCH, HIDDEN), y=integers(VOCAB, BATCH)),
    bugs={
        "margin_without_offset": "the margin is taken from the class of that number among this rank's own",
        "normalised_over_classes": "the classes' weights are normalised over the classes of this rank",
    },
)
class MarginSoftmax(Model):
    """Partial FC: cosines with sharded classes, and a margin for the right one."""

    def build(self):
        self.net, self.classes = nn.Linear(HIDDEN, HIDDEN), sharded(0, VOCAB, HIDDEN)

    def forward(self, x, y):
        feature = F.normalize(self.net(x), dim=-1)
        weight = F.normalize(self.classes, dim=0 if self.bug == "normalised_over_classes" else 1)
        cosine = F.linear(mappings.copy_to_tensor_model_parallel_region(feature), weight)
        own = torch.arange(weight.shape[0], device=x.device)
        if self.bug != "margin_without_offset":
            own = own + comm.rank("tp") * weight.shape[0]
        cosine = cosine - 0.2 * (y[:, None] == own).to(cosine)
        return nxd.parallel_cross_entropy(8 * cosine, y).mean()
