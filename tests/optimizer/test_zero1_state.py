"""ZeRO-1's state dict: what is in it, and runs that go on from it; the memory of masters."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import NeuronZero1Optimizer
from neuronx_dist.parallel_layers.utils import load_optimizer_state_dict
from tests.optimizer.zero1_training import train, weights_of
from tests.support.synthetic import LAYOUTS, Model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mesh", [Mesh(1), Mesh(4), Mesh(8, tp=2, pp=2), Mesh(8, pp=2, cp=2)], ids=str)
@pytest.mark.slow
def test_resumed_run_is_bit_equal(mesh: Mesh, dtype: torch.dtype, tmp_path: Path) -> None:
    def make(model: Model) -> NeuronZero1Optimizer:
        options = dict(lr=0.1, max_norm=0.5, save_master_weights=dtype == torch.bfloat16)
        return NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, **options)

    def rank_main() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        model = Model(dtype)
        optimizer = make(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        train(model, optimizer, 0, 3)
        scheduler.step()
        weights = weights_of(model)
        optimizer.save_sharded_state_dict(tmp_path, num_workers_per_step=3)
        train(model, optimizer, 3, 6)

        resumed = Model(dtype)
        resumed_optimizer = make(resumed)
        resumed.load_state_dict(weights)
        resumed_optimizer.load_sharded_state_dict(tmp_path, num_workers_per_step=3)
        assert resumed_optimizer.param_groups[0]["lr"] == 0.05
        train(resumed, resumed_optimizer, 3, 6)
        return weights_of(model), weights_of(resumed)

    for model, resumed in comm.threads.run(mesh, rank_main):
        assert all(torch.equal(model[name], resumed[name]) for name in model)
    # A file for each rank. Upstream's names lack pp, and cp, so that ranks overwrote each other's.
    assert len(list(tmp_path.iterdir())) == mesh.world_size
    name = f"optim.dp_rank_00.cp_rank_00.tp_rank_00.pp_rank_{mesh.pp - 1:02d}"
    assert (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["NAdam", "Adagrad", "RAdam", "Adamax", "RMSprop", "ASGD", "Rprop", "Adadelta"])
@pytest.mark.parametrize("zero1", [True, False])
def test_a_resumed_run_is_bit_equal_with_any_optimizer_in_float64(name: str, zero1: bool) -> None:
    """NAdam's running product is fp32; torch loads it in the parameter's dtype, and went on to other bits."""

    def make(param: nn.Parameter) -> torch.optim.Optimizer:
        cls = getattr(torch.optim, name)
        return NeuronZero1Optimizer([param], cls, lr=0.1, grad_clipping=False) if zero1 else cls([param], lr=0.1)

    def steps(param: nn.Parameter, optimizer: torch.optim.Optimizer, first: int) -> None:
        for step in range(first, first + 4):
            param.grad = (param.detach() * (step + 1)).sin()
            optimizer.step()

    def rank_main() -> None:
        param = nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3))
        optimizer = make(param)
        steps(param, optimizer, 0)
        resumed = nn.Parameter(param.detach().clone())
        other = make(resumed)
        saved = copy.deepcopy(optimizer.state_dict())
        other.load_state_dict(saved) if zero1 else load_optimizer_state_dict(other, saved)
        steps(param, optimizer, 4)
        steps(resumed, other, 4)
        assert torch.equal(param, resumed)

    comm.threads.run(Mesh(2), rank_main)


def test_state_dict_keys() -> None:
    def rank_main() -> None:
        model = Model(torch.bfloat16)
        optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, lr=0.1, save_master_weights=True)
        assert optimizer.state_dict()["base_state"] == {}
        train(model, optimizer, last=1)
        state = optimizer.state_dict()
        assert set(state) == {
            *("state", "param_groups", "base_state", "shape_info", "rank_of_shards", "sharded_master_weights")
        }
        assert state["shape_info"] == {index: LAYOUTS[name].shape for index, name in enumerate(LAYOUTS)}
        for index, values in state["base_state"].items():
            shape = LAYOUTS[list(LAYOUTS)[index]].shape or (1,)
            assert tuple(values["exp_avg"].shape) == (math.ceil(shape[0] / 2), *shape[1:])
            assert values["exp_avg"].dtype == state["sharded_master_weights"][index].dtype == torch.float32

    comm.threads.run(Mesh(2), rank_main)


def test_state_of_something_else_is_refused() -> None:
    def optimizer(
        *rows: int, base: Any = torch.optim.AdamW, dtype: torch.dtype = torch.float32, **options: Any
    ) -> NeuronZero1Optimizer:
        params = [nn.Parameter(torch.ones(num, 2, dtype=dtype)) for num in rows]
        for param in params:
            param.grad = torch.ones_like(param)
        zero1 = NeuronZero1Optimizer(params, base, lr=0.1, **options)
        zero1.step()
        return zero1

    def rank_main() -> None:
        ours = optimizer(4, 3)
        with pytest.raises(ValueError, match="lacks base_state, shape_info"):
            ours.load_state_dict(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).state_dict())
        with pytest.raises(
            ValueError, match=r"parameter 1 has shape \(5, 2\) there and \(3, 2\) here \(1 of 2 differ\)"
        ):
            ours.load_state_dict(optimizer(4, 5).state_dict())
        with pytest.raises(ValueError, match=r"another sharding degree: .* \(4, 2\) there and \(2, 2\) here"):
            ours.load_state_dict(optimizer(4, 3, sharding_groups=[[0], [1]]).state_dict())
        masters_alone: Any = dict(base=torch.optim.SGD, dtype=torch.bfloat16, save_master_weights=True)
        with pytest.raises(ValueError, match=r"another sharding degree: .* \(4, 2\) there and \(2, 2\) here"):
            optimizer(4, **masters_alone).load_state_dict(
                optimizer(4, sharding_groups=[[0], [1]], **masters_alone).state_dict()
            )
        with pytest.raises(FileNotFoundError):
            ours.load_sharded_state_dict("/nonexistent")
        with pytest.raises(ValueError, match="num_workers_per_step must be at least 1, got 0"):
            ours.load_sharded_state_dict("/nonexistent", num_workers_per_step=0)

    comm.threads.run(Mesh(2), rank_main)


@pytest.mark.parametrize("lazy", [False, True])
def test_init_zero_takes_loaded_weights(lazy: bool) -> None:
    def rank_main() -> None:
        param = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        optimizer = NeuronZero1Optimizer([param], torch.optim.SGD, lr=0.25, grad_clipping=False, lazy_init=lazy)
        assert (optimizer.base_optimizer is None) == lazy
        with torch.no_grad():
            param.fill_(2.0)
        optimizer.init_zero()
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert param.tolist() == [1.75] * 3

    comm.threads.run(Mesh(2), rank_main)


def test_lazy_optimizer_shards_at_its_first_step() -> None:
    def rank_main() -> None:
        param = nn.Parameter(torch.ones(3))
        optimizer = NeuronZero1Optimizer([param], torch.optim.SGD, lr=0.5, grad_clipping=False, lazy_init=True)
        optimizer.zero_grad()
        param.grad = torch.ones(3)
        optimizer.step()
        assert param.tolist() == [0.5] * 3

    comm.threads.run(Mesh(2), rank_main)


# --- memory --------------------------------------------------------------------------------------------------------


def test_own_rows_are_the_parameter_once_and_the_master_holds_them() -> None:
    def rank_main() -> dict[str, list[range]]:
        shapes: dict[str, tuple[int, ...]] = {
            "divides": (8, 2),
            "padded": (5, 3),
            "smaller than dp": (2,),
            "scalar": (),
        }
        params = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
        optimizer = NeuronZero1Optimizer(params.values(), torch.optim.SGD, lr=0.1)
        for shard in optimizer.shards:
            rows, local_rows = shard.param.detach().reshape(shard.param.shape or (1,)), shard.own_rows
            assert torch.equal(shard.master[: len(local_rows)], rows[local_rows.start : local_rows.stop])
        return {name: [shard.own_rows] for name, shard in zip(params, optimizer.shards)}

    results = comm.threads.run(Mesh(4), rank_main)
    found = {name: [result[name][0] for result in results] for name in results[0]}
    assert [len(rows) for rows in found["padded"]] == [2, 2, 1, 0]
    assert [len(rows) for rows in found["smaller than dp"]] == [1, 1, 0, 0]
    for name, count in {"divides": 8, "padded": 5, "smaller than dp": 2, "scalar": 1}.items():
        assert [row for rows in found[name] for row in rows] == list(range(count)), name


def test_a_master_in_the_dtype_of_its_parameter_is_no_copy() -> None:
    """Values loaded into the parameter are in the master, and vice versa; a state dict has separate tensors."""

    def rank_main() -> None:
        model = nn.ParameterDict({"even": torch.ones(4, 3), "odd": torch.ones(3), "low": torch.ones(4).bfloat16()})
        optimizer = NeuronZero1Optimizer(
            model.parameters(), torch.optim.SGD, lr=1.0, grad_clipping=False, save_master_weights=True
        )
        even, low, odd = optimizer.shards  # in the order of the names
        assert (even.is_view, low.is_view, odd.is_view) == (True, False, False)
        with torch.no_grad():
            model["even"].fill_(3.0)
        assert even.master.eq(3.0).all() and torch.equal(even.master, model["even"][list(even.own_rows)])
        model["even"].grad = torch.ones(4, 3)
        optimizer.step()
        assert model["even"].eq(2.0).all()
        saved = optimizer.state_dict()["sharded_master_weights"]
        assert saved[0].untyped_storage().nbytes() == 2 * 3 * 4 and saved[0].eq(2.0).all()
        model["even"].data = torch.full((4, 3), 7.0)  # as moving a model to a device does
        model["even"].grad = torch.ones(4, 3)
        optimizer.step()
        assert model["even"].eq(6.0).all() and even.is_view
        model["even"].data = torch.full((4, 3), 8.0).bfloat16()
        model["even"].grad = torch.ones(4, 3).bfloat16()
        optimizer.step()
        assert model["even"].eq(7.0).all() and not even.is_view and even.master.dtype == torch.float32

    comm.threads.run(Mesh(2), rank_main)


@pytest.mark.parametrize("save_weights", [True, False])
def test_masters_that_are_loaded_alone_wait_for_the_next_step(save_weights: bool) -> None:
    """All ranks have the same parameters before it, and those of the saved run after it."""

    def param_and_optimizer(value: float) -> tuple[nn.Parameter, NeuronZero1Optimizer]:
        param = nn.Parameter(torch.full((4, 2), value) + torch.arange(4.0)[:, None])
        options = {"lr": 0.1, "save_master_weights": save_weights}
        return param, NeuronZero1Optimizer([param], torch.optim.AdamW, **options)

    def step(param: nn.Parameter, optimizer: NeuronZero1Optimizer) -> None:
        param.grad = torch.ones_like(param)
        optimizer.step()

    def rank() -> None:
        param, optimizer = param_and_optimizer(0.0)
        step(param, optimizer)
        state = optimizer.state_dict()
        other, resumed = param_and_optimizer(5.0)
        before = other.detach().clone()
        resumed.load_state_dict(state)
        assert torch.equal(other, before)
        with torch.no_grad():
            if not save_weights:
                other.copy_(param)
        for _ in range(2):
            step(param, optimizer)
            step(other, resumed)
            assert torch.equal(other, param)

        loaded, usual = param_and_optimizer(5.0)  # the weights first, as documented: nothing takes more memory
        with torch.no_grad():
            loaded.copy_(param)
        usual.load_state_dict(optimizer.state_dict())
        assert usual.shards[0].is_view
        step(param, optimizer)
        step(loaded, usual)
        assert torch.equal(loaded, param)

    comm.threads.run(Mesh(2), rank)
