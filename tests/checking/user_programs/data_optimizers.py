"""Optimizers: torch's on sharded weights, ZeRO-1 of the package and by hand, updates written out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.optimizer import MuonAdamW
from tests.checking.user_programs.support import normal, programs

DP = {"dp": 2}
TP = {"tp": 2}
REGRESSION = dict(x=normal(8, 4), y=normal(8, 4))


def mlp(bias=True):
    return nn.Sequential(nn.Linear(4, 8, bias=bias), nn.GELU(), nn.Linear(8, 4, bias=bias))


def parallel_mlp(bias=True):
    return nn.Sequential(
        nxd.ColumnParallelLinear(4, 8, bias=bias, gather_output=False),
        nn.GELU(),
        nxd.RowParallelLinear(8, 4, bias=bias, input_is_parallel=True),
    )


def mse_step(model, optimizer, batch):
    optimizer.zero_grad()
    F.mse_loss(model(batch["x"]), batch["y"]).backward()
    nxd.reduce_gradients(model)
    optimizer.step()


@programs(
    mesh=TP,
    inputs=REGRESSION,
    optimizer=lambda params: torch.optim.Muon(params, lr=0.05),
    bugs={"sharded": "Muon orthogonalises each rank's shard of a matrix by itself"},
)
def muon(bug):
    return dict(model_fn=lambda: parallel_mlp(False) if bug else mlp(False), step=mse_step)


def muon_and_adamw(params):
    params = list(params)
    matrices, vectors = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
    return [dict(params=matrices, optimizer="muon"), dict(params=vectors, optimizer="adamw")]


@programs(
    mesh={"dp": 2, "tp": 2},
    inputs=REGRESSION,
    optimizer=lambda params: nxd.NeuronZero1Optimizer(muon_and_adamw(params), MuonAdamW, lr=0.01),
    bugs={"by_itself": "each rank orthogonalises its shards, without the wrapper that brings them together"},
)
def muon_under_zero1(bug):
    def step(model, optimizer, batch):
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        nxd.reduce_gradients(model, average_over_data=bool(bug))
        optimizer.step()
        optimizer.zero_grad()

    plain = dict(optimizer=lambda params: MuonAdamW(muon_and_adamw(params), lr=0.01)) if bug else {}
    return dict(model_fn=parallel_mlp, step=step, **plain)


@programs(
    mesh={"dp": 2, "tp": 2},
    inputs=REGRESSION,
    optimizer=lambda params: torch.optim.Adafactor(params, lr=0.05),
    bugs={"sharded": "Adafactor takes means of squares over the shard's rows and columns"},
)
def adafactor(bug):
    return dict(model_fn=parallel_mlp if bug else mlp, step=mse_step)


@programs(
    mesh={"dp": 2, "tp": 2},
    inputs=REGRESSION,
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    bugs={"unreduced": "the gradients are not averaged over dp before AdamW"},
)
def adamw_on_shards(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        if bug != "unreduced":
            nxd.reduce_gradients(model)
        optimizer.step()

    return dict(model_fn=parallel_mlp, step=step)


@programs(
    mesh=TP,
    inputs=REGRESSION,
    bugs={"own_norms": "the trust ratio of a sharded weight is taken from the norms of the shards"},
)
def trust_ratio_by_hand(bug):
    def norm(x, sharded):
        square = x.square().sum()
        return (comm.all_reduce(square, "tp") if sharded and not bug else square).sqrt()

    @torch.no_grad()
    def lars(params):
        for p in params:
            sharded = getattr(p, "tensor_model_parallel", False)
            ratio = norm(p, sharded) / (norm(p.grad, sharded) + 1e-6)
            p.sub_(0.02 * ratio * p.grad)

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        lars(model.parameters())

    return dict(model_fn=parallel_mlp, step=step)


@programs(
    mesh=DP,
    inputs=REGRESSION,
    optimizer=lambda params: nxd.NeuronZero1Optimizer(params, torch.optim.Adam, lr=0.01, max_norm=0.1),
    bugs={
        "clipped_before": "gradients are clipped by each rank's own norm before ZeRO-1 averages them",
        "summed_before": "gradients are summed by hand, and ZeRO-1 averages dp equal sums",
    },
)
def zero1(bug):
    def step(model, optimizer, batch):
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        if bug == "clipped_before":
            nxd.clip_grad_norm(model.parameters(), 0.1)
        elif bug == "summed_before":
            for p in model.parameters():
                comm.all_reduce(p.grad, "dp", out=p.grad)
        nxd.reduce_gradients(model, average_over_data=False)
        optimizer.step()
        optimizer.zero_grad()

    if bug == "summed_before":
        plain = dict(max_norm=float("inf"), lr=0.1)
        return dict(
            model_fn=mlp,
            step=step,
            optimizer=lambda params: nxd.NeuronZero1Optimizer(params, torch.optim.SGD, **plain),
        )
    return dict(model_fn=mlp, step=step)


@programs(
    mesh=DP,
    inputs=REGRESSION,
    bugs={
        "not_gathered": "each rank updates its own slice of the weights, and nobody gathers the slices",
        "not_divided": "the scattered sum of gradients of mean losses is not divided by dp",
        "wrong_slice": "the weights of one slice are updated with the gradients of another",
    },
)
def zero1_on_a_flat_slice(bug):
    @torch.no_grad()
    def update(params):
        params = list(params)
        flat = torch.cat([p.reshape(-1) for p in params])
        grads = torch.cat([p.grad.reshape(-1) for p in params])
        n = comm.size("dp")
        own_grad = comm.reduce_scatter(grads, "dp")
        if bug != "not_divided":
            own_grad = own_grad / n
        size = flat.numel() // n
        index = comm.rank("dp")
        if bug == "wrong_slice":
            index = n - 1 - index
        own = flat[index * size : (index + 1) * size] - 0.1 * own_grad
        if bug == "not_gathered":
            flat[index * size : (index + 1) * size] = own
        else:
            flat = comm.all_gather(own, "dp")
        for p, piece in zip(params, flat.split([p.numel() for p in params])):
            p.copy_(piece.view_as(p))

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        update(model.parameters())

    return dict(model_fn=mlp, step=step)


@programs(
    mesh=DP,
    inputs=REGRESSION,
    bugs={"in_the_gradient": "weight decay is added to each rank's gradient before these are summed"},
)
def weight_decay_by_hand(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        out = model(batch["x"])
        loss = F.mse_loss(out, batch["y"], reduction="sum") / (out.numel() * comm.size("dp"))
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                if bug == "in_the_gradient":
                    p.grad = comm.all_reduce(p.grad + 0.1 * p, "dp")
                else:
                    p.grad = comm.all_reduce(p.grad, "dp") + 0.1 * p
        optimizer.step()

    return dict(model_fn=mlp, step=step)


@programs(
    mesh=DP,
    inputs=REGRESSION,
    bugs={"own_squares": "the second moment is that of the local gradients, so that the ranks' weights part"},
)
def rmsprop_by_hand(bug):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 4))
            self.register_buffer("square", torch.zeros(4, 4))

        def forward(self, x):
            return torch.tanh(x @ self.weight)

    def step(model, optimizer, batch):
        model.weight.grad = None
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        with torch.no_grad():
            mean = comm.all_reduce(model.weight.grad, "dp") / comm.size("dp")
            used = model.weight.grad if bug == "own_squares" else mean
            model.square.mul_(0.9).addcmul_(used, used, value=0.1)
            model.weight.sub_(0.01 * mean / (model.square.sqrt() + 1e-6))

    return dict(model_fn=Model, step=step)


@programs(
    mesh=DP,
    inputs=REGRESSION,
    bugs={"adam": "weights are averaged after a step by Adam, which is not linear in the gradients"},
)
def weights_averaged_after_the_step(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(comm.all_reduce(p, "dp") / comm.size("dp"))

    return dict(model_fn=mlp, step=step, optimizer=(lambda p: torch.optim.Adam(p, lr=0.01)) if bug else None)


@programs(
    mesh=DP,
    inputs=REGRESSION,
    bugs={"own_loss": "the learning rate follows this rank's loss"},
)
def learning_rate_from_the_loss(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        loss.backward()
        nxd.reduce_gradients(model)
        loss = loss.detach()
        if bug != "own_loss":
            loss = comm.all_reduce(loss, "dp") / comm.size("dp")
        lr = 0.1 / (1 + loss)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(lr * p.grad)

    return dict(model_fn=mlp, step=step)


@programs(
    mesh=DP,
    inputs=dict(x=normal(8, 4), y=normal(8, 4), mask=lambda generator: torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 0])),
    bugs={"own_tokens": "the warm-up counts the samples that this rank has seen"},
)
def warm_up_by_samples_seen(bug):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            return self.net(x)

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        count = comm.all_reduce(batch["mask"].sum(), "dp")
        error = (model(batch["x"]) - batch["y"]).square().mean(-1) * batch["mask"]
        (error.sum() / count).backward()
        with torch.no_grad():
            model.seen += batch["mask"].sum() * comm.size("dp") if bug == "own_tokens" else count
            factor = (model.seen / 20).clamp(max=1.0)
            for p in model.parameters():
                p.grad = comm.all_reduce(p.grad, "dp") * factor
        optimizer.step()

    return dict(model_fn=Model, step=step)
