"""Losses and metrics over the whole batch, data-parallel. No rule was written or tuned for these programs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.spmd import I, P, R, S
from tests.checking.user_programs.support import descend, integers, normal, programs

DP = {"dp": 2}
REGRESSION = dict(x=normal(8, 4), y=normal(8, 2))
LABELLED = dict(x=normal(8, 6), y=integers(5, 8))


def classifier():
    return nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 5))


@programs(
    mesh=DP,
    inputs=LABELLED,
    bugs={
        "count_of_all": "the loss is divided by the positives of all ranks, and the gradients are averaged",
        "own_positives": "each rank divides by the number of its own positives",
    },
)
def focal_loss(bug):
    def step(model, optimizer, batch):
        logits = model(batch["x"])
        target = F.one_hot(batch["y"], 5).to(logits) * (batch["y"] > 1).unsqueeze(-1)
        positives = target.sum()
        if bug != "own_positives":
            positives = comm.all_reduce(positives, "dp")
            if bug is None:
                positives = positives / comm.size("dp")
        p = logits.sigmoid()
        p_t = p * target + (1 - p) * (1 - target)
        ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        descend((ce * (1 - p_t) ** 2).sum().div(positives.clamp(min=0.5)), model, optimizer)

    return dict(model_fn=classifier, step=step)


@programs(
    mesh=DP,
    inputs=dict(x=normal(8, 6), y=integers(2, 8, 5)),
    bugs={
        "own_dice": "the ratio is that of this rank's sums, and the ratios are averaged",
        "invariant": "the sums are I, so that each rank's gradient is a summand, and the gradients are averaged",
    },
)
def soft_dice_over_the_batch(bug):
    def step(model, optimizer, batch):
        p, t = model(batch["x"]).sigmoid(), batch["y"].to(batch["x"])
        common, both = (p * t).sum(), p.sum() + t.sum()
        if bug != "own_dice":
            dst = I if bug == "invariant" else R
            common, both = (spmd.all_reduce(v, "dp", src=P, dst=dst) for v in (common, both))
        loss = 1 - (2 * common + 1) / (both + 1)
        descend(loss, model, optimizer)

    return dict(model_fn=classifier, step=step)


@programs(
    mesh=DP,
    inputs=dict(a=normal(8, 6), b=normal(8, 6)),
    bugs={
        "own_statistics": "the features are standardised by mean and deviation of this rank's rows",
        "own_correlation": "the correlation is that of this rank's rows",
    },
)
def barlow_twins(bug):
    def standardised(z):
        if bug == "own_statistics":
            mean, square = z.mean(0), z.square().mean(0)
        else:
            moments = torch.stack([z.mean(0), z.square().mean(0)]) / comm.size("dp")
            mean, square = spmd.all_reduce(moments, "dp", src=P, dst=R)
        return (z - mean) / (square - mean.square() + 1e-3).sqrt()

    def step(model, optimizer, batch):
        a, b = standardised(model(batch["a"])), standardised(model(batch["b"]))
        c = a.T @ b / (a.shape[0] * comm.size("dp"))
        if bug == "own_correlation":
            c = c * comm.size("dp")
        else:
            c = spmd.all_reduce(c, "dp", src=P, dst=R)
        on = torch.diagonal(c) - 1
        descend(on.square().sum() + 0.05 * (c.square().sum() - torch.diagonal(c).square().sum()), model, optimizer)

    return dict(model_fn=classifier, step=step)


@programs(
    mesh=DP,
    inputs=dict(x=normal(8, 6), y=integers(5, 8), good=integers(2, 8)),
    bugs={"own_divergence": "the reference point is the clamped divergence of this rank's samples"},
)
def kahneman_tversky(bug):
    """KTO: the reference point is an estimate over the whole batch, clamped at 0."""

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.policy, self.reference = classifier(), classifier().requires_grad_(False)

        def forward(self, x, y):
            def of(net):
                return net(x).log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)

            with torch.no_grad():
                reference = of(self.reference)
            return of(self.policy) - reference

    def step(model, optimizer, batch):
        ratio = model(batch["x"], batch["y"])
        divergence = ratio.detach().mean()
        if not bug:
            divergence = comm.all_reduce(divergence, "dp") / comm.size("dp")
        divergence = divergence.clamp(min=0)
        sign = 2.0 * batch["good"] - 1
        descend((1 - torch.sigmoid(sign * (ratio - divergence))).mean(), model, optimizer)

    return dict(model_fn=Policy, step=step)


@programs(
    mesh=DP,
    inputs=REGRESSION,
    bugs={"mean_inside": "the derivative is that of the mean of this rank's outputs: its size depends on their number"},
)
def gradient_penalty(bug):
    def critic():
        return nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1))

    def step(model, optimizer, batch):
        x = batch["x"].requires_grad_()
        score = model(x)
        (slope,) = torch.autograd.grad(score.mean() if bug else score.sum(), x, create_graph=True)
        penalty = (slope.norm(2, dim=-1) - 1).square().mean()
        descend(score.mean() + 10 * penalty, model, optimizer)

    return dict(model_fn=critic, step=step)


@programs(
    mesh=DP,
    inputs=dict(x=normal(8, 6), y=integers(5, 8, ignored=0.4)),
    bugs={
        "own_count": "the summed gradients are divided by the number of this rank's labels",
        "mean_count": "the count is the mean over the ranks, and the gradients are summed",
    },
)
def divided_after_accumulation(bug):
    """Sums of microbatches, divided at the end by the labels of all microbatches and ranks."""

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        labels = torch.zeros((), dtype=torch.long)
        for x, y in zip(batch["x"].split(2), batch["y"].split(2)):
            F.cross_entropy(model(x), y, reduction="sum").backward()
            labels = labels + (y != -100).sum()
        if bug != "own_count":
            labels = comm.all_reduce(labels, "dp")
        if bug == "mean_count":
            labels = labels / comm.size("dp")
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad, "dp") / labels.clamp(min=1)
        optimizer.step()

    return dict(model_fn=classifier, step=step)


@programs(
    mesh=DP,
    inputs=LABELLED,
    bugs={"own_hardest": "each rank keeps the harder half of its own samples"},
)
def hardest_samples(bug):
    def step(model, optimizer, batch):
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        every = losses.detach() if bug else comm.all_gather(losses.detach(), "dp")
        kept = every.shape[0] // 2
        threshold = every.topk(kept).values[-1]
        scale = 1 if bug else comm.size("dp")
        descend((losses * (losses >= threshold)).sum() * scale / kept, model, optimizer)

    return dict(model_fn=classifier, step=step)


@programs(
    mesh=DP,
    inputs=LABELLED,
    bugs={"mean_of_exponentials": "each rank exponentiates its own loss, and the perplexities are averaged"},
)
def perplexity_as_a_metric(bug):
    def step(model, optimizer, batch):
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        descend(loss, model, optimizer)
        logged = loss.detach()
        if bug:
            return {"perplexity": comm.all_reduce(logged.exp(), "dp") / comm.size("dp")}
        return {"perplexity": (comm.all_reduce(logged, "dp") / comm.size("dp")).exp()}

    return dict(model_fn=classifier, step=step)


@programs(
    mesh=DP,
    inputs=LABELLED,
    bugs={"summed": "the loss is a sum over this rank's samples, and the gradients are averaged over the ranks"},
)
def label_smoothing_and_accuracy(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad(set_to_none=True)
        logits = model(batch["x"])
        kind = dict(reduction="sum") if bug else {}
        loss = F.cross_entropy(logits, batch["y"], label_smoothing=0.1, **kind)
        loss.backward()
        nxd.reduce_gradients(model)
        optimizer.step()
        right = (logits.detach().argmax(-1) == batch["y"]).sum()
        return {"accuracy": comm.all_reduce(right, "dp") / (len(batch["y"]) * comm.size("dp"))}

    return dict(model_fn=classifier, step=step, optimizer=lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3))


@programs(
    mesh=DP,
    inputs=REGRESSION,
    bugs={"invariant": "the averaged loss is I: each rank's gradients are summands, and they are averaged once more"},
)
def loss_averaged_before_backward(bug):
    def step(model, optimizer, batch):
        loss = F.huber_loss(model(batch["x"]), batch["y"])
        loss = spmd.all_reduce(loss, "dp", src=P("avg"), dst=I if bug else R)
        descend(loss, model, optimizer)
        return loss

    return dict(model_fn=lambda: nn.Linear(4, 2), step=step)


@programs(
    mesh={"dp": 4},
    inputs=dict(x=normal(8, 6)),
    bugs={
        "own_spread": "the variance that must not fall is that of this rank's rows",
        "gathered_as_invariant": "the gather passes on this rank's piece of the gradient only, and it is averaged",
    },
)
def variance_and_covariance(bug):
    """VICReg's two terms of a gathered batch."""

    def step(model, optimizer, batch):
        z = model(batch["x"])
        if bug != "own_spread":
            z = spmd.all_gather(z, "dp", src=S(0), dst=I if bug else R)
        z = z - z.mean(0)
        deviation = (z.square().mean(0) + 1e-4).sqrt()
        covariance = z.T @ z / z.shape[0]
        off = covariance - torch.diag(torch.diagonal(covariance))
        descend(F.relu(2 - deviation).mean() + off.square().sum() / 5, model, optimizer)

    return dict(model_fn=classifier, step=step)
