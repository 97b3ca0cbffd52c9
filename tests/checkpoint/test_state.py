"""Names of what is saved; optimizers and models of other make than the checkpoint's."""

import math

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.checkpoint.errors import CheckpointMismatch
from neuronx_dist.checkpoint.run_state import collect
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import NeuronZero1Optimizer
from neuronx_dist.weights.shard_spec import ShardSpec, set_spec
from tests.checkpoint.llama_layouts import load, save, whole

TP2, DP2, ONE = Mesh(2, tp=2), Mesh(2), Mesh(1)


class Model(nn.Module):
    """A fused and a padded layer, a weight of no dims, one that may be tied, buffers. Values are their positions."""

    def __init__(self, tied=False, width=3):
        super().__init__()
        self.fused = nn.Parameter(torch.empty(0))
        self.padded = nn.Parameter(torch.empty(0))
        specs = {
            "fused": ShardSpec("tp", 0, stride=2, num_partitions=comm.size("tp"), full_shape=(8, width)),
            "padded": ShardSpec("tp", 1, num_partitions=comm.size("tp"), full_shape=(2, 6), unpadded=5),
        }
        for number, (name, spec) in enumerate(specs.items()):
            full = torch.arange(1.0, math.prod(spec.unpadded_shape) + 1).view(spec.unpadded_shape) + 100 * number
            local = spec.local_slice(full, comm.rank("tp")).clone()
            setattr(self, name, nn.Parameter(local))
            set_spec(self, name, spec)
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.one = nn.Linear(5, 3, bias=False)
        self.other = nn.Linear(5, 3, bias=False)
        with torch.no_grad():
            self.one.weight.copy_(torch.arange(15.0).view(3, 5))
            self.other.weight.copy_(self.one.weight)
        if tied:
            self.other.weight = self.one.weight
        self.register_buffer("count", torch.tensor([4, 5]))
        self.register_buffer("hidden", torch.zeros(1), persistent=False)


def trained(model, optimizer):
    for step in range(2):
        for number, param in enumerate(dict.fromkeys(model.parameters())):
            param.grad = torch.full_like(param, 0.1 * (number + 1) * (step + 1))
        optimizer.step()
    return optimizer


def adamw(params, **options):
    return torch.optim.AdamW(params, lr=0.1, **options)


def zero1(params, **options):
    return NeuronZero1Optimizer(params, torch.optim.AdamW, lr=0.1, grad_clipping=False, **options)


def zeroed(model):
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    return model


def saved(make_optimizer, root, tied=False):
    model = Model(tied)
    save(model, trained(model, make_optimizer(model.parameters())), root)


def loaded(make_optimizer, root, tied=False, **options):
    model = zeroed(Model(tied))
    optimizer = make_optimizer(model.parameters())
    load(model, optimizer, root, **options)
    return collect(model, optimizer)


@pytest.mark.parametrize("mesh, make_optimizer", [(ONE, adamw), (TP2, adamw), (DP2, zero1), (TP2, zero1)])
def test_the_names_and_whole_shapes(mesh, make_optimizer, tmp_path):
    comm.threads.run(mesh, saved, make_optimizer, tmp_path)
    tensors = whole(tmp_path)
    shapes = {"fused": (8, 3), "padded": (2, 5), "scale": (), "one.weight": (3, 5), "other.weight": (3, 5)}
    expected = {f"model.{name}": shape for name, shape in shapes.items()} | {"model.count": (2,)}
    for name, shape in shapes.items():
        expected |= {f"optimizer.state.{name}.{entry}": shape for entry in ("exp_avg", "exp_avg_sq")}
        expected[f"optimizer.state.{name}.step"] = ()
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == expected
    assert tensors["model.count"].tolist() == [4, 5]
    assert float(tensors["optimizer.state.scale.step"]) == 2.0
    assert float(tensors["optimizer.state.scale.exp_avg"]) != 0.0


@pytest.mark.parametrize("first", [(ONE, adamw), (TP2, zero1), (DP2, zero1)])
@pytest.mark.parametrize("second", [(ONE, adamw), (TP2, adamw), (DP2, zero1)])
@pytest.mark.slow
def test_layouts_and_optimizers_save_the_same(first, second, tmp_path):
    comm.threads.run(first[0], saved, first[1], tmp_path / "a")
    comm.threads.run(second[0], saved, second[1], tmp_path / "b")

    def again(make_optimizer):
        model = zeroed(Model())
        optimizer = make_optimizer(model.parameters())
        load(model, optimizer, tmp_path / "a")
        save(model, optimizer, tmp_path / "c")

    comm.threads.run(second[0], again, second[1])
    expected, same, through = (whole(tmp_path / name) for name in "abc")
    for key in expected:
        assert torch.equal(expected[key], same[key]) and torch.equal(expected[key], through[key]), key


def test_a_tied_weight_is_written_once_and_read_under_each_name(tmp_path):
    comm.threads.run(ONE, saved, adamw, tmp_path, True)
    tensors = whole(tmp_path)
    assert torch.equal(tensors["model.one.weight"], tensors["model.other.weight"])
    sizes = {}
    for name, is_tied in (("tied", True), ("not", False)):
        comm.threads.run(ONE, saved, adamw, tmp_path / name, is_tied)
        sizes[name] = (tmp_path / name / "tag" / "__0_0.distcp").stat().st_size
    assert sizes["not"] - sizes["tied"] > 3 * 60
    (state,) = comm.threads.run(ONE, loaded, adamw, tmp_path, False)  # into a model where they are two
    assert torch.equal(state.tensors["model.other.weight"].tensor, tensors["model.one.weight"])
    assert state.tensors["optimizer.state.other.weight.exp_avg"].tensor.abs().sum() > 0


def test_two_tensors_are_not_loaded_into_a_tied_weight(tmp_path):
    comm.threads.run(ONE, saved, adamw, tmp_path)
    with pytest.raises(CheckpointMismatch, match="one.weight and other.weight are two tensors in the checkpoint"):
        comm.threads.run(ONE, loaded, adamw, tmp_path, True)


def grouped(make_optimizer, lr):
    def make(params):
        params = list(params)
        return make_optimizer([{"params": params[:2], "lr": lr, "weight_decay": 0.5}, {"params": params[2:]}])

    return make


@pytest.mark.parametrize("first, second", [(adamw, zero1), (zero1, adamw)])
def test_options_of_groups_come_from_the_checkpoint(first, second, tmp_path):
    comm.threads.run(DP2, saved, grouped(first, 0.7), tmp_path)
    for state in comm.threads.run(DP2, loaded, grouped(second, 0.2), tmp_path):
        assert [(group["lr"], group["weight_decay"]) for group in state.groups] == [(0.7, 0.5), (0.1, 0.01)]
        assert [group["params"] for group in state.groups] == [
            ["fused", "padded"],
            ["scale", "one.weight", "other.weight"],
        ]


def test_groups_that_were_divided_otherwise_are_refused(tmp_path):
    comm.threads.run(ONE, saved, grouped(adamw, 0.7), tmp_path)
    with pytest.raises(
        CheckpointMismatch,
        match="parameter group 0 of the optimizer has parameters of several groups of the checkpoint, 0, 1",
    ):
        comm.threads.run(ONE, loaded, adamw, tmp_path)


def test_a_state_whose_place_is_not_known_is_refused():
    def run():
        model = Model()
        optimizer = trained(model, adamw(model.parameters()))
        optimizer.state[model.fused]["factor"] = torch.zeros(7)
        collect(model, optimizer)

    with pytest.raises(ValueError, match=r"AdamW has 'factor' of shape \(7,\) for fused"):
        comm.threads.run(TP2, run)


def test_optimizers_of_other_models_are_refused():
    def run(model):
        collect(model, adamw(Model().parameters()))

    with pytest.raises(ValueError, match="not one of this rank's parameters"):
        comm.threads.run(ONE, lambda: run(Model()))
    with pytest.raises(ValueError, match="pass the model too"):
        comm.threads.run(ONE, run, None)


def test_plain_numbers_in_the_state_and_lazy_shards(tmp_path):
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param]["calls"] = self.state[param].get("calls", 0) + 1
            return super().step(closure)

    def make(params):
        return NeuronZero1Optimizer(params, Counting, lr=0.1, momentum=0.9, lazy_init=True)

    comm.threads.run(DP2, saved, make, tmp_path)
    for state in comm.threads.run(DP2, loaded, make, tmp_path):
        assert state.objects[("optimizer", "state", "fused", "calls")] == 2
        assert state.tensors["optimizer.state.fused.momentum_buffer"].tensor.abs().sum() > 0


def test_meta_parameters_are_refused():
    def run():
        model = Model()
        model.one.to_empty(device="meta")
        collect(model)

    with pytest.raises(ValueError, match="model.one.weight is on the meta device"):
        comm.threads.run(ONE, run)
