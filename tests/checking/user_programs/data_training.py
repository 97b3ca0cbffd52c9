"""Several losses, models and optimizers in one step; averages of weights; per-sample gradients; checkpointing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import neuronx_dist as nxd
from neuronx_dist import comm
from tests.checking.user_programs.support import integers, normal, programs

DP = {"dp": 2}
LABELLED = dict(x=normal(8, 6), y=integers(5, 8))


def classifier():
    return nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 5))


@programs(
    mesh=DP,
    inputs=dict(x=normal(8, 6), y=integers(5, 8), z=normal(8, 2)),
    bugs={"second_not_reduced": "the reduction stands between the backwards of the two losses"},
)
def two_losses(bug):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.label, self.box = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(8, 2)

        def forward(self, x):
            h = F.silu(self.trunk(x))
            return self.label(h), self.box(h)

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        logits, boxes = model(batch["x"])
        F.cross_entropy(logits, batch["y"]).backward(retain_graph=True)
        if bug == "second_not_reduced":
            nxd.reduce_gradients(model)
        (0.5 * F.smooth_l1_loss(boxes, batch["z"])).backward()
        if bug is None:
            nxd.reduce_gradients(model)
        optimizer.step()

    return dict(model_fn=Model, step=step)


@programs(
    mesh=DP,
    inputs=LABELLED,
    bugs={"head_only": "the adapter trains too, and only the head's gradients are averaged"},
)
def frozen_backbone(bug):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Linear(6, 8)
            self.backbone.requires_grad_(False)
            self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 8, bias=False)
            self.head = nn.Linear(8, 5)

        def forward(self, x):
            return self.head(torch.relu(self.backbone(x) + self.up(self.down(x))))

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.cross_entropy(model(batch["x"]), batch["y"]).backward()
        for p in (model.head if bug == "head_only" else model).parameters():
            if p.requires_grad:
                p.grad = comm.all_reduce(p.grad, "dp") / comm.size("dp")
        optimizer.step()

    return dict(model_fn=Model, step=step)


@programs(
    mesh=DP,
    inputs=dict(noise=normal(8, 3), real=normal(8, 6)),
    bugs={"critic_unreduced": "only the generator's gradients are averaged"},
)
def generator_and_critic(bug):
    def average(module):
        for p in module.parameters():
            p.grad = comm.all_reduce(p.grad, "dp") / comm.size("dp")

    def model_fn():
        return nn.ModuleDict(
            dict(
                generator=nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)),
                critic=nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Linear(8, 1)),
            )
        )

    @torch.no_grad()
    def descend(module, lr):
        for p in module.parameters():
            p -= lr * p.grad

    def step(model, optimizer, batch):
        generator, critic = model["generator"], model["critic"]
        optimizer.zero_grad()
        fake = generator(batch["noise"]).detach()
        loss = F.softplus(-critic(batch["real"])).mean() + F.softplus(critic(fake)).mean()
        loss.backward()
        if bug != "critic_unreduced":
            average(critic)
        descend(critic, 0.05)
        optimizer.zero_grad()
        F.softplus(-critic(generator(batch["noise"]))).mean().backward()
        average(generator)
        descend(generator, 0.1)

    return dict(model_fn=model_fn, step=step)


@programs(
    mesh={"dp": 2, "tp": 2},
    inputs=LABELLED,
    bugs={"one_group": "gradients of the second optimizer's parameters are not averaged"},
)
def two_optimizers(bug):
    def model_fn():
        model = nn.Sequential(
            nxd.ColumnParallelLinear(6, 8, gather_output=False),
            nn.ReLU(),
            nxd.RowParallelLinear(8, 6, input_is_parallel=True),
            nn.Linear(6, 5),
        )
        body = [p for layer in model[:3] for p in layer.parameters()]
        model.head_optimizer = torch.optim.SGD(model[3].parameters(), lr=0.2)
        return model, torch.optim.SGD(body, lr=0.1, momentum=0.9)

    def step(model, optimizer, batch):
        optimizers = [optimizer, model.head_optimizer]
        for each in optimizers:
            each.zero_grad()
        F.cross_entropy(model(batch["x"]), batch["y"]).backward()
        for each in optimizers[:1] if bug == "one_group" else optimizers:
            for group in each.param_groups:
                for p in group["params"]:
                    p.grad = comm.all_reduce(p.grad, "dp") / comm.size("dp")
        for each in optimizers:
            each.step()

    return dict(model_fn=model_fn, step=step)


@programs(
    mesh=DP,
    inputs=dict(x=normal(8, 6), view=normal(8, 6)),
    bugs={"own_center": "the teacher's centre is the mean of this rank's outputs"},
)
def self_distillation(bug):
    class Dino(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = classifier(), classifier()
            self.teacher.requires_grad_(False)
            self.register_buffer("center", torch.zeros(5))

        def forward(self, x, view):
            with torch.no_grad():
                target = self.teacher(view)
                mean = target.mean(0)
                if bug != "own_center":
                    mean = comm.all_reduce(target.sum(0), "dp") / (target.shape[0] * comm.size("dp"))
                probabilities = F.softmax((target - self.center) / 0.5, dim=-1)
                self.center.copy_(0.9 * self.center + 0.1 * mean)
            return -(probabilities * F.log_softmax(self.student(x), dim=-1)).sum(-1).mean()

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        model(batch["x"], batch["view"]).backward()
        nxd.reduce_gradients(model)
        optimizer.step()
        with torch.no_grad():
            for s, t in zip(model.student.parameters(), model.teacher.parameters()):
                t.lerp_(s, 0.05)

    return dict(model_fn=Dino, step=step)


@programs(
    mesh=DP,
    inputs=LABELLED,
    bugs={"unaveraged": "weights for evaluation are averaged over steps that used each rank's own gradients"},
)
def stochastic_weight_averaging(bug):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = classifier()
            self.register_buffer("count", torch.zeros(()))
            for i, p in enumerate(self.net.parameters()):
                self.register_buffer(f"average_{i}", torch.zeros_like(p))

        def forward(self, x, y):
            return F.cross_entropy(self.net(x), y)

    @torch.no_grad()
    def average(model):
        model.count += 1
        for i, p in enumerate(model.net.parameters()):
            running = getattr(model, f"average_{i}")
            running += (p - running) / model.count

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        model(batch["x"], batch["y"]).backward()
        if bug is None:
            nxd.reduce_gradients(model)
        optimizer.step()
        average(model)

    return dict(model_fn=Model, step=step)


@programs(
    mesh=DP,
    inputs=dict(x=normal(8, 6), y=integers(5, 8), valid_x=normal(8, 6), valid_y=integers(5, 8)),
    bugs={"own_score": "each rank keeps the weights that are best on its own part of the validation set"},
)
def best_weights_by_validation(bug):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(6, 5)
            self.register_buffer("best_loss", torch.full((), 2.05))
            self.register_buffer("best_weight", torch.zeros(5, 6))

        def forward(self, x):
            return self.net(x)

    @torch.no_grad()
    def validate(model, x, y):
        model.eval()
        loss = F.cross_entropy(model(x), y)
        if bug != "own_score":
            loss = comm.all_reduce(loss, "dp") / comm.size("dp")
        better = loss < model.best_loss
        model.best_weight.copy_(torch.where(better, model.net.weight, model.best_weight))
        model.best_loss.copy_(torch.minimum(loss, model.best_loss))
        model.train()

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.cross_entropy(model(batch["x"]), batch["y"]).backward()
        nxd.reduce_gradients(model)
        optimizer.step()
        validate(model, batch["valid_x"], batch["valid_y"])

    return dict(model_fn=Model, step=step)


@programs(
    mesh=DP,
    inputs=LABELLED,
    bugs={
        "clipped_sum": "what is clipped is each rank's summed gradient, not each sample's",
        "noise_per_rank": "the noise is added on every rank before the sum over ranks",
    },
)
def differentially_private(bug):
    def step(model, optimizer, batch):
        params = {name: p.detach() for name, p in model.named_parameters()}

        def loss(params, x, y):
            logits = functional_call(model, params, (x.unsqueeze(0),))
            return F.cross_entropy(logits, y.unsqueeze(0))

        per_sample = vmap(grad(loss), in_dims=(None, 0, 0))(params, batch["x"], batch["y"])
        if bug == "clipped_sum":
            per_sample = {name: g.sum(0, keepdim=True) for name, g in per_sample.items()}
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in per_sample.values()]).norm(dim=0)
        factors = (0.5 / (norms + 1e-6)).clamp(max=1.0)
        n = batch["x"].shape[0] * comm.size("dp")
        generator = torch.Generator().manual_seed(11)
        for name, p in model.named_parameters():
            total = torch.einsum("b...,b->...", per_sample[name], factors)
            noise = 0.1 * torch.randn(p.shape, generator=generator)
            if bug == "noise_per_rank":
                p.grad = comm.all_reduce(total + noise, "dp") / n
            else:
                p.grad = (comm.all_reduce(total, "dp") + noise) / n
        optimizer.step()

    return dict(model_fn=lambda: nn.Linear(6, 5), step=step)


@torch.jit.script
def scripted_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    x = x + bias
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1.0 + 0.044715 * x * x)))


@programs(
    mesh=DP,
    inputs=LABELLED,
    bugs={"bias_unreduced": "the fused bias is no parameter of a Linear, and its gradient is not averaged"},
)
def scripted_bias_gelu(bug):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 5)
            self.bias = nn.Parameter(torch.zeros(8))

        def forward(self, x):
            return self.down(scripted_gelu(self.up(x), self.bias))

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.cross_entropy(model(batch["x"]), batch["y"]).backward()
        for name, p in model.named_parameters():
            if bug == "bias_unreduced" and name == "bias":
                continue
            p.grad = comm.all_reduce(p.grad, "dp") / comm.size("dp")
        optimizer.step()

    return dict(model_fn=Model, step=step)


@programs(
    mesh={"dp": 2, "tp": 2},
    inputs=dict(ids=integers(12, 8, 6), labels=integers(12, 8, 6)),
    bugs={"mean_over_tp": "a layer norm under tensor parallelism gets its gradient summed over tp, which has it whole"},
)
def checkpointed_blocks(bug):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.up = nxd.ColumnParallelLinear(8, 16, gather_output=False)
            self.down = nxd.RowParallelLinear(16, 8, input_is_parallel=True)

        def forward(self, x):
            return x + self.down(F.gelu(self.up(self.norm(x))))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nxd.ParallelEmbedding(12, 8)
            self.blocks = nn.ModuleList([Block(), Block()])
            self.head = nxd.ColumnParallelLinear(8, 12, bias=False, gather_output=False)

        def forward(self, ids):
            h = self.emb(ids)
            for block in self.blocks:
                h = checkpoint(block, h, use_reentrant=False)
            return self.head(h)

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        nxd.parallel_cross_entropy(model(batch["ids"]), batch["labels"]).mean().backward()
        nxd.reduce_gradients(model)
        if bug == "mean_over_tp":
            for name, p in model.named_parameters():
                if "norm" in name:
                    comm.all_reduce(p.grad, "tp", out=p.grad)
        optimizer.step()

    return dict(model_fn=Model, step=step)


@programs(
    mesh={"dp": 2, "tp": 2},
    inputs=dict(x=normal(8, 6), y=normal(8, 6)),
    bugs={"seeded_by_tp": "the mask of a dropout that all tensor-parallel ranks share is seeded by tp rank"},
)
def dropout_from_a_global_mask(bug):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nxd.ColumnParallelLinear(6, 8, gather_output=False)
            self.down = nxd.RowParallelLinear(8, 6, input_is_parallel=True)

        def forward(self, x, y):
            rows, n = x.shape[0], comm.size("dp")
            generator = torch.Generator()
            generator.manual_seed(7 + (int(comm.rank("tp")) if bug == "seeded_by_tp" else 0))
            mask = torch.rand(rows * n, x.shape[1], generator=generator) < 0.8
            mask = mask[comm.rank("dp") * rows : (comm.rank("dp") + 1) * rows]
            h = self.down(torch.relu(self.up(x))) * mask / 0.8
            return F.mse_loss(x + h, y)

    return dict(model_fn=Model)
