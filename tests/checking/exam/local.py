"""Code that works on the positions of a shard, and values that are equal after a reduction (item 5)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.parallel_layers import mappings
from neuronx_dist.spmd import I, S
from tests.checking.exam.support import pair
from tests.checking.user_programs.model_base import experts
from tests.checking.user_programs.support import descend, normal

DP, TP, CP, EP = {"dp": 2}, {"tp": 2}, {"cp": 4}, {"dp": 2, "ep": 2}
X = dict(x=normal(4, 8, 8))
ON_CP = {"x": {"cp": S(1)}}
REGRESSION = dict(x=normal(8, 4), y=normal(8, 2))


def model(build):
    """`build(bug)` as a program that takes the default step."""
    return lambda bug: dict(model_fn=lambda: build(bug).to(torch.get_default_dtype()))


def named(name, make):
    make.__name__ = name
    return make


class Rotate(torch.autograd.Function):
    """Sends to the next rank of the ring; gradients go back, or on."""

    @staticmethod
    def forward(ctx, x, back):
        ctx.back, size = back, comm.size("cp")
        return comm.permute(x.contiguous(), "cp", [(i, (i + 1) % size) for i in range(size)])

    @staticmethod
    def backward(ctx, grad):
        size, step = comm.size("cp"), -1 if ctx.back else 1
        return comm.permute(grad.contiguous(), "cp", [(i, (i + step) % size) for i in range(size)]), None


class Attention(nn.Module):
    def __init__(self, bug):
        super().__init__()
        self.bug = bug
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def loss(self, x, y):
        y = x + self.out(y.transpose(1, 2).flatten(2))
        return y.square().sum() / (y.shape[0] * y.shape[1])

    def parts(self, q, k, v):
        """Numerator and denominator of the softmax over the keys of all ranks."""
        numerator, denominator = 0, 0
        turns = comm.size("cp")
        if self.bug == "one_turn_too_few":
            turns = max(1, turns - 1)
        for turn in range(turns):
            weights = (q @ k.transpose(-1, -2) / 4).exp()
            numerator, denominator = numerator + weights @ v, denominator + weights.sum(-1, keepdim=True)
            if turn + 1 < turns:
                k, v = (Rotate.apply(t, self.bug != "gradient_goes_on") for t in (k, v))
        return numerator / denominator


class Ring(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return self.loss(x, self.parts(q, k, v))


class MappedRing(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return self.loss(x, spmd.local_map(self.parts, out_types={"cp": S(2)}, in_types={"cp": S(2)})(q, k, v))


RING = {"gradient_goes_on": "gradients go around the ring in the direction of the keys"}
pair("5 ring attention", mesh=CP, inputs=X, in_types=ON_CP, bugs=RING)(named("ring", model(Ring)))
pair("5 ring attention", mesh=CP, inputs=X, in_types=ON_CP, bugs=RING)(named("mapped_ring", model(MappedRing)))


class Capacity(nn.Module):
    """One-hot dispatch to slots, which a running count of this rank's tokens assigns."""

    def __init__(self, bug):
        super().__init__()
        self.bug = bug
        self.router = nn.Linear(8, 4)
        experts(self, "weight", 4, 8, 8)

    def slots(self, chosen):
        return (chosen.cumsum(0) - 1) * chosen

    def dispatched(self, dispatch, tokens):
        return torch.einsum("tec,th->ech", dispatch, tokens)

    def combined(self, dispatch, y, gates):
        return torch.einsum("tec,ech,te->th", dispatch, y, gates)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        gates = self.router(tokens).softmax(-1)
        chosen = F.one_hot(gates.argmax(-1), 4)
        slot = self.slots(chosen)
        dispatch = F.one_hot(slot, tokens.shape[0]).to(x) * chosen.unsqueeze(-1)  # [t, e, c]
        sent = mappings.enter_expert_parallel_region(self.dispatched(dispatch, tokens))
        y = torch.tanh(torch.einsum("erch,ehk->erck", sent, self.weight))
        y = y.flatten(0, 1) if self.bug else mappings.exit_expert_parallel_region(y)
        y = self.combined(dispatch, y, gates)
        return (tokens + y).square().sum() / tokens.shape[0]


class MappedCapacity(Capacity):
    """Slots are those of this rank's tokens: dispatch and combination are in local code."""

    def slots(self, chosen):
        return spmd.local_map(super().slots, out_types={"ep": S(0)}, in_types={"ep": S(0)})(chosen)

    def dispatched(self, dispatch, tokens):
        filled = spmd.local_map(super().dispatched, out_types={"ep": S(1)}, in_types={"ep": S(0)})
        return filled(dispatch, tokens)

    def combined(self, dispatch, y, gates):
        in_types = [{"ep": S(0)}, {"ep": S(1)}, {"ep": S(0)}]
        return spmd.local_map(super().combined, out_types={"ep": S(0)}, in_types=in_types)(dispatch, y, gates)


BACK = {"not_sent_back": "results are combined before they are back"}
pair("5 capacity", mesh=EP, inputs=X, bugs=BACK)(named("capacity_by_cumsum", model(Capacity)))
pair("5 capacity", mesh=EP, inputs=X, bugs=BACK)(named("mapped_capacity", model(MappedCapacity)))


class Head(nn.Module):
    def __init__(self, bug):
        super().__init__()
        self.bug = bug
        self.head = nxd.ColumnParallelLinear(8, 16, bias=False, gather_output=False)


class Top(Head):
    def top(self, logits):
        return logits.topk(4 // comm.size("tp") if self.bug else 4, dim=-1).values

    def forward(self, x):
        candidates = spmd.all_gather(self.top(self.head(x)), "tp", src=S(-1), dst=I)
        return candidates.topk(4, dim=-1).values.log_softmax(-1).square().mean()


class MappedTop(Head):
    def top(self, logits):
        return logits.topk(4, dim=-1).values

    def forward(self, x):
        local = spmd.local_map(self.top, out_types={"tp": S(-1)}, in_types={"tp": S(-1)})(self.head(x))
        if self.bug:
            return spmd.all_gather(local.log_softmax(-1), "tp", src=S(-1), dst=I).square().mean()
        candidates = spmd.all_gather(local, "tp", src=S(-1), dst=I)
        return candidates.topk(4, dim=-1).values.log_softmax(-1).square().mean()


class Largest(Head):
    """A margin between the largest logit and all others; the maximum is over a sharded vocabulary."""

    def forward(self, x):
        logits = self.head(x)
        top = logits.detach().max(-1, keepdim=True).values
        if not self.bug:
            top = comm.all_reduce(top, "tp", op="max")
        exp = (logits - top).exp()
        total = spmd.all_reduce(exp.sum(-1), "tp", src=spmd.P, dst=I)
        return total.log().mean()


pair("5 top-k", mesh=TP, inputs=X, bugs={"fewer": "each rank takes half as many of its logits"})(
    named("top", model(Top))
)
pair("5 top-k", mesh=TP, inputs=X, bugs={"own": "each rank normalises over its own candidates"})(
    named("mapped_top", model(MappedTop))
)
pair("5 top-k", mesh=TP, inputs=X, bugs={"own_maximum": "each rank subtracts the maximum of its own logits"})(
    named("largest_logit", model(Largest))
)


class Greedy(nn.Module):
    """Embeds the token that is most probable, over a sharded vocabulary, for the next step."""

    def __init__(self, bug):
        super().__init__()
        self.bug = bug
        self.head = nxd.ColumnParallelLinear(8, 16, bias=False, gather_output=False)
        self.embedding = nn.Embedding(16, 8)

    def forward(self, x):
        logits = self.head(x)
        with torch.no_grad():
            if self.bug == "own":
                chosen = logits.argmax(-1)
            else:
                chosen = comm.all_gather(logits.detach(), "tp", dim=-1).argmax(-1)
        return (x - self.embedding(chosen)).square().mean()


pair("5 sampling", mesh=TP, inputs=X, bugs={"own": "each rank takes the best of its own logits"})(
    named("greedy", model(Greedy))
)


class Gumbel(Head):
    """Samples by adding Gumbel noise to gathered logits: the noise has one seed on all ranks."""

    def forward(self, x):
        logits = spmd.all_gather(self.head(x), "tp", src=S(-1), dst=I)
        seed = 7 + (comm.rank("tp") if self.bug else 0)
        generator = torch.Generator().manual_seed(seed)
        noise = -torch.rand(logits.shape, generator=generator, dtype=logits.dtype).log().neg().log()
        weights = ((logits + noise) / 0.5).softmax(-1)
        return (weights * logits).sum(-1).square().mean()


pair("5 sampling", mesh=TP, inputs=X, bugs={"own_noise": "each rank draws other noise for the same logits"})(
    named("gumbel", model(Gumbel))
)


class ShardedGumbel(Head):
    """Noise for this rank's logits is an input: the maximum over all of them is picked where it is."""

    def forward(self, x, noise):
        scores = self.head(x) + noise
        top = scores.detach().amax(-1)
        if not self.bug:
            top = comm.all_reduce(top, "tp", op="max")
        chosen = scores.detach() == top.unsqueeze(-1)
        picked = spmd.all_reduce((scores * chosen).sum(-1), "tp", src=spmd.P, dst=I)
        return picked.square().mean()


pair(
    "5 sampling",
    mesh=TP,
    inputs=dict(x=normal(4, 8, 8), noise=normal(4, 8, 16)),
    in_types={"noise": {"tp": S(2)}},
    bugs={"own": "each rank picks the best of its own logits"},
)(named("gumbel_maximum_of_shards", model(ShardedGumbel)))


def averaged(x):
    return comm.all_reduce(x, "dp") / comm.size("dp")


@pair(
    "5 item",
    mesh=DP,
    inputs=REGRESSION,
    bugs={"own": "each rank stops by its own loss"},
)
def early_stop(bug):
    def step(model, optimizer, batch):
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        nxd.reduce_gradients(model)
        mean = loss.detach() if bug else averaged(loss.detach())
        if mean.item() < min(model.best, 3.5):
            optimizer.step()
            model.best = mean.item() * 2

    def model_fn():
        model = nn.Linear(4, 2)
        model.best = float("inf")
        return model

    return dict(model_fn=model_fn, step=step)


@pair(
    "5 item",
    mesh=DP,
    inputs=REGRESSION,
    bugs={"not_reduced": "the gradients that are logged are not reduced, nor those of the step"},
)
def logs_the_loss(bug):
    def step(model, optimizer, batch):
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        if not bug:
            nxd.reduce_gradients(model)
        log = f"loss {averaged(loss.detach()).item():.4f}, norm {model.weight.norm().item():.3f}"
        assert log
        optimizer.step()

    return dict(model_fn=lambda: nn.Linear(4, 2), step=step)


@pair(
    "5 item",
    mesh=DP,
    inputs=REGRESSION,
    bugs={"own": "the scheduler sees each rank's own loss"},
)
def plateau_scheduler(bug):
    def step(model, optimizer, batch):
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        descend(loss, model, optimizer)
        if not hasattr(model, "scheduler"):
            model.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, patience=0, factor=0.3, threshold=0.5
            )
        model.scheduler.step((loss.detach() if bug else averaged(loss.detach())).item())

    return dict(model_fn=lambda: nn.Linear(4, 2), step=step)


@pair(
    "5 item",
    mesh=DP,
    inputs=REGRESSION,
    bugs={"own": "each rank skips the step by its own gradients"},
)
def skipped_steps(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        own = torch.stack([p.grad.abs().max() for p in model.parameters()]).max() if bug else None
        nxd.reduce_gradients(model)
        largest = torch.stack([p.grad.abs().max() for p in model.parameters()]).max()
        if (own if bug else largest) < 2.15:
            optimizer.step()

    return dict(model_fn=lambda: nn.Linear(4, 2), step=step)


@pair(
    "5 item",
    mesh=DP,
    inputs=REGRESSION,
    bugs={"own_scale": "the scale by which a loss is multiplied comes from this rank's own loss"},
)
def adaptive_weight_by_item(bug):
    def step(model, optimizer, batch):
        out = model(batch["x"])
        loss, penalty = F.mse_loss(out, batch["y"]), out.abs().mean()
        values = torch.stack([loss.detach(), penalty.detach()])
        first, second = (values if bug else averaged(values)).tolist()
        descend(loss + first / second * penalty, model, optimizer)

    return dict(model_fn=lambda: nn.Linear(4, 2), step=step)
