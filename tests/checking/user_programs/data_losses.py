"""Losses whose denominator, statistics or negatives come from the whole batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.spmd import R, S
from tests.checking.user_programs.support import descend, integers, normal, programs

DP = {"dp": 2}
LABELLED = dict(x=normal(8, 6), y=integers(5, 8))
PADDED = dict(ids=integers(12, 8, 6), labels=integers(12, 8, 6, ignored=0.4))


def classifier():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))


def language_model():
    return nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 12))


@programs(
    mesh=DP,
    inputs=PADDED,
    bugs={
        "own_tokens": "the mean over each rank's own valid tokens, of which the ranks have different numbers",
        "summed": "global_num_items is for averaged gradients, and they are summed",
    },
)
def tokens_counted_globally(bug):
    def step(model, optimizer, batch):
        logits, labels = model(batch["ids"]), batch["labels"]
        items = nxd.global_num_items(labels, shift=False, dtype=logits.dtype)
        if bug == "own_tokens":
            items = (labels != -100).sum()
        nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        optimizer.zero_grad()
        (nll / items).backward()
        if bug == "summed":
            for p in model.parameters():
                p.grad = comm.all_reduce(p.grad, "dp")
        else:
            nxd.reduce_gradients(model)
        optimizer.step()

    return dict(model_fn=language_model, step=step)


@programs(
    mesh={"dp": 4},
    inputs=dict(x=normal(8, 4), y=normal(8, 4), mask=integers(2, 8, 4, ignored=0.4, ignore_index=0)),
    bugs={"own_mask": "each rank divides by the sum of its own mask, and the gradients are averaged"},
)
def masked_mean(bug):
    def step(model, optimizer, batch):
        mask = batch["mask"].to(batch["x"].dtype)
        error = (model(batch["x"]) - batch["y"]).square() * mask
        if bug == "own_mask":
            loss = error.sum() / mask.sum().clamp(min=1)
        else:
            count = comm.all_reduce(mask.sum(), "dp").clamp(min=1)
            loss = error.sum() * comm.size("dp") / count
        descend(loss, model, optimizer)

    return dict(model_fn=lambda: nn.Linear(4, 4), step=step)


@programs(
    mesh=DP,
    inputs=LABELLED,
    bugs={"class_weights": "with class weights the mean is divided by the weights of this rank's own labels"},
)
def mean_cross_entropy(bug):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = classifier()
            self.register_buffer("weight", torch.linspace(0.1, 3.0, 5))

        def forward(self, x, y):
            return F.cross_entropy(self.net(x), y, self.weight if bug == "class_weights" else None)

    return dict(model_fn=Model)


@programs(
    mesh=DP,
    inputs=dict(x=normal(8, 6), y=integers(2, 8)),
    bugs={"own_counts": "the weight of positives comes from this rank's part of the batch"},
)
def balanced_binary_loss(bug):
    def step(model, optimizer, batch):
        y = batch["y"].to(batch["x"].dtype)
        counts = torch.stack([y.sum(), (1 - y).sum()])
        if bug != "own_counts":
            counts = comm.all_reduce(counts, "dp")
        pos_weight = (counts[1] + 1) / (counts[0] + 1)
        logits = model(batch["x"]).squeeze(-1)
        loss = F.binary_cross_entropy_with_logits(logits, y, pos_weight=pos_weight)
        descend(loss, model, optimizer)

    return dict(model_fn=lambda: nn.Linear(6, 1), step=step)


@programs(
    mesh=DP,
    inputs=dict(x=normal(8, 6), actions=integers(5, 8), rewards=normal(8)),
    bugs={"own_statistics": "advantages are normalised by mean and deviation of this rank's rewards"},
)
def policy_gradient(bug):
    def normalise(r):
        if bug == "own_statistics":
            return (r - r.mean()) / (r.var(unbiased=False).sqrt() + 1e-8)
        n = r.numel() * comm.size("dp")
        mean = comm.all_reduce(r.sum(), "dp") / n
        var = comm.all_reduce((r - mean).square().sum(), "dp") / n
        return (r - mean) / (var.sqrt() + 1e-8)

    def step(model, optimizer, batch):
        log_probs = F.log_softmax(model(batch["x"]), dim=-1)
        chosen = log_probs.gather(-1, batch["actions"].unsqueeze(-1)).squeeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        loss = -(normalise(batch["rewards"]) * chosen).mean() - 0.01 * entropy.mean()
        descend(loss, model, optimizer)

    return dict(model_fn=classifier, step=step)


@programs(
    mesh=DP,
    inputs=dict(image=normal(8, 6), text=normal(8, 4)),
    bugs={
        "no_offset": "the positives of every rank are counted from 0, which are those of rank 0",
        "no_gradient": "embeddings are gathered without gradient: other ranks' negatives do not train them",
    },
)
def clip_with_local_rows(bug):
    class Clip(nn.Module):
        def __init__(self):
            super().__init__()
            self.image = nn.Linear(6, 5, bias=False)
            self.text = nn.Linear(4, 5, bias=False)

        def forward(self, image, text):
            image = F.normalize(self.image(image), dim=-1)
            text = F.normalize(self.text(text), dim=-1)
            if bug == "no_gradient":
                all_text = comm.all_gather(text, "dp")
            else:
                all_text = spmd.all_gather(text, "dp", src=S(0), dst=R)
            logits = 5.0 * image @ all_text.t()
            targets = torch.arange(len(image))
            if bug != "no_offset":
                targets = targets + comm.rank("dp") * len(image)
            return F.cross_entropy(logits, targets)

    return dict(model_fn=Clip)


@programs(
    mesh=DP,
    inputs=dict(a=normal(8, 6), b=normal(8, 6)),
    bugs={"averaged": "the whole loss with the gradient of the own rows only wants the sum over ranks, not the mean"},
)
def contrastive_loss_of_all_rows(bug):
    def gather_keeping_own(z):
        rows = list(comm.all_gather(z.detach(), "dp").chunk(comm.size("dp")))
        rows[comm.rank("dp")] = z
        return torch.cat(rows)

    def step(model, optimizer, batch):
        a, b = gather_keeping_own(model(batch["a"])), gather_keeping_own(model(batch["b"]))
        similarity = F.normalize(a, dim=1) @ F.normalize(b, dim=1).t() / 0.2
        loss = F.cross_entropy(similarity, torch.arange(similarity.shape[0]))
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad, "dp")
            if bug == "averaged":
                p.grad = p.grad / comm.size("dp")
        optimizer.step()

    return dict(model_fn=lambda: nn.Linear(6, 4), step=step)


@programs(
    mesh=DP,
    inputs=dict(q=normal(8, 6), k=normal(8, 6)),
    bugs={"own_keys": "the queue of negatives takes in this rank's keys only, so that the queues differ"},
)
def momentum_contrast(bug):
    class MoCo(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Linear(6, 4)
            self.key_encoder = nn.Linear(6, 4)
            for p in self.key_encoder.parameters():
                p.requires_grad_(False)
            self.register_buffer("queue", torch.ones(16, 4))

        def forward(self, q, k):
            q = F.normalize(self.encoder(q), dim=1)
            with torch.no_grad():
                for p, target in zip(self.encoder.parameters(), self.key_encoder.parameters()):
                    target.mul_(0.9).add_(p, alpha=0.1)
                k = F.normalize(self.key_encoder(k), dim=1)
            positive = (q * k).sum(1, keepdim=True)
            negative = q @ self.queue.clone().t()
            logits = torch.cat([positive, negative], dim=1) / 0.2
            with torch.no_grad():
                keys = torch.cat([k, k]) if bug == "own_keys" else comm.all_gather(k, "dp", dim=0)
                self.queue.copy_(torch.cat([keys[:8], self.queue[:-8]]))
            return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))

    return dict(model_fn=MoCo)


@programs(
    mesh=DP,
    inputs=LABELLED,
    bugs={"batch_norm": "nn.BatchNorm1d takes the statistics of this rank's rows"},
)
def synchronised_batch_norm(bug):
    class SyncBatchNorm(nn.Module):
        def __init__(self, features):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(features))
            self.bias = nn.Parameter(torch.zeros(features))
            self.register_buffer("running_mean", torch.zeros(features))

        def forward(self, x):
            n = x.shape[0] * comm.size("dp")
            mean = spmd.all_reduce(x.sum(0), "dp", src=spmd.P, dst=R) / n
            var = spmd.all_reduce((x - mean).square().sum(0), "dp", src=spmd.P, dst=R) / n
            with torch.no_grad():
                self.running_mean.lerp_(mean, 0.1)
            return (x - mean) * torch.rsqrt(var + 1e-5) * self.weight + self.bias

    def model_fn():
        norm = nn.BatchNorm1d(8) if bug == "batch_norm" else SyncBatchNorm(8)
        return nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(8, 5))

    def step(model, optimizer, batch):
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        descend(loss, model, optimizer)

    return dict(model_fn=model_fn, step=step)


@programs(
    mesh=DP,
    inputs=dict(x=normal(8, 6), weight=normal(8)),
    bugs={"own_softmax": "importance weights are normalised over the rank's samples, then averaged over ranks"},
)
def importance_weights(bug):
    def step(model, optimizer, batch):
        weight = batch["weight"].exp()
        total = weight.sum() if bug == "own_softmax" else comm.all_reduce(weight.sum(), "dp") / comm.size("dp")
        losses = model(batch["x"]).square().mean(-1)
        optimizer.zero_grad()
        (losses * weight / total).sum().backward()
        nxd.reduce_gradients(model)
        optimizer.step()

    return dict(model_fn=classifier, step=step)


@programs(
    mesh={"dp": 2},
    inputs=LABELLED,
    bugs={"per_rank": "the L2 penalty, which every rank has whole, is added on each rank, and gradients are summed"},
)
def penalty_beside_a_summed_loss(bug):
    def step(model, optimizer, batch):
        out = model(batch["x"])
        loss = F.cross_entropy(out, batch["y"], reduction="sum") / (len(out) * comm.size("dp"))
        penalty = 0.1 * sum(p.square().sum() for p in model.parameters())
        loss = loss + (penalty if bug == "per_rank" else penalty / comm.size("dp"))
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad, "dp")
        optimizer.step()

    return dict(model_fn=classifier, step=step)


@programs(
    mesh=DP,
    inputs=dict(x=normal(8, 6)),
    bugs={"own_clusters": "the codebook moves to the means of this rank's vectors"},
)
def vector_quantiser(bug):
    class Quantiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Linear(6, 3)
            self.decoder = nn.Linear(3, 6)
            self.register_buffer("codes", torch.linspace(-1, 1, 12).view(4, 3))

        def forward(self, x):
            z = self.encoder(x)
            nearest = torch.cdist(z.detach(), self.codes).argmin(1)
            quantised = self.codes[nearest]
            with torch.no_grad():
                one_hot = F.one_hot(nearest, 4).to(z.dtype)
                counts, sums = one_hot.sum(0), one_hot.t() @ z
                if bug != "own_clusters":
                    counts, sums = comm.all_reduce(counts, "dp"), comm.all_reduce(sums, "dp")
                self.codes.mul_(0.9).add_(0.1 * sums / (counts + 1e-5).unsqueeze(1))
            out = self.decoder(z + (quantised - z).detach())
            return F.mse_loss(out, x) + 0.25 * F.mse_loss(z, quantised)

    return dict(model_fn=Quantiser)


@programs(
    mesh={"dp": 2},
    inputs=dict(x=normal(8, 6), y=integers(5, 8), soft=normal(6, 5)),
    in_types={"soft": {"dp": R}},
    bugs={"batch_of_one_rank": "the soft loss is a sum over the batch divided by the rows of one rank, then summed"},
)
def distillation(bug):
    def step(model, optimizer, batch):
        with torch.no_grad():
            teacher = F.softmax(batch["x"] @ batch["soft"] / 2.0, dim=-1)
        logits = model(batch["x"])
        rows = batch["x"].shape[0] * comm.size("dp")
        hard = F.cross_entropy(logits, batch["y"], reduction="sum") / rows
        soft = F.kl_div(F.log_softmax(logits / 2.0, dim=-1), teacher, reduction="sum")
        loss = hard + 4.0 * soft / (batch["x"].shape[0] if bug == "batch_of_one_rank" else rows)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad, "dp")
        optimizer.step()

    return dict(model_fn=classifier, step=step)
