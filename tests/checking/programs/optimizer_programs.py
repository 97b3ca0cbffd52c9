"""Optimizers that look at one element at a time, and those that mix them; torch's and written by hand."""

from __future__ import annotations

import functools

import torch

import neuronx_dist as nxd
from neuronx_dist import comm
from tests.checking.programs.whole_steps import DP, TP, Net, Sharded, program


def loss(model, x):
    return model(x).square().sum()


def with_optimizer(build, make, only=lambda param: True):
    """The model and an optimizer of its parameters."""

    def model_fn():
        model = build()
        return model, make([param for param in model.parameters() if only(param)])

    return model_fn


def reduced(model):
    for param in model.parameters():
        param.grad = comm.all_reduce(param.grad, "dp")


CHANGED_IN_A_STEP = ("lr", "foreach", "fused", "capturable")


def two_steps(model, optimizer, x):
    before = [{**group, "params": [*group["params"]]} for group in optimizer.param_groups]
    for _ in range(2):
        model.zero_grad()
        loss(model, x).backward()
        reduced(model)
        optimizer.step()
        groups = optimizer.param_groups
        assert [[*map(id, group["params"])] for group in groups] == [[*map(id, group["params"])] for group in before]
        assert all(group[key] is before[0][key] for group in groups for key in group if key in CHANGED_IN_A_STEP)
        states = {}  # of what is alike one is updated, and all have its state
        for param in groups[0]["params"]:
            state = {*optimizer.state.get(param, ())}
            assert states.setdefault(param.shape, state) == state


def is_matrix(param):
    return param.dim() == 2


# --- torch's ----------------------------------------------------------------------------------------------------------

ELEMENTWISE = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "sgd_momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_foreach": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "adam": functools.partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.1),
    "adamw_foreach": functools.partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "adamw_fused": functools.partial(torch.optim.AdamW, lr=0.1, fused=True),
    "adamw_capturable": functools.partial(torch.optim.AdamW, lr=torch.tensor(0.1), foreach=False),
    "adamax": functools.partial(torch.optim.Adamax, lr=0.1),
    "nadam": functools.partial(torch.optim.NAdam, lr=0.1),
    "radam": functools.partial(torch.optim.RAdam, lr=0.1),
    "asgd": functools.partial(torch.optim.ASGD, lr=0.1),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1),
    "adadelta": functools.partial(torch.optim.Adadelta, lr=0.1),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.1, centered=True, momentum=0.9),
    "rprop": functools.partial(torch.optim.Rprop, lr=0.1),
}
for _name, _make in ELEMENTWISE.items():
    for _build, _mesh in ((Net, DP), (Sharded, TP)):

        def _step(model, optimizer, x):
            two_steps(model, optimizer, x)

        _step.__name__ = f"{_name}_{'dp' if _mesh is DP else 'tp'}"
        program(with_optimizer(_build, _make), _mesh)(_step)


class Twins(torch.nn.Module):
    """Two layers that are alike."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (torch.nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


@program(with_optimizer(Twins, ELEMENTWISE["adamw_capturable"]))
def adamw_of_layers_that_are_alike(model, optimizer, x):
    two_steps(model, optimizer, x)


def muon(params):
    return torch.optim.Muon(params, lr=0.1)


def adafactor(params):
    return torch.optim.Adafactor(params, lr=0.1)


@program(with_optimizer(Net, muon, is_matrix))
def muon_on_replicated(model, optimizer, x):
    two_steps(model, optimizer, x)


@program(with_optimizer(Sharded, muon), TP, refused="Muon")
def muon_on_sharded(model, optimizer, x):
    two_steps(model, optimizer, x)


@program(with_optimizer(Net, adafactor))
def adafactor_on_replicated(model, optimizer, x):
    two_steps(model, optimizer, x)


@program(with_optimizer(Sharded, adafactor), TP, refused="Adafactor")
def adafactor_on_sharded(model, optimizer, x):
    two_steps(model, optimizer, x)


def lbfgs_step(model, optimizer, x):
    def closure():
        optimizer.zero_grad()
        total = loss(model, x)
        total.backward()
        reduced(model)
        return comm.all_reduce(total.detach(), "dp")

    optimizer.step(closure)


def lbfgs(params):
    return torch.optim.LBFGS(params, lr=0.01, max_iter=3)


@program(with_optimizer(Net, lbfgs))
def lbfgs_on_replicated(model, optimizer, x):
    lbfgs_step(model, optimizer, x)


@program(with_optimizer(Sharded, lbfgs), TP, refused="LBFGS")
def lbfgs_on_sharded(model, optimizer, x):
    lbfgs_step(model, optimizer, x)


# --- ZeRO-1 -----------------------------------------------------------------------------------------------------------


def shards(param):
    return param.detach().chunk(comm.size("dp"))[comm.rank("dp")]


def zero1_by_rows(model, x, make):
    """Each dp rank updates its rows of every parameter."""
    masters = [torch.nn.Parameter(shards(param).clone()) for param in model.parameters()]
    optimizer = make(masters)
    loss(model, x).backward()
    for master, param in zip(masters, model.parameters()):
        master.grad = comm.reduce_scatter(param.grad, "dp")
    optimizer.step()
    with torch.no_grad():
        for master, param in zip(masters, model.parameters()):
            param.copy_(comm.all_gather(master.detach(), "dp"))


@program()
def zero1_rows_with_adamw(model, optimizer, x):
    zero1_by_rows(model, x, functools.partial(torch.optim.AdamW, lr=0.1))


class TwoMatrices(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(4, 8, bias=False, dtype=torch.float64)
        self.down = torch.nn.Linear(8, 4, bias=False, dtype=torch.float64)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


@program(TwoMatrices, refused="Muon")
def zero1_rows_with_muon(model, optimizer, x):
    zero1_by_rows(model, x, muon)


class Mixing(torch.optim.SGD):
    """Not one of torch's, and not elementwise: an update of unit norm."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(param.grad / param.grad.norm(), alpha=-group["lr"])


def zero1(optimizer_class):
    def model_fn():
        model = TwoMatrices()
        return model, nxd.NeuronZero1Optimizer(model.parameters(), optimizer_class, lr=0.1, grad_clipping=False)

    return model_fn


def summed(model, optimizer, x):
    (loss(model, x) * comm.size("dp")).backward()  # the optimizer takes the mean
    optimizer.step()


@program(zero1(torch.optim.SGD))
def zero1_with_sgd(model, optimizer, x):
    summed(model, optimizer, x)


@program(zero1(Mixing), refused="Mixing")
def zero1_with_a_mixing_optimizer(model, optimizer, x):
    summed(model, optimizer, x)


# --- written by hand --------------------------------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                momentum = state["momentum"]
                update = (momentum * 0.9 + param.grad * 0.1).sign()
                param.add_(update, alpha=-group["lr"])
                momentum.lerp_(param.grad, 0.01)


class Lars(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                trust = param.norm() / (param.grad.norm() + 1e-8)
                param.add_(param.grad * trust, alpha=-group["lr"])


class ParallelLars(Lion):
    """The norm of a sharded parameter is over all its shards."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                squares = torch.stack([param.square().sum(), param.grad.square().sum()])
                weight, grad = comm.all_reduce(squares, "tp").sqrt().unbind()
                param.add_(param.grad * (weight / (grad + 1e-8)), alpha=-group["lr"])


class Shampoo(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                left = torch.eye(param.shape[0], dtype=param.dtype) + param.grad @ param.grad.T
                param.sub_(torch.linalg.solve(left, param.grad), alpha=group["lr"])


class ScaledByRank(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad * (1 + comm.rank("dp")), alpha=group["lr"])


@program(with_optimizer(Net, functools.partial(Lion, lr=0.1)))
def lion_on_replicated(model, optimizer, x):
    two_steps(model, optimizer, x)


@program(with_optimizer(Sharded, functools.partial(Lion, lr=0.1)), TP)
def lion_on_sharded(model, optimizer, x):
    two_steps(model, optimizer, x)


@program(with_optimizer(Net, functools.partial(Lars, lr=0.1)))
def lars_on_replicated(model, optimizer, x):
    two_steps(model, optimizer, x)


@program(with_optimizer(Sharded, functools.partial(Lars, lr=0.1)), TP, refused="norm")
def lars_on_sharded(model, optimizer, x):
    two_steps(model, optimizer, x)


@program(with_optimizer(Sharded, functools.partial(ParallelLars, lr=0.1)), TP)
def parallel_lars_on_sharded(model, optimizer, x):
    two_steps(model, optimizer, x)


@program(with_optimizer(Net, functools.partial(Shampoo, lr=0.1), is_matrix))
def shampoo_on_replicated(model, optimizer, x):
    two_steps(model, optimizer, x)


@program(with_optimizer(Sharded, functools.partial(Shampoo, lr=0.1)), TP, refused="Shampoo")
def shampoo_on_sharded(model, optimizer, x):
    two_steps(model, optimizer, x)


@program(with_optimizer(Net, functools.partial(ScaledByRank, lr=0.1)), refused="dp")
def update_scaled_by_rank(model, optimizer, x):
    two_steps(model, optimizer, x)


@program()
def plain_loop(model, optimizer, x):
    loss(model, x).backward()
    reduced(model)
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1 * param.grad


@program(refused="dp")
def plain_loop_without_reduction(model, optimizer, x):
    loss(model, x).backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1 * param.grad


@program(Sharded, TP, refused="norm")
def plain_loop_of_normalised_gradients(model, optimizer, x):
    loss(model, x).backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1 * param.grad / param.grad.norm()


class ClippedWhereLarge(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                scale = 0.1 if param.grad.norm().item() > 1e9 else 1.0 + comm.rank("dp")
                param.sub_(param.grad * scale, alpha=group["lr"])


@program(with_optimizer(Net, functools.partial(ClippedWhereLarge, lr=1e-3)), refused="dp")
def branch_on_a_value(model, optimizer, x):
    two_steps(model, optimizer, x)


class HalvedWhereLarge(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                norm = param.grad.norm().item()
                scale = 1.0 + comm.rank("dp") if norm > 1.5 else 0.5
                param.sub_(param.grad * scale, alpha=group["lr"])


@program(with_optimizer(Net, functools.partial(HalvedWhereLarge, lr=0.01)), assumed="HalvedWhereLarge.step")
def branch_that_is_not_judged(model, optimizer, x):
    two_steps(model, optimizer, x)


class Normalised(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"] / param.grad.norm().item())


@program(with_optimizer(Sharded, functools.partial(Normalised, lr=0.01)), TP, refused="norm")
def value_of_a_shard(model, optimizer, x):
    two_steps(model, optimizer, x)
