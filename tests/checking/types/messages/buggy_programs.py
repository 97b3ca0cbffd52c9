"""More buggy programs, for the repairs: loops over parameters, layers given the wrong thing, repeated mistakes.

As in `programs.py`, each is one rank's program, and right on one rank with whole inputs.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist import comm, parallel_cross_entropy, spmd
from neuronx_dist.parallel_layers import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from neuronx_dist.parallel_layers.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from neuronx_dist.spmd import I, R, S
from tests.checking.types.messages.running import BUGGY, ids, p, program, t

buggy = functools.partial(program, programs=BUGGY)

copy, reduce = copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
gather = gather_from_tensor_model_parallel_region
MLP = dict(x=t(I, 4, 8), w1=p(S(0), 16, 8), w2=p(S(1), 8, 16))
MIXED = dict(**MLP, gain=p(I, 8))
VOCABULARY = dict(x=t(I, 4, 8), head=p(S(0), 16, 8), labels=ids(R, 16, 4))
DATA = dict(x=t({"dp": S(0)}, 4, 8), w=p({"dp": R}, 8, 8))


def mlp(x, w1, w2):
    return reduce(F.linear(F.gelu(F.linear(copy(x), w1)), w2))


# --- loops over parameters, some of which are sharded ---


@buggy(**MIXED)
def penalty_of_all_parameters(x, w1, w2, gain):
    total = mlp(x, w1, w2).pow(2).mean()
    for w in (w1, w2, gain):
        total = total + w.pow(2).sum()
    return total


@buggy(**MIXED)
def penalty_of_whole_parameters_first(x, w1, w2, gain):
    penalty = 0.0
    for w in [gain, w1, w2]:
        penalty = penalty + w.pow(2).sum()
    return (mlp(x, w1, w2) * gain).pow(2).mean() + penalty


@buggy(**MIXED)
def penalty_of_sharded_parameters_first(x, w1, w2, gain):
    penalty = 0.0
    for w in [w1, w2, gain]:
        penalty = penalty + w.pow(2).sum()
    return (mlp(x, w1, w2) * gain).pow(2).mean() + penalty


@buggy(**MIXED)
def penalty_in_place(x, w1, w2, gain):
    penalty = torch.zeros((), dtype=x.dtype)
    for w in [w1, gain, w2]:
        penalty += w.pow(2).sum()
    return (mlp(x, w1, w2) * gain).pow(2).mean() + penalty


@buggy(**MIXED)
def penalty_by_a_variable(x, w1, w2, gain):
    penalty = 0.0
    for w in [w1, gain, w2]:
        square = w.pow(2).sum()
        penalty = penalty + square
    return (mlp(x, w1, w2) * gain).pow(2).mean() + penalty


@buggy(**MIXED)
def penalty_by_sum(x, w1, w2, gain):
    parameters = [w1, w2, gain]
    return (mlp(x, w1, w2) * gain).pow(2).mean() + sum(w.pow(2).sum() for w in parameters)


@buggy(**MIXED)
def penalty_by_stack(x, w1, w2, gain):
    parameters = [w1, gain, w2]
    squares = torch.stack([w.pow(2).sum() for w in parameters])
    return (mlp(x, w1, w2) * gain).pow(2).mean() + squares.sum()


@buggy(**MIXED)
def penalty_with_every_term_reduced(x, w1, w2, gain):
    penalty = 0.0
    for w in [w1, gain, w2]:
        penalty = penalty + spmd.all_reduce(w.pow(2).sum(), "tp", dst=I)
    return (mlp(x, w1, w2) * gain).pow(2).mean() + penalty


@buggy(**MIXED)
def penalty_reduced_after_the_loop(x, w1, w2, gain):
    penalty = 0.0
    for w in [w1, gain, w2]:
        penalty = penalty + w.pow(2).sum()
    penalty = spmd.all_reduce(penalty, "tp", dst=I)
    return (mlp(x, w1, w2) * gain).pow(2).mean() + penalty


@buggy(**MIXED)
def norms_of_all_parameters(x, w1, w2, gain):
    norms = torch.stack([w.norm() for w in [w1, w2, gain]])
    return (mlp(x, w1, w2) * gain).pow(2).mean() + norms.sum()


@buggy(**MIXED)
def norm_of_the_gradients(x, w1, w2, gain):
    loss = (mlp(x, w1, w2) * gain).pow(2).mean()
    loss.backward()
    total = 0.0
    with torch.no_grad():
        for w in [w1, w2, gain]:
            total = total + w.grad.pow(2).sum()
        for w in [w1, w2, gain]:
            w.grad.div_(total.sqrt())
    return loss


@buggy(
    {"mlp.up_proj.weight": p(S(0), 16, 8), "mlp.down_proj.weight": p(S(1), 8, 16), "scale.weight": p(I, 8, 8)},
    x=t(I, 4, 8),
)
class PenaltyOfAModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Mlp()
        self.scale = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        penalty = 0.0
        for _, param in self.named_parameters():
            penalty = penalty + param.abs().sum()
        return self.scale(self.mlp(x)).pow(2).mean() + 0.1 * penalty


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = nn.Linear(8, 16, bias=False)
        self.down_proj = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return reduce(self.down_proj(F.silu(self.up_proj(copy(x)))))


# --- whole logits ---


@buggy(**VOCABULARY)
def whole_logits_into_the_parallel_loss(x, head, labels):
    logits = gather(F.linear(copy(x), head))
    return parallel_cross_entropy(logits, labels).mean()


@buggy(**VOCABULARY)
def whole_logits_scaled(x, head, labels):
    logits = spmd.all_gather(F.linear(copy(x), head), "tp", src=S(1), dst=I) / 0.7
    return parallel_cross_entropy(logits.float().double(), labels).mean()


@buggy(**VOCABULARY)
def whole_replicated_logits(x, head, labels):
    logits = spmd.all_gather(F.linear(copy(x), head), "tp", src=S(1), dst=R)
    return spmd.convert(parallel_cross_entropy(logits, labels).mean(), "tp", src=R, dst=I, expert_mode=True)


@buggy(x=t(I, 4, 8), w=p(S(1), 16, 8), labels=ids(R, 16, 4))
def pending_logits_into_the_parallel_loss(x, w, labels):
    logits = F.linear(spmd.convert(x, "tp", src=I, dst=S(1)), w)
    return parallel_cross_entropy(logits, labels).mean()


# --- collectives that do nothing, or too much ---


@buggy(**MLP)
def gathers_what_is_whole(x, w1, w2):
    x = spmd.all_gather(x, "tp", src=S(0), dst=I)
    return mlp(x, w1, w2).pow(2).mean()


def _mean_of_squares(x, w1, w2):
    return mlp(x, w1, w2).pow(2).mean()


@buggy(**MLP, whole=_mean_of_squares)
def gathers_replicated_as_replicated(x, w1, w2):
    x = spmd.all_gather(copy(x), "tp", src=R, dst=R)
    return reduce(F.linear(F.gelu(F.linear(x, w1)), w2)).pow(2).mean()


@buggy(**MLP, whole=_mean_of_squares)
def gathers_invariant_as_replicated(x, w1, w2):
    x = spmd.all_gather(x, "tp", src=I, dst=R)
    return reduce(F.linear(F.gelu(F.linear(x, w1)), w2)).pow(2).mean()


@buggy(**MLP)
def reduces_twice_in_a_row(x, w1, w2):
    y = mlp(x, w1, w2)
    y = reduce(y)
    y = reduce(y)
    return y.pow(2).mean()


@buggy(**MLP)
def copies_twice(x, w1, w2):
    x = copy(copy(x))
    return reduce(F.linear(F.gelu(F.linear(x, w1)), w2)).pow(2).mean()


@buggy(x=t(S(1), 2, 4, 8), w1=p(S(0), 16, 8), w2=p(S(1), 8, 16))
def sequence_gathered_along_the_batch(x, w1, w2):
    x = spmd.all_gather(x, "tp", src=S(0), dst=R)
    y = F.linear(F.gelu(F.linear(x.softmax(1), w1)), w2)
    return reduce(reduce_scatter_to_sequence_parallel_region(y, 1).pow(2).sum())


@buggy(x=t(S(1), 2, 4, 8), w1=p(S(0), 16, 8), w2=p(S(1), 8, 16))
def sequence_reduced_instead_of_scattered(x, w1, w2):
    h = gather_from_sequence_parallel_region(x, 1)
    y = reduce(F.linear(F.gelu(F.linear(h, w1)), w2))
    return reduce((x + y).pow(2).sum())


@buggy(x=t(I, 2, 4, 8), w1=p(S(0), 16, 8), w2=p(S(1), 8, 16))
def sequence_gathered_that_is_whole(x, w1, w2):
    h = gather_from_sequence_parallel_region(x, 1)
    return reduce(F.linear(F.gelu(F.linear(h, w1)), w2)).pow(2).mean()


@buggy(x=t(I, 2, 4, 8), w1=p(S(0), 16, 8), w2=p(S(1), 8, 16))
def exchanges_what_is_whole(x, w1, w2):
    h = spmd.all_to_all(x, "tp", src=S(1), dst=S(2))
    return reduce(h.pow(2).sum())


@buggy(x=t(I, 4, 8), w=p(S(0), 16, 8))
def converts_a_shard(x, w):
    h = F.linear(copy(x), w)
    h = spmd.convert(h, "tp", src=I, dst=S(1))
    return reduce(h.pow(2).sum())


@buggy(**MLP)
def scatters_a_whole_sum(x, w1, w2):
    y = spmd.reduce_scatter(mlp(x, w1, w2), "tp", dst=S(1))
    return reduce(y.pow(2).sum())


# --- several bugs in one program ---


@buggy(**MLP)
def neither_copy_nor_reduce(x, w1, w2):
    y = F.linear(F.gelu(F.linear(x, w1)), w2)
    return (x + y).pow(2).mean()


@buggy(**MLP, b=p(I, 8), v1=p(S(0), 16, 8), v2=p(S(1), 8, 16))
def two_layers_without_reductions(x, w1, w2, b, v1, v2):
    y = F.linear(F.gelu(F.linear(copy(x), w1)), w2, b)
    x = x + y
    z = F.linear(F.gelu(F.linear(copy(x), v1)), v2)
    return (x + z).pow(2).mean()


@buggy(**MLP, gain=p(I, 8))
def norm_and_residual_of_a_pending_sum(x, w1, w2, gain):
    y = F.linear(F.gelu(F.linear(copy(x), w1)), w2)
    y = F.layer_norm(y, (8,), gain)
    return torch.tanh(x + y).mean()


@buggy(x=t(I, 2, 4, 8), q=p(S(0), 8, 8), k=p(S(0), 8, 8), v=p(S(0), 8, 8), o=p(S(1), 8, 8))
def attention_by_hand(x, q, k, v, o):
    queries, keys, values = (F.linear(x, w).view(2, 4, 4, 2).transpose(1, 2) for w in (q, k, v))
    context = F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).reshape(2, 4, 8)
    return (x + F.linear(context, o)).pow(2).mean()


# --- sums and products of data ---


@buggy(**DATA, mesh=dict(dp=2))
def maximum_of_the_data(x, w):
    y = F.linear(x, w)
    return (y / y.detach().abs().max()).pow(2).sum()


@buggy(**DATA, mesh=dict(dp=2))
def normalised_by_the_sum_of_the_data(x, w):
    y = F.linear(x, w).exp()
    return (y / y.sum()).pow(2).sum()


@buggy(**DATA, mesh=dict(dp=2))
def log_of_the_sum_over_the_data(x, w):
    return F.linear(x, w).exp().sum().log()


@buggy(x=t(I, 4, 8), w=p(S(0), 16, 8))
def statistics_of_a_shard(x, w):
    h = F.linear(copy(x), w)
    h = h - h.mean(-1, keepdim=True)
    return reduce(h.pow(4).sum())


@buggy(x=t(I, 4, 8), w=p(S(0), 16, 8))
def plain_verb_in_the_graph(x, w):
    h = F.linear(copy(x), w)
    h = comm.all_gather(h, "tp", dim=0)
    return h.softmax(-1).pow(2).mean()


@buggy(x=t(I, 4, 8), w=p(S(0), 16, 8))
def two_shards_of_one_dim(x, w):
    h = F.linear(copy(x), w)
    g = spmd.convert(x, "tp", src=I, dst=S(0))
    return reduce((h[:, :4] * 0).sum() + g.pow(2).sum()) + gather(h).pow(2).mean() + (h + h).softmax(-1).mean()


@buggy(x=t(I, 4, 16), gate_up=p(S(0, stride=2), 16, 16), other=p(S(0), 16, 16))
def blocks_and_pieces(x, gate_up, other):
    h = F.linear(copy(x), gate_up) * F.linear(copy(x), other)
    return reduce(h.pow(2).sum())


@buggy(x=t(I, 4, 8), w=p(S(0), 16, 8), out=p(S(1), 8, 16))
def reduces_by_the_maximum(x, w, out):
    y = F.linear(F.linear(copy(x), w), out)
    y = y / y.detach().abs().amax()
    return reduce(y).pow(2).mean()


DIFFERING = {}


@program(**MLP, v1=p(S(0), 16, 8), v2=p(S(1), 8, 16), programs=DIFFERING)
def layers_of_which_one_is_reduced(x, w1, w2, v1, v2):
    first = lambda x: mlp(x, w1, w2)  # noqa: E731
    second = lambda x: F.linear(F.gelu(F.linear(copy(x), v1)), v2)  # noqa: E731
    for layer in (first, second):
        x = x + layer(x)
    return x.pow(2).mean()
