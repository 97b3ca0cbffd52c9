"""Activation checkpointing in pipelines: of layers, around several of them, Hugging Face's own; what is recomputed."""

from __future__ import annotations

import copy
import functools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers import LlamaForCausalLM

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import random
from neuronx_dist.pipeline import NxDPPModel
from tests.hf.models import batch as llama_batch
from tests.hf.models import llama_config, reference_model
from tests.support.pipeline_models import Block, Model, batch, error, make, on_ranks, reference

pytestmark = pytest.mark.slow  # together more than the fast tier has room for

PP2 = Mesh(2, pp=2)
TRAIN: dict[str, Any] = {"output_loss_value_spec": True, "num_microbatches": 2}


def counted(module: nn.Module, inside: str) -> Counter[str]:
    """Number of runs of each submodule whose name ends in `inside`, recordings left out."""
    calls: Counter[str] = Counter()

    def count(name: str, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if not isinstance(output, FakeTensor):
            calls[name] += 1

    for name, child in module.named_modules():
        if name.endswith(inside):
            child.register_forward_hook(functools.partial(count, name))
    return calls


def trained(model: nn.Module, mesh: Mesh, prepare: Callable[[NxDPPModel], Any], **options: Any) -> dict[str, int]:
    """Trains a step on ranks, compares it with one process; how often the `up` of each layer ran."""
    expected, grads = reference(model, batch(), options.get("num_microbatches", TRAIN["num_microbatches"]))

    def use(pipeline: NxDPPModel) -> Any:
        prepare(pipeline)
        calls = counted(pipeline.original_module, ".up")
        loss = pipeline.run_train(**batch())
        before_eval = dict(calls)
        pipeline.run_eval(**batch())
        evaluated = {name: calls[name] - before_eval[name] for name in before_eval}
        assert all(count == pipeline.num_microbatches for count in evaluated.values()), "evaluation recomputes nothing"
        assert (loss is not None) == pipeline.is_last_stage()
        return loss, {n: p.grad for n, p in pipeline.local_named_parameters()}, before_eval

    runs: dict[str, int] = {}
    for rank, (loss, local, calls) in enumerate(on_ranks(mesh, model, use, **{**TRAIN, **options})):
        assert loss is None or error(loss, expected) < 1e-12
        for name, grad in local.items():
            assert error(grad, grads[name]) < 1e-12, name
        if rank % (mesh.world_size // mesh.pp) == 0:
            runs.update(calls)
    return runs


ALL, NONE = {f"layers.{i}.up": 4 for i in range(4)}, {f"layers.{i}.up": 2 for i in range(4)}


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("layers", [Block, "Block", None, ["layers.0", "layers.1", "layers.2", "layers.3"]])
def test_layers_of_a_pipeline_are_recomputed_once_for_each_microbatch(layers: Any, pp: int) -> None:
    def prepare(pipeline: NxDPPModel) -> None:
        assert nxd.recompute(pipeline, layers).modules == tuple(f"layers.{i}" for i in range(4))

    assert trained(make(), Mesh(pp, pp=pp), prepare) == ALL


def test_one_layer_alone_and_twice_is_once() -> None:
    def prepare(pipeline: NxDPPModel) -> None:
        nxd.recompute(pipeline, "layers.2")
        once = pipeline.layers[2].forward
        nxd.recompute(pipeline, "layers.2")
        assert pipeline.layers[2].forward is once

    assert trained(make(), PP2, prepare) == {**NONE, "layers.2.up": 4}


def test_nothing_is_recomputed_without_it() -> None:
    assert trained(make(), PP2, lambda pipeline: None) == NONE


def test_before_the_pipeline_is_made() -> None:
    model = make()
    nxd.recompute(model, Block)
    assert trained(model, PP2, lambda pipeline: None) == ALL


def test_nxds_name() -> None:
    def prepare(pipeline: NxDPPModel) -> None:
        nxd.apply_activation_checkpointing(pipeline, check_fn=lambda module: isinstance(module, Block))

    assert trained(make(), PP2, prepare) == ALL
    everything = make()
    nxd.apply_activation_checkpointing(everything, nxd.checkpoint_wrapper)
    wrapped = [name for name, module in everything.named_modules() if "forward" in module.__dict__]
    assert wrapped == [name for name, _ in everything.named_modules() if name]
    with pytest.raises(ValueError, match="returned a Sequential around embed, .* pass neuronx_dist.checkpoint_wrapper"):
        nxd.apply_activation_checkpointing(make(), nn.Sequential)


class Around(Model):
    """Checkpoints around two layers, or what lies between layers, as torch's user writes them."""

    reentrant = False

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in zip(self.layers[::2], self.layers[1::2]):
            x = torch_checkpoint(
                lambda x, a, b: torch.tanh(b(a(x) * 2) + x), x, first, second, use_reentrant=self.reentrant
            )
        return x


class Reentrant(Around):
    reentrant = True


class Nested(Around):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return torch_checkpoint(super().body, x, use_reentrant=False) + x


@pytest.mark.parametrize("model_class", [Around, Reentrant, Nested])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_checkpoints_around_several_layers_are_kept(model_class: type[Model], pp: int) -> None:
    """At pp 4 the cuts go through them: each stage recomputes its own part."""
    assert trained(make(model_class), Mesh(pp, pp=pp), lambda pipeline: None) == ALL


@pytest.mark.parametrize("model_class", [Around, Reentrant])
def test_two_checkpoints_are_not_one(model_class: type[Model]) -> None:
    def use(pipeline: NxDPPModel) -> Any:
        nodes = pipeline.program(batch()).chunks[0].plan.nodes
        return {str(node.target): node.meta["info"].checkpoint for node in nodes if node.op == "call_module"}

    (numbers,) = on_ranks(Mesh(1), make(model_class), use, **TRAIN)
    assert numbers["embed"] is numbers["head"] is None
    assert numbers["layers.0"] == numbers["layers.1"] != numbers["layers.2"] == numbers["layers.3"] is not None


@pytest.mark.parametrize(
    "options",
    [{"schedule": "gpipe"}, {"virtual_pipeline_size": 2}, {"schedule": "zb_h1"}, {"schedule": "zb_v"}],
    ids=str,
)
@pytest.mark.parametrize("model_class", [Model, Around, Nested])
def test_every_schedule_recomputes_once(model_class: type[Model], options: dict[str, Any]) -> None:
    """Halves of a backward share what was recomputed."""
    model = make(model_class)
    if model_class is Model:
        nxd.recompute(model, Block)
    assert trained(model, PP2, lambda pipeline: None, **options) == ALL


def test_what_is_saved_for_backward_is_less() -> None:
    def saved(pipeline: NxDPPModel, checkpointed: bool) -> int:
        if checkpointed:
            nxd.recompute(pipeline)
        sizes: dict[int, int] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            if not isinstance(x, nn.Parameter):
                sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        program = pipeline.program(batch(4))
        inputs = {0: batch(4)["ids"], 1: batch(4)["labels"]}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            assert program.chunks[0].run(pipeline.original_module, inputs, [])
        return sum(sizes.values())

    whole, less = (
        on_ranks(Mesh(1), make(), functools.partial(saved, checkpointed=c), output_loss_value_spec=True)[0]
        for c in (False, True)
    )
    assert less < whole / 2


def test_a_compiled_layer_recomputes_too() -> None:
    results = []
    for compiled in (False, True):
        model = make()
        nxd.recompute(model, Block)
        if compiled:
            for layer in model.layers:
                layer.compile(backend="aot_eager")
        model(**batch()).backward()
        results.append([param.grad for param in model.parameters()])
    assert all(error(grad, expected) < 1e-12 for expected, grad in zip(*results))


def test_a_layer_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="this Model has no layer 'Blok'; nearest .* are Block"):
        nxd.recompute(make(), "Blok")
    with pytest.raises(ValueError, match="the name of a layer, or a predicate on modules, got 3"):
        nxd.recompute(make(), [3])
    with pytest.raises(ValueError, match="the transformer layers of this Model are unknown"):
        nxd.recompute(make())


# --- random numbers ---------------------------------------------------------------------------------------------------


class Dropping(Block):
    """Draws from both streams, between layers with parameters."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = F.dropout(super().forward(x), 0.3, self.training)
        with random.get_rng_tracker().fork():
            return F.dropout(x, 0.3, self.training) * self.norm.weight


class DroppingModel(Model):
    around = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dropping() for _ in range(4))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = (
                torch_checkpoint(lambda x, layer: F.dropout(layer(x), 0.3), x, layer, use_reentrant=False)
                if self.around
                else F.dropout(layer(x), 0.3)
            )
        return x


@pytest.mark.parametrize("how", ["layers", "around"])
@pytest.mark.parametrize("mesh", [Mesh(1), PP2], ids=str)
def test_recomputation_replays_the_random_streams(how: str, mesh: Mesh) -> None:
    """The schedule has several microbatches in flight."""
    results = []
    for checkpointed in (False, True):
        model = make(DroppingModel)
        model.around = checkpointed and how == "around"
        if checkpointed and how == "layers":
            nxd.recompute(model, Dropping)

        def use(pipeline: NxDPPModel) -> Any:
            random.model_parallel_manual_seed(3)
            losses = [pipeline.run_train(**batch()) for _ in range(2)]
            with random.get_rng_tracker().fork():
                drawn = torch.rand(2)
            return (
                losses,
                {n: p.grad for n, p in pipeline.local_named_parameters()},
                drawn,
                torch.rand(2),
            )

        results.append(on_ranks(mesh, model, use, transformer_layer_cls=Dropping, **{**TRAIN, "num_microbatches": 4}))
    for (loss, grads, *drawn), (expected, expected_grads, *expected_drawn) in zip(*results):
        assert loss == expected and all(map(torch.equal, drawn, expected_drawn))
        assert all(error(grad, expected_grads[name]) < 1e-12 for name, grad in grads.items())


# --- Hugging Face's own -----------------------------------------------------------------------------------------------


def llama_step(mesh: Mesh, model: Any, enable: Callable[[Any], None], when: str, **options: Any) -> list[Any]:
    """Loss, gradients, and how often each MLP ran, on each rank."""
    ids, labels = llama_batch(batch_size=4)

    def main() -> Any:
        mine = copy.deepcopy(model)
        if when == "before":
            enable(mine)
        if mesh.tp > 1:
            mine = nxd.hf.swap(mine, sequence_parallel=options.get("sequence_parallel", False))
        pipeline = NxDPPModel(
            mine,
            transformer_layer_cls="LlamaDecoderLayer",
            auto_partition=True,
            num_microbatches=2,
            output_loss_value_spec={"loss": True},
        )
        pipeline.train()
        calls = counted(mine, ".up_proj")
        if when == "after":
            enable(pipeline)
        with torch.autocast("cpu", torch.bfloat16, enabled=options.get("autocast", False)):
            loss = pipeline.run_train(input_ids=ids, labels=labels)
        return loss, {n: p.grad.clone() for n, p in pipeline.local_named_parameters()}, dict(calls)

    return comm.threads.run(mesh, main)


def hf_own(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable()


def hf_reentrant(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})


@pytest.mark.slow
@pytest.mark.parametrize(
    "when,enable,sequence_parallel",
    [
        ("before", hf_own, True),
        ("after", hf_own, False),
        ("before", hf_reentrant, False),
        ("after", nxd.recompute, True),
        ("before", nxd.recompute, False),
    ],
)
def test_a_swapped_model_with_checkpointing_is_bit_equal(when: str, enable: Any, sequence_parallel: bool) -> None:
    model = reference_model(llama_config(), LlamaForCausalLM)
    mesh = Mesh(4, pp=2, tp=2)
    options = {"sequence_parallel": sequence_parallel}
    plain = llama_step(mesh, model, lambda model: None, when, **options)
    recomputing = llama_step(mesh, model, enable, when, **options)
    for (loss, grads, calls), (expected, expected_grads, once) in zip(recomputing, plain):
        assert (loss is None) == (expected is None) and (loss is None or torch.equal(loss, expected))
        assert all(torch.equal(grad, expected_grads[name]) for name, grad in grads.items())
        assert calls == {name: 2 * count for name, count in once.items()} and calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_and_bf16_recompute_the_same(dtype: torch.dtype) -> None:
    model = reference_model(llama_config(), LlamaForCausalLM, dtype)
    options = {"autocast": dtype is torch.float32}
    plain = llama_step(PP2, model, lambda model: None, "after", **options)
    recomputing = llama_step(PP2, model, nxd.recompute, "after", **options)
    for (_, grads, _), (_, expected, _) in zip(recomputing, plain):
        assert all(torch.equal(grad, expected[name]) for name, grad in grads.items())


def dropping_llama_gradients(enable: str) -> Any:
    random.model_parallel_manual_seed(3)
    model = reference_model(llama_config(attention_dropout=0.4), LlamaForCausalLM)
    random.model_parallel_manual_seed(3)
    mine = nxd.hf.swap(model)
    pipeline = NxDPPModel(
        mine, transformer_layer_cls="LlamaDecoderLayer", num_microbatches=2, output_loss_value_spec={"loss": True}
    )
    pipeline.train()
    if enable == "hf":
        hf_own(pipeline)
    elif enable == "layers":
        nxd.recompute(pipeline)
    ids, labels = llama_batch(batch_size=4)
    pipeline.run_train(input_ids=ids, labels=labels)
    return {name: p.grad for name, p in pipeline.local_named_parameters()}


def test_attention_dropout_of_sharded_heads_is_replayed() -> None:
    """Dropout draws from this rank's stream, which torch's checkpoint (Hugging Face's default) does not restore."""
    plain, *others = (
        comm.threads.run(Mesh(2, tp=2), dropping_llama_gradients, enable) for enable in ("", "hf", "layers")
    )
    for ranks in others:
        for grads, expected in zip(ranks, plain):
            assert all(torch.equal(grad, expected[name]) for name, grad in grads.items())
