"""Sharding of weights, recomputation, accumulation and norms, written by hand (items 4 and 8)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.spmd import R, S
from tests.checking.exam.support import pair
from tests.checking.user_programs.support import normal

DP, TP, GRID = {"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}
REGRESSION = dict(x=normal(8, 4), y=normal(8, 2))


class GatherWeight(torch.autograd.Function):
    """Gathers a weight's rows; its gradient is the mean over the ranks, scattered, as FSDP's is."""

    bug = None

    @staticmethod
    def forward(ctx, shard):
        return comm.all_gather(shard, "dp", dim=0)

    @staticmethod
    def backward(ctx, grad):
        return comm.reduce_scatter(grad, "dp", dim=0) / comm.size("dp")


class GatherWeightSum(GatherWeight):
    @staticmethod
    def backward(ctx, grad):
        return comm.reduce_scatter(grad, "dp", dim=0)


class GatherWeightOwn(GatherWeight):
    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(comm.size("dp"))[comm.rank("dp")] / comm.size("dp")


class FullySharded(nn.Module):
    def __init__(self, gather):
        super().__init__()
        self.gather = gather
        n = comm.size("dp")
        self.w1 = nn.Parameter(torch.empty(8 // n, 4))
        self.w2 = nn.Parameter(torch.empty(2 // n, 8))
        spmd.set_spec(self, "w1", spmd.ShardSpec("dp", 0, num_partitions=n, full_shape=(8, 4)))
        spmd.set_spec(self, "w2", spmd.ShardSpec("dp", 0, num_partitions=n, full_shape=(2, 8)))

    def forward(self, x):
        h = torch.relu(F.linear(x, self.gather(self.w1)))
        return F.linear(h, self.gather(self.w2))


@pair(
    "4 FSDP",
    mesh=DP,
    inputs=REGRESSION,
    bugs={
        "summed": "the gather's backward sums the gradients of mean losses",
        "own": "each rank takes its rows of its own gradient",
    },
)
def mean_in_the_backward_of_the_gather(bug):
    gather = {None: GatherWeight, "summed": GatherWeightSum, "own": GatherWeightOwn}[bug]

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        optimizer.step()

    return dict(model_fn=lambda: FullySharded(lambda shard: gather.apply(shard)), step=step)


@pair(
    "4 FSDP",
    mesh=DP,
    inputs=REGRESSION,
    bugs={"not_divided": "the sum that the backward of the gather takes is left as the gradient of a mean"},
)
def mean_after_the_backward_of_the_gather(bug):
    def gather(shard):
        return spmd.all_gather(shard, "dp", src=S(0), dst=R)

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        if not bug:
            for p in model.parameters():
                p.grad.div_(comm.size("dp"))
        optimizer.step()

    return dict(model_fn=lambda: FullySharded(gather), step=step)


class Recomputed(nn.Module):
    """A residual block whose mlp is recomputed in backward."""

    def __init__(self, reentrant, bug):
        super().__init__()
        self.reentrant, self.bug = reentrant, bug
        self.first = nn.Linear(4, 4)
        self.up = nxd.ColumnParallelLinear(4, 8, bias=False, gather_output=False)
        self.down = nxd.RowParallelLinear(8, 4, bias=False, input_is_parallel=True, reduce_output=bug is None)
        self.head = nn.Linear(4, 2)

    def mlp(self, h):
        return self.down(F.silu(self.up(h)))

    def block(self, h):
        return h + self.mlp(h)

    def forward(self, x):
        h = self.first(x)
        for _ in range(2):
            h = checkpoint(self.block, h, use_reentrant=self.reentrant)
        return self.head(h)


def recomputed(reentrant):
    def make(bug):
        def step(model, optimizer, batch):
            optimizer.zero_grad()
            F.mse_loss(model(batch["x"]), batch["y"]).backward()
            if bug != "not_averaged":
                nxd.reduce_gradients(model)
            optimizer.step()

        return dict(model_fn=lambda: Recomputed(reentrant, bug if bug == "partial" else None), step=step)

    make.__name__ = "reentrant_residual" if reentrant else "recomputed_residual"
    bugs = {"partial": "the output of the row layer is not reduced", "not_averaged": "gradients are not reduced"}
    pair("4 recomputation", mesh=GRID, inputs=REGRESSION, bugs=bugs)(make)


recomputed(True)
recomputed(False)


class Recompute(torch.autograd.Function):
    """Runs a function without a graph, and again in backward."""

    @staticmethod
    def forward(ctx, function, x, *params):
        ctx.function = function
        ctx.save_for_backward(x, *params)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, grad):
        x, *params = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.function(x)
        grads = torch.autograd.grad(y, (x, *params), grad)
        return None, *grads


@pair(
    "4 recomputation",
    mesh=GRID,
    inputs=REGRESSION,
    bugs={"not_reduced": "the output of the row layer is not reduced"},
)
def recompute_function_by_hand(bug):
    class Model(Recomputed):
        def forward(self, x):
            h = self.first(x)
            h = Recompute.apply(self.block, h, self.up.weight, self.down.weight)
            return self.head(h)

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        nxd.reduce_gradients(model)
        optimizer.step()

    return dict(model_fn=lambda: Model(True, bug), step=step)


class RecomputeAll(torch.autograd.Function):
    """Runs again in backward, which adds to the gradients of the parameters by itself, as Megatron's function does."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


def recomputed_by_hand(name, mesh, in_types=None, inputs=REGRESSION):
    def make(bug):
        class Model(Recomputed):
            def forward(self, x):
                h = self.first(x)
                for _ in range(2):
                    h = RecomputeAll.apply(self.block, h)
                return self.head(h)

        def step(model, optimizer, batch):
            optimizer.zero_grad()
            F.mse_loss(model(batch["x"]), batch["y"]).backward()
            if bug != "not_averaged":
                nxd.reduce_gradients(model)
            optimizer.step()

        return dict(model_fn=lambda: Model(True, bug if bug == "partial" else None), step=step)

    make.__name__ = name
    bugs = {"partial": "the output of the row layer is not reduced"} if mesh.get("tp") else {}
    bugs["not_averaged"] = "gradients are not reduced"
    pair("4 recomputation", mesh=mesh, inputs=inputs, in_types=in_types, bugs=bugs)(make)


recomputed_by_hand("recomputed_as_megatron", GRID)
recomputed_by_hand("recomputed_as_megatron_on_dp", DP)
recomputed_by_hand(
    "recomputed_as_megatron_on_dp_and_cp",
    {"dp": 2, "cp": 2},
    {"dp": S(0), "cp": S(1)},
    dict(x=normal(4, 6, 4), y=normal(4, 6, 2)),
)


@pair(
    "4 accumulation",
    mesh=DP,
    inputs=REGRESSION,
    bugs={"summed": "the sum of the ranks' mean gradients is not divided"},
)
def chunks_after_forget(bug):
    def step(model, optimizer, batch):
        x, y = spmd.forget(batch["x"], "dp"), spmd.forget(batch["y"], "dp")
        optimizer.zero_grad()
        for first, second in zip(x.chunk(2), y.chunk(2)):
            (F.mse_loss(model(first), second) / 2).backward()
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad, "dp")
            if not bug:
                p.grad = p.grad / comm.size("dp")
        optimizer.step()

    return dict(model_fn=lambda: nn.Linear(4, 2), step=step)


@pair(
    "4 accumulation",
    mesh=DP,
    inputs=REGRESSION,
    bugs={"summed": "the sum over the ranks of sums, each divided by the rows of one rank"},
)
def chunks_after_forget_divided_by_rows(bug):
    def step(model, optimizer, batch):
        x, y = spmd.forget(batch["x"], "dp"), spmd.forget(batch["y"], "dp")
        optimizer.zero_grad()
        rows = batch["x"].shape[0]
        for first, second in zip(x.chunk(2), y.chunk(2)):
            ((model(first) - second).square().sum() / rows).backward()
        if bug:
            for p in model.parameters():
                p.grad = comm.all_reduce(p.grad, "dp")
        else:
            nxd.reduce_gradients(model)
        optimizer.step()

    return dict(model_fn=lambda: nn.Linear(4, 2), step=step)


class Mixed(nn.Module):
    """Sharded weights, and a norm and a bias that every rank holds."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nxd.ColumnParallelLinear(4, 8, gather_output=False)
        self.down = nxd.RowParallelLinear(8, 2, input_is_parallel=True)

    def forward(self, x):
        return self.down(F.silu(self.up(self.norm(x))))


def clipped(name, class_, squares, bugs):
    """Registers a step that clips by the norm of which `squares(model, bug)` are the summands on this rank."""

    def make(bug):
        def step(model, optimizer, batch):
            optimizer.zero_grad()
            F.mse_loss(model(batch["x"]), batch["y"]).backward()
            total = comm.all_reduce(squares(model, bug), "tp")
            factor = (0.1 / (total.sqrt() + 1e-6)).clamp(max=1.0)
            for p in model.parameters():
                p.grad.mul_(factor)
            optimizer.step()

        return dict(model_fn=Mixed, step=step)

    make.__name__ = name
    pair(class_, mesh=TP, inputs=REGRESSION, bugs=bugs)(make)


def filtered(model, bug):
    total = torch.zeros(())
    for p in model.parameters():
        sharded = spmd.spec_of(p).axis == "tp"
        counted = sharded or comm.rank("tp") == 0
        if bug == "last_alone":
            counted = comm.rank("tp") == comm.size("tp") - 1
        if bug == "all_counted" or counted:
            total = total + p.grad.square().sum()
    return total


def listed(model, bug):
    counted = []
    for p in model.parameters():
        sharded = spmd.spec_of(p).axis == "tp"
        if bug == "sharded_on_first" and comm.rank("tp") == 0 or bug is None and (sharded or comm.rank("tp") == 0):
            counted.append(p.grad)
    return sum((grad.norm() ** 2 for grad in counted), torch.zeros(()))


clipped(
    "norm_filter",
    "4 norm filter",
    filtered,
    {
        "all_counted": "replicated gradients are counted on every rank",
        "last_alone": "shards count on one rank",
    },
)
clipped("norm_filter_as_list", "4 norm filter", listed, {"sharded_on_first": "shards of the first rank alone count"})


@pair(
    "4 norm filter",
    mesh=TP,
    inputs=REGRESSION,
    bugs={"not_marked": "a bias that every rank holds is taken for a shard"},
)
def norms_by_two_sums(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        sharded, whole = torch.zeros(()), torch.zeros(())
        for name, p in model.named_parameters():
            if spmd.spec_of(p).axis == "tp" or (bug and name == "down.bias"):
                sharded = sharded + p.grad.square().sum()
            else:
                whole = whole + p.grad.square().sum()
        norm = (comm.all_reduce(sharded, "tp") + whole).sqrt()
        for p in model.parameters():
            p.grad.mul_((0.1 / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()

    return dict(model_fn=Mixed, step=step)


class Tied(nn.Module):
    """An embedding that is also the head."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 4))

    def forward(self, x, y):
        h = torch.tanh(F.linear(x, self.weight))
        return F.mse_loss(F.linear(h, self.weight.t()), y.repeat(1, 2))


@pair(
    "4 norm filter",
    mesh=DP,
    inputs=dict(x=normal(8, 4), y=normal(8, 2)),
    bugs={"before_the_mean": "the norm is that of gradients that are not averaged yet"},
)
def clipped_after_the_mean(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        model(batch["x"], batch["y"]).backward()
        if bug:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        nxd.reduce_gradients(model)
        if not bug:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    return dict(model_fn=Tied, step=step)
