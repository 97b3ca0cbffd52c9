"""Programs with a bug that people really make, in the manner of Megatron, NxD and Hugging Face code.

Each is one rank's program: `t(type, *shape)` says how an input is laid out over tp (or, as a dict, over several axes)
and its whole shape. On one rank with whole inputs each is right, which is what the repaired program must equal. Line
numbers in the expected messages count from a program's `def`.
"""

import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd  # noqa: F401 - the repaired program calls it
from neuronx_dist import comm, spmd
from neuronx_dist.parallel_layers import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from neuronx_dist.parallel_layers.mappings import reduce_scatter_to_sequence_parallel_region
from neuronx_dist.spmd import I, P, R, S, V
from tests.checking.types.messages.running import ids, p, program, t

MLP = dict(x=t(I, 4, 8), w1=p(S(0), 16, 8), w2=p(S(1), 8, 16))
NORM = dict(gain=p(I, 8))


# --- the quick start's four ---


@program(**MLP)
def forgot_copy_to(x, w1, w2):
    h = F.gelu(F.linear(x, w1))
    return reduce_from_tensor_model_parallel_region(F.linear(h, w2)).pow(2).mean()


@program(**MLP)
def reduced_twice(x, w1, w2):
    h = F.gelu(F.linear(copy_to_tensor_model_parallel_region(x), w1))
    y = reduce_from_tensor_model_parallel_region(F.linear(h, w2))
    out = x + reduce_from_tensor_model_parallel_region(y)
    return out.pow(2).mean()


@program(**MLP, **NORM)
def norm_of_a_pending_sum(x, w1, w2, gain):
    h = F.gelu(F.linear(copy_to_tensor_model_parallel_region(x), w1))
    y = F.linear(h, w2)
    return (F.rms_norm(y, (8,), gain) + x).pow(2).mean()


@program({"mlp.up_proj.weight": p(S(0), 16, 8), "mlp.down_proj.weight": p(S(1), 8, 16)}, x=t(I, 4, 8))
class ResidualPlusUnreduced(nn.Module):
    """The residual is added to the output of a row-parallel layer that nobody reduced."""

    def __init__(self):
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x):
        hidden_states = x + self.mlp(x)
        return hidden_states.pow(2).mean()


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = nn.Linear(8, 16, bias=False)
        self.down_proj = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        x = copy_to_tensor_model_parallel_region(x)
        return self.down_proj(F.silu(self.up_proj(x)))


# --- reductions that are missing, or wrong ---


@program(**MLP)
def activation_of_a_pending_sum(x, w1, w2):
    h = F.linear(F.linear(copy_to_tensor_model_parallel_region(x), w1), w2)
    return torch.sigmoid(h).mean()


@program(**MLP)
def constant_added_to_a_pending_sum(x, w1, w2):
    h = F.gelu(F.linear(copy_to_tensor_model_parallel_region(x), w1))
    out = F.linear(h, w2) + 1.0
    return out.pow(2).mean()


@program(**MLP, b=p(I, 8))
def bias_before_the_sum(x, w1, w2, b):
    h = F.gelu(F.linear(copy_to_tensor_model_parallel_region(x), w1))
    out = reduce_from_tensor_model_parallel_region(F.linear(h, w2, b))
    return out.pow(2).mean()


@program(**MLP, b=p(I, 8), rounds=2)
def bias_added_to_the_summands(x, w1, w2, b):
    h = F.gelu(F.linear(copy_to_tensor_model_parallel_region(x), w1))
    y = F.linear(h, w2)
    y = y + b
    return reduce_from_tensor_model_parallel_region(y).pow(2).mean()


@program(**MLP, gate=p(S(1), 8, 16))
def product_of_two_pending_sums(x, w1, w2, gate):
    h = F.gelu(F.linear(copy_to_tensor_model_parallel_region(x), w1))
    score = F.linear(h, gate)
    value = F.linear(h, w2)
    return (value * score).mean()


@program(**MLP)
def square_of_a_pending_sum(x, w1, w2):
    h = F.gelu(F.linear(copy_to_tensor_model_parallel_region(x), w1))
    y = F.linear(h, w2)
    return (y * y).mean()


@program(**MLP)
def gathered_a_sum(x, w1, w2):
    h = F.gelu(F.linear(copy_to_tensor_model_parallel_region(x), w1))
    y = F.linear(h, w2)
    out = gather_from_tensor_model_parallel_region(y)
    return out.pow(2).mean()


@program(**MLP)
def verb_reduces_what_is_equal(x, w1, w2):
    with torch.no_grad():
        scale = comm.all_reduce(x.abs().sum(), "tp")
    h = F.gelu(F.linear(copy_to_tensor_model_parallel_region(x / scale), w1))
    return reduce_from_tensor_model_parallel_region(F.linear(h, w2)).pow(2).mean()


@program(x=t(I, 4, 8), head=p(S(0), 16, 8), labels=ids(R, 16, 4))
def maximum_reduced_by_sum(x, head, labels):
    logits = F.linear(copy_to_tensor_model_parallel_region(x), head)
    with torch.no_grad():
        peak = comm.all_reduce(logits.amax(-1), "tp")
    total = reduce_from_tensor_model_parallel_region((logits - peak.unsqueeze(-1)).exp().sum(-1))
    return (total.log() * (1 + peak)).mean()


@program(x=t(I, 4, 8), w=p(R, 8, 8))
def residual_i_plus_reduced_to_r(x, w):
    y = spmd.convert(F.linear(spmd.convert(x, "tp", src=I, dst=R), w), "tp", src=R, dst=P)
    y = spmd.all_reduce(y, "tp", dst=R)
    out = x + y
    return out.pow(2).mean()


@program(**MLP, level="L")
def residual_plus_unreduced_locally(x, w1, w2):
    h = F.gelu(F.linear(copy_to_tensor_model_parallel_region(x), w1))
    y = F.linear(h, w2)
    return (x + y).pow(2).mean()


@program(**MLP, b=p(I, 8), level="L", rounds=2)
def bias_before_the_sum_locally(x, w1, w2, b):
    h = F.gelu(F.linear(copy_to_tensor_model_parallel_region(x), w1))
    y = F.linear(h, w2, b)
    return reduce_from_tensor_model_parallel_region(y).pow(2).mean()


# --- gathers that are missing, or wrong ---


@program(x=t(I, 4, 8), w=p(S(0), 8, 8))
def forgot_gather_output(x, w):
    y = F.linear(copy_to_tensor_model_parallel_region(x), w)
    out = x + y
    return out.pow(2).mean()


@program(x=t(I, 4, 8), w=p(S(0), 16, 8), head=p(I, 8, 16))
def sharded_features_into_a_whole_weight(x, w, head):
    h = F.gelu(F.linear(copy_to_tensor_model_parallel_region(x), w))
    return F.linear(h, head).pow(2).mean()


@program(x=t(I, 4, 6, 8), w=p(S(0), 16, 8))
def gathers_another_dim(x, w):
    h = F.gelu(F.linear(copy_to_tensor_model_parallel_region(x), w))
    out = spmd.all_gather(h, "tp", src=S(1), dst=I)
    return out.softmax(-1).pow(2).mean()


@program(x=t(I, 4, 8), gate_up=p(S(0, stride=2), 16, 8))
def gathers_fused_blocks(x, gate_up):
    fused = F.linear(copy_to_tensor_model_parallel_region(x), gate_up)
    gate, up = gather_from_tensor_model_parallel_region(fused).chunk(2, -1)
    return (F.silu(gate) * up).mean()


@program(x=t(I, 4, 8), router=p(S(0), 6, 8))
def softmax_over_a_shard(x, router):
    scores = F.linear(copy_to_tensor_model_parallel_region(x), router)
    return F.softmax(scores, dim=-1).pow(2).mean()


@program(x=t(I, 4, 8), w=p(S(0), 16, 8), gain=p(S(0), 16))
def norm_over_a_shard(x, w, gain):
    q = F.linear(copy_to_tensor_model_parallel_region(x), w)
    q = F.rms_norm(q, (q.shape[-1],), gain)
    return reduce_from_tensor_model_parallel_region(q.pow(4).sum())


@program(x=t(I, 4, 8), w=p(S(0), 16, 8))
def handwritten_norm_over_a_shard(x, w):
    q = F.linear(copy_to_tensor_model_parallel_region(x), w)
    variance = q.pow(2).mean(-1)
    return reduce_from_tensor_model_parallel_region((q * torch.rsqrt(variance + 1e-6).unsqueeze(-1)).pow(4).sum())


@program(x=t(I, 2, 4, 8), head=p(S(0), 16, 8), labels=ids(R, 16, 2, 4))
def cross_entropy_over_a_vocabulary_shard(x, head, labels):
    logits = F.linear(copy_to_tensor_model_parallel_region(x), head).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten())


def _masked_lookup(tokens, table):
    first = comm.rank("tp") * table.shape[0]
    local = spmd.trust(tokens - first, "tp", V)
    elsewhere = (local < 0) | (local >= table.shape[0])
    rows = F.embedding(local.masked_fill(elsewhere, 0), table).masked_fill(elsewhere.unsqueeze(-1), 0.0)
    return reduce_from_tensor_model_parallel_region(spmd.trust(rows, "tp", P)).pow(2).mean()


@program(tokens=ids(R, 8, 4, 3), table=p(S(0), 16, 8), repaired=_masked_lookup)
def lookup_in_a_sharded_table(tokens, table):
    return F.embedding(tokens, table).pow(2).mean()


# --- views ---


@program(
    x=t(I, 4, 8),
    gate_up=p(S(0), 16, 8),
    w2=p(S(1), 8, 8),
    repaired=dict(gate_up=p(S(0, stride=2), 16, 8)),
)
def gate_and_up_cut_from_a_contiguous_shard(x, gate_up, w2):
    fused = F.linear(copy_to_tensor_model_parallel_region(x), gate_up)
    gate, up = fused.chunk(2, dim=-1)
    return reduce_from_tensor_model_parallel_region(F.linear(F.silu(gate) * up, w2)).pow(2).mean()


@program(x=t(I, 2, 3, 8), wq=p(S(0), 8, 8))
def view_with_all_heads(x, wq):
    num_heads, head_dim = 4, 2
    q = F.linear(copy_to_tensor_model_parallel_region(x), wq)
    q = q.view(2, 3, num_heads, head_dim).transpose(1, 2)
    return reduce_from_tensor_model_parallel_region((q @ q.transpose(-1, -2)).softmax(-1).pow(2).sum())


@program(x=t(I, 2, 3, 8), wq=p(S(0), 8, 8))
def heads_merged_without_transposing_back(x, wq):
    q = F.linear(copy_to_tensor_model_parallel_region(x), wq).view(2, 3, -1, 2).transpose(1, 2)
    context = q.reshape(2, 3, -1)
    return context.softmax(-1).pow(2).mean()


@program(x=t(I, 4, 8), w=p(S(0), 16, 8))
def first_features_of_a_shard(x, w):
    h = F.linear(copy_to_tensor_model_parallel_region(x), w)
    rotary = h[:, :4]
    return rotary.pow(2).mean()


# --- sequence and context parallelism ---


@program(x=t(S(1), 2, 4, 8), w1=p(S(0), 16, 8), w2=p(S(1), 8, 16))
def sequence_shard_plus_pending_sum(x, w1, w2):
    h = F.gelu(F.linear(spmd.all_gather(x, "tp", src=S(1), dst=R), w1))
    y = F.linear(h, w2)
    out = x + y
    return reduce_from_tensor_model_parallel_region(out.pow(2).sum())


@program(x=t(S(1), 2, 4, 8), gain=p(I, 8))
def norm_weight_not_marked_sequence_parallel(x, gain):
    y = F.rms_norm(x, (8,), gain)
    return reduce_from_tensor_model_parallel_region(y.pow(4).sum())


@program(x=t(I, 2, 4, 8))
def reduce_scatters_what_is_equal(x):
    x = reduce_scatter_to_sequence_parallel_region(x, 1)
    return reduce_from_tensor_model_parallel_region(x.pow(3).sum())


def _own_piece_of_the_table(x, table):
    cos = spmd.convert(table, "tp", src=R, dst=S(0))
    return reduce_from_tensor_model_parallel_region((x * cos.unsqueeze(0)).pow(2).sum())


@program(x=t(S(1), 2, 4, 8), table=t(R, 4, 8), repaired=_own_piece_of_the_table)
def first_positions_for_a_sequence_shard(x, table):
    cos = table[: x.shape[1]]
    return reduce_from_tensor_model_parallel_region((x * cos.unsqueeze(0)).pow(2).sum())


@program(q=t(S(1), 2, 4, 8), k=t(S(1), 2, 4, 8))
def queries_and_keys_of_a_sequence_shard(q, k):
    scores = torch.matmul(q, k.transpose(1, 2))
    return reduce_from_tensor_model_parallel_region(scores.softmax(-1).pow(2).sum())


@program(x=t(S(1), 2, 4, 8), w=p(S(0), 16, 8))
def sequence_shard_into_a_column_weight(x, w):
    h = F.gelu(F.linear(x, w))
    return reduce_from_tensor_model_parallel_region(h.pow(2).sum())


# --- losses, data parallelism, values that leave torch ---


@program(x=t({"dp": S(0)}, 4, 8), y=t({"dp": S(0)}, 4, 8), w=p({"dp": R}, 8, 8), mesh=dict(dp=2))
def mean_over_samples_plus_a_sum(x, y, w):
    prediction = F.linear(x, w)
    return F.mse_loss(prediction, y) + prediction.pow(2).sum()


@program(x=t({"dp": S(0)}, 4, 8), w=p({"dp": R}, 8, 8), mesh=dict(dp=2))
def mean_that_is_summed_before_a_logarithm(x, w):
    mean = spmd.all_reduce(F.linear(x, w).pow(2).mean(), "dp", dst=I)
    return mean.log()


@program(x=t(R, 4, 8), w=p(S(0), 8, 8))
def loss_reduced_to_r(x, w):
    loss = spmd.all_reduce(F.linear(x, w).pow(2).sum(), "tp", dst=R)
    loss.backward()
    return loss


@program(x=t(V, 4, 8), w=p(R, 8, 8), level="L", same=True)
def loss_that_varies(x, w):
    loss = F.linear(x, w).pow(2).sum()
    loss.backward()
    return loss


@program(x=t({"dp": S(0)}, 4, 8), w=p({}, 8, 8), mesh=dict(dp=2), same=True, repaired=dict(w=p({"dp": R}, 8, 8)))
def forgot_an_axis(x, w):
    return F.linear(x, w).pow(2).sum()


@program(x=t(I, 4, 8), w=p(S(0), 8, 8))
def norm_of_a_shard_as_a_number(x, w):
    norm = w.detach().pow(2).sum().item() ** 0.5
    y = F.linear(copy_to_tensor_model_parallel_region(x), w / norm)
    return reduce_from_tensor_model_parallel_region(y.pow(2).sum())


@program(x=t(I, 4, 8), w=p(S(0), 8, 8), numeric=False)
def decides_by_what_differs(x, w):
    h = F.linear(copy_to_tensor_model_parallel_region(x), w)
    if h.detach().abs().max() > 100:
        h = h / 2
    return reduce_from_tensor_model_parallel_region(h.pow(2).sum())


# --- writes ---


@program(**MLP)
def accumulates_summands_in_place(x, w1, w2):
    out = x.clone()
    h = F.gelu(F.linear(copy_to_tensor_model_parallel_region(x), w1))
    out += F.linear(h, w2)
    return out.pow(2).mean()


@program(x=t(I, 4, 8), w=p(I, 8, 8), piece=t(V, 16), numeric=False)
def row_of_a_parameter_overwritten(x, w, piece):
    with torch.no_grad():
        w[0] = piece
    return F.linear(x, w).pow(2).mean()


@program(x=t(I, 4, 8), w=p(I, 8, 8), numeric=False)
def written_through_data(x, w):
    w.data.clamp_(-1, 1)
    return F.linear(x, w).pow(2).mean()


@program(x=t(I, 4, 8), w=p(I, 8, 8), numeric=False)
def written_where_nobody_looks(x, w):
    y = F.linear(x, w)
    with spmd.no_typecheck():
        y.mul_(2)
    return y.pow(2).mean()


CAUSAL = torch.ones(4, 4, dtype=torch.float64).tril()


@program(x=t(I, 4, 4), same=True)
def constant_from_outside(x):
    return (x * CAUSAL).pow(2).mean()


@program(w=p(S(0), 8, 8), b=p(I, 8), numeric=False)
def largest_of_a_packed_buffer(w, b):
    with torch.no_grad():
        flat = torch.cat([w.reshape(-1), b])
        flat.abs().max()
    return b.pow(2).mean()


# --- random numbers, unknown functions, custom backward ---


@program(x=t(I, 4, 8), numeric=False)
def dropout_of_what_is_equal_from_the_own_stream(x):
    spmd.random.manual_seed(0)
    with spmd.random.streams().fork():
        return F.dropout(x, 0.5).pow(2).mean()


@torch.overrides.wrap_torch_function(lambda x: (x,))
def fused_activation(x):
    return x * torch.sigmoid(1.702 * x)


@program(**MLP)
def unknown_function_of_a_pending_sum(x, w1, w2):
    h = F.gelu(F.linear(copy_to_tensor_model_parallel_region(x), w1))
    y = F.linear(h, w2)
    return fused_activation(y).pow(2).mean()


class Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return F.linear(x, w)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


class RowAndReduce(Row):
    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_w = Row.backward(ctx, grad)
        return comm.all_reduce(grad_x, "tp"), grad_w


def _with_its_reduction(x, w):
    h = RowAndReduce.apply(x, w)
    return reduce_from_tensor_model_parallel_region(h.pow(2).sum())


@program(x=t(I, 4, 8), w=p(S(0), 16, 8), repaired=_with_its_reduction)
def backward_without_its_reduction(x, w):
    h = Row.apply(x, w)
    return reduce_from_tensor_model_parallel_region(h.pow(2).sum())
