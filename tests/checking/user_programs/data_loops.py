"""Hand-written data-parallel loops: reducing gradients, accumulating them, cutting the batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.spmd import R, S
from tests.checking.user_programs.support import integers, normal, programs

DP = {"dp": 2}
REGRESSION = dict(x=normal(8, 4), y=normal(8, 1))
TEXT = dict(ids=integers(12, 8, 6), labels=integers(12, 8, 6))


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))


def averaged(model):
    for p in model.parameters():
        p.grad = comm.all_reduce(p.grad, "dp") / comm.size("dp")


@programs(mesh=DP, inputs=REGRESSION, bugs={"not_divided": "summed gradients of a mean loss are not divided by dp"})
def all_reduce_by_hand(bug):
    def step(model, optimizer, batch):
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad, "dp")
            if bug != "not_divided":
                p.grad = p.grad / comm.size("dp")
        optimizer.step()
        optimizer.zero_grad()

    return dict(model_fn=mlp, step=step)


@programs(
    mesh={"dp": 4},
    inputs=REGRESSION,
    bugs={"divided_twice": "the loss is a sum over the global batch size already, and the gradients are averaged too"},
)
def sum_over_the_global_batch(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad(set_to_none=True)
        out = model(batch["x"])
        global_batch_size = out.shape[0] * comm.size("dp")
        loss = (out - batch["y"]).square().sum() / global_batch_size
        loss.backward()
        for p in model.parameters():
            comm.all_reduce(p.grad, "dp", out=p.grad)
            if bug == "divided_twice":
                p.grad.div_(comm.size("dp"))
        optimizer.step()

    return dict(model_fn=mlp, step=step)


@programs(
    mesh={"dp": 2, "tp": 2},
    inputs=TEXT,
    optimizer=lambda params: nxd.NeuronZero1Optimizer(params, torch.optim.AdamW, lr=1e-2),
    bugs={"global_sum": "a loss divided by the tokens of all ranks, in ZeRO-1, which takes the mean over the data"},
)
def quick_start(bug):
    def model_fn():
        return nn.Sequential(
            nxd.ParallelEmbedding(12, 8),
            nxd.ColumnParallelLinear(8, 16, gather_output=False),
            nn.SiLU(),
            nxd.RowParallelLinear(16, 8, input_is_parallel=True),
            nxd.ColumnParallelLinear(8, 12, bias=False, gather_output=False),
        )

    def step(model, optimizer, batch):
        loss = nxd.parallel_cross_entropy(model(batch["ids"]), batch["labels"])
        if bug == "global_sum":
            loss = loss.sum() / (loss.numel() * comm.size("dp"))
        else:
            loss = loss.mean()
        loss.backward()
        nxd.reduce_gradients(model, average_over_data=False)
        optimizer.step()
        optimizer.zero_grad()

    return dict(model_fn=model_fn, step=step)


@programs(mesh=DP, inputs=REGRESSION, bugs={"never_synced": "the wrapper's sync is not called before the step"})
def ddp_wrapper(bug):
    class DistributedDataParallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args):
            return self.module(*args)

        def sync_gradients(self):
            world = comm.size("dp")
            for param in self.module.parameters():
                if param.requires_grad and param.grad is not None:
                    param.grad.div_(world)
                    comm.all_reduce(param.grad, "dp", out=param.grad)

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        loss.backward()
        if bug != "never_synced":
            model.sync_gradients()
        optimizer.step()

    return dict(model_fn=lambda: DistributedDataParallel(mlp()), step=step)


@programs(
    mesh=DP,
    inputs=REGRESSION,
    bugs={
        "summed_inside": "gradients are summed over dp after every microbatch, the first ones twice",
        "last_one_only": "the reduction stands before the last microbatch's backward",
    },
)
def accumulation_by_chunk(bug):
    n_micro = 2

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        total = batch["x"].shape[0] * comm.size("dp")
        for i, (x, y) in enumerate(zip(batch["x"].chunk(n_micro), batch["y"].chunk(n_micro))):
            if bug == "last_one_only" and i == n_micro - 1:
                nxd.reduce_gradients(model)
            (((model(x) - y) ** 2).sum() * comm.size("dp") / total).backward()
            if bug == "summed_inside":
                for p in model.parameters():
                    p.grad = comm.all_reduce(p.grad, "dp")
        if bug == "summed_inside":
            for p in model.parameters():
                p.grad /= comm.size("dp")
        elif bug is None:
            nxd.reduce_gradients(model)
        optimizer.step()

    return dict(model_fn=mlp, step=step)


@programs(
    mesh=DP,
    inputs=REGRESSION,
    bugs={"dp_in_the_loss": "the loss is divided by microbatches and ranks, and the gradients are averaged over ranks"},
)
def accumulation_by_slices(bug):
    def step(model, optimizer, batch):
        n_micro = 4
        size = batch["x"].shape[0] // n_micro
        for i in range(n_micro):
            x, y = batch["x"][i * size : (i + 1) * size], batch["y"][i * size : (i + 1) * size]
            loss = F.mse_loss(model(x), y) / n_micro
            if bug == "dp_in_the_loss":
                loss = loss / comm.size("dp")
            loss.backward()
        nxd.reduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()

    return dict(model_fn=mlp, step=step)


@programs(
    mesh=DP,
    inputs=REGRESSION,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    bugs={
        "not_cleared": "gradients of the last step are left in place, summed, and summed again with the new ones",
    },
)
def accumulation_by_split_and_sums(bug):
    def step(model, optimizer, batch):
        rows = batch["x"].size(0)
        for x, y in zip(torch.split(batch["x"], rows // 2), torch.split(batch["y"], rows // 2)):
            loss = F.l1_loss(model(x), y, reduction="sum") / (rows * comm.size("dp"))
            loss.backward()
        grads = [p.grad for p in model.parameters()]
        for grad, total in zip(grads, comm.all_reduce(grads, "dp")):
            grad.copy_(total)
        optimizer.step()
        if bug != "not_cleared":
            optimizer.zero_grad()

    return dict(model_fn=mlp, step=step)


@programs(
    mesh={"dp": 2, "tp": 2},
    inputs=dict(x=normal(8, 4), y=normal(8, 4)),
    bugs={"wrong_axis": "gradients are averaged over tp, not over dp"},
)
def mean_over_a_named_axis(bug):
    def model_fn():
        return nn.Sequential(
            nxd.ColumnParallelLinear(4, 8, gather_output=False),
            nn.Tanh(),
            nxd.RowParallelLinear(8, 4, input_is_parallel=True),
        )

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        axis = "tp" if bug == "wrong_axis" else "dp"
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad, axis) / comm.size(axis)
        optimizer.step()

    return dict(model_fn=model_fn, step=step)


@programs(
    mesh={"dp": 2, "cp": 2},
    inputs=TEXT,
    in_types={"cp": S(1)},
    bugs={"dp_only": "with the sequence cut over cp the gradients are averaged over dp only"},
)
def tokens_cut_over_cp(bug):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(12, 8)
            self.pos = nn.Parameter(torch.zeros(6, 8))
            self.head = nn.Linear(8, 12)

        def forward(self, ids):
            start = comm.rank("cp") * ids.shape[1]
            positions = torch.arange(start, start + ids.shape[1])
            return self.head(torch.tanh(self.emb(ids) + self.pos[positions]))

    def step(model, optimizer, batch):
        logits = model(batch["ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        axis = "dp" if bug == "dp_only" else ("dp", "cp")
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad, axis) / comm.size(axis)
        optimizer.step()

    return dict(model_fn=Model, step=step)


@programs(
    mesh=DP,
    inputs=REGRESSION,
    in_types={"dp": R},
    bugs={"same_part": "every rank trains on the first part of the batch that all ranks have loaded"},
)
def own_rows_of_a_whole_batch(bug):
    def step(model, optimizer, batch):
        n = batch["x"].shape[0] // comm.size("dp")
        rank = 0 if bug == "same_part" else comm.rank("dp")
        x, y = batch["x"][rank * n : (rank + 1) * n], batch["y"][rank * n : (rank + 1) * n]
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        averaged(model)
        optimizer.step()

    return dict(model_fn=mlp, step=step)


@programs(
    mesh=DP,
    inputs=REGRESSION,
    in_types={"dp": R},
    bugs={"seeded_by_rank": "each rank shuffles by a seed of its own, so that their samples overlap"},
)
def distributed_sampler(bug):
    def indices(n, epoch):
        generator = torch.Generator()
        generator.manual_seed(epoch + (int(comm.rank("dp")) if bug == "seeded_by_rank" else 0))
        return torch.randperm(n, generator=generator)[comm.rank("dp") :: comm.size("dp")]

    def step(model, optimizer, batch):
        own = indices(batch["x"].shape[0], epoch=3)
        loss = (model(batch["x"][own]) - batch["y"][own]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        averaged(model)
        optimizer.step()

    return dict(model_fn=mlp, step=step)


@programs(
    mesh=DP,
    inputs=REGRESSION,
    fill=False,
    bugs={"not_the_biases": "weights are drawn by rank, and only the matrices are broadcast"},
)
def broadcast_of_first_weights(bug):
    def model_fn():
        generator = torch.Generator().manual_seed(100 + int(comm.rank("dp")))
        model = mlp()
        with torch.no_grad():
            for p in model.parameters():
                p.uniform_(-0.5, 0.5, generator=generator)
                if bug == "not_the_biases" and p.dim() < 2:
                    continue
                comm.broadcast(p, "dp", src=0, out=p)
        return model

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        nxd.reduce_gradients(model)
        optimizer.step()

    return dict(model_fn=model_fn, step=step)


@programs(
    mesh=DP,
    inputs=REGRESSION,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    bugs={"stale": "the flat buffer is summed, and the gradients that the optimizer sees are copies made before"},
)
def flat_gradient_buffer(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.smooth_l1_loss(model(batch["x"]), batch["y"]).backward()
        params = list(model.parameters())
        flat = torch.cat([p.grad.reshape(-1) for p in params])
        reduced = comm.all_reduce(flat, "dp") / comm.size("dp")
        source = flat if bug == "stale" else reduced
        for p, piece in zip(params, source.split([p.numel() for p in params])):
            p.grad = piece.view_as(p)
        optimizer.step()

    return dict(model_fn=mlp, step=step)


@programs(
    mesh=DP,
    inputs=REGRESSION,
    bugs={"mean_of_means": "the sum over ranks of mean losses: the weight is dp times the gradient of one process"},
)
def fully_sharded_weight(bug):
    class FullySharded(nn.Module):
        def __init__(self):
            super().__init__()
            n = comm.size("dp")
            self.w1 = nn.Parameter(torch.empty(8 // n, 4))
            self.w2 = nn.Parameter(torch.empty(2 // n, 8))
            spmd.set_spec(self, "w1", spmd.ShardSpec("dp", 0, num_partitions=n, full_shape=(8, 4)))
            spmd.set_spec(self, "w2", spmd.ShardSpec("dp", 0, num_partitions=n, full_shape=(2, 8)))

        def forward(self, x):
            w1 = spmd.all_gather(self.w1, "dp", src=S(0), dst=R)
            h = torch.relu(F.linear(x, w1))
            w2 = spmd.all_gather(self.w2, "dp", src=S(0), dst=R)
            return F.linear(h, w2)

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        out = model(batch["x"])
        loss = F.mse_loss(out, batch["y"].expand_as(out))
        if bug != "mean_of_means":
            loss = loss / comm.size("dp")  # the backward of the gather sums over the ranks
        loss.backward()
        optimizer.step()

    return dict(model_fn=FullySharded, step=step)
