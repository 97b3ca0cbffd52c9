"""Programs that work on this rank's own part of something: right ones, and wrong ones that look alike.

In the manner of `messages/programs.py`: each is one rank's program, and on one rank with whole inputs it is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from neuronx_dist import comm, spmd
from neuronx_dist.spmd import I, P, R, S, V
from tests.checking.types.messages.running import Input, Program, ids, p, t


class Case(NamedTuple):
    """A program, and what is to be said of it.

    Attributes:
        refused: words of the error; "": it is accepted.
        listed: words that the assumptions and trusted declarations of the report hold together.
        right: whether the ranks give what one rank gives.
    """

    program: Program
    refused: str
    listed: tuple[str, ...]
    right: bool


CASES: dict[str, Case] = {}


def case(
    refused: str = "", listed: tuple[str, ...] = (), right: bool = True, mesh: Any = None, **inputs: Input
) -> Callable[[Any], Any]:
    def register(body: Any) -> Any:
        name = body.__name__
        CASES[name] = Case(
            Program(name, body, inputs, mesh or {"tp": 2}, "G", False, None, False, body), refused, listed, right
        )
        return body

    return register


# --- lookups in a sharded vocabulary ---

TABLE = dict(tokens=ids(R, 8, 3, 5), weight=p(S(0), 8, 4))
MASKED = ("is masked",)
UNMASKED = "these are not masked"


def bounds(weight):
    count = weight.shape[0]
    first = comm.rank("tp") * count
    return first, first + count


@case(**TABLE, listed=MASKED)
def lookup_masked_by_assignment(tokens, weight):
    first, end = bounds(weight)
    mask = (tokens < first) | (tokens >= end)
    local = tokens - first
    local[mask] = 0
    out = weight[local]
    out[mask] = 0
    return spmd.all_reduce(out, "tp", src=P, dst=I).pow(2).sum()


@case(**TABLE, listed=MASKED)
def lookup_masked_by_fill(tokens, weight):
    first, end = bounds(weight)
    mask = torch.logical_or(tokens < first, tokens >= end)
    out = F.embedding((tokens - first).masked_fill(mask, 0), weight)
    out = out.masked_fill(mask.unsqueeze(-1), 0.0)
    return spmd.all_reduce(out, "tp", dst=I).pow(2).sum()


@case(**TABLE, listed=MASKED)
def lookup_masked_by_where(tokens, weight):
    first, end = bounds(weight)
    own = (tokens >= first) & (tokens < end)
    out = F.embedding(torch.where(own, tokens - first, 0), weight)
    out = torch.where(own[..., None], out, torch.zeros_like(out))
    return spmd.all_reduce(out, "tp", dst=I).pow(2).sum()


@case(**TABLE, listed=MASKED)
def lookup_masked_by_product(tokens, weight):
    first, _ = bounds(weight)
    local = tokens - first
    own = (local >= 0) & (local < weight.shape[0])
    out = weight.index_select(0, local.clamp(0, weight.shape[0] - 1).flatten()).view(*tokens.shape, -1)
    out = out * own.unsqueeze(-1).to(out.dtype)
    return spmd.all_reduce(spmd.reinterpret(out, "tp", src=V, dst=P), "tp", dst=I).pow(2).sum()


@case(**TABLE, listed=MASKED)
def lookup_masked_after_a_scale_and_a_transposition(tokens, weight):
    first, end = bounds(weight)
    mask = (tokens < first) | (tokens >= end)
    out = (F.embedding((tokens - first) * ~mask, weight) * 2.0).transpose(0, 1).contiguous()
    out = out.masked_fill(mask.t().unsqueeze(-1), 0)
    return spmd.all_reduce(out, "tp", dst=I).pow(2).sum()


@case(**TABLE, refused="rank 0 it keeps positions 0 to 4, and the rank holds 0 to 3", right=False)
def lookup_masked_beyond_the_end(tokens, weight):
    first, end = bounds(weight)
    mask = (tokens < first) | (tokens > end)
    local = (tokens - first).clamp(0, weight.shape[0] - 1)
    out = F.embedding(local, weight).masked_fill(mask.unsqueeze(-1), 0.0)
    return spmd.all_reduce(out, "tp", dst=I).pow(2).sum()


@case(**TABLE, refused="the mask does not match the positions that each rank holds", right=False)
def lookup_that_keeps_what_is_foreign(tokens, weight):
    first, end = bounds(weight)
    foreign = ~((tokens >= first) & (tokens < end))
    out = weight[(tokens - first) % weight.shape[0]]
    out = torch.where(foreign.unsqueeze(-1), out, torch.zeros_like(out))
    return spmd.all_reduce(out, "tp", dst=I).pow(2).sum()


@case(**TABLE, refused="the mask does not match the positions that each rank holds", right=False)
def lookup_that_loses_the_first_row(tokens, weight):
    first, _ = bounds(weight)
    local = tokens - first
    own = (local > 0) & (local < weight.shape[0])
    out = weight[local.clamp(0, weight.shape[0] - 1)] * own[..., None]
    return spmd.all_reduce(out, "tp", dst=I).pow(2).sum()


@case(**TABLE, refused="the mask does not match the positions that each rank holds", right=False)
def lookup_by_positions_that_are_not_shifted(tokens, weight):
    first, end = bounds(weight)
    own = (tokens >= first) & (tokens < end)
    out = weight[torch.where(own, tokens - first - 1, 0).clamp(0)] * own[..., None]
    return spmd.all_reduce(out, "tp", dst=I).pow(2).sum()


@case(tokens=ids(R, 7, 3, 5), weight=p(S(0), 8, 4), listed=MASKED)
def lookup_in_a_padded_table(tokens, weight):
    first, end = bounds(weight)
    own = (tokens >= first) & (tokens < end) & (tokens < 7 + 0 * first)
    out = weight[torch.where(own, tokens - first, 0)] * own[..., None]
    return spmd.all_reduce(out, "tp", dst=I).pow(2).sum()


SHARED = dict(tokens=ids({"dp": S(0), "tp": R}, 8, 4, 5), weight=p({"dp": R, "tp": S(0)}, 8, 4))


@case(**SHARED, mesh={"dp": 2, "tp": 2}, listed=MASKED)
def lookup_of_sharded_ids_masked_by_rows(tokens, weight):
    first, end = bounds(weight)
    mask = (tokens < first) | (tokens >= end)
    local = tokens - first
    local[mask] = 0
    out = F.embedding(local, weight)
    out[mask, :] = 0.0
    return spmd.all_reduce(out, "tp", src=P, dst=I).pow(2).sum()


LOGITS = dict(logits=t(S(1), 6, 8), target=ids(R, 8, 6))


@case(**LOGITS, listed=MASKED)
def target_logit_masked(logits, target):
    count = logits.shape[1]
    first = comm.rank("tp") * count
    outside = (target < first) | (target >= first + count)
    local = (target - first).masked_fill(outside, 0)
    picked = logits.gather(1, local.unsqueeze(1)).squeeze(1)
    picked = picked.masked_fill(outside, 0.0)
    total = spmd.all_reduce(logits.exp().sum(1), "tp", dst=I)
    return (total.log() - spmd.all_reduce(picked, "tp", dst=I)).sum()


@case(**LOGITS, refused=UNMASKED, right=False)
def target_logit_not_masked(logits, target):
    count = logits.shape[1]
    local = (target - comm.rank("tp") * count).clamp(0, count - 1)
    picked = logits.gather(1, local.unsqueeze(1)).squeeze(1)
    total = spmd.all_reduce(logits.exp().sum(1), "tp", dst=I)
    return (total.log() - spmd.all_reduce(picked, "tp", dst=I)).sum()


@case(**TABLE, refused=UNMASKED, right=False)
def lookup_of_clamped_positions(tokens, weight):
    first, _ = bounds(weight)
    out = weight[(tokens - first).clamp(0, weight.shape[0] - 1)]
    return spmd.all_reduce(out, "tp", src=P, dst=I).pow(2).sum()


@case(**TABLE, refused=UNMASKED, right=False)
def lookup_whose_result_is_not_masked(tokens, weight):
    first, end = bounds(weight)
    mask = (tokens < first) | (tokens >= end)
    local = tokens - first
    local[mask] = 0
    out = F.embedding(local, weight) * 0.5
    return spmd.all_reduce(out, "tp", src=V, dst=I).pow(2).sum()


@case(**TABLE, refused=UNMASKED, right=False)
def lookup_not_masked_and_declared_a_sum(tokens, weight):
    first, _ = bounds(weight)
    out = weight[(tokens - first) % weight.shape[0]].relu()
    return spmd.all_reduce(spmd.reinterpret(out, "tp", src=V, dst=P), "tp", dst=I).pow(2).sum()


@case(**TABLE, refused=UNMASKED, right=False)
def lookup_not_masked_and_reduced_by_a_verb(tokens, weight):
    first, _ = bounds(weight)
    out = weight[(tokens - first) % weight.shape[0]]
    return comm.all_reduce(out.detach(), "tp").sum() + weight.sum() * 0.0


@case(**TABLE, refused="another tensor indexes it", right=False)
def lookup_of_whole_ids(tokens, weight):
    out = weight[tokens % weight.shape[0]]
    return spmd.all_reduce(out, "tp", src=P, dst=I).pow(2).sum()


# --- gathered or summed shards ---

SHARD = dict(x=t(S(1), 4, 6), w=t(I, 6, 3))
ORDER = ("in the order of the sharding",)


@case(**SHARD, listed=ORDER)
def stacked_and_put_together_in_order(x, w):
    pieces = spmd.all_gather(x, "tp", src=V, dst=I)
    return (pieces.permute(1, 0, 2).reshape(4, 6) @ w).pow(2).sum()


@case(**SHARD, refused="in another order", right=False)
def stacked_and_put_together_in_another_order(x, w):
    pieces = spmd.all_gather(x, "tp", src=V, dst=I)
    return (pieces.permute(1, 2, 0).reshape(4, 6) @ w).pow(2).sum()


@case(**SHARD, refused="in another order", right=False)
def stacked_and_merged_with_the_rows(x, w):
    pieces = spmd.all_gather(x * 2.0, "tp", src=V, dst=I, gather_dim=1)  # [4, tp, 3]
    pieces = torch.tanh(pieces).transpose(0, 1).flatten(0, 1)  # [tp * 4, 3]
    return (pieces.reshape(4, 6) @ w).pow(2).sum()


@case(**SHARD, listed=ORDER)
def stacked_beside_and_put_together_after_a_product(x, w):
    pieces = spmd.all_gather(x, "tp", src=V, dst=I, gather_dim=-2)  # [4, tp, 3]
    return ((pieces * 2.0).exp().flatten(1) @ w).pow(2).sum()


@case(**SHARD, listed=ORDER)
def stacked_and_put_together_in_a_loop(x, w):
    pieces = spmd.all_gather(x, "tp", src=V, dst=I)
    return (torch.cat([*pieces], 1) @ w).pow(2).sum()


@case(x=t(S(0), 4, 6), w=t(I, 6, 3), listed=ORDER)
def stacked_rows(x, w):
    pieces = spmd.all_gather(x, "tp", src=V, dst=I)
    return (pieces.reshape(-1, 6) @ w).pow(2).sum()


@case(x=t(S(0), 4, 6), refused="added up", right=False)
def shards_added_up(x):
    return spmd.all_reduce(x, "tp", src=V, dst=I).pow(2).sum()


@case(x=t(S(0), 8, 6), refused="added up", right=False)
def shards_added_up_and_scattered(x):
    return spmd.all_reduce(spmd.reduce_scatter(x, "tp", src=V, dst=S(0)).pow(2).sum(), "tp", dst=I)


@case(x=t(S(0), 4, 6), listed=("are summands",))
def what_varies_is_summed(x):
    own = spmd.local(x).pow(2).sum()
    return spmd.all_reduce(own, "tp", src=V, dst=I)


# --- local code ---

EXPERTS = dict(x=t(R, 5, 4), up=p(S(0), 4, 4, 6), down=p(S(0), 4, 6, 4), router=t(R, 4, 4))


def weights_of(x, router):
    return (x @ router).softmax(-1)


@case(**EXPERTS, listed=("each rank takes a position of its own part of a parameter's sharded dim 0",))
def loop_over_local_experts(x, up, down, router):
    scores = weights_of(x, router)
    first = comm.rank("tp") * up.shape[0]
    out = 0
    for e in range(up.shape[0]):
        out = out + (F.silu(x @ up[e]) @ down[e]) * scores[:, first + e, None]
    return spmd.all_reduce(out, "tp", src=P, dst=I).pow(2).sum()


@spmd.local_map(out_types={"tp": P}, in_types=[{"tp": R}, {"tp": S(0)}, {"tp": S(0)}, {"tp": R}])
def experts_of_this_rank(x, up, down, scores):
    first = comm.rank("tp") * up.shape[0]
    out = 0
    for e in range(up.shape[0]):
        out = out + (F.silu(x @ up[e]) @ down[e]) * scores[:, first + e, None]
    return out


@case(**EXPERTS, listed=("local_map: experts_of_this_rank",))
def loop_over_local_experts_in_a_scope(x, up, down, router):
    out = experts_of_this_rank(x, up, down, weights_of(x, router))
    return spmd.all_reduce(out, "tp", dst=I).pow(2).sum()


@case(**EXPERTS, refused="it is P on tp, and cannot be declared R", right=False)
def local_code_whose_result_is_said_to_be_equal(x, up, down, router):
    part = spmd.local_map(lambda: x @ spmd.reinterpret(up[0], "tp", src=V, dst=P), out_types={"tp": R})
    return part().pow(2).sum()


@case(**EXPERTS, refused="cannot be declared S", right=False)
def equal_values_that_are_said_to_be_shards(x, up, down, router):
    whole = spmd.local_map(lambda: x * 2, out_types={"tp": S(0)})
    return whole().pow(2).sum()


@case(**{**EXPERTS, "x": t(I, 5, 4)}, refused="an I operand that receives a gradient", right=False)
def local_code_is_checked_too(x, up, down, router):
    part = spmd.local_map(lambda: (x @ up[0]) @ down[0], out_types={"tp": P})
    return spmd.all_reduce(part(), "tp", dst=I).sum()


@case(**EXPERTS, refused="it is S(0) on tp, not S(1)", right=False)
def local_code_whose_input_is_not_what_it_says(x, up, down, router):
    part = spmd.local_map(lambda w: x @ w[0], out_types={"tp": P}, in_types={"tp": S(1)})
    return spmd.all_reduce(part(up).sum(), "tp", dst=I)


MLP = dict(x=t(R, 5, 4), w1=p(S(1), 4, 8), w2=p(S(0), 8, 4))


@case(**MLP, listed=("each rank takes its own part of sharded dim 0: that all parts are used in the same way",))
def blocks_of_a_sharded_mlp(x, w1, w2):
    y = 0
    for i in range(0, w1.shape[1], 2):
        y = y + F.gelu(x @ w1[:, i : i + 2]) @ w2[i : i + 2]
    return spmd.all_reduce(y, "tp", dst=I).pow(2).sum()


@case(**MLP, listed=("local_map: blocked",))
def blocks_of_a_sharded_mlp_in_a_scope(x, w1, w2):
    def blocked():
        y = 0
        for i in range(0, w1.shape[1], 2):
            y = y + F.gelu(x @ w1[:, i : i + 2]) @ w2[i : i + 2]
        return y

    return spmd.all_reduce(spmd.local_map(blocked, out_types={"tp": P})(), "tp", dst=I).pow(2).sum()


@case(x=t(S(1), 3, 8), refused="local_map", right=False)
def top_k_of_a_shard(x):
    return spmd.all_reduce(x.topk(2, 1).values.sum(), "tp", dst=I)


@spmd.local_map(out_types=[{"tp": S(1)}, {"tp": S(1)}])
def own_top_k(x):
    values, index = x.topk(2, 1)
    return values, index + comm.rank("tp") * x.shape[1]


@case(x=t(S(1), 3, 8), listed=("local_map: own_top_k",))
def top_k_of_the_top_k_of_shards(x):
    values, index = own_top_k(x)
    values = spmd.all_gather(values, "tp", src=S(1), dst=I)
    index = spmd.all_gather(index, "tp", src=S(1), dst=I)
    best, where = values.topk(2, 1)
    return (best * index.gather(1, where)).sum()


# --- pieces of the batch of this rank ---

BATCH = dict(x=t({"dp": S(0)}, 8, 4), y=t({"dp": S(0)}, 8, 3), w=p({"dp": R}, 4, 3))
DP = {"dp": 2}
PIECES = ("all parts are used in the same way",)


def squares(x, y, w):
    return (F.tanh(x @ w) - y).pow(2).sum()


@case(**BATCH, mesh=DP, listed=PIECES)
def gradients_accumulated_over_chunks(x, y, w):
    loss = 0
    for own_x, own_y in zip(x.chunk(2), y.chunk(2)):
        loss = loss + squares(own_x, own_y, w)
    return loss


@case(**BATCH, mesh=DP, listed=PIECES)
def backward_of_each_split(x, y, w):
    loss = 0
    for own_x, own_y in zip(torch.split(x, 2), y.split([2] * (y.shape[0] // 2))):
        part = squares(own_x, own_y, w)
        part.backward()
        loss = loss + part.detach()
    return loss


@case(**BATCH, mesh=DP, listed=PIECES)
def gradients_accumulated_over_slices(x, y, w):
    loss = 0
    for i in range(0, x.shape[0], 2):
        loss = loss + squares(x[i : i + 2], y.narrow(0, i, 2), w)
    return loss


@case(**BATCH, mesh=DP, listed=PIECES)
def one_sample_at_a_time(x, y, w):
    return sum(squares(x[i : i + 1], y[i : i + 1, :], w) for i in range(x.shape[0]))


GRID = dict(x=t({"dp": S(0), "tp": R}, 8, 4), y=t({"dp": S(0), "tp": S(1)}, 8, 6), w=p({"dp": R, "tp": S(1)}, 4, 6))


@case(**GRID, mesh={"dp": 2, "tp": 2}, listed=PIECES)
def chunks_beside_tensor_parallelism(x, y, w):
    loss = 0
    for own_x, own_y in zip(x.tensor_split(2), y.hsplit(1)[0].vsplit(2)):
        loss = loss + squares(own_x, own_y, w)
    return loss


@case(**BATCH, mesh=DP, listed=PIECES)
def chunks_put_together_again(x, y, w):
    hidden = torch.cat([F.tanh(part @ w) for part in x.split(2)])
    return (hidden - y).pow(2).sum()


@case(x=t({"dp": S(0)}, 8, 2, 4), ids=ids({"dp": S(0)}, 3, 8, 2), w=p({"dp": R}, 4, 3), mesh=DP, listed=PIECES)
def chunks_of_tokens_and_of_their_chunks(x, ids, w):
    loss = 0
    for own, labels in zip(x.view(-1, 4).chunk(2), ids.flatten().chunk(2)):
        for logits, label in zip((own @ w).chunk(2), labels.chunk(2)):
            loss = loss + F.cross_entropy(logits, label, reduction="sum")
    return loss


@case(**BATCH, mesh=DP, refused="are not neighbours in the whole", right=False)
def chunks_put_together_in_another_order(x, y, w):
    first, second = x.chunk(2)
    return (torch.cat([second, first]) @ w - y).pow(2).sum()


@case(x=t({"dp": S(0)}, 12, 4), w=p({"dp": R}, 4, 3), mesh=DP, refused="are not neighbours in the whole", right=False)
def chunks_put_together_without_the_middle(x, w):
    first, _, last = x.chunk(3)
    return (torch.cat([first, last]) @ w).pow(2).sum()


@case(x=t({"dp": S(0)}, 12, 4), y=t({"dp": S(0)}, 12, 3), w=p({"dp": R}, 4, 3), mesh=DP,
      refused="they are parts of each rank's piece", right=False)  # fmt: skip
def chunks_without_the_middle_against_other_chunks(x, y, w):
    first, _, last = x.chunk(3)
    one, other, _ = y.chunk(3)
    return (torch.cat([first, last]) @ w - torch.cat([one, other])).pow(2).sum()


@case(**BATCH, mesh=DP, refused="are not neighbours in the whole", right=False)
def a_half_of_the_samples_against_the_other(x, y, w):
    first, second = (x @ w).chunk(2)
    return (first * second).sum()


@case(h=t({"tp": S(1)}, 4, 8), refused="chunk(2) cuts it into pieces", right=False)
def gate_and_up_of_a_weight_that_is_not_sharded_in_blocks(h):
    gate, up = h.chunk(2, 1)
    return (F.silu(gate) * up).sum()


@case(x=t({"tp": S(1)}, 4, 8, 3), refused="an index picks one of its positions", right=False)
def the_first_token_of_a_sharded_sequence(x):
    return spmd.all_reduce(x[:, 0].sum(), "tp", dst=I)
