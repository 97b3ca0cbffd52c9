"""Gradients that hooks change: of tensors, parameters and modules, and after accumulation; clipping; loss scaling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from tests.checking.user_programs.support import normal, programs

DP = {"dp": 2}
TP = {"tp": 2}
REGRESSION = dict(x=normal(8, 4), y=normal(8, 1))
WIDE = dict(x=normal(8, 4), y=normal(8, 4))


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def parallel_mlp():
    return nn.Sequential(
        nn.LayerNorm(4),
        nxd.ColumnParallelLinear(4, 8, gather_output=False),
        nn.Tanh(),
        nxd.RowParallelLinear(8, 4, input_is_parallel=True),
    )


def mse_step(model, optimizer, batch):
    optimizer.zero_grad()
    F.mse_loss(model(batch["x"]), batch["y"]).backward()
    optimizer.step()


@programs(
    mesh=DP,
    inputs=REGRESSION,
    bugs={
        "sum": "the hook sums the gradients of a mean loss and does not divide",
        "own_clamp": "each rank clamps first",
    },
)
def gradients_reduced_in_parameter_hooks(bug):
    def hook(grad):
        if bug == "own_clamp":
            grad = grad.clamp(-0.3, 0.3)
        grad = comm.all_reduce(grad, "dp")
        if bug != "sum":
            grad = grad / comm.size("dp")
        return grad if bug == "own_clamp" else grad.clamp(-0.3, 0.3)

    def model_fn():
        model = mlp()
        for p in model.parameters():
            p.register_hook(hook)
        return model

    return dict(model_fn=model_fn, step=mse_step)


@programs(
    mesh=DP,
    inputs=REGRESSION,
    bugs={"each_microbatch": "the hook runs after each of two backwards, and sums what it has summed already"},
)
def ddp_by_post_accumulate_hooks(bug):
    def reduce(param):
        param.grad = comm.all_reduce(param.grad, "dp") / comm.size("dp")

    def reduce_sum(param):
        comm.all_reduce(param.grad, "dp", out=param.grad)

    def model_fn():
        model = mlp()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(reduce_sum if bug else reduce)
        return model

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        if not bug:
            F.mse_loss(model(batch["x"]), batch["y"]).backward()
        else:
            for x, y in zip(batch["x"].chunk(2), batch["y"].chunk(2)):
                (F.mse_loss(model(x), y) / (2 * comm.size("dp"))).backward()
        optimizer.step()

    return dict(model_fn=model_fn, step=step)


@programs(
    mesh=DP,
    inputs=REGRESSION,
    bugs={"not_reduced": "the optimizer in the hook steps with this rank's gradient"},
)
def optimizer_in_backward(bug):
    def model_fn():
        model = mlp()

        def update(param):
            if bug != "not_reduced":
                param.grad = comm.all_reduce(param.grad, "dp") / comm.size("dp")
            with torch.no_grad():
                param.sub_(0.1 * param.grad)
            param.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        return model

    def step(model, optimizer, batch):
        F.mse_loss(model(batch["x"]), batch["y"]).backward()

    return dict(model_fn=model_fn, step=step)


@programs(
    mesh=DP,
    inputs=REGRESSION,
    bugs={"by_own_norm": "the gradient of the activations is divided by the norm of this rank's part of it"},
)
def gradient_scaled_at_an_activation(bug):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

        def forward(self, x, y):
            h = torch.tanh(self.trunk(x))
            h.register_hook(lambda g: g / (g.norm() + 1e-6) if bug else g * 0.5)
            return F.mse_loss(self.head(h), y)

    return dict(model_fn=Model)


@programs(
    mesh=TP,
    inputs=WIDE,
    bugs={"forgotten": "nobody sums the gradient of the input of the column-parallel layer: its norm trains wrongly"},
)
def backward_sum_by_tensor_hook(bug):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            n = comm.size("tp")
            self.norm = nn.LayerNorm(4)
            self.up = nn.Parameter(torch.empty(8 // n, 4))
            self.down = nn.Parameter(torch.empty(4, 8 // n))
            spmd.set_spec(self, "up", spmd.ShardSpec("tp", 0, num_partitions=n, full_shape=(8, 4)))
            spmd.set_spec(self, "down", spmd.ShardSpec("tp", 1, num_partitions=n, full_shape=(4, 8)))

        def forward(self, x, y):
            h = self.norm(x)
            if bug != "forgotten":
                h.register_hook(lambda g: comm.all_reduce(g, "tp"))
            out = F.linear(torch.relu(F.linear(h, self.up)), self.down)
            return F.mse_loss(spmd.all_reduce(out, "tp", dst=spmd.I), y)

    return dict(model_fn=Block)


@programs(
    mesh=TP,
    inputs=WIDE,
    bugs={"scaled_by_rank": "a full backward hook of the parallel layer scales by this rank's own gradient norm"},
)
def module_backward_hook(bug):
    def clip(module, grad_input, grad_output):
        (g,) = grad_input
        if bug == "scaled_by_rank":
            return (g * torch.clamp(0.05 / g.norm(), max=1.0),)
        return (g.clamp(-0.02, 0.02),)

    def model_fn():
        model = parallel_mlp()
        model[2].register_full_backward_hook(clip)
        return model

    return dict(model_fn=model_fn, step=mse_step)


@programs(
    mesh=TP,
    inputs=WIDE,
    bugs={
        "own_norm": "the norm for clipping is that of this rank's shards",
        "replicated_twice": "the squares of replicated parameters are summed over tp too",
    },
)
def clipping_by_hand(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        sharded = torch.zeros(())
        replicated = torch.zeros(())
        for p in model.parameters():
            if getattr(p, "tensor_model_parallel", False):
                sharded = sharded + p.grad.square().sum()
            else:
                replicated = replicated + p.grad.square().sum()
        if bug == "replicated_twice":
            total = comm.all_reduce(sharded + replicated, "tp")
        elif bug == "own_norm":
            total = sharded + replicated
        else:
            total = comm.all_reduce(sharded, "tp") + replicated
        scale = (0.1 / (total.sqrt() + 1e-6)).clamp(max=1.0)
        for p in model.parameters():
            p.grad.mul_(scale)
        optimizer.step()

    return dict(model_fn=parallel_mlp, step=step)


@programs(
    mesh=DP,
    inputs=REGRESSION,
    bugs={"before_the_mean": "each rank clips its own gradients before they are averaged"},
)
def torch_clipping(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        if bug == "before_the_mean":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        nxd.reduce_gradients(model)
        if bug is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()

    return dict(model_fn=mlp, step=step)


@programs(
    mesh={"dp": 2, "tp": 2},
    inputs=WIDE,
    bugs={"torch_norm": "torch's clip_grad_norm_ takes the norm of this rank's shards"},
)
def package_clipping(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        nxd.reduce_gradients(model)
        clip = torch.nn.utils.clip_grad_norm_ if bug else nxd.clip_grad_norm
        clip(model.parameters(), 0.1)
        optimizer.step()

    return dict(model_fn=parallel_mlp, step=step)


def sometimes_overflowing(generator):
    """The first row is infinite in about every second step."""
    x = torch.randn(8, 4, generator=generator)
    x[0] = x[0] if torch.rand((), generator=generator) < 0.5 else torch.inf
    return x


@programs(
    mesh=DP,
    inputs=dict(x=sometimes_overflowing, y=normal(8, 1)),
    bugs={"own_overflow": "each rank looks for overflow in its own gradients, and skips the step on its own"},
)
def loss_scaler(bug):
    scale = 1024.0

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        (F.mse_loss(model(batch["x"]), batch["y"]) * scale).backward()
        grads = [p.grad for p in model.parameters()]
        overflow = torch.stack([g.isfinite().logical_not().any() for g in grads]).any().to(grads[0].dtype)
        if bug != "own_overflow":
            overflow = comm.all_reduce(overflow, "dp", op="max")
        nxd.reduce_gradients(model)
        for g in grads:
            g.copy_(torch.where(overflow > 0, torch.zeros_like(g), g / scale))
        optimizer.step()

    return dict(model_fn=lambda: nn.Linear(4, 1), step=step)
