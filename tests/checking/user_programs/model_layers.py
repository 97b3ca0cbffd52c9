"""Layers beside the package's: adapters, norms and convolutions over shards, autograd functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.parallel_layers import mappings
from neuronx_dist.spmd import I, P, R, S
from tests.checking.user_programs.model_base import BATCH, HIDDEN, INNER, SEQ, TP, Model, X, model, sharded, whole
from tests.checking.user_programs.support import normal

IMAGES = dict(x=normal(BATCH, 4, 6, 6))


@model(
    mesh=TP, inputs=X, bugs={"low_rank_not_copied": "the gradient of the adapter's A is that of this rank's part of B"}
)
class ColumnLora(Model):
    """An adapter on a frozen column-parallel layer: A whole, B sharded as the layer."""

    def build(self):
        self.base = nxd.ColumnParallelLinear(HIDDEN, INNER, bias=False, gather_output=False).requires_grad_(False)
        self.a, self.b = whole(2, HIDDEN), sharded(0, INNER, 2)
        self.down = nxd.RowParallelLinear(INNER, HIDDEN, input_is_parallel=True)

    def forward(self, x):
        low = F.linear(x, self.a)
        if not self.bug:
            low = mappings.copy_to_tensor_model_parallel_region(low)
        return (x + self.down(self.base(x) + 2.0 * F.linear(low, self.b))).square().mean()


@model(mesh=TP, inputs=X, bugs={"low_rank_not_summed": "each rank adds the adapter's product of its own features"})
class RowLora(Model):
    """An adapter on a frozen row-parallel layer: A sharded as the layer, B whole."""

    def build(self):
        self.up = nxd.ColumnParallelLinear(HIDDEN, INNER, gather_output=False)
        self.base = nxd.RowParallelLinear(INNER, HIDDEN, bias=False, input_is_parallel=True).requires_grad_(False)
        self.a, self.b = sharded(1, 2, INNER), whole(HIDDEN, 2)

    def forward(self, x):
        h = torch.relu(self.up(x))
        low = F.linear(h, self.a)
        if not self.bug:
            low = mappings.reduce_from_tensor_model_parallel_region(low)
        return (self.base(h) + F.linear(low, self.b)).square().mean()


@model(
    mesh={"tp": 4},
    inputs=X,
    bugs={
        "norm_of_a_shard": "the mean square is that of this rank's features",
        "summed_without_a_gradient": "the sum of squares is reduced by the plain verb, which has no gradient",
    },
)
class QkNorm(Model):
    """OLMo's norm over the features of all heads, which are sharded."""

    def build(self):
        self.q, self.scale = nxd.ColumnParallelLinear(HIDDEN, INNER, gather_output=False), sharded(0, INNER)
        self.out = nxd.RowParallelLinear(INNER, HIDDEN, input_is_parallel=True)

    def forward(self, x):
        q = self.q(x)
        if self.bug == "norm_of_a_shard":
            mean = q.square().mean(-1, keepdim=True)
        elif self.bug == "summed_without_a_gradient":
            mean = comm.all_reduce(q.square().sum(-1, keepdim=True), "tp") / INNER
        else:
            mean = spmd.all_reduce(q.square().sum(-1, keepdim=True), "tp", src=P, dst=R) / INNER
        return (x + self.out(torch.tanh(q * torch.rsqrt(mean + 1e-6) * self.scale))).square().mean()


@model(
    mesh=TP,
    inputs=IMAGES,
    bugs={
        "groups_of_the_whole": "group_norm is given the number of groups of all channels",
        "bias_on_every_rank": "the second convolution's bias is in each partial sum",
        "not_reduced": "the second convolution's products are not summed over input channels",
    },
)
class Convolutions(Model):
    """Two convolutions with sharded channels between them, and a group norm there."""

    def build(self):
        self.first, self.second = sharded(0, 8, 4, 3, 3), sharded(1, 4, 8, 3, 3)
        self.scale, self.shift, self.bias = sharded(0, 8), sharded(0, 8), whole(4)

    def forward(self, x):
        h = F.conv2d(mappings.copy_to_tensor_model_parallel_region(x), self.first, padding=1)
        groups = 4 if self.bug == "groups_of_the_whole" else 4 // comm.size("tp")
        h = F.silu(F.group_norm(h, groups, self.scale, self.shift))
        if self.bug == "bias_on_every_rank":
            y = mappings.reduce_from_tensor_model_parallel_region(F.conv2d(h, self.second, self.bias, padding=1))
        else:
            y = F.conv2d(h, self.second, padding=1)
            if self.bug != "not_reduced":
                y = mappings.reduce_from_tensor_model_parallel_region(y)
            y = y + self.bias[:, None, None]
        return (x + y).square().mean()


class CopyToRanks(torch.autograd.Function):
    """Megatron's f: identity, and the sum of the gradients."""

    @staticmethod
    def forward(ctx, x, reduce):
        ctx.reduce = reduce
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return (comm.all_reduce(grad, "tp") if ctx.reduce else grad), None


class SumOverRanks(torch.autograd.Function):
    """Megatron's g: the sum, and the identity."""

    @staticmethod
    def forward(ctx, x, reduce_twice):
        ctx.reduce_twice = reduce_twice
        return comm.all_reduce(x, "tp")

    @staticmethod
    def backward(ctx, grad):
        return (comm.all_reduce(grad, "tp") if ctx.reduce_twice else grad), None


@model(
    mesh=TP,
    inputs=X,
    bugs={
        "backward_of_f_is_the_identity": "the gradient of the input is not summed",
        "backward_of_g_is_a_sum": "the gradient of the output, equal on all ranks, is summed",
    },
)
class OwnRegions(Model):
    """Region functions copied from Megatron."""

    def build(self):
        self.inp, self.up, self.down = nn.Linear(HIDDEN, HIDDEN), sharded(0, INNER, HIDDEN), sharded(1, HIDDEN, INNER)

    def forward(self, x):
        h = CopyToRanks.apply(self.inp(x), self.bug != "backward_of_f_is_the_identity")
        h = F.linear(F.gelu(F.linear(h, self.up)), self.down)
        return (x + SumOverRanks.apply(h, self.bug == "backward_of_g_is_a_sum")).square().mean()


class LinearWithReducedInputGrad(torch.autograd.Function):
    """A column-parallel product, whose input gradient is reduced in backward."""

    @staticmethod
    def forward(ctx, x, weight, bug):
        ctx.save_for_backward(x, weight)
        ctx.bug = bug
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight
        grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        if ctx.bug == "weight_gradient_reduced":
            return grad_x, comm.all_reduce(grad_weight, "tp"), None
        handle = comm.all_reduce(grad_x, "tp", async_op=True)
        if ctx.bug == "result_not_taken":
            handle.wait()
            return grad @ weight, grad_weight, None
        return handle.wait(), grad_weight, None


@model(
    mesh=TP,
    inputs=X,
    bugs={
        "weight_gradient_reduced": "the gradient of the sharded weight is reduced, that of the input is not",
        "result_not_taken": "the reduced gradient is awaited, and the unreduced one returned",
    },
)
class OwnLinear(Model):
    """The overlapped linear layer of a script."""

    def build(self):
        self.inp, self.up = nn.Linear(HIDDEN, HIDDEN), sharded(0, INNER, HIDDEN)
        self.down = nxd.RowParallelLinear(INNER, HIDDEN, input_is_parallel=True)

    def forward(self, x):
        h = LinearWithReducedInputGrad.apply(self.inp(x), self.up, self.bug)
        return (x + self.down(F.gelu(h))).square().mean()


@model(
    mesh={"tp": 4},
    inputs=X,
    bugs={"input_not_copied": "inside the checkpointed block the input's gradient is not summed"},
)
class Checkpointed(Model):
    """Two blocks, each recomputed in backward."""

    def build(self):
        self.inp = nn.Linear(HIDDEN, HIDDEN)
        self.ups = nn.ParameterList([sharded(0, INNER, HIDDEN) for _ in range(2)])
        self.downs = nn.ParameterList([sharded(1, HIDDEN, INNER) for _ in range(2)])

    def block(self, x, up, down):
        h = x if self.bug else spmd.convert(x, "tp", src=I, dst=R)
        return x + spmd.all_reduce(F.linear(F.silu(F.linear(h, up)), down), "tp", src=P, dst=I)

    def forward(self, x):
        x = self.inp(x)
        for up, down in zip(self.ups, self.downs):
            x = checkpoint(self.block, x, up, down, use_reentrant=False)
        return x.square().mean()


@torch.jit.script
def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = x + bias
    return y * 0.5 * (1.0 + torch.tanh(0.79788456 * y * (1.0 + 0.044715 * y * y)))


@model(mesh=TP, inputs=X, bugs={"not_reduced": "the partial products are not summed"})
class ScriptedActivation(Model):
    """Megatron's fused bias and gelu."""

    def build(self):
        self.up = nxd.ColumnParallelLinear(HIDDEN, INNER, gather_output=False, skip_bias_add=True)
        self.down = nxd.RowParallelLinear(INNER, HIDDEN, input_is_parallel=True, reduce_output=not self.bug)

    def forward(self, x):
        h, bias = self.up(x)
        return (x + self.down(bias_gelu(h, bias))).square().mean()


@model(mesh=TP, inputs=X, bugs={"norm_of_a_shard": "the penalty takes the norm of this rank's part of the weight"})
class WeightPenalty(Model):
    """A penalty on the norm of a sharded weight."""

    def build(self):
        self.up = nxd.ColumnParallelLinear(HIDDEN, INNER, gather_output=False)
        self.down = nxd.RowParallelLinear(INNER, HIDDEN, input_is_parallel=True)

    def forward(self, x):
        loss = (x - self.down(torch.tanh(self.up(x)))).square().mean()
        if self.bug:
            return loss + 0.1 * self.up.weight.norm()
        return loss + 0.1 * spmd.all_reduce(self.up.weight.square().sum(), "tp", src=P, dst=I).sqrt()


@model(mesh={"tp": 4}, inputs=X, bugs={"norm_of_a_shard": "a layer norm over this rank's features"})
class NormBetweenExchanges(Model):
    """Features are exchanged against the sequence, so that each position has all of them for the norm."""

    def build(self):
        self.up = nxd.ColumnParallelLinear(HIDDEN, INNER, gather_output=False)
        self.down = nxd.RowParallelLinear(INNER, HIDDEN, input_is_parallel=True)

    def forward(self, x):
        h = self.up(x)  # [b, s, i/tp]
        if self.bug:
            h = F.layer_norm(h, h.shape[-1:])
        else:
            h = spmd.all_to_all(h, "tp", src=S(2), dst=S(1))
            h = F.layer_norm(h, (INNER,))
            h = spmd.all_to_all(h, "tp", src=S(1), dst=S(2))
        return (x + self.down(h)).square().mean()


@model(
    mesh=TP,
    inputs=X,
    bugs={"mask_of_the_rank": "the mask of what all ranks have is drawn from a seed that differs by rank"},
)
class SeededMask(Model):
    """A dropout mask drawn from a generator of its own, on activations that all ranks have."""

    def build(self):
        self.up = nxd.ColumnParallelLinear(HIDDEN, INNER, gather_output=False)
        self.down = nxd.RowParallelLinear(INNER, HIDDEN, input_is_parallel=True)

    def forward(self, x):
        seed = 1234 + (comm.rank("tp") if self.bug else 0)
        keep = torch.rand(x.shape, generator=torch.Generator().manual_seed(int(seed)), device="cpu") > 0.2
        return (x + self.down(F.relu(self.up(x))) * keep.to(x.device)).square().mean()


@model(
    mesh=TP,
    inputs=dict(x=normal(BATCH, SEQ, 12)),
    bugs={"norm_over_padding": "a norm over local heads, padding included"},
)
class PaddedAttention(Model):
    """Three heads over two ranks, by pad_model."""

    def build(self):
        self.attention = nn.Module()
        self.attention.qkv = nxd.ColumnParallelLinear(12, 36, bias=False, gather_output=False, stride=3)
        self.attention.out = nxd.RowParallelLinear(12, 12, bias=False, input_is_parallel=True)
        nxd.pad_model(self, comm.size("tp"), 3)

    def forward(self, x):
        q, k, v = self.attention.qkv(x).unflatten(-1, (3, -1, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        y = y.reshape(*x.shape[:2], -1)
        if self.bug == "norm_over_padding":
            y = F.layer_norm(y, (y.shape[-1],))
        return (x + self.attention.out(y)).square().mean()
