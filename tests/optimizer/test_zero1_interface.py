"""ZeRO-1 as a torch optimizer: parameter groups, schedulers, what it refuses, and its state."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.gradients import buckets
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import NeuronZero1Optimizer
from tests.optimizer.zero1_training import train
from tests.support.synthetic import Model


def test_parameter_groups_scheduler_and_closure() -> None:
    def schedule(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], rank_mean: float) -> list[torch.Tensor]:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))

        def closure() -> str:
            for param in params:
                param.grad = torch.full_like(param, rank_mean)
            return "loss"

        for _ in range(4):
            assert optimizer.step(closure) == "loss"
            scheduler.step()
        return [param.detach().clone() for param in params]

    def build() -> tuple[list[nn.Parameter], list[dict[str, Any]]]:
        params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((2, 2), 2.0)), nn.Parameter(torch.zeros(1))]
        return params, [{"params": params[:1], "weight_decay": 0.5}, {"params": params[1:2], "lr": 0.2}]

    def rank_main() -> list[torch.Tensor]:
        params, groups = build()
        optimizer = NeuronZero1Optimizer(groups, torch.optim.AdamW, grad_clipping=False, weight_decay=0.0)
        assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.2]  # the class's own default
        optimizer.add_param_group({"params": params[2:], "lr": 0.5})
        return schedule(optimizer, params, float(comm.rank("dp")) * 2)

    params, groups = build()
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    optimizer.add_param_group({"params": params[2:], "lr": 0.5})
    expected = schedule(optimizer, params, 1.0)
    for result in comm.threads.run(Mesh(2), rank_main):
        for value, reference in zip(result, expected):
            assert torch.allclose(value, reference, rtol=1e-6)


@pytest.mark.parametrize("has_gradient", [(), (1,), (0, 1)])
def test_a_step_without_any_gradient_warns(has_gradient: tuple[int, ...], recwarn: pytest.WarningsRecorder) -> None:
    def rank_main() -> list[float]:
        params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
        optimizer = NeuronZero1Optimizer(params, torch.optim.SGD, lr=0.5)
        if comm.rank("dp") in has_gradient:
            params[1].grad = torch.ones(2)
        optimizer.step()
        return [param.sum().item() for param in params]

    assert all((y == 2.0) == (not has_gradient) and x == 3.0 for x, y in comm.threads.run(Mesh(2), rank_main))
    messages = [str(warning.message) for warning in recwarn if issubclass(warning.category, UserWarning)]
    assert bool(messages) == (not has_gradient)
    assert all("NeuronZero1Optimizer.step: none of the 2 trainable parameters" in message for message in messages)


def test_a_closure_runs_backward() -> None:
    """`step` computes without gradients; what the closure computes has them."""

    def rank_main() -> tuple[float, list[float]]:
        param = nn.Parameter(torch.tensor([3.0, 4.0]))
        optimizer = NeuronZero1Optimizer([param], torch.optim.SGD, lr=0.5, grad_clipping=False)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = param.square().sum() * (1.0 + comm.rank("dp"))
            loss.backward()
            return loss

        return optimizer.step(closure).item(), param.tolist()

    # The mean of the gradients 2p and 4p is 3p.
    assert comm.threads.run(Mesh(2), rank_main) == [(25.0, [-1.5, -2.0]), (50.0, [-1.5, -2.0])]


def test_a_group_that_is_added_has_the_defaults_of_the_class() -> None:
    """Adam without lr: a scheduler finds it in the groups, and goes on from it."""

    def rank_main() -> list[float]:
        optimizer = NeuronZero1Optimizer([nn.Parameter(torch.ones(2))], torch.optim.Adam)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.ones(2)
        optimizer.step()
        scheduler.step()
        return [group["lr"] for group in optimizer.param_groups]

    assert comm.threads.run(Mesh(2), rank_main) == [[5e-4, 5e-4]] * 2


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_schedulers_that_change_momentum(name: str) -> None:
    """Such schedulers read the optimizer's defaults, of which the class has more than were passed."""

    def trained(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> torch.Tensor:
        arguments = {"OneCycleLR": {"max_lr": 0.1, "total_steps": 9}, "CyclicLR": {"base_lr": 0.1, "max_lr": 0.2}}[name]
        scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **arguments)
        for _ in range(4):
            param.grad = torch.linspace(-1, 1, 4)
            optimizer.step()
            scheduler.step()
        return param.detach()

    def rank() -> torch.Tensor:
        param = nn.Parameter(torch.ones(4))
        return trained(NeuronZero1Optimizer([param], torch.optim.AdamW, lr=0.1, grad_clipping=False), param)

    param = nn.Parameter(torch.ones(4))
    expected = trained(torch.optim.AdamW([param], lr=0.1), param)
    for result in comm.threads.run(Mesh(2), rank):
        assert torch.equal(result, expected)


def test_named_parameters_keep_their_names() -> None:
    """Names are in the wrapper's groups and its state dict; the optimizer of the shards needs none."""

    def rank_main() -> None:
        model = nn.ParameterDict({"a": torch.ones(3), "frozen": torch.ones(2), "b": torch.ones(1)})
        model["frozen"].requires_grad_(False)
        optimizer = NeuronZero1Optimizer(model.named_parameters(), torch.optim.SGD, lr=1.0, grad_clipping=False)
        model["a"].grad, model["b"].grad = torch.ones(3), torch.ones(1)
        optimizer.step()
        assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["a", "b", "frozen"]
        assert "param_names" not in optimizer.base_optimizer.param_groups[0]
        assert {name: param.tolist() for name, param in model.items()} == {
            "a": [0.0] * 3,
            "b": [0.0],
            "frozen": [1.0] * 2,
        }

    comm.threads.run(Mesh(2), rank_main)


def test_parameters_that_are_not_contiguous() -> None:
    def rank_main() -> None:
        values = torch.arange(12.0).view(3, 4)
        param, plain = nn.Parameter(values.clone().t()), nn.Parameter(values.t().contiguous())
        assert not param.is_contiguous()
        optimizer = NeuronZero1Optimizer([param, plain], torch.optim.SGD, lr=1.0, grad_clipping=False)
        param.grad, plain.grad = values.t().square(), values.t().square()
        optimizer.step()
        assert torch.equal(param, plain) and torch.equal(param, values.t() - values.t().square())

    comm.threads.run(Mesh(2), rank_main)


class Counting(torch.optim.SGD):
    """Keeps a value in its parameter groups, as schedule-free optimizers do: steps get larger."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = group["lr"] + 1.0
            group["steps"] = group.get("steps", 0) + 1
        super().step(closure)


def test_values_that_an_optimizer_keeps_in_its_groups() -> None:
    """Values in the wrapper's groups are in its state dict: a resumed run continues from them."""

    def steps(param: nn.Parameter, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            param.grad = torch.ones_like(param)
            optimizer.step()

    def rank_main() -> None:
        options: dict[str, Any] = dict(lr=0.0, max_norm=math.inf)
        param, resumed = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        optimizer = NeuronZero1Optimizer([param], Counting, **options)
        steps(param, optimizer, 2)
        assert optimizer.param_groups[0]["steps"] == 2 and optimizer.param_groups[0]["lr"] == 2.0
        assert param.tolist() == [-3.0, -3.0]  # 1 and 2
        with torch.no_grad():
            resumed.copy_(param)
        other = NeuronZero1Optimizer([resumed], Counting, **options)
        other.load_state_dict(optimizer.state_dict())
        steps(resumed, other, 1)
        assert resumed.tolist() == [-6.0, -6.0] and other.param_groups[0]["steps"] == 3

    comm.threads.run(Mesh(2), rank_main)


def test_frozen_and_missing_gradients() -> None:
    """No gradient on any rank: skipped as torch does, not even decayed. On one rank: the others count as zero."""

    def rank_main() -> None:
        model = nn.ParameterDict({name: torch.ones(3) for name in ("all", "one", "none", "frozen")})
        model["frozen"].requires_grad_(False)
        optimizer = NeuronZero1Optimizer(
            model.parameters(), torch.optim.SGD, lr=1.0, weight_decay=0.5, max_norm=math.inf
        )
        assert set(optimizer.state_dict()["shape_info"]) == {0, 1, 2}
        model["all"].grad = torch.ones(3)
        if comm.rank("dp") == 1:
            model["one"].grad = torch.full((3,), 2.0)
        optimizer.step()
        assert model["all"].tolist() == [-0.5] * 3
        assert model["one"].tolist() == [0.0] * 3  # 1 - (2 / 4 + 0.5)
        assert model["none"].tolist() == model["frozen"].tolist() == [1.0] * 3
        assert optimizer.grad_norm.item() == pytest.approx(math.sqrt(3 + 3 / 4))

    comm.threads.run(Mesh(4), rank_main)


def test_stage_without_parameters() -> None:
    def rank_main() -> float:
        params = [nn.Parameter(torch.ones(2))] if comm.rank("pp") == 0 else []
        for param in params:
            param.grad = torch.full((2,), 3.0)
        optimizer = NeuronZero1Optimizer([{"params": params}], torch.optim.SGD, lr=1.0)
        optimizer.step()
        return optimizer.grad_norm.item()

    assert comm.threads.run(Mesh(4, pp=2), rank_main) == pytest.approx([3 * math.sqrt(2)] * 4)


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "SparseAdam"])
def test_optimizers_that_are_not_elementwise_are_refused(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    subclass = type("Mine", (getattr(torch.optim, name),), {})

    def rank_main() -> None:
        with pytest.raises(ValueError, match=r"Mine cannot work on shards of parameters: it .* elementwise"):
            NeuronZero1Optimizer([nn.Parameter(torch.ones(2))], subclass)

    comm.threads.run(Mesh(1), rank_main)


def test_without_a_mesh_the_error_says_what_to_call() -> None:
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        NeuronZero1Optimizer([nn.Parameter(torch.ones(2))], torch.optim.SGD, lr=0.1)


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(TypeError, match="neither it nor SGD takes the option 'momentun'; nearest: momentum"):
        comm.threads.run(
            Mesh(1), lambda: NeuronZero1Optimizer([nn.Parameter(torch.ones(2))], torch.optim.SGD, momentun=0.9)
        )
    with pytest.raises(TypeError, match="neither it nor SGD takes the option 'clip_grad'; nearest: .*grad_clipping"):
        comm.threads.run(
            Mesh(1), lambda: NeuronZero1Optimizer([nn.Parameter(torch.ones(2))], torch.optim.SGD, clip_grad=True)
        )


# --- shards ----------------------------------------------------------------------------------------------------------


def test_shards_are_public() -> None:
    """One for each trainable parameter, in order; the base optimizer's parameters are their masters."""

    def rank_main() -> None:
        model = Model(torch.bfloat16)
        model.norm.requires_grad_(False)
        params = [param for param in model.parameters() if param.requires_grad]
        optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.SGD, lr=0.1, lazy_init=True)
        assert optimizer.shards == [] and optimizer.base_optimizer is None
        optimizer.init_zero()
        assert [shard.param for shard in optimizer.shards] == params
        model.set_gradients(0)
        for shard, master in zip(optimizer.shards, optimizer.base_optimizer.param_groups[0]["params"], strict=True):
            assert shard.master is master and shard.gradient.tensor is shard.param.grad
            assert shard.shape == tuple(master.shape) and shard.degree == 2

    comm.threads.run(Mesh(2), rank_main)


def test_buckets_are_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts: Counter[int] = Counter()  # by rank
    cut = buckets.cut

    def counting(*args: Any) -> Any:
        cuts[comm.rank("world")] += 1
        return cut(*args)

    monkeypatch.setattr(buckets, "cut", counting)

    def rank_main() -> None:
        def cuts_of_three_steps() -> int:
            before = cuts[comm.rank("world")]
            for _ in range(3):
                for param in params:
                    param.grad = torch.ones_like(param)
                optimizer.step()
                optimizer.zero_grad()
            return cuts[comm.rank("world")] - before

        params = [nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(3)]
        optimizer = NeuronZero1Optimizer(params[:2], torch.optim.SGD, lr=0.0)
        assert cuts_of_three_steps() == 2  # for reduce-scatter and for all-gather
        assert cuts_of_three_steps() == 0
        optimizer.add_param_group({"params": params[2:]})
        assert cuts_of_three_steps() == 2
        params[1].data = params[1].data.float()
        assert cuts_of_three_steps() == 2
        with comm.record() as calls:
            assert cuts_of_three_steps() == 0
        # A bucket of two bfloat16 parameters, one of a parameter that is wider now, each way.
        assert Counter(call.verb for call in calls) == {"reduce_scatter": 3 * 2, "all_gather": 3 * 2, "all_reduce": 3}

    comm.threads.run(Mesh(2), rank_main)


@pytest.mark.slow
def test_a_deleted_model_and_its_optimizer_are_collected() -> None:
    def rank_main() -> None:
        model = Model()
        optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, lr=0.1, use_grad_acc_hook=True)
        train(model, optimizer, last=2)
        gone = [weakref.ref(x) for x in (model, model.norm, optimizer, optimizer.shards[0])]
        del model, optimizer
        gc.collect()
        assert [ref() for ref in gone] == [None] * 4

    comm.threads.run(Mesh(2), rank_main)


# --- copies ---


class Layers(nn.Module):
    """Parallel layers and a norm, whose rows two ranks do not divide."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nxd.ColumnParallelLinear(3, 8, gather_output=False, dtype=dtype)
        self.down = nxd.RowParallelLinear(8, 3, input_is_parallel=True, dtype=dtype)
        self.norm = nn.LayerNorm(3, dtype=dtype)
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.copy_(torch.linspace(-0.3, 0.1 * (number + 1), param.numel()).view_as(param))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.down(torch.tanh(self.up(x))))
        return out


def make_steps(model: nn.Module, optimizer: NeuronZero1Optimizer, numbers: range) -> list[torch.Tensor]:
    """Returns the norms of the steps, and the weights after the last one."""
    norms = []
    for number in numbers:
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 12).view(4, 3) * (number + 1) + comm.rank("dp")
        model(x.to(model.norm.weight.dtype)).square().mul(torch.tensor([1.0, -2.0, 3.0])).mean().backward()
        nxd.reduce_gradients(model, average_over_data=False)
        optimizer.step()
        assert optimizer.grad_norm is not None
        norms.append(optimizer.grad_norm)
    return [*norms, *(param.detach().clone() for param in model.parameters())]


@pytest.mark.each_pair
@pytest.mark.parametrize("mesh", [Mesh(1), Mesh(2), Mesh(4, tp=2)], ids=str)
@pytest.mark.parametrize("optimizer_first", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"overlap": True}, {"use_grad_acc_hook": True}, {"optimizer_dtype": torch.float64}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_deep_copy_goes_on_as_the_original(
    mesh: Mesh, optimizer_first: bool, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """The copies of a model and its optimizer train bit-equal, and change nothing of the originals."""

    def rank_main() -> None:
        model = Layers(dtype)
        params = [{"params": [*model.up.parameters()], "lr": 0.05}, {"params": [*model.down.parameters()]}]
        optimizer = NeuronZero1Optimizer(params, torch.optim.AdamW, lr=0.1, max_norm=0.5, **options)
        optimizer.add_param_group({"params": [*model.norm.parameters()], "weight_decay": 0.0})
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)  # which wraps `optimizer.step`
        make_steps(model, optimizer, range(2))
        before = [param.detach().clone() for param in model.parameters()]
        if optimizer_first:
            copied, of_copy = copy.deepcopy((optimizer, model))
        else:
            of_copy, copied = copy.deepcopy((model, optimizer))
        assert type(copied) is NeuronZero1Optimizer and copied.base_optimizer is not optimizer.base_optimizer
        results = make_steps(of_copy, copied, range(2, 4))
        assert all(map(torch.equal, before, model.parameters()))
        expected = make_steps(model, optimizer, range(2, 4))
        assert len(results) == 8 and all(map(torch.equal, results, expected))

    comm.threads.run(mesh, rank_main)


def test_a_deep_copy_before_the_shards_are_made() -> None:
    def rank_main() -> None:
        model = Layers(torch.float32)
        optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, lazy_init=True)
        of_copy, copied = copy.deepcopy((model, optimizer))
        assert copied.base_optimizer is None and copied.shards == []
        results, expected = (make_steps(*pair, range(1)) for pair in ((of_copy, copied), (model, optimizer)))
        assert all(map(torch.equal, results, expected))

    comm.threads.run(Mesh(2), rank_main)


def test_a_parameter_that_is_unfrozen_later_is_refused() -> None:
    def main() -> None:
        frozen, trained = (torch.nn.Parameter(torch.ones(3), requires_grad=trains) for trains in (False, True))
        optimizer = nxd.NeuronZero1Optimizer([frozen, trained], torch.optim.SGD, lr=0.1)
        trained.grad = torch.ones(3)
        optimizer.step()
        frozen.requires_grad_(True)
        with pytest.raises(
            RuntimeError, match=r"1 parameters, the first of shape \(3,\), were frozen .*add_param_group"
        ):
            optimizer.step()

    comm.threads.run(Mesh(2), main)
