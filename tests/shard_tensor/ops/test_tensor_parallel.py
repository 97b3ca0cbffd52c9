"""Parallel layers of this package on ShardTensors of another axis: outputs and gradients are those of one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist import comm, spmd
from neuronx_dist.comm import threads
from neuronx_dist.gradients.reduce import reduce_gradients
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import layers, mappings
from neuronx_dist.parallel_layers.layer_norm import LayerNorm, RMSNorm
from neuronx_dist.parallel_layers.loss_functions import parallel_cross_entropy
from neuronx_dist.shard_tensor import DeviceMesh, Partial, Replicate, Shard, ShardTensor, distribute_tensor
from neuronx_dist.sharded_functions.vocabulary import hide_padding
from neuronx_dist.spmd import I, P, R, S, V
from tests.shard_tensor.support.cases import assert_close

pytestmark = pytest.mark.slow

BATCH, LENGTH, HIDDEN, VOCABULARY = 3, 16, 8, 12


def column(inputs: int = HIDDEN, outputs: int = 12, **options: Any) -> layers.ColumnParallelLinear:
    return layers.ColumnParallelLinear(inputs, outputs, dtype=torch.float64, **options)


def row(inputs: int = HIDDEN, outputs: int = 6, **options: Any) -> layers.RowParallelLinear:
    return layers.RowParallelLinear(inputs, outputs, dtype=torch.float64, **options)


def table(size: int = VOCABULARY, **options: Any) -> layers.ParallelEmbedding:
    return layers.ParallelEmbedding(size, HIDDEN, dtype=torch.float64, **options)


def whole(y: torch.Tensor) -> torch.Tensor:
    return mappings.gather_from_tensor_model_parallel_region(y)


class Fused(nn.Module):
    """Two column layers with one input-gradient collective."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = column(gather_output=False), column(outputs=6, gather_output=False)
        layers.fuse_columns([self.first, self.second])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([whole(self.first(x)), whole(self.second(x))], -1)


class Sequence(nn.Module):
    """Sequence parallelism: norm, column and row on shards of the sequence, which is gathered for the loss."""

    def __init__(self, norm: Callable[..., nn.Module]) -> None:
        super().__init__()
        options = {"sequence_parallel_enabled": True, "sequence_dimension": 1}
        self.norm = norm(HIDDEN, sequence_parallel_enabled=True, dtype=torch.float64)
        self.up = column(gather_output=False, **options)
        self.down = row(12, input_is_parallel=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = mappings.scatter_to_sequence_parallel_region(x, 1)
        y = self.down(self.up(self.norm(x)).tanh())
        return mappings.gather_from_sequence_parallel_region(y, 1, to_model_parallel=False)


class Loss(nn.Module):
    """Logits of a head and their cross entropy; the labels are a ShardTensor, or plain."""

    def __init__(self, *, plain: bool = False, vocabulary: int = VOCABULARY, **options: Any) -> None:
        super().__init__()
        self.plain, self.options = plain, options | {"vocab_size": vocabulary}
        self.head = column(outputs=vocabulary + vocabulary % 2, gather_output=False)
        self.vocabulary = vocabulary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        labels = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % self.vocabulary
        labels[0, 3:9] = -100
        if isinstance(x, ShardTensor) and not self.plain:
            spec = x._spec
            placements = [p if p in (Shard(0), Shard(1)) else Replicate() for p in spec.placements]
            sizes = [along if p in (Shard(0), Shard(1)) else None for p, along in zip(placements, spec.sizes)]
            labels = distribute_tensor(labels, spec.mesh, placements, sizes=sizes, src=None)
        logits = self.head(x)
        if comm.size("tp") == 1:  # and no vocabulary is padded
            logits = logits[..., : self.vocabulary]
        return parallel_cross_entropy(logits, labels, **self.options)


class Block(nn.Module):
    """A decoder layer between an embedding and a loss, with sequence parallelism or without."""

    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__()
        options = {"sequence_parallel_enabled": sequence_parallel, "sequence_dimension": 1}
        norm = {"sequence_parallel_enabled": sequence_parallel, "dtype": torch.float64}
        self.table = table(**options)
        self.norms = nn.ModuleList([LayerNorm(HIDDEN, **norm), RMSNorm(HIDDEN, **norm)])
        self.qkv = nn.ModuleList([column(outputs=HIDDEN, gather_output=False, **options) for _ in range(3)])
        layers.fuse_columns(list(self.qkv))
        self.out = row(outputs=HIDDEN, input_is_parallel=True, **options)
        self.up = column(outputs=32, gather_output=False, stride=2, **options)
        self.down = row(16, HIDDEN, input_is_parallel=True, **options)
        self.head = column(outputs=VOCABULARY, gather_output=False, **options)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        h = self.norms[0](x)
        q, k, v = (layer(h).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        x = x + self.down(F.silu(gate) * up)
        return parallel_cross_entropy(self.head(x), ids.roll(-1, 1))


@dataclass(frozen=True)
class Layer:
    """A module of parallel layers; on tp its input and its output are whole on every rank."""

    build: Callable[[], nn.Module]
    forward: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda module, x: module(x)
    ids: bool = False
    features: bool = True  # whether the input may be sharded along its last dim


LAYERS = {
    "column": Layer(column),
    "column, stride": Layer(lambda: column(stride=2)),
    "column, shards": Layer(lambda: column(gather_output=False), lambda m, x: whole(m(x))),
    "column, bias apart": Layer(lambda: column(skip_bias_add=True), lambda m, x: m(x)[0] + m(x)[1]),
    "column, replicas": Layer(
        lambda: column(gather_output=False, replicas=comm.size("tp")),
        lambda m, x: whole(m(x).chunk(comm.size("tp"), -1)[comm.rank("tp")]),
    ),
    "columns, fused": Layer(Fused),
    "row": Layer(row, features=False),
    "row, stride": Layer(lambda: row(stride=2), features=False),
    "row, partial": Layer(
        lambda: row(reduce_output=False),
        lambda m, x: spmd.all_reduce(m(x), "tp", src=P, dst=I),
        features=False,
    ),
    "sequence, layer norm": Layer(lambda: Sequence(LayerNorm)),
    "sequence, rms norm": Layer(lambda: Sequence(RMSNorm)),
    "embedding": Layer(table, ids=True),
    "embedding, padding": Layer(lambda: table(padding_idx=4), ids=True),
    "embedding, hidden": Layer(lambda: table(shard_across_embedding=True), ids=True),
    "embedding, sequence": Layer(
        lambda: table(sequence_parallel_enabled=True, sequence_dimension=1),
        lambda m, x: mappings.gather_from_sequence_parallel_region(m(x), 1, to_model_parallel=False),
        ids=True,
    ),
    "embedding, sequence first": Layer(
        lambda: table(sequence_parallel_enabled=True),
        lambda m, x: mappings.gather_from_sequence_parallel_region(m(x), 0, to_model_parallel=False),
        ids=True,
    ),
    "embedding, hidden, sequence": Layer(
        lambda: table(shard_across_embedding=True, sequence_parallel_enabled=True, sequence_dimension=1),
        lambda m, x: mappings.gather_from_sequence_parallel_region(m(x), 1, to_model_parallel=False),
        ids=True,
    ),
    "loss": Layer(Loss),
    "loss, plain labels": Layer(lambda: Loss(plain=True)),
    "loss, smoothing": Layer(lambda: Loss(label_smoothing=0.1)),
    "loss, in place": Layer(lambda: Loss(inplace_logits=True)),
    "loss, padded": Layer(lambda: Loss(vocabulary=11)),
    "block": Layer(lambda: Block(False), ids=True),
    "block, sequence": Layer(lambda: Block(True), ids=True),
}
SPLITS = {0: {2: (1, 2), 3: (0, 2, 1)}, 1: {2: (10, 6), 3: (2, 14, 0)}, 2: {2: (5, 3), 3: (1, 7, 0)}}


def given(layer: Layer) -> torch.Tensor:
    if layer.ids:
        return (torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 5 + 1) % VOCABULARY
    return torch.linspace(-1, 2, BATCH * LENGTH * HIDDEN, dtype=torch.float64).sin().view(BATCH, LENGTH, HIDDEN)


def own_part(x: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    spec = spmd.spec_of(param)
    return x if spec.axis is None else spec.local_slice(x.detach(), comm.rank(spec.axis))


def built(layer: Layer, weights: dict[str, nn.Parameter]) -> nn.Module:
    """The layer with this rank's part of the weights."""
    module = layer.build()
    with torch.no_grad():
        for name, param in module.named_parameters():
            if name in weights:
                param.copy_(own_part(weights[name], param))
    return module


def step(layer: Layer, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A forward and a backward; the output."""
    y = layer.forward(module, x)
    factor = torch.linspace(0.5, 2, y.numel(), dtype=torch.float64).view(y.shape)
    (y * factor).sum().backward()
    return y


def assert_like_one_process(
    name: str, mesh: Mesh, axes: Any, placements: list[Any], sizes: list[Any] | None, *, typed: bool = False
) -> None:
    layer = LAYERS[name]
    plain = given(layer).requires_grad_(not layer.ids)
    with comm.as_rank(Mesh(1), 0):
        reference = built(layer, {})
        expected = step(layer, reference, plain)
    wanted = dict(reference.named_parameters())

    def rank() -> None:
        device_mesh = DeviceMesh.from_axes(axes)
        module = built(layer, wanted)
        with spmd.SpmdTypeMode() if typed else nullcontext():
            own = spmd.assert_type(given(layer), R if layer.ids else I).requires_grad_(not layer.ids)
            x = distribute_tensor(own, device_mesh, placements, sizes=sizes, src=None)
            y = step(layer, module, x)
        assert isinstance(y, ShardTensor)
        assert_close(y.full_tensor().detach(), expected.detach(), f"{name}: output")
        if not layer.ids:
            assert x.grad._spec is x._spec
            assert_close(x.grad.full_tensor(), plain.grad, f"{name}: input")
        for key, param in module.named_parameters():
            grad = param.grad
            assert type(grad) is torch.Tensor, key
            if spmd.spec_of(param).sequence_parallel:
                grad = comm.all_reduce(grad, "tp")
            assert_close(grad, own_part(wanted[key].grad, param), f"{name}: {key}")

    threads.run(mesh, rank)


@pytest.mark.each_value
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_uneven_shards_of_each_dim(name, count):
    layer = LAYERS[name]
    for dim in range(3 if layer.features and not layer.ids else 2):
        mesh = Mesh(2 * count, tp=2)
        assert_like_one_process(name, mesh, "dp", [Shard(dim)], [SPLITS[dim][count]])


@pytest.mark.parametrize("name", LAYERS)
def test_two_dims_of_a_mesh(name):
    assert_like_one_process(name, Mesh(8, tp=2, cp=2), ("dp", "cp"), [Shard(0), Shard(1)], [(2, 1), (4, 12)])
    assert_like_one_process(name, Mesh(8, tp=2, cp=2), ("dp", "cp"), [Replicate(), Shard(1)], [None, (10, 6)])


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("column, replicas", "row, partial")])
def test_types(name):
    """Under the checker, which proves what is not declared."""
    assert_like_one_process(name, Mesh(4, tp=2), "dp", [Shard(1)], [(10, 6)], typed=True)


@pytest.mark.parametrize("placement", [Replicate(), Partial(), Partial("avg"), Partial("max")])
def test_inputs_that_are_not_sharded(placement):
    """A sum over the domain is reduced before a bias is added; a maximum before anything."""

    def rank():
        mesh = DeviceMesh.from_axes("dp")
        x = given(LAYERS["row"]) * (1 + comm.rank("dp")) - comm.rank("dp")
        x = ShardTensor.from_local(x.requires_grad_(), mesh, [placement])
        torch.manual_seed(0)
        layer = row()
        whole_input = x.full_tensor()
        y = spmd.convert(x, "tp", src=I, dst=S(1))
        y = spmd.all_gather(y, "tp", src=S(1), dst=I)
        assert_close(layer(y).full_tensor().detach(), layer(whole_input).detach(), str(placement))
        assert Partial("max") not in (*y.placements, *layer(x).placements)
        assert_close(layer(x).full_tensor().detach(), layer(whole_input).detach(), str(placement))

    threads.run(Mesh(4, tp=2), rank)


def calls_of(name: str, sharded: bool) -> list[tuple[str, str]]:
    """Verbs and axes of a forward and a backward on rank 0."""
    layer = LAYERS[name]

    def rank() -> list[tuple[str, str]]:
        module, x = built(layer, {}), given(layer).requires_grad_(not layer.ids)
        if sharded:
            x = distribute_tensor(x.detach().requires_grad_(not layer.ids), DeviceMesh.from_axes("dp"), [Shard(0)])
        with comm.record() as calls:
            layer.forward(module, x).sum().backward()
        return [(call.verb, call.axis) for call in calls]

    return threads.run(Mesh(4, tp=2), rank)[0]


# How many all-reduces over the domain a backward adds: one for each layer, of all its parameters.
ADDED = {
    "column, shards": 1,
    "columns, fused": 1,
    "row": 1,
    "sequence, layer norm": 3,
    "sequence, rms norm": 3,
    "embedding": 1,
    "embedding, sequence": 1,
    "loss": 1,
}


@pytest.mark.parametrize("name", ADDED)
def test_collectives(name):
    """Over tp those of plain tensors, in their order; over the domain one for the parameters of each layer."""
    plain, sharded = calls_of(name, False), calls_of(name, True)
    assert [call for call in sharded if call[1] == "tp"] == plain
    assert [call for call in sharded if call[1] != "tp"] == [("all_reduce", "dp")] * (1 + ADDED[name])  # one is sum()'s


def on_all_ranks(function: Callable[[DeviceMesh], Any], mesh: Mesh | None = None) -> list[str]:
    def rank() -> str:
        with pytest.raises((ValueError, NotImplementedError, IndexError)) as caught:
            function(DeviceMesh.from_axes("dp"))
        return f"{caught.type.__name__}: {caught.value}"

    return threads.run(mesh or Mesh(4, tp=2), rank)


def sharded_input(mesh: DeviceMesh, dim: int, sizes: tuple[int, ...]) -> ShardTensor:
    return distribute_tensor(given(LAYERS["row"]), mesh, [Shard(dim)], sizes=[sizes], src=None)


REFUSALS = {
    "own axis": (
        lambda mesh: row(tensor_model_parallel_group="dp", input_is_parallel=False)(sharded_input(mesh, 1, (10, 6))),
        "ValueError: convert over dp of a ShardTensor [Shard(dim=1)] on DeviceMesh",
    ),
    "own axis, no operator": (
        lambda mesh: column(tensor_model_parallel_group="dp", gather_output=False)(sharded_input(mesh, 1, (10, 6))),
        "ValueError: ColumnParallelLinear over dp of a ShardTensor [Shard(dim=1)] on DeviceMesh",
    ),
    "features": (
        lambda mesh: row()(sharded_input(mesh, 2, (4, 4))),
        "ValueError: convert over 2 ranks would split or join dim 2, the features, which is sharded on mesh dim 0",
    ),
    "odd sequence": (
        lambda mesh: row(input_is_parallel=True, sequence_parallel_enabled=True, sequence_dimension=1)(
            sharded_input(mesh, 1, (9, 7))[..., :4]
        ),
        "ValueError: RowParallelLinear splits dim 1 over 2 ranks, but its shards [9, 7] on mesh dim 0 are not",
    ),
    "not its features": (
        lambda mesh: row(input_is_parallel=True)(sharded_input(mesh, 1, (10, 6))),
        "the input [3, 16, 8] of torch.float64 does not fit the weight [6, 4]",
    ),
    "taken apart": (
        lambda mesh: spmd.reduce_scatter(sharded_input(mesh, 1, (8, 8)), "tp", src=P, dst=V, scatter_dim=1),
        "ValueError: reduce_scatter would unstack dim 1, which is sharded in ShardTensorSpec(",
    ),
    "max_norm": (
        lambda mesh: table(max_norm=1.0)(distribute_tensor(given(LAYERS["embedding"]), mesh, [Shard(0)])),
        "NotImplementedError: ParallelEmbedding of ShardTensors does not support max_norm and sparse",
    ),
    "labels": (
        lambda mesh: parallel_cross_entropy(sharded_input(mesh, 1, (10, 6)), torch.zeros(3, 15, dtype=torch.int64)),
        "ValueError: parallel_cross_entropy: labels [3, 15] do not match logits [3, 16, 8]",
    ),
    "an id": (
        lambda mesh: table()(distribute_tensor(given(LAYERS["embedding"]) + 1, mesh, [Replicate()])),
        "IndexError: ParallelEmbedding: id 12 is outside the vocabulary of 12",
    ),
    "a label": (
        lambda mesh: parallel_cross_entropy(
            sharded_input(mesh, 1, (10, 6)), distribute_tensor(torch.full((3, 16), 16), mesh, [Shard(1)])
        ),
        "IndexError: parallel_cross_entropy: label 16 is outside the vocabulary of 16",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_on_all_ranks(name):
    function, message = REFUSALS[name]
    for text in on_all_ranks(function):
        assert message in text


def test_padding_is_hidden_in_place():
    def rank():
        x = sharded_input(DeviceMesh.from_axes("dp"), 1, (10, 6))
        assert hide_padding(x, 15) is x
        hidden = x.full_tensor() == -math.inf
        assert hidden.sum() == (BATCH * LENGTH if comm.rank("tp") else 0)
        with pytest.raises(ValueError, match="the vocabulary dim must be complete on each rank"):
            hide_padding(sharded_input(DeviceMesh.from_axes("dp"), 2, (5, 3)), 15)

    threads.run(Mesh(4, tp=2), rank)


@pytest.mark.parametrize("operator", ["stack", "unbind", "exchange"])
def test_operators_that_add_or_take_a_dim(operator):
    """V is stacked on a dim of its own, and the sharded dims move by one."""

    def rank():
        mesh = DeviceMesh.from_axes("dp")
        x = sharded_input(mesh, 1, (10, 6))
        stacked = spmd.all_gather(x * (1 + comm.rank("tp")), "tp", src=V, dst=I)
        assert stacked.placements == (Shard(2),) and stacked.shape == (2, 3, 16, 8)
        expected = given(LAYERS["row"])
        assert_close(stacked.full_tensor(), torch.stack([expected, 2 * expected]), "stacked")
        if operator == "unbind":
            own = spmd.reduce_scatter(stacked, "tp", src=P, dst=V)
            assert own.placements == (Shard(1),)
            assert_close(own.full_tensor(), 2 * (1 + comm.rank("tp")) * expected, "own")
        if operator == "exchange":
            own = spmd.all_to_all(stacked, "tp")
            assert own.placements == stacked.placements
            assert_close(own.full_tensor(), torch.stack([(1 + comm.rank("tp")) * expected] * 2), "exchanged")

    threads.run(Mesh(4, tp=2), rank)


def test_reducing_gradients_over_the_domain_as_well_changes_nothing():
    """Shards are equal on all ranks of the mean, so the mean equals each of them."""

    def rank():
        layer = LAYERS["sequence, layer norm"]
        module = built(layer, {})
        x = sharded_input(DeviceMesh.from_axes("dp"), 1, (10, 6))
        step(layer, module, x)
        before = {name: param.grad.clone() for name, param in module.named_parameters()}
        reduce_gradients(module)
        for name, param in module.named_parameters():
            if spmd.spec_of(param).sequence_parallel:  # summed over tp, as ever
                before[name] = comm.all_reduce(before[name], "tp")
            assert_close(param.grad, before[name], name)

    threads.run(Mesh(4, tp=2), rank)
