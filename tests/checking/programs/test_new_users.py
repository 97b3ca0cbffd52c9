"""Programs of people who use the checker for the first time, and its answers: repairs that can be pasted."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.parallel_layers import mappings
from neuronx_dist.parallel_layers import parallel_state as ps

MESH = {"dp": 2, "tp": 2}


def model():
    return nn.Sequential(
        nxd.ColumnParallelLinear(8, 32, gather_output=False), nxd.RowParallelLinear(32, 8, input_is_parallel=True)
    )


def problem(build=model, inputs=None, **more) -> str:
    """The message of the one problem."""
    report = spmd.check(build, torch.zeros(4, 8) if inputs is None else inputs, MESH, **more)
    (found,) = report.problems
    return found.message


def module(forward, **layers):
    """A function that builds a module of some layers."""

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            for name, make in layers.items():
                setattr(self, name, make())

    Module.forward = forward
    return Module


def column(**more):
    return nxd.ColumnParallelLinear(8, 32, gather_output=False, bias=False, **more)


def backward(model, x):
    loss = model(x).square().mean()
    loss.backward()
    return loss


def test_a_raw_collective_on_gradients_is_told_the_axis_of_its_group():
    def step(model, optimizer, x):
        backward(model, x)
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ps.get_data_parallel_group())

    text = problem(step=step)
    assert "repair: nxd.reduce_gradients(model) after the last backward" in text
    assert 'or: comm.all_reduce(p.grad, "dp", out=p.grad)' in text and "with spmd.no_typecheck():" in text
    assert "in the step of rank 0" in text

    def over_tp(model, optimizer, x):
        y = model(x)
        dist.all_reduce(y, group=ps.get_tensor_model_parallel_group())

    text = problem(step=over_tp)
    assert 'repair: comm.all_reduce(y, "tp", out=y)' in text and "reduce_gradients" not in text

    def over_all(model, optimizer, x):
        y = model(x)
        dist.all_reduce(y)

    assert 'repair: comm.all_reduce(y, "world", out=y)' in problem(step=over_all)


def test_distributed_data_parallel_is_left_out():
    def step(model, optimizer, x):
        backward(nn.parallel.DistributedDataParallel(model, process_group=ps.get_data_parallel_group()), x)

    for text in (problem(step=step), problem(lambda: nn.parallel.DistributedDataParallel(model()))):
        assert "DistributedDataParallel cannot be checked: leave it out, and call reduce_gradients(model)" in text
        assert "incompatible function arguments" not in text and "test_new_users.py" in text


def test_a_row_layer_that_is_given_its_own_part():
    row = {"row": lambda: nxd.RowParallelLinear(32, 8, input_is_parallel=False)}
    layers = module(lambda self, x: self.row(self.column(x)).square().mean(), column=column, **row)
    assert "repair: input_is_parallel=True on the layer" in problem(layers)
    scattered = module(
        lambda self, x: mappings.scatter_to_tensor_model_parallel_region(self.column(x)).sum(), column=column
    )
    assert "all_to_all" not in problem(scattered) and "drop this one" in problem(scattered)


def stacked(forward):
    build = module(forward, column=column)
    return spmd.check(build, torch.zeros(4, 6, 8), MESH)


def test_the_repair_of_pieces_in_the_wrong_order_can_be_pasted():
    def wrong(self, x):
        g = spmd.all_gather(self.column(x), "tp", src=spmd.V, dst=spmd.R)
        return g.movedim(0, 1).flatten(1, 2).square().mean()

    def repaired(self, x):
        g = spmd.all_gather(self.column(x), "tp", src=spmd.V, dst=spmd.I)
        return g.movedim(0, 1).movedim(1, 2).flatten(2, 3).square().mean()

    (found,) = stacked(wrong).problems
    assert "repair: g.movedim(0, 1).movedim(1, 2).flatten(2, 3)" in found.message
    assert "src=spmd.S(2)" in found.message
    assert stacked(repaired).ok


def test_the_repair_of_a_cross_entropy_of_a_shard_can_be_pasted():
    def wrong(self, x, y):
        return F.cross_entropy(self.column(x).flatten(0, 1), y.flatten())

    def repaired(self, x, y):
        loss = nxd.parallel_cross_entropy(self.column(x).flatten(0, 1), y.flatten())
        return loss.sum() / nxd.global_num_items(y.flatten(), shift=False)

    inputs = (torch.zeros(4, 6, 8), torch.zeros(4, 6, dtype=torch.long))
    text = problem(module(wrong, column=column), inputs)
    call = "nxd.parallel_cross_entropy(self.column(x).flatten(0, 1), y.flatten())"
    assert f"repair: {call}.sum() / nxd.global_num_items(y.flatten(), shift=False)" in text
    assert f"or: {call}.mean(), if every label counts" in text
    assert spmd.check(module(repaired, column=column), inputs, MESH).ok


def test_printing_is_left_out_of_the_step():
    def step(model, optimizer, x):
        print(backward(model, x).item())

    assert "repair: leave printing and logging out of the step that is checked" in problem(step=step)


def test_clipping_by_torch_is_replaced():
    def unreduced(model, optimizer, x):
        backward(model, x)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def sharded(model, optimizer, x):
        backward(model, x)
        nxd.reduce_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def repaired(model, optimizer, x):
        backward(model, x)
        nxd.reduce_gradients(model)
        nxd.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()

    for step in (unreduced, sharded):
        text = problem(step=step)
        assert "repair: nxd.clip_grad_norm(model.parameters(), 1.0) after nxd.reduce_gradients(model)" in text
        assert "<operand" not in text
    assert spmd.check(model, torch.zeros(4, 8), MESH, step=repaired).ok


def test_a_parameter_that_is_a_shard_nobody_declared():
    def forward(self, x):
        return (self.column(x) * self.w).square().sum()

    text = problem(module(forward, column=column, w=lambda: nn.Parameter(torch.empty(16))))
    assert "set_tensor_model_parallel_attributes(self.w, True, 0, 1) where it is made" in text

    def declared():
        w = nn.Parameter(torch.empty(16))
        nxd.parallel_layers.utils.set_tensor_model_parallel_attributes(w, True, 0, 1)
        return w

    def repaired(self, x):
        return spmd.all_reduce((self.column(x) * self.w).square().sum(-1), "tp", dst=spmd.I).mean()

    assert spmd.check(module(repaired, column=column, w=declared), torch.zeros(4, 8), MESH).ok


def test_step_is_given_all_inputs_as_one():
    def step(model, optimizer, x, y):
        backward(model, x)

    text = problem(inputs=(torch.zeros(4, 8), torch.zeros(4, 8)), step=step)
    assert "step is called as step(model, optimizer, inputs), where inputs" in text and "is a tuple of 2" in text
    report = spmd.check(model, torch.zeros(4, 8), MESH, step=lambda *arguments: backward(arguments[0], arguments[2]))
    assert report.ok


class Loss(nn.Module):
    """A model with a parameter and a buffer that no initialiser sets."""

    def __init__(self):
        super().__init__()
        self.layers = model()
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x):
        return (self.layers(x) * self.scale + self.shift).square().mean()


def test_a_module_in_the_place_of_a_function():
    with comm.as_rank(nxd.Mesh(4, tp=2), 0):
        module = Loss()
    before = {name: (value, value.clone()) for name, value in module.state_dict(keep_vars=True).items()}
    assert spmd.check(module, torch.zeros(4, 8), MESH).ok
    for name, value in module.state_dict(keep_vars=True).items():
        assert value is before[name][0] and torch.equal(value, before[name][1]) and value.grad is None
    with pytest.raises(TypeError, match="check: model_fn is a str: pass a function that builds the model"):
        spmd.check("model", torch.zeros(2, 2), MESH)


@pytest.mark.parametrize("inputs", [torch.zeros(4, 8), lambda: torch.randn(4, 8)], ids=["tensor", "unseeded function"])
def test_values_where_nothing_initialises_a_tensor_and_inputs_are_drawn(inputs):
    report = spmd.check(Loss, inputs, MESH, numeric=True)
    assert report.ok and "loss and 5 gradients equal those of one process" in report.details(), report

    class Twice(Loss):
        def forward(self, x):
            return 2 * super().forward(x) if comm.size("tp") > 1 else super().forward(x)

    assert not spmd.check(Twice, inputs, MESH, numeric=True).ok


def test_options_and_inputs_that_do_not_fit():
    text = problem(lambda width: nn.Linear(width, 2))
    assert (
        "missing a required argument: 'width': model_fn is called with the options []; its parameters are ['width']"
        in text
    )
    text = problem(lambda: nn.Linear(8, 2), inputs={"inputs": torch.zeros(4, 8)})
    assert "forward is called with the example inputs ['inputs']; its parameters are ['input']" in text
    assert "Linear.forward: missing a required argument: 'input'" in text


@pytest.mark.parametrize("move", [lambda m: m.cuda(), lambda m: m.to("cuda"), lambda m: m.weight.cuda() or m])
def test_a_move_to_a_device_is_left_out(move):
    text = problem(lambda: move(nn.Linear(8, 2)))
    assert "A check has no device and no values: leave .cuda(), .to(device)" in text and "test_new_users.py" in text


def test_logits_are_named_once():
    def forward(self, x):
        logits = self.column(x)
        return nxd.parallel_cross_entropy(logits, torch.zeros(4, dtype=torch.long)).mean()

    build = module(forward, column=lambda: nxd.ColumnParallelLinear(8, 32, gather_output=True))
    assert "parallel_cross_entropy of logits [4, 32]" in problem(build)


def test_a_declaration_that_does_not_hold_is_answered_by_code():
    def forward(self, x):
        return spmd.assert_type(self.column(x), {"tp": spmd.R}).sum()

    text = problem(module(forward, column=column))
    assert 'repair: spmd.redistribute(x, "tp", src=spmd.S(1), dst=spmd.R)' in text
    assert 'or: spmd.assert_type(x, {"tp": spmd.S(1)})' in text


def test_a_mesh_is_a_mapping():
    with pytest.raises(ValueError, match="mesh: 'dp=2' has no sizes by axis: write {'dp': 2, 'tp': 4}"):
        spmd.check(model, torch.zeros(4, 8), mesh="dp=2")


def attributes(module: nn.Module) -> list:
    """All that a check could change of a module: its tables, tensors and hooks, the mode, and torch's generator."""
    modules = [{name: dict(x) if isinstance(x, dict) else x for name, x in vars(m).items()} for m in module.modules()]
    values = [x.clone() for x in module.state_dict().values()]
    return [modules, values, torch.get_rng_state()]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_that_existed_before_keeps_its_tensors(device):
    """`lambda: module` in place of a function that builds one: the check has a copy for each rank."""
    with torch.device(device):
        existing = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)).eval()
        existing.register_forward_hook(lambda module, args, result: None)
        existing.tied = existing[0].weight
    before, versions = attributes(existing), [x._version for x in existing.parameters()]
    tensors = [*existing.parameters()]

    def step(module, optimizer, inputs):
        module(inputs).square().mean().backward()
        nxd.reduce_gradients(module)
        optimizer.step()

    report = spmd.check(lambda: existing, torch.zeros(4, 8), {"dp": 2}, step=step, numeric=device == "cpu")
    assert report.ok, report
    after = attributes(existing)
    assert before[0] == after[0] and all(x is y for x, y in zip(tensors, existing.parameters()))
    assert all(map(torch.equal, before[1], after[1])) if device == "cpu" else all(x.is_meta for x in tensors)
    assert torch.equal(before[2], after[2]) and versions == [x._version for x in existing.parameters()]
    assert not any(x.grad is not None for x in existing.parameters())


class Shards(nn.Module):
    """A Megatron block by hand: half of the columns, then half of the rows, of a feed-forward layer of 32."""

    def __init__(self, declare=()):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        for name, dim, shape in declare:
            spec = spmd.ShardSpec("tp", dim=dim, num_partitions=2, full_shape=shape)
            spmd.set_spec(getattr(self, name), "weight", spec)

    def forward(self, x):
        h = F.gelu(self.up(spmd.convert(x, "tp", src=spmd.I, dst=spmd.R)))
        return self.reduced(self.down(h)).square().mean()

    def reduced(self, y):
        return spmd.all_reduce(y, "tp", src=spmd.P, dst=spmd.I)


class ByVerb(Shards):
    def reduced(self, y):
        return comm.all_reduce(y, "tp")


class Gathered(Shards):
    def reduced(self, y):
        return spmd.all_gather(y, "tp", src=spmd.S(0), dst=spmd.R)


@pytest.mark.parametrize("build", [Shards, ByVerb, Gathered])
def test_shards_that_are_not_declared_are_told_first_and_no_reduction_is_to_be_dropped(build):
    text = problem(build)
    assert "no parameter of the model is declared as a shard of tp: up.weight [16, 8], down.weight [8, 16]" in text
    spec = 'spmd.ShardSpec("tp", dim=0, num_partitions=2, full_shape=(32, 8))'
    assert f'repair: spmd.set_spec(up, "weight", {spec}) where the model is built' in text
    assert "drop" not in text


def test_declared_shards_pass_and_a_sum_too_many_is_told_as_before():
    declared = [("up", 0, (32, 8)), ("down", 1, (8, 32))]
    assert spmd.check(lambda: Shards(declared), torch.zeros(4, 8), MESH).ok

    class Twice(Shards):
        def reduced(self, y):
            return super().reduced(super().reduced(y))

    assert "it is I already, drop this one" in problem(lambda: Twice(declared))
