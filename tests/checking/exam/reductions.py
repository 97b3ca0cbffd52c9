"""Maxima, norms, quotients and counts that are reduced over ranks (item 3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from tests.checking.exam.support import pair
from tests.checking.user_programs.support import integers, normal

DP, TP = {"dp": 2}, {"tp": 2}
REGRESSION = dict(x=normal(8, 4), y=normal(8, 2))
PADDED = dict(x=normal(8, 6, 4), y=normal(8, 6), mask=integers(2, 8, 6, ignored=0.4, ignore_index=0))


def parallel_mlp():
    return nn.Sequential(
        nxd.ColumnParallelLinear(4, 8, gather_output=False),
        nn.SiLU(),
        nxd.RowParallelLinear(8, 2, input_is_parallel=True, bias=False),
    )


def sharded_parameters(model):
    return [p for p in model.parameters() if spmd.spec_of(p).axis == "tp"]


def scale_gradients(model, factor):
    for p in model.parameters():
        p.grad.mul_(factor)


@pair(
    "3 maxima",
    mesh=TP,
    inputs=REGRESSION,
    bugs={
        "not_reduced": "each rank takes the largest entry of its own shards",
        "summed": "the ranks' maxima are added up",
    },
)
def clipped_by_largest_entry(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        largest = torch.stack([p.grad.abs().max() for p in model.parameters()]).max()
        if bug != "not_reduced":
            largest = comm.all_reduce(largest, "tp", op="sum" if bug else "max")
        scale_gradients(model, 0.1 / (largest + 1e-6))
        optimizer.step()

    return dict(model_fn=parallel_mlp, step=step)


@pair(
    "3 maxima",
    mesh=TP,
    inputs=REGRESSION,
    bugs={"own": "the scale of the quantised weight comes from this rank's shard"},
)
def weight_quantised_by_running_maximum(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        largest = torch.zeros(())
        for p in model.parameters():
            largest = torch.maximum(largest, p.grad.abs().amax())
        if not bug:
            largest = comm.all_reduce(largest, "tp", op="max")
        step_size = largest / 7 + 1e-6
        for p in model.parameters():
            p.grad = (p.grad / step_size).round() * step_size
        optimizer.step()

    return dict(model_fn=parallel_mlp, step=step)


class Amax(nn.Module):
    """A linear layer that scales its input by the largest amax of the last steps, as delayed scaling of fp8 does."""

    def __init__(self, bug):
        super().__init__()
        self.bug = bug
        self.linear = nn.Linear(4, 2)
        self.register_buffer("history", torch.ones(4))

    def forward(self, x, y):
        scale = self.history.max()
        amax = x.detach().abs().max()
        if self.bug != "own":
            amax = comm.all_reduce(amax, "dp", op="sum" if self.bug == "summed" else "max")
        with torch.no_grad():
            self.history.copy_(torch.cat([amax.view(1), self.history[:-1]]))
        return F.mse_loss(self.linear((x / scale * 8).tanh() * scale / 8), y)


@pair(
    "3 amax history",
    mesh=DP,
    inputs=REGRESSION,
    bugs={"own": "each rank writes the amax of its own rows", "summed": "the ranks' amaxes are added up"},
)
def amax_history_by_cat(bug):
    return dict(model_fn=lambda: Amax(bug))


@pair(
    "3 amax history",
    mesh=DP,
    inputs=REGRESSION,
    bugs={"not_reduced": "the maximum of each rank's rows is not reduced"},
)
def amax_of_several_tensors_by_cat(bug):
    def step(model, optimizer, batch):
        x, y = batch["x"], batch["y"]
        amaxes = torch.cat([t.abs().max().reshape(1) for t in (x, y)])
        if not bug:
            amaxes = comm.all_reduce(amaxes, "dp", op="max")
        optimizer.zero_grad()
        F.mse_loss(model(x / amaxes[0]), y / amaxes[1]).backward()
        nxd.reduce_gradients(model)
        optimizer.step()

    return dict(model_fn=lambda: nn.Linear(4, 2), step=step)


@pair(
    "3 norms",
    mesh=TP,
    inputs=REGRESSION,
    bugs={
        "not_reduced": "each rank clips by the norm of its own shards",
        "norms_summed": "the ranks' norms are added up, not their squares",
    },
)
def clipped_by_squared_norms(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        if bug == "norms_summed":
            norm = comm.all_reduce(torch.stack([p.grad.norm() for p in sharded_parameters(model)]).norm(), "tp")
        else:
            total = sum(p.grad.norm() ** 2 for p in sharded_parameters(model))
            if not bug:
                total = comm.all_reduce(total, "tp")
            norm = total.sqrt()
        scale_gradients(model, (0.1 / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()

    return dict(model_fn=parallel_mlp, step=step)


@pair(
    "3 norms",
    mesh=TP,
    inputs=REGRESSION,
    bugs={"own": "the trust ratio of a shard is that of its own norms"},
)
def lars_by_norms_of_shards(bug):
    def norm(x):
        return x.norm() if bug else comm.all_reduce(torch.linalg.vector_norm(x).pow(2), "tp").sqrt()

    def step(model, optimizer, batch):
        model.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        with torch.no_grad():
            for p in sharded_parameters(model):
                p.sub_(0.1 * norm(p) / norm(p.grad) * p.grad)

    return dict(model_fn=parallel_mlp, step=step)


@pair(
    "3 quotients",
    mesh=DP,
    inputs=PADDED,
    bugs={
        "own_quotients": "each rank's own mean is averaged",
        "numerator_only": "the numerator alone is reduced",
    },
)
def quotient_of_reduced_sums(bug):
    def step(model, optimizer, batch):
        mask = batch["mask"].to(batch["x"].dtype)
        error = ((model(batch["x"]).squeeze(-1) - batch["y"]).square() * mask).sum()
        count = mask.sum()
        optimizer.zero_grad()
        if not bug:
            loss = error / comm.all_reduce(count, "dp")
        else:
            loss = error / count
        loss.backward()
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad, "dp") / (comm.size("dp") if bug else 1)
        optimizer.step()
        both = comm.all_reduce(torch.stack([error.detach(), count]), "dp")
        return both[0] / (count if bug == "numerator_only" else both[1])

    return dict(model_fn=lambda: nn.Linear(4, 1), step=step)


@pair(
    "3 quotients",
    mesh={"dp": 2, "tp": 2},
    inputs=dict(x=normal(4, 8, 4)),
    bugs={"tp_forgotten": "the numerator is reduced over tp and dp, the count over dp alone"},
    in_types={"x": {"dp": spmd.S(0), "tp": spmd.S(1)}},
)
def weighted_mean_over_two_axes(bug):
    """Weights of tokens come from the tokens; the loss is the weighted mean over all of them."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 4))
            self.weight.sequence_parallel_enabled = True

        def forward(self, x):
            weight = x[..., 0].square().detach()
            loss = ((x @ self.weight).square().sum(-1) * weight).sum()
            total = comm.all_reduce(weight.sum(), "dp" if bug else ("dp", "tp"))
            return loss * comm.size("dp") / total

    return dict(model_fn=Model)


@pair(
    "3 auxiliary losses",
    mesh=DP,
    inputs=dict(x=normal(8, 4), y=normal(8, 2)),
    bugs={"summed": "the auxiliary loss is summed over dp, though gradients are averaged"},
)
def auxiliary_loss_per_microbatch(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        for x, y in zip(batch["x"].chunk(2), batch["y"].chunk(2)):
            out = model(x)
            auxiliary = 0.1 * out.square().mean()
            if bug == "summed":
                auxiliary = spmd.all_reduce(auxiliary, "dp", src=spmd.V, dst=spmd.R)
            loss = F.mse_loss(out, y) / 2
            (loss + auxiliary / 2).backward()
        nxd.reduce_gradients(model)
        optimizer.step()

    return dict(model_fn=lambda: nn.Linear(4, 2), step=step)


@pair(
    "3 auxiliary losses",
    mesh=DP,
    inputs=dict(x=normal(8, 4), y=normal(8, 2)),
    bugs={
        "own_fractions": "the product of two means over this rank's tokens is no mean of anything over all tokens",
        "not_scaled": "the loss of all tokens is P, and gradients are averaged",
    },
)
def load_balance_over_data_ranks(bug):
    """The Switch loss: fraction of tokens times mean probability, per expert, over the tokens of all ranks."""

    def step(model, optimizer, batch):
        out = model(batch["x"])
        probabilities = out.softmax(-1)
        chosen = F.one_hot(probabilities.argmax(-1), 2).to(out.dtype)
        fractions = chosen.mean(0)
        if bug != "own_fractions":
            fractions = comm.all_reduce(fractions, "dp") / comm.size("dp")
        auxiliary = 2 * (fractions * probabilities.mean(0)).sum()
        if bug == "not_scaled":
            auxiliary = 2 * (fractions * probabilities.sum(0) / 8).sum()
        optimizer.zero_grad()
        (F.mse_loss(out, batch["y"]) + 0.1 * auxiliary).backward()
        nxd.reduce_gradients(model)
        optimizer.step()

    return dict(model_fn=lambda: nn.Linear(4, 2), step=step)


@pair(
    "3 counts as numbers",
    mesh=DP,
    inputs=PADDED,
    bugs={
        "own": "the count is that of this rank's tokens",
        "averaged": "the sum over all tokens is divided by their number, and gradients are averaged",
    },
)
def count_as_python_number(bug):
    def step(model, optimizer, batch):
        mask = batch["mask"].to(batch["x"].dtype)
        error = (model(batch["x"]).squeeze(-1) - batch["y"]).square() * mask
        count = int(mask.sum() if bug == "own" else comm.all_reduce(mask.sum(), "dp"))
        optimizer.zero_grad()
        (error.sum() / count).backward()
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad, "dp") / (comm.size("dp") if bug == "averaged" else 1)
        optimizer.step()

    return dict(model_fn=lambda: nn.Linear(4, 1), step=step)


@pair(
    "3 counts as numbers",
    mesh=DP,
    inputs=PADDED,
    bugs={"summed": "the number of items is for averaged gradients, and they are summed"},
)
def items_of_a_rank_by_item(bug):
    def step(model, optimizer, batch):
        mask = batch["mask"].to(batch["x"].dtype)
        error = (model(batch["x"]).squeeze(-1) - batch["y"]).square() * mask
        items = (comm.all_reduce(mask.sum(), "dp") / comm.size("dp")).item()
        optimizer.zero_grad()
        (error.sum() / items).backward()
        if bug:
            for p in model.parameters():
                p.grad = comm.all_reduce(p.grad, "dp")
        else:
            nxd.reduce_gradients(model)
        optimizer.step()

    return dict(model_fn=lambda: nn.Linear(4, 1), step=step)


@pair(
    "3 counts as numbers",
    mesh=DP,
    inputs=dict(x=normal(8, 6, 4), y=normal(8, 6)),
    bugs={"rows_of_one_process": "the rows are those of this rank, and gradients are summed"},
)
def size_as_plain_number(bug):
    """Divides by sequences times positions; the number of positions is written out."""

    def step(model, optimizer, batch):
        error = (model(batch["x"]).squeeze(-1) - batch["y"]).square()
        rows = batch["x"].shape[0]
        optimizer.zero_grad()
        (error.sum() / (rows * 6)).backward()
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad, "dp") / (1 if bug else comm.size("dp"))
        optimizer.step()

    return dict(model_fn=lambda: nn.Linear(4, 1), step=step)
