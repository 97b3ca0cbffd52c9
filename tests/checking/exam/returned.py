"""Metrics, counts, tied tables, gathered rows, order of pieces and plain numbers (items 6 to 11)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.spmd import I, R, S
from tests.checking.exam.support import pair
from tests.checking.user_programs.support import descend, integers, normal

DP, TP, CP = {"dp": 2}, {"tp": 2}, {"cp": 2}
REGRESSION = dict(x=normal(8, 4), y=normal(8, 2))
LABELLED = dict(x=normal(8, 6), y=integers(5, 8))


def averaged(x):
    return comm.all_reduce(x, "dp") / comm.size("dp")


# --- 6: what a step returns


@pair(
    "6 returned",
    mesh=DP,
    inputs=LABELLED,
    bugs={
        "numerator": "hits are those of this rank, the count that of all",
        "own": "the accuracy is that of this rank",
        "count": "the count is that of this rank, the hits are all",
    },
)
def accuracy(bug):
    def step(model, optimizer, batch):
        logits = model(batch["x"])
        descend(F.cross_entropy(logits, batch["y"]), model, optimizer)
        hits = (logits.argmax(-1) == batch["y"]).sum()
        count = torch.ones_like(batch["y"]).sum()
        if bug not in ("numerator", "own"):
            hits = comm.all_reduce(hits, "dp")
        if bug not in ("count", "own"):
            count = comm.all_reduce(count, "dp")
        return dict(accuracy=hits / count)

    return dict(model_fn=lambda: nn.Linear(6, 5), step=step)


@pair("6 returned", mesh=DP, inputs=REGRESSION, bugs={"summed": "the sum of the ranks' means is returned as the loss"})
def mean_loss(bug):
    def step(model, optimizer, batch):
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        descend(loss, model, optimizer)
        return comm.all_reduce(loss.detach(), "dp") if bug else averaged(loss.detach())

    return dict(model_fn=lambda: nn.Linear(4, 2), step=step)


@pair("6 returned", mesh=TP, inputs=REGRESSION, bugs={"own": "the norm of this rank's gradients is returned"})
def gradient_norm(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
        squares = sum(p.grad.square().sum() for p in model.parameters())
        return squares if bug else comm.all_reduce(squares, "tp")

    def model_fn():
        return nn.Sequential(
            nxd.ColumnParallelLinear(4, 8, bias=False, gather_output=False),
            nxd.RowParallelLinear(8, 2, bias=False, input_is_parallel=True),
        )

    return dict(model_fn=model_fn, step=step)


# --- 7: means of means


@pair(
    "7 mean of means",
    mesh=DP,
    inputs=dict(x=normal(8, 6), y=integers(5, 8, ignored=0.4)),
    bugs={"own_labels": "the mean over this rank's labels, of which the ranks have different numbers"},
)
def labels_that_count(bug):
    def step(model, optimizer, batch):
        logits, y = model(batch["x"]), batch["y"]
        if bug:
            loss = F.cross_entropy(logits, y)
        else:
            loss = F.cross_entropy(logits, y, reduction="sum") / nxd.global_num_items(
                y, shift=False, dtype=logits.dtype
            )
        descend(loss, model, optimizer)

    return dict(model_fn=lambda: nn.Linear(6, 5), step=step)


@pair(
    "7 mean of means",
    mesh=DP,
    inputs=dict(x=normal(8, 6), y=normal(8, 6), mask=integers(2, 8, 6, ignored=0.4, ignore_index=0)),
    bugs={"selected": "the mean over the positions that this rank's mask selects"},
)
def masked_positions(bug):
    def step(model, optimizer, batch):
        error = (model(batch["x"]) - batch["y"]).square()
        mask = batch["mask"].bool()
        if bug:
            loss = error[mask].mean()
        else:
            loss = (error * mask).sum() * comm.size("dp") / comm.all_reduce(mask.sum(), "dp")
        descend(loss, model, optimizer)

    return dict(model_fn=lambda: nn.Linear(6, 6), step=step)


@pair(
    "7 mean of means",
    mesh=DP,
    inputs=dict(x=normal(8, 6), y=normal(8, 6), mask=integers(2, 8, 6, ignored=0.4, ignore_index=0)),
    bugs={"per_sample_mean_of_tokens": "every sequence has its own mean in one process too, but the sum over the rank"},
)
def mean_per_sequence(bug):
    def step(model, optimizer, batch):
        mask = batch["mask"].to(batch["x"].dtype)
        error = ((model(batch["x"]) - batch["y"]).square() * mask).sum(-1)
        counts = mask.sum(-1).clamp(min=1)
        if bug:
            loss = error.sum() / counts.sum()
        else:
            loss = (error / counts).mean()
        descend(loss, model, optimizer)

    return dict(model_fn=lambda: nn.Linear(6, 6), step=step)


# --- 9: own rows among gathered ones


@pair(
    "9 own rows",
    mesh=DP,
    inputs=dict(a=normal(8, 6), b=normal(8, 6)),
    bugs={"averaged": "the whole loss with the gradient of the own rows wants the sum over the ranks"},
)
def rows_in_their_place(bug):
    def gather(z):
        rows = list(comm.all_gather(z.detach(), "dp").chunk(comm.size("dp")))
        rows[comm.rank("dp")] = z
        return torch.cat(rows)

    def step(model, optimizer, batch):
        a, b = gather(model(batch["a"])), gather(model(batch["b"]))
        similarity = F.normalize(a, dim=1) @ F.normalize(b, dim=1).t() / 0.2
        optimizer.zero_grad()
        F.cross_entropy(similarity, torch.arange(similarity.shape[0])).backward()
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad, "dp")
            if bug:
                p.grad = p.grad / comm.size("dp")
        optimizer.step()

    return dict(model_fn=lambda: nn.Linear(6, 4), step=step)


@pair(
    "9 own rows",
    mesh=DP,
    inputs=dict(a=normal(8, 6), b=normal(8, 6)),
    bugs={"own_gradient": "a row of other ranks' losses gets no gradient from them"},
)
def clip_loss(bug):
    def step(model, optimizer, batch):
        a, b = F.normalize(model(batch["a"]), dim=1), F.normalize(model(batch["b"]), dim=1)
        every = spmd.all_gather(b, "dp", src=S(0), dst=I if bug else R)
        targets = comm.rank("dp") * len(a) + torch.arange(len(a))
        descend(F.cross_entropy(a @ every.t() / 0.2, targets), model, optimizer)

    return dict(model_fn=lambda: nn.Linear(6, 4), step=step)


def written_rows(name, put):
    """Registers a loss over the rows of all ranks, in which `put(every, z, rank)` puts this rank's own."""

    def make(bug):
        def gather(z):
            elsewhere = bug == "at_the_next_rank"
            return put(comm.all_gather(z.detach(), "dp"), z, (comm.rank("dp") + elsewhere) % comm.size("dp"))

        def step(model, optimizer, batch):
            a, b = gather(model(batch["a"])), gather(model(batch["b"]))
            similarity = F.normalize(a, dim=1) @ F.normalize(b, dim=1).t() / 0.2
            optimizer.zero_grad()
            F.cross_entropy(similarity, torch.arange(similarity.shape[0])).backward()
            for p in model.parameters():
                p.grad = comm.all_reduce(p.grad, "dp")
                if bug == "averaged":
                    p.grad = p.grad / comm.size("dp")
            optimizer.step()

        return dict(model_fn=lambda: nn.Linear(6, 4), step=step)

    make.__name__ = name
    bugs = {"averaged": "the loss of all rows with the gradient of the own ones wants the sum over the ranks"}
    if put is not by_operator:
        bugs["at_the_next_rank"] = "the own rows replace those of the next rank"
    pair("9 own rows", mesh=DP, inputs=dict(a=normal(8, 6), b=normal(8, 6)), bugs=bugs)(make)


def by_slice(every, z, rank):
    every = every.clone()
    every[rank * len(z) : (rank + 1) * len(z)] = z
    return every


def by_narrow(every, z, rank):
    every = every.clone()
    every.narrow(0, rank * len(z), len(z)).copy_(z)
    return every


def by_parts(every, z, rank):
    first = rank * len(z)
    return torch.cat([every[:first], z, every[first + len(z) :]])


def by_operator(every, z, rank):
    return spmd.all_gather(z, "dp", src=S(0), dst=I)


written_rows("rows_by_operator", by_operator)
written_rows("rows_by_slice", by_slice)
written_rows("rows_by_narrow", by_narrow)
written_rows("rows_by_parts", by_parts)


@pair(
    "9 own rows",
    mesh=DP,
    inputs=dict(a=normal(8, 6), y=integers(3, 8)),
    bugs={"own_first": "the own rows stand first among gathered ones, and the labels in the order of the ranks"},
)
def supervised_contrastive(bug):
    def step(model, optimizer, batch):
        z = F.normalize(model(batch["a"]), dim=1)
        rows, labels = spmd.all_gather(z, "dp", src=S(0), dst=R), comm.all_gather(batch["y"], "dp")
        if bug:
            rest = [part for i, part in enumerate(rows.chunk(comm.size("dp"))) if i != comm.rank("dp")]
            rows = torch.cat([z, *rest])
        same = (batch["y"][:, None] == labels[None, :]).to(z.dtype)
        log = (z @ rows.t() / 0.5).log_softmax(-1)
        descend(-(log * same).sum(1).mean(), model, optimizer)

    return dict(model_fn=lambda: nn.Linear(6, 4), step=step)


# --- 10: order of pieces


def zigzag(x, dim):
    """This rank's two pieces of a sequence cut into 2N, one from each end."""
    pieces, rank, last = x.chunk(2 * comm.size("cp"), dim), comm.rank("cp"), 2 * comm.size("cp") - 1
    return torch.cat([pieces[rank], pieces[last - rank]], dim)


class Zigzag(nn.Module):
    """Each rank has a piece from each end; the keys are gathered, and put into the order of the sequence."""

    def __init__(self, bug):
        super().__init__()
        self.bug = bug
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def loss(self, x, y):
        y = x + self.out(y.transpose(1, 2).flatten(2))
        return y.square().sum() / (y.shape[0] * y.shape[1])

    def forward(self, x):
        x = zigzag(x, 1)
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        n = comm.size("cp")
        positions = zigzag(torch.arange(8), 0)
        order = [i if half == 0 else 2 * n - 1 - i for i in range(n) for half in range(2)]
        k, v = (spmd.all_gather(t, "cp", src=S(2), dst=R) for t in (k, v))
        if self.bug != "rank_order":
            place = [order.index(i) for i in range(2 * n)]
            k, v = (torch.cat([t.chunk(2 * n, 2)[i] for i in place], 2) for t in (k, v))
        mask = positions[:, None] >= torch.arange(8)[None, :]
        return self.loss(x, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def zigzag_attention(bug):
    return dict(model_fn=lambda: Zigzag(bug).to(torch.get_default_dtype()))


pair(
    "10 order of pieces",
    mesh=CP,
    inputs=dict(x=normal(4, 8, 8)),
    bugs={"rank_order": "the pieces of both ends are left in the order of the ranks, the mask is that of the sequence"},
)(zigzag_attention)


# --- 11: plain numbers


@pair(
    "11 plain numbers",
    mesh=DP,
    inputs=REGRESSION,
    bugs={"not_divided": "the sum of mean gradients is not divided"},
)
def divided_by_a_literal(bug):
    """Learning rate that is right on two ranks, and on no other number of them: it is listed."""

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad, "dp")
            if not bug:
                p.grad = p.grad / comm.size("dp")
        optimizer.step()

    return dict(model_fn=lambda: nn.Linear(4, 2), step=step)


@pair(
    "11 plain numbers",
    mesh=DP,
    inputs=REGRESSION,
    bugs={"twice": "averaged gradients are divided by 2, a plain number, once more"},
)
def learning_rate_by_a_literal(bug):
    def step(model, optimizer, batch):
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        if bug:
            loss = loss / (2 if comm.size("dp") > 1 else 1)
        descend(loss, model, optimizer)

    return dict(model_fn=lambda: nn.Linear(4, 2), step=step)
