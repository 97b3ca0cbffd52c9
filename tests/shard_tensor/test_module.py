"""Modules of ShardTensors: the RFC's examples, tensor parallelism, states."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist import comm, distributed
from neuronx_dist.distributed import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from tests.shard_tensor.support.cases import assert_close, on_ranks, verbs


class MyModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 8, dtype=torch.float64)
        self.fc2 = nn.Linear(8, 8, dtype=torch.float64)
        self.relu = nn.ReLU()

    def forward(self, input):
        return self.relu(self.fc1(input) + self.fc2(input))


def inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 40, dtype=torch.float64).view(5, 8)


def states() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in {"fc1.weight": (8, 8), "fc1.bias": (8,), "fc2.weight": (8, 8), "fc2.bias": (8,)}.items()
    }


def model() -> MyModule:
    result = MyModule()
    result.load_state_dict(states())
    return result


def check_against_one_process(module, x):
    twin = model()
    expected = twin(inputs())
    expected.square().mean().backward()
    y = module(x)
    assert_close(y.full_tensor().detach(), expected.detach(), "output")
    y.square().mean().backward()
    for name, param in module.named_parameters():
        assert isinstance(param, DTensor) and isinstance(param, nn.Parameter)
        assert param.grad.placements == param.placements
        assert_close(param.grad.full_tensor(), twin.get_parameter(name).grad, name)


def test_the_rfcs_partition_functions():
    """`mod._apply(to_dist_tensor)`, and a weight that is assigned; torch's DTensor refuses both forms."""

    def run(mesh):
        rowwise = [Shard(0)]

        def shard_params(mod_name, mod):
            def to_dist_tensor(t):
                return distribute_tensor(t, mesh, rowwise)

            mod._apply(to_dist_tensor)

        sharded_module = distribute_module(model(), mesh, partition_fn=shard_params)
        assert all(param.placements == (Shard(0),) for param in sharded_module.parameters())
        check_against_one_process(sharded_module, inputs())

        def shard_fc(mod_name, mod):
            if mod_name == "fc1":
                mod.weight = torch.nn.Parameter(distribute_tensor(mod.weight, mesh, rowwise))

        sharded_module = distribute_module(model(), mesh, partition_fn=shard_fc)
        assert sharded_module.fc1.weight.placements == (Shard(0),)
        assert sharded_module.fc2.weight.placements == (Replicate(),)
        check_against_one_process(sharded_module, inputs())

    on_ranks(3, run)


def test_functions_of_every_number_of_arguments():
    def run(mesh):
        seen = []
        distribute_module(
            model(),
            mesh,
            partition_fn=lambda name, mod, device_mesh: seen.append((name, device_mesh)),
            input_fn=lambda mod, xs, device_mesh: (distribute_tensor(xs[0], device_mesh, [Shard(0)]),),
            output_fn=lambda mod, y, device_mesh: y.full_tensor(),
        )(inputs())
        assert [name for name, _ in seen] == ["", "fc1", "fc2", "relu"] and all(m is mesh for _, m in seen)
        module = distribute_module(
            model(),
            mesh,
            input_fn=lambda x: distribute_tensor(x, mesh, [Shard(0)]),
            output_fn=lambda y: y.redistribute(),
        )
        assert module(inputs()).placements == (Replicate(),)
        with pytest.raises(TypeError, match="partition_fn takes 5 arguments, but it is called with 2 or 3"):
            distribute_module(model(), mesh, partition_fn=lambda a, b, c, d, e: None)

    on_ranks(2, run)


def test_data_on_shards_and_weights_on_all_ranks():
    def run(mesh):
        module = distribute_module(model(), mesh)
        check_against_one_process(module, distribute_tensor(inputs(), mesh, [Shard(0)], sizes=[(4, 1)]))

    on_ranks(2, run)


class Block(nn.Module):
    """Column-parallel, then row-parallel."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 12, dtype=torch.float64)
        self.down = nn.Linear(12, 8, dtype=torch.float64)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def test_tensor_parallel_weights_communicate_as_hand_written_layers():
    torch.manual_seed(0)
    plain = Block()

    def run(mesh):
        def shard(name, mod):
            if isinstance(mod, nn.Linear):
                dim = 0 if name == "up" else 1
                mod.weight = nn.Parameter(distribute_tensor(mod.weight.detach(), mesh, [Shard(dim)], sizes=[(8, 4)]))
                if name == "up":
                    mod.bias = nn.Parameter(distribute_tensor(mod.bias.detach(), mesh, [Shard(0)], sizes=[(8, 4)]))

        twin = copy.deepcopy(plain)
        block = distribute_module(copy.deepcopy(plain), mesh, partition_fn=shard)
        x = distribute_tensor(inputs().requires_grad_(), mesh, src=None)
        expected_x = inputs().requires_grad_()
        expected = twin(expected_x)
        with comm.record() as forward:
            y = block(x)
            loss = y.square().mean()
        with comm.record() as backward:
            loss.backward()
        expected.square().mean().backward()
        assert_close(y.full_tensor().detach(), expected.detach(), "output")
        assert_close(x.grad.full_tensor(), expected_x.grad, "input gradient")
        for name, param in block.named_parameters():
            assert_close(param.grad.full_tensor(), twin.get_parameter(name).grad, name)
        return verbs(forward), verbs(backward)

    assert on_ranks(2, run) == [(["all_reduce"], ["all_reduce"])] * 2


def test_state_dicts():
    def run(mesh):
        module = distribute_module(
            model(), mesh, lambda name, mod: mod._apply(lambda t: distribute_tensor(t, mesh, [Shard(0)]))
        )
        state = module.state_dict()
        assert all(isinstance(x, DTensor) for x in state.values())
        for name, x in state.items():
            assert_close(x.full_tensor(), states()[name], name)
        other = distribute_module(MyModule(), mesh)
        other.load_state_dict(state)
        for name, param in other.named_parameters():
            assert_close(param.full_tensor().detach(), states()[name], name)
        other.load_state_dict({name: x * 2 for name, x in states().items()})
        assert_close(other.fc1.weight.full_tensor().detach(), states()["fc1.weight"] * 2, "from plain tensors")

    on_ranks(2, run)


def test_all_names_of_the_rfc_are_there():
    for name in distributed.__all__:
        assert getattr(distributed, name) is not None


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 7, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight
        self.first, self.second = nn.Module(), nn.Module()
        self.first.register_buffer("scale", torch.full((7,), 2.0, dtype=torch.float64))
        self.second.register_buffer("scale", self.first.scale)
        with torch.no_grad():
            self.embed.weight.copy_(torch.linspace(-1, 1, 28).view(7, 4))

    def forward(self, tokens):
        return self.head(self.embed(tokens)) * self.first.scale


def _sharded(*names):
    def partition(name, module, mesh):
        if name in names:
            module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]))

    return partition


@pytest.mark.parametrize("names", [(), ("embed",), ("head",), ("embed", "head")], ids="_".join)
def test_tied_parameters_stay_tied(names):
    tokens = torch.tensor([[0, 3, 6], [2, 2, 5]])
    twin = Tied()
    twin(tokens).square().mean().backward()

    def run(mesh):
        module = distribute_module(Tied(), mesh, partition_fn=_sharded(*names))
        assert module.embed.weight is module.head.weight
        assert module.first.scale is module.second.scale
        assert module.embed.weight.placements == ((Shard(0),) if names else (Replicate(),))
        assert [name for name, _ in module.named_parameters()] == ["embed.weight"]
        module(tokens).square().mean().backward()
        assert_close(module.head.weight.grad.full_tensor(), twin.embed.weight.grad, "gradient")

    on_ranks(2, run)
