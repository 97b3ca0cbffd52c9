"""Steps between gradients and weights, data-parallel. No rule was written or tuned for these programs."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

import neuronx_dist as nxd
from neuronx_dist import comm
from tests.checking.user_programs.support import integers, normal, programs

DP = {"dp": 2}
REGRESSION = dict(x=normal(8, 4), y=normal(8, 2))


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def parallel_mlp():
    return nn.Sequential(
        nn.LayerNorm(4),
        nxd.ColumnParallelLinear(4, 8, gather_output=False),
        nn.SiLU(),
        nxd.RowParallelLinear(8, 2, input_is_parallel=True),
    )


def averaged(tensor):
    return comm.all_reduce(tensor, "dp") / comm.size("dp")


@programs(mesh=DP, inputs=REGRESSION, bugs={"own_signs": "each rank takes the sign of its own gradient"})
def lion_by_hand(bug):
    @torch.no_grad()
    def update(model):
        for name, p in model.named_parameters():
            grad = p.grad if bug else averaged(p.grad)
            before = model.momenta.get(name, torch.zeros_like(p))
            direction = (0.9 * before + 0.1 * grad).sign()
            if bug:
                direction, grad = averaged(direction), averaged(grad)
            model.momenta[name] = 0.99 * before + 0.01 * grad
            p.add_(direction + 0.1 * p, alpha=-0.01)

    def step(model, optimizer, batch):
        model.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        update(model)

    def model_fn():
        model = mlp()
        model.momenta = {}
        return model

    return dict(model_fn=model_fn, step=step)


@programs(mesh=DP, inputs=REGRESSION, bugs={"summed": "the momenta are summed over the ranks where they are averaged"})
def momentum_averaged_instead_of_gradients(bug):
    """Every rank keeps the momentum of its own gradients, and the step is along their mean."""

    def step(model, optimizer, batch):
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        with torch.no_grad():
            for p in model.parameters():
                if not hasattr(p, "momentum"):
                    p.momentum = torch.zeros_like(p)
                p.momentum.mul_(0.9).add_(p.grad)
                direction = comm.all_reduce(p.momentum, "dp")
                if not bug:
                    direction = direction / comm.size("dp")
                p -= 0.05 * direction
        model.zero_grad()

    return dict(model_fn=mlp, step=step)


@programs(
    mesh=DP,
    inputs=REGRESSION,
    bugs={"summed_each_time": "what is summed after each microbatch is divided by dp only once, at the end"},
)
def averaged_after_each_microbatch(bug):
    """Wasteful and right: the mean of what is equal is itself."""

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        for x, y in zip(batch["x"].chunk(2), batch["y"].chunk(2)):
            (F.mse_loss(model(x), y) / 2).backward()
            for p in model.parameters():
                p.grad = comm.all_reduce(p.grad, "dp")
                if not bug:
                    p.grad = p.grad / comm.size("dp")
        if bug:
            for p in model.parameters():
                p.grad = p.grad / comm.size("dp")
        optimizer.step()

    return dict(model_fn=mlp, step=step)


@programs(
    mesh=DP,
    inputs=REGRESSION,
    bugs={"own_ascent": "each rank climbs along its own gradient, and only the second ones are averaged"},
)
def sharpness_aware_minimisation(bug):
    @torch.no_grad()
    def climb(parameters):
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        moves = [0.1 * p.grad / (norm + 1e-12) for p in parameters]
        for p, move in zip(parameters, moves):
            p.add_(move)
            p.grad = None
        return moves

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        parameters = list(model.parameters())
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        if not bug:
            nxd.reduce_gradients(model)
        moves = climb(parameters)
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        nxd.reduce_gradients(model)
        with torch.no_grad():
            for p, move in zip(parameters, moves):
                p.sub_(averaged(move) if bug else move)
        optimizer.step()

    return dict(model_fn=mlp, step=step)


@programs(
    mesh=DP,
    inputs=REGRESSION,
    bugs={"orthogonalised_first": "each rank orthogonalises its own factor before the factors are averaged"},
)
def gradients_of_low_rank(bug):
    """PowerSGD without feedback of the error: two thin factors are averaged in place of a matrix."""

    def compress(grad, rank=2):
        q = torch.eye(grad.shape[1], rank, dtype=grad.dtype, device=grad.device)
        left = grad @ q
        if not bug:
            left = comm.all_reduce(left, "dp") / comm.size("dp")
        left, _ = torch.linalg.qr(left)
        if bug:
            left = comm.all_reduce(left, "dp") / comm.size("dp")
        right = averaged(grad.t() @ left)
        return left @ right.t()

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        for p in model.parameters():
            p.grad = compress(p.grad) if p.grad.ndim == 2 else averaged(p.grad)
        optimizer.step()

    return dict(model_fn=mlp, step=step)


@programs(mesh=DP, inputs=REGRESSION, bugs={"own_factor": "the covariance of the inputs is that of this rank's rows"})
def preconditioned_by_inputs(bug):
    """K-FAC's factor of one linear layer."""

    def step(model, optimizer, batch):
        x, y = batch["x"], batch["y"]
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        nxd.reduce_gradients(model)
        factor = x.t() @ x / x.shape[0]
        if not bug:
            factor = averaged(factor)
        damped = factor + 0.1 * torch.eye(4, dtype=x.dtype, device=x.device)
        for p in model.parameters():
            p.grad = torch.linalg.solve(damped, p.grad.t()).t()
        optimizer.step()

    return dict(model_fn=lambda: nn.Linear(4, 2, bias=False), step=step)


@programs(
    mesh={"dp": 4},
    inputs=REGRESSION,
    bugs={"matrices_only": "the list that is reduced leaves out the biases"},
)
def gradients_reduced_as_a_list(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.smooth_l1_loss(model(batch["x"]), batch["y"]).backward()
        grads = [p.grad for p in model.parameters() if p.ndim > 1 or not bug]
        torch._foreach_div_(grads, comm.size("dp"))
        comm.all_reduce(grads, "dp", out=grads)
        optimizer.step()

    return dict(model_fn=mlp, step=step, optimizer=lambda params: torch.optim.NAdam(params, lr=0.05))


@programs(
    mesh=DP,
    inputs=REGRESSION,
    bugs={"gradients_of_the_first": "the first rank steps with its own gradients, and sends its weights to all"},
)
def weights_from_the_first_rank(bug):
    """A parameter server: all take the weights of the first rank after its step."""

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        if not bug:
            for p in model.parameters():
                p.grad = averaged(p.grad)
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(comm.broadcast(p, "dp", src=0))

    return dict(model_fn=mlp, step=step)


@programs(
    mesh=DP,
    inputs=dict(x=normal(8, 4), u=normal(8, 4), y=integers(3, 8)),
    bugs={"decay_by_own_loss": "how fast the teacher follows depends on this rank's loss"},
)
def mean_teacher(bug):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.student = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        supervised = F.cross_entropy(model.student(batch["x"]), batch["y"])
        with torch.no_grad():
            target = model.teacher(batch["u"]).softmax(-1)
        consistency = F.mse_loss(model.student(batch["u"]).softmax(-1), target)
        (supervised + 3.0 * consistency).backward()
        nxd.reduce_gradients(model)
        optimizer.step()
        with torch.no_grad():
            level = supervised.detach()
            level = level if bug else averaged(level)
            rate = 0.5 * torch.exp(-level)
            for kept, now in zip(model.teacher.parameters(), model.student.parameters()):
                kept.lerp_(now, rate)

    return dict(model_fn=Pair, step=step)


@programs(
    mesh=DP,
    inputs=dict(x=normal(8, 4), y=normal(8, 2)),
    bugs={"weights_only": "the stacked biases are parameters of their own, and nobody averages their gradients"},
)
def ensemble_by_vmap(bug):
    members = 3

    class Ensemble(nn.Module):
        def __init__(self):
            super().__init__()
            self.template = [nn.Linear(4, 2)]  # hidden from the parameters
            models = [nn.Linear(4, 2) for _ in range(members)]
            stacked, _ = stack_module_state(models)
            self.weight, self.bias = nn.Parameter(stacked["weight"].detach()), nn.Parameter(stacked["bias"].detach())

        def forward(self, x):
            def one(weight, bias):
                return functional_call(self.template[0], {"weight": weight, "bias": bias}, (x,))

            return vmap(one)(self.weight, self.bias)  # [members, b, 2]

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        out = model(batch["x"])
        spread = out.var(0, unbiased=False).mean()
        ((out - batch["y"]).square().mean() - 0.1 * spread).backward()
        for name, p in model.named_parameters():
            if name == "weight" or not bug:
                p.grad = averaged(p.grad)
        optimizer.step()

    return dict(model_fn=Ensemble, step=step)


@programs(
    mesh={"dp": 2, "tp": 2},
    inputs=REGRESSION,
    bugs={"over_the_world": "gradients are averaged over all ranks, those of different shards together"},
)
def mean_over_the_data_ranks(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad(set_to_none=True)
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        group = "world" if bug else "dp"
        scale = 1.0 / comm.size(group)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.copy_(comm.all_reduce(p.grad * scale, group))
        optimizer.step()

    return dict(model_fn=parallel_mlp, step=step)


@programs(
    mesh={"dp": 2, "tp": 2},
    inputs=REGRESSION,
    bugs={"own_rank_only": "the largest entry for clipping is that of this rank's shards"},
)
def clipped_by_the_largest_entry(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        nxd.reduce_gradients(model)
        with torch.no_grad():
            largest = torch.stack([p.grad.abs().amax() for p in model.parameters()]).amax()
            if not bug:
                largest = comm.all_reduce(largest, "tp", op="max")
            factor = (0.05 / largest).clamp(max=1.0)
            for p in model.parameters():
                p.grad.mul_(factor)
        optimizer.step()

    return dict(model_fn=parallel_mlp, step=step)


@programs(
    mesh={"dp": 2, "tp": 2},
    inputs=REGRESSION,
    bugs={"scaled_by_hand": "the loss is divided by dp before ZeRO-1, which divides too"},
)
def zero1_with_weight_decay_groups(bug):
    def optimizer(params):
        params = list(params)
        matrices, vectors = [p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]
        groups = [dict(params=matrices, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)]
        return nxd.NeuronZero1Optimizer(groups, torch.optim.SGD, lr=0.1, momentum=0.9, max_norm=float("inf"))

    def step(model, optimizer, batch):
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        (loss / comm.size("dp") if bug else loss).backward()
        nxd.reduce_gradients(model, average_over_data=False)
        optimizer.step()
        optimizer.zero_grad()

    return dict(model_fn=parallel_mlp, step=step, optimizer=optimizer)


# Found by looking at the verdicts on the programs above; not in the figures.


@programs(mesh=DP, inputs=REGRESSION, bugs={"not_divided": "the sum of gradients of mean losses is copied back"})
def mean_copied_into_the_gradient(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        for p in model.parameters():
            total = comm.all_reduce(p.grad, "dp")
            p.grad.copy_(total if bug else total / comm.size("dp"))
        optimizer.step()

    return dict(model_fn=mlp, step=step)


@programs(mesh=DP, inputs=REGRESSION)
def mean_assigned_to_all_positions(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        for p in model.parameters():
            p.grad[:] = averaged(p.grad)
        optimizer.step()

    return dict(model_fn=mlp, step=step)
