"""Sequences over cp, sharded vocabularies, experts, pipelines. No rule was written or tuned for these programs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.parallel_layers import mappings
from neuronx_dist.spmd import I, P, R, S
from tests.checking.user_programs.model_base import (
    BATCH,
    HIDDEN,
    INNER,
    SEQ,
    TOKENS,
    TP,
    VOCAB,
    Model,
    X,
    experts,
    model,
    sharded,
)
from tests.checking.user_programs.support import integers, normal, programs

# --- context parallelism ---


@programs(
    mesh={"dp": 2, "cp": 2},
    inputs=dict(ids=integers(VOCAB, BATCH, SEQ)),
    in_types={"ids": {"cp": S(1)}},
    bugs={
        "shifted_locally": "labels are shifted within each part of the sequence: one at each border is lost",
        "own_count": "each rank divides by the number of its own labels: the last part has one less",
    },
)
def labels_shifted_over_the_border(bug):
    """The first token of the next part is the label of the last one of this."""

    def shifted(ids):
        size = comm.size("cp")
        last = torch.full_like(ids[:, :1], -100)
        if bug != "shifted_locally" and size > 1:
            first = comm.permute(ids[:, :1].contiguous(), "cp", [(i, i - 1) for i in range(1, size)])
            last = torch.where(torch.tensor(comm.rank("cp") == size - 1), last, first)
        return torch.cat([ids[:, 1:], last], 1)

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        labels = shifted(batch["ids"])
        logits = model(batch["ids"])
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count = (labels != -100).sum()
        if bug != "own_count":
            count = comm.all_reduce(count, ("dp", "cp")) / comm.size(("dp", "cp"))
        (total / count).backward()
        nxd.reduce_gradients(model)
        optimizer.step()

    return dict(model_fn=lambda: nn.Sequential(nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)), step=step)


@programs(
    mesh={"cp": 2},
    inputs=dict(x=normal(BATCH, SEQ, HIDDEN), y=normal(BATCH, SEQ, 1)),
    in_types={"x": {"cp": S(1)}, "y": {"cp": S(1)}},
    bugs={"not_over_cp": "gradients are averaged over dp, of which there is one rank, and not over cp"},
)
def regression_on_parts_of_sequences(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        axis = "dp" if bug else ("dp", "cp")
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad, axis) / comm.size(axis)
        optimizer.step()

    return dict(model_fn=lambda: nn.Sequential(nn.Linear(HIDDEN, 6), nn.Mish(), nn.Linear(6, 1)), step=step)


@model(
    mesh={"cp": 2},
    inputs=dict(x=normal(BATCH, SEQ, HIDDEN)),
    in_types={"x": {"cp": S(1)}},
    bugs={"own_total": "each rank normalises its weights over its part of the sequence, and the results are averaged"},
)
class WeightedPooling(Model):
    """Attention pooling over the whole sequence, in two sums."""

    def build(self):
        self.score, self.value = nn.Linear(HIDDEN, 1), nn.Linear(HIDDEN, 4)

    def forward(self, x):
        weight, value = self.score(x).exp(), self.value(x)
        if self.bug:
            pooled = (weight * value).sum(1) / weight.sum(1) / comm.size("cp")
            return spmd.all_reduce(pooled, "cp", src=P, dst=R).square().mean()
        total = spmd.all_reduce(weight.sum(1), "cp", src=P, dst=R)
        pooled = spmd.all_reduce((weight * value).sum(1), "cp", src=P, dst=R) / total
        return pooled.square().mean()


# --- vocabularies ---


@model(
    mesh=TP,
    inputs=TOKENS,
    bugs={
        "softmax_of_the_shard": "both distributions are normalised over this rank's part of the vocabulary",
        "gradient_summed": "the sum of the divergence sums its gradients too, which are equal on all ranks",
    },
)
class VocabularyDistillation(Model):
    """The divergence of two sharded distributions, by hand."""

    def build(self):
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.student, self.teacher = sharded(0, VOCAB, HIDDEN), sharded(0, VOCAB, HIDDEN)
        self.teacher.requires_grad_(False)

    def log_softmax(self, logits):
        if self.bug == "softmax_of_the_shard":
            return logits.log_softmax(-1)
        top = comm.all_reduce(logits.detach().amax(-1, keepdim=True), "tp", op="max")
        total = spmd.all_reduce((logits - top).exp().sum(-1, keepdim=True), "tp", src=P, dst=R)
        return logits - top - total.log()

    def forward(self, ids, labels):
        h = mappings.copy_to_tensor_model_parallel_region(self.embedding(ids))
        student = self.log_softmax(F.linear(h, self.student))
        with torch.no_grad():
            teacher = self.log_softmax(F.linear(h, self.teacher))
        divergence = (teacher.exp() * (teacher - student)).sum(-1)
        divergence = spmd.all_reduce(divergence, "tp", src=P, dst=R if self.bug == "gradient_summed" else I)
        return (divergence * (labels > 2)).mean()


# --- experts ---


class SoftMixture(nn.Module):
    """Soft MoE: every slot is a mean of the tokens of its sample, every token a mean of the slots."""

    def __init__(self):
        super().__init__()
        self.slots = nn.Linear(HIDDEN, 4, bias=False)
        experts(self, "weight", 4, HIDDEN, HIDDEN)

    def forward(self, x):
        logits = self.slots(x)
        inside = torch.einsum("bse,bsh->ebh", logits.softmax(1), x).contiguous()
        sent = mappings.enter_expert_parallel_region(inside)
        y = torch.einsum("erbh,ehk->erbk", sent, self.weight).tanh()
        y = mappings.exit_expert_parallel_region(y)
        return (x + torch.einsum("bse,ebh->bsh", logits.softmax(-1), y)).square().mean()


@programs(
    mesh={"dp": 2, "ep": 2},
    inputs=X,
    bugs={
        "experts_averaged": "gradients of different experts are averaged with one another",
        "experts_not_divided": "experts have the gradients of all ranks' tokens, each of a mean over one rank's",
    },
)
def soft_mixture(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        model(batch["x"]).backward()
        for name, p in model.named_parameters():
            if name == "weight" and bug != "experts_averaged":
                if bug is None:
                    p.grad /= comm.size("ep")
            else:
                p.grad = comm.all_reduce(p.grad, "dp") / comm.size("dp")
        optimizer.step()

    return dict(model_fn=SoftMixture, step=step)


@model(
    mesh={"dp": 2, "ep": 2},
    inputs=X,
    bugs={"dropped_by_rank": "the places of an expert are given out over all tokens of the rank, not sample by sample"},
)
class CapacityPerSample(Model):
    """Switch routing: an expert takes three tokens of a sample at most, and the others pass it by."""

    def build(self):
        self.router = nn.Linear(HIDDEN, 4)
        experts(self, "weight", 4, HIDDEN, HIDDEN)

    def forward(self, x):
        samples, capacity = x.shape[0], 3
        gate, expert = self.router(x).softmax(-1).max(-1)
        chosen = F.one_hot(expert, 4)  # [b, s, e]
        if self.bug:
            x, gate, chosen = (t.reshape(1, -1, *t.shape[2:]) for t in (x, gate, chosen))
            capacity = capacity * samples
        place = chosen.cumsum(1) * chosen - 1
        dispatch = (
            F.one_hot(place.clamp(min=0), place.shape[1])[..., :capacity] * (chosen * (place < capacity))[..., None]
        )
        dispatch = dispatch.to(x)
        sent = torch.einsum("bsec,bsh->ebch", dispatch, x)
        y = mappings.enter_expert_parallel_region(sent.flatten(1, 2))
        y = mappings.exit_expert_parallel_region(torch.einsum("erth,ehk->ertk", y, self.weight).tanh())
        y = torch.einsum("bsec,ebch->bsh", dispatch, y.unflatten(1, (-1, capacity)))
        return (x + gate.unsqueeze(-1) * y).square().mean()


@spmd.local_map(out_types={"tp": P}, in_types=[{"tp": R}, {"tp": S(-1)}, {"tp": S(0)}, {"tp": S(0)}])
def chosen_by_own_experts(x, gates, up, down):
    """Each expert of this rank takes the two tokens of a sample that want it most."""
    y = torch.zeros_like(x)
    for e in range(up.shape[0]):
        weight, index = gates[..., e].topk(2, dim=1)
        index = index.unsqueeze(-1).expand(-1, -1, x.shape[-1])
        out = F.silu(x.gather(1, index) @ up[e]) @ down[e]
        y = y.scatter_add(1, index, out * weight.unsqueeze(-1))
    return y


@model(
    mesh=TP,
    inputs=X,
    bugs={
        "not_reduced": "each rank adds what its own experts say of the tokens",
        "tokens_not_copied": "the tokens' gradient is that of this rank's experts",
    },
)
class ExpertChoice(Model):
    """Experts choose tokens; their ranks see all tokens."""

    def build(self):
        self.mix, self.router = nn.Linear(HIDDEN, HIDDEN), sharded(0, 4, HIDDEN)
        self.up, self.down = sharded(0, 4, HIDDEN, INNER), sharded(0, 4, INNER, HIDDEN)

    def forward(self, x):
        x = x + torch.tanh(self.mix(x))
        copied = x if self.bug == "tokens_not_copied" else mappings.copy_to_tensor_model_parallel_region(x)
        y = chosen_by_own_experts(copied, F.linear(copied, self.router).sigmoid(), self.up, self.down)
        if self.bug != "not_reduced":
            y = mappings.reduce_from_tensor_model_parallel_region(y)
        return (x + y).square().mean()


# --- pipelines ---


class Feed(nn.Module):
    def __init__(self, sequence_parallel=False, marked=True):
        super().__init__()
        options = dict(sequence_parallel_enabled=True, sequence_dimension=1) if sequence_parallel else {}
        self.norm = nxd.RMSNorm(HIDDEN, sequence_parallel_enabled=sequence_parallel and marked)
        self.up = nxd.ColumnParallelLinear(HIDDEN, INNER, bias=False, gather_output=False, **options)
        self.down = nxd.RowParallelLinear(INNER, HIDDEN, bias=False, input_is_parallel=True, **options)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Regressor(Model):
    def build(self):
        self.blocks = nn.ModuleList([Feed() for _ in range(2)])
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        loss = self.head(x).square()
        return loss.sum() if self.bug == "summed" else loss.mean()


def pipeline(module, names):
    return nxd.NxDPPModel(
        module.to(torch.get_default_dtype()),
        transformer_layer_cls=Feed,
        num_microbatches=2,
        auto_partition=True,
        input_names=names,
        output_loss_value_spec=True,
    )


@programs(
    mesh={"pp": 2, "dp": 2},
    inputs=X,
    bugs={"summed": "the loss is a sum over the microbatch, and the engine takes the mean over microbatches and ranks"},
)
def pipeline_of_a_mean(bug):
    return dict(model_fn=lambda: pipeline(Regressor(bug), ["x"]))


class SequenceParallelStages(Model):
    def build(self):
        self.embedding = nxd.ParallelEmbedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList([Feed(True, marked=not (self.bug and i)) for i in range(2)])
        self.head = nxd.ColumnParallelLinear(HIDDEN, VOCAB, bias=False, gather_output=False)

    def forward(self, ids, labels):
        x = mappings.scatter_to_sequence_parallel_region(self.embedding(ids), 1)
        for block in self.blocks:
            x = block(x)
        x = mappings.gather_from_sequence_parallel_region(x, 1, to_model_parallel=False)
        return nxd.parallel_cross_entropy(self.head(x), labels).mean()


@programs(
    mesh={"pp": 2, "tp": 2},
    inputs=TOKENS,
    bugs={"second_norm_not_marked": "the norm of the last stage sees a part of the sequence, and nobody sums it"},
)
def sequence_parallel_pipeline(bug):
    return dict(model_fn=lambda: pipeline(SequenceParallelStages(bug), ["ids", "labels"]))
