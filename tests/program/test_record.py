"""Recorded programs equal their modules: outputs, losses, every gradient and buffer, to the bit."""

from __future__ import annotations

import inspect
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils import torch_compilable_check

from neuronx_dist.program.builder import Builder
from neuronx_dist.program.program import run_program, values_in
from neuronx_dist.program.record import record_program
from neuronx_dist.program.recording import TracingError
from neuronx_dist.rules import RULES
from tests.parallelize.support.programs import Function, assert_equal, sample, tensors_of
from tests.support.architectures import ARCHITECTURES, Architecture

RECORDED = [architecture for architecture in ARCHITECTURES if architecture.name != "Mixtral"]


@pytest.mark.one_in(2)
@pytest.mark.slow  # together more than the fast tier has room for
@pytest.mark.parametrize("architecture", RECORDED, ids=lambda architecture: architecture.name)
def test_architectures(architecture: Architecture) -> None:
    program = assert_equal(architecture.make(2), architecture.inputs())
    unknown = {call.name for call in program.calls if call.function not in RULES}
    assert unknown == ({"apply"} if architecture.name == "BLOOM" else set())  # its autograd function
    names = [value.name for value in (*program.leaves, *(value for call in program.calls for value in call.results))]
    assert len(names) == len(set(names)) and all(name.isidentifier() for name in names)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5, bias=False) for _ in range(3)])
        self.unused = nn.Linear(5, 5)

    def forward(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        x = data["data"]
        for layer in self.layers:
            x = layer(x)
        return F.binary_cross_entropy(torch.sigmoid(x), data["target"])


def test_samples_in_a_dict_and_unused_parameters() -> None:
    program = assert_equal(MLP(), {"data": {"data": torch.randn(4, 5), "target": torch.rand(4, 5)}})
    assert [(value.name, value.path) for value in program.inputs] == [
        ("data_data", "data.data"),
        ("data_target", "data.target"),
    ]
    assert [value.name for value in program.parameters] == [f"layers_{index}_weight" for index in range(3)]
    assert [call.module for call in program.calls] == ["layers.0", "layers.1", "layers.2", "", ""]
    assert [call.flops for call in program.calls] == [200, 200, 200, 0, 0]
    assert program.calls[0].source == "x = layer(x)" and program.calls[0].where.startswith(__file__)


class GPT(nn.Module):
    """The embedding is the head too; q, k and v are one product."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(ids)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (q, k, v))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def test_tied_weights_are_one_parameter() -> None:
    ids = torch.arange(12).reshape(2, 6) % 11
    program = assert_equal(GPT(), {"ids": ids, "labels": ids.flip(1)})
    assert [value.path for value in program.parameters] == [
        "embedding.weight",
        "norm.weight",
        "norm.bias",
        "qkv.weight",
        "qkv.bias",
    ]
    (chunk,) = [call for call in program.calls if call.name == "chunk"]
    assert chunk.several and [value.shape for value in chunk.results] == [(2, 6, 8)] * 3


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(F.relu(self.norm(self.conv(x)), inplace=True)).mean((2, 3))


@pytest.mark.parametrize("training", [True, False])
def test_both_modes(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norm writes its statistics, dropout draws: in training only. In a job, torch's may be on GPUs only."""
    module = ConvNet()
    with monkeypatch.context() as job:
        job.setattr(torch.distributed, "is_initialized", lambda: True)
        synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(ConvNet())
        record_program(synchronised, {"x": torch.randn(2, 3, 8, 8)}, training=training)
    program = assert_equal(module, {"x": torch.randn(2, 3, 8, 8)}, training)
    assert module.training and program.training is training
    calls = {call.name: call for call in program.calls}
    norm, dropout = calls["batch_norm"], calls["dropout"]
    names = [value.name for value in values_in((norm.args, norm.kwargs))]
    assert [names[index] for index in norm.writes] == ["norm_running_mean", "norm_running_var"] * training
    bound = inspect.signature(F.dropout).bind(*dropout.args, **dropout.kwargs).arguments
    assert dropout.random is training and (bound["p"], bound["training"]) == (0.3, training)
    assert [value.path for value in program.buffers] == (
        ["norm.running_mean", "norm.running_var", *["norm.num_batches_tracked"] * training]
    )


ops = torch.ops  # any attribute of which is a namespace


def test_a_global_module_has_no_state() -> None:
    class Quantized(nn.Module):
        bits = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ops.quantized.embedding_bag_byte_rowwise_offsets(x) if self.bits else x.relu()

    assert_equal(Quantized(), {"x": torch.randn(3)})


def test_frozen_submodules_stay_frozen() -> None:
    """A module that is in training, with a part that is not, is recorded as it is."""
    module = ConvNet()
    module.norm.eval()
    assert "copy_" not in {
        call.name for call in record_program(module, {"x": torch.randn(2, 3, 8, 8)}, training=True).calls
    }
    module.eval()
    calls = {call.name for call in record_program(module, {"x": torch.randn(2, 3, 8, 8)}, training=True).calls}
    assert "copy_" in calls and not module.training and not module.norm.training


class TwoInTwoOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(3, 4)

    def forward(self, x: torch.Tensor, *, y: torch.Tensor, scale: float = 2.0) -> tuple[Any, ...]:
        with torch.no_grad():
            mask = (x > 0).float().mean(-1, keepdim=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            joined = self.a(x) + self.b(y)
        return joined.float() * mask * scale, self.b(y).max(dim=-1).values


def test_two_inputs_two_outputs_and_spans() -> None:
    program = assert_equal(TwoInTwoOut(), {"x": torch.randn(2, 5), "y": torch.randn(2, 3), "scale": 3.0})
    calls = {call.name: call for call in program.calls}
    assert not calls["mean"].grad and calls["max"].grad
    assert calls["add"].autocast == ("cpu", torch.bfloat16, True) and calls["mul"].autocast is None
    assert [leaf if isinstance(leaf, float) else leaf.name for leaf in program.arguments] == ["x", "y", 3.0]


def test_what_depends_on_nothing_does_not_vary() -> None:
    def forward(self: Function, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(5).to(torch.float64)
        return x * positions.cos() + self.total + torch.tensor(2.0)

    program = assert_equal(Function(forward), {"x": sample()})
    results = [value for call in program.calls for value in call.results]
    assert {value.name for value in results if not value.varies} == {"arange", "to", "cos", "tensor"}
    assert all(value.varies for value in program.leaves)


def test_dead_calls_are_left_out() -> None:
    program = assert_equal(Function(lambda self, x: (x.exp().sin(), x + self.weight)[1]), {"x": sample()})
    assert [call.name for call in program.calls] == ["add"]


def test_getters_are_functions_that_rules_know() -> None:
    program = assert_equal(Function(lambda self, x: self.weight.T @ x), {"x": sample()})
    assert program.calls[0].function == torch.Tensor.T.__get__ and len(program.calls[0].args) == 1


def test_a_tensor_of_forward_may_be_told_to_require_a_gradient() -> None:
    """T5 does so under gradient checkpointing, Wav2Vec2 with a view of its argument; nobody reads that gradient.

    That of an argument is another matter.
    """

    def forward(self: Function, x: torch.Tensor) -> torch.Tensor:
        bias, view = torch.zeros(5, dtype=x.dtype), x[:]
        for tensor in [x] if of_argument else [bias, view]:
            tensor.requires_grad = True
        return view * self.weight + bias

    of_argument = False
    program = assert_equal(Function(forward), {"x": sample()})
    assert [call.name for call in program.calls if call.results[0].requires_grad] == ["mul", "add"]
    of_argument = True
    with pytest.raises(TracingError, match="forward sets .requires_grad of a tensor"):
        record_program(Function(forward), {"x": sample()}, training=True)


def test_a_check_of_values_is_assumed_to_pass() -> None:
    """LLaVA compares the number of image tokens with that of features, without a result."""

    def forward(self: Function, x: torch.Tensor) -> torch.Tensor:
        torch_compilable_check((x > -100).sum() == x.numel(), "too small")
        return torch.distributions.Normal(x, self.weight.exp(), validate_args=True).mean * 2

    program = assert_equal(Function(forward), {"x": sample()})
    assert [call.name for call in program.calls] == ["exp", "broadcast_tensors", "mul"]


@pytest.mark.parametrize("outer", [False, True])
def test_checkpoints_are_numbered(outer: bool) -> None:
    def forward(self: Function, x: torch.Tensor) -> torch.Tensor:
        for use_reentrant in (True, False):
            x = torch.utils.checkpoint.checkpoint(lambda y: (y * self.weight).sin(), x, use_reentrant=use_reentrant)
        return x + 1

    def around(self: Function, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(lambda x: forward(self, x), x, use_reentrant=outer)

    arguments = {"x": sample().requires_grad_()}
    program = record_program(Function(forward), arguments, training=True)
    assert [(call.name, call.checkpoints) for call in program.calls] == [
        ("mul", (0,)), ("sin", (0,)), ("mul", (1,)), ("sin", (1,)), ("add", ()),
    ]  # fmt: skip
    program = record_program(Function(around), arguments, training=True)
    numbers = [call.checkpoints for call in program.calls]
    assert [len(path) for path in numbers] == [2, 2, 2, 2, 1]
    assert len({path[0] for path in numbers}) == 1 and len({path[:2] for path in numbers}) == 3


def test_hooks_of_modules_are_part_of_forward() -> None:
    module = MLP()
    module.layers[1].register_forward_hook(lambda module, args, result: result * 2)
    module.layers[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    program = assert_equal(module, {"data": {"data": torch.randn(4, 5), "target": torch.rand(4, 5)}})
    assert [call.name for call in program.calls][1:4] == ["linear", "mul", "add"]


def test_random_calls_are_marked_and_stay() -> None:
    def forward(self: Function, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        mask = x.new_empty(6, 1).bernoulli_(0.5).div_(0.5)
        return F.dropout(x * mask, 0.5) + torch.randn_like(x)

    program = assert_equal(Function(forward), {"x": sample()})
    assert [call.name for call in program.calls if call.random] == ["rand", "bernoulli_", "dropout", "randn_like"]


def test_a_weight_by_another_reference_is_one_parameter() -> None:
    """A list that the module keeps holds the parameter itself; the module's own is replaced while it is recorded."""
    module = Function(lambda self, x: x * self.weight + self.kept[0].sin() + self.kept[1])
    module.kept = [module.weight, module.total]
    program = record_program(module, {"x": sample()}, training=True)
    assert [value.path for value in program.leaves] == ["x", "weight", "total"]
    result = run_program(program, tensors_of(program, module, {"x": sample()}))
    assert torch.equal(result, module(sample()))


def test_what_forward_writes_to_a_modules_config_is_taken_back() -> None:
    """Image models of transformers keep there which loss they chose: the module would not be the same any more."""

    def forward(self: Function, x: torch.Tensor) -> torch.Tensor:
        self.config.kind, self.config.calls = "chosen", self.config.calls + 1
        vars(self.config).pop("left", None)
        return x * self.weight

    module = Function(forward)
    module.config = SimpleNamespace(calls=0, left=3)
    record_program(module, {"x": sample()}, training=True)
    assert vars(module.config) == {"calls": 0, "left": 3}


def test_hooks_that_forward_registers_are_removed_again() -> None:
    """A forward that registers hooks the first time would otherwise register them in each recording."""

    def forward(self: Any, x: torch.Tensor) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        self.seen = seen
        if not hasattr(self, "hooked"):
            self.hooked = True
            self.child.register_forward_hook(lambda module, args, output: self.seen.append(output))
        self.child(x)
        return seen

    module = Function(forward)
    module.child = nn.Tanh()
    for training in (True, False):
        assert len(record_program(module, {"x": sample()}, training=training).outputs) == 1
    assert not module.child._forward_hooks


def test_names_are_identifiers_that_nothing_else_has() -> None:
    builder = Builder()
    wishes = ["a_1", "a", "a", "a", "layers.0.weight", "0", "class", "torch", "print", "__add__"]
    assert [builder.name(wish) for wish in wishes] == [
        "a_1", "a", "a_2", "a_3", "layers_0_weight", "v0", "class_1", "torch_1", "print_1", "add",
    ]  # fmt: skip


def test_a_module_is_recorded_where_its_weights_are() -> None:
    """The dummy arguments are taken to be there too; weights on meta are taken to be where the arguments are."""
    seen = io.StringIO()  # a list would be as empty afterwards as before

    def forward(self: Function, x: torch.Tensor) -> torch.Tensor:
        print(x.device.type, self.weight.device.type, file=seen)
        return x * self.weight

    for device in ("cpu", "meta"):
        record_program(Function(forward).to(device), {"x": sample().to("meta")}, training=True)
        record_program(Function(forward).to(device), {"x": sample()}, training=True)
    assert seen.getvalue() == "cpu cpu\n" * 4


def test_attention_draws_where_it_drops() -> None:
    """The operator is marked random in either case."""

    def forward(self: Function, x: torch.Tensor) -> torch.Tensor:
        y = F.scaled_dot_product_attention(x, x, x)
        return F.scaled_dot_product_attention(y, y, y, dropout_p=0.5)

    program = record_program(Function(forward), {"x": torch.randn(1, 2, 4, 8)}, training=True)
    calls = [call for call in program.calls if call.name == "scaled_dot_product_attention"]
    assert [call.random for call in calls] == [False, True]
