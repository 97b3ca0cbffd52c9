"""Models that take no memory until they are partitioned: every way to give a stage its values."""

from __future__ import annotations

import copy
import functools
import os
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline import NxDPPModel
from neuronx_dist.weights.shard_spec import gather_full, spec_of
from tests.hf.models import batch as llama_batch
from tests.hf.models import llama_config, reference_model
from tests.support.pipeline_models import HIDDEN, VOCAB, Block, Model, batch, error, make, reference

pytestmark = pytest.mark.slow  # together more than the fast tier has room for

PLACEMENTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {}),
    (4, {}),
    (2, {"virtual_pipeline_size": 2}),
    (2, {"schedule": "zb_v"}),  # stage 0 has both ends of the model, and so both names of a tied weight
]


def on_meta(tied: bool) -> nn.Module:
    with nxd.init_on_device("meta"):
        return Model(tied=tied).double()


def fill(pipeline: NxDPPModel, state: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, param in pipeline.local_named_parameters():
            param.copy_(state[name])


WAYS = {
    "to_empty, then in place": lambda model, state: (model.to_empty(device="cpu"), fill(model, state)),
    "assign the whole state dict": lambda model, state: model.load_state_dict(state, assign=True),
    "assign this stage's": lambda model, state: model.load_state_dict(
        {name: value for name, value in state.items() if model.is_local(name)}, assign=True
    ),
    "to_empty, then load": lambda model, state: (model.to_empty(device="cpu"), model.load_state_dict(state)),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pp,options", PLACEMENTS, ids=str)
def test_values_come_after_the_partition(pp: int, options: dict[str, Any], tied: bool) -> None:
    """The first step, the norm of its gradients, and the loss of the second step are those of one process."""
    if not os.environ.get("NXD_FULL") and tied == ((pp, options) in PLACEMENTS[1::2]):
        pytest.skip("NXD_FULL=1")
    model = make(tied=tied)
    state = copy.deepcopy(model.state_dict())
    loss, grads = reference(model, batch(), 2)
    model(**batch()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    second = model(**batch()).detach()

    def main(way: str) -> Any:
        pipeline = NxDPPModel(
            on_meta(tied), Block, 2, output_loss_value_spec=True, auto_partition=True, broadcast_and_average_loss=True,
            _delay_tracing=False, **options,
        )  # fmt: skip
        with pytest.raises(RuntimeError, match="is on the meta device: give it a value first"):
            pipeline.run_train(**batch())
        WAYS[way](pipeline, copy.deepcopy(state))
        assert (pipeline.embed.weight is pipeline.head.weight) == tied
        losses = [pipeline.run_train(**batch())]
        local = {name: param.grad.clone() for name, param in pipeline.local_named_parameters()}
        found = nxd.clip_grad_norm(pipeline.local_parameters(), 1.0)
        torch.optim.SGD(pipeline.local_parameters(), lr=0.1).step()
        pipeline.zero_grad()
        return [*losses, pipeline.run_train(**batch())], local, found

    turn = PLACEMENTS.index((pp, options)) % 2
    for way in WAYS if os.environ.get("NXD_FULL") else [*WAYS][turn::2]:
        for losses, local, found in comm.threads.run(Mesh(pp, pp=pp), main, way):
            assert error(losses[0], loss) < 1e-10 and error(found, norm) < 1e-10 and error(losses[1], second) < 1e-10
            assert all(error(grad, grads[name]) < 1e-10 for name, grad in local.items()), way


def test_buffers_of_a_model_on_meta_have_their_values() -> None:
    """Rotary frequencies are computed when a model is built, and are in no state dict."""
    config = llama_config()
    whole = reference_model(config)
    ids, labels = llama_batch()
    expected = whole(input_ids=ids, labels=labels).loss.detach()

    def main() -> Any:
        with nxd.init_on_device("meta"):
            module = LlamaForCausalLM(config).double()
        assert all(param.is_meta for param in module.parameters()) and not any(b.is_meta for b in module.buffers())
        pipeline = NxDPPModel(
            module, "LlamaDecoderLayer", output_loss_value_spec={"loss": True}, auto_partition=True,
            broadcast_and_average_loss=True,
        )  # fmt: skip
        pipeline.load_state_dict(copy.deepcopy(whole.state_dict()), assign=True)
        return pipeline.run_train(input_ids=ids, labels=labels)

    assert all(error(loss, expected) < 1e-6 for loss in comm.threads.run(Mesh(2, pp=2), main))


def ramp(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(torch.linspace(-0.5, 0.7, weight.numel()).view(weight.shape))


class Scale(nn.Module):
    """A buffer that is computed when the module is built, as rotary frequencies are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, HIDDEN, dtype=torch.double))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class ParallelBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": torch.double, "init_method": ramp}
        self.scale = Scale()
        self.norm = nxd.LayerNorm(HIDDEN, dtype=torch.double)
        self.up = nxd.ColumnParallelLinear(HIDDEN, 2 * HIDDEN, gather_output=False, **options)
        self.down = nxd.RowParallelLinear(2 * HIDDEN, HIDDEN, input_is_parallel=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.scale(self.norm(x)))))


class ParallelModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nxd.ParallelEmbedding(VOCAB - 1, HIDDEN, dtype=torch.double, init_method=ramp)
        self.layers = nn.ModuleList(ParallelBlock() for _ in range(2))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids % (VOCAB - 1))
        for layer in self.layers:
            x = layer(x)
        return (x.sum(-1) - labels).square().mean()


def init_of_the_release(module: nn.Module, device: torch.device) -> None:
    """Fills modules as `init_weights` of NxD's Llama does, which replaces modules that only have buffers."""
    assert device == torch.device("cpu")
    for key, child in module._modules.items():
        if isinstance(child, Scale):
            module._modules[key] = Scale()
    if isinstance(module, nxd.LayerNorm):
        module.weight.fill_(1.0)
        module.bias.fill_(0.25)
    elif isinstance(module, (nxd.ParallelEmbedding, nxd.RowParallelLinear, nxd.ColumnParallelLinear)):
        module.init_weight_cpu()
        if getattr(module, "bias", None) is not None:
            module.bias.zero_()


def init_with_std(module: nn.Module, device: torch.device, std: float) -> None:
    assert std == 0.5
    init_of_the_release(module, device)


@pytest.mark.parametrize("mesh", [Mesh(1), Mesh(2, tp=2), Mesh(2, pp=2), Mesh(4, tp=2, pp=2)], ids=str)
@pytest.mark.parametrize("init", [init_of_the_release, functools.partial(init_with_std, std=0.5)])
def test_param_init_fn_of_the_release_gets_the_device(mesh: Mesh, init: Any) -> None:
    """NxD calls it for each module of the stage with `(module, device)`; its guide's `(module)` is in `test_model`."""

    def main() -> Any:
        with torch.device("meta"):
            model = ParallelModel()
        pipeline = NxDPPModel(
            model, ParallelBlock, num_microbatches=2, output_loss_value_spec=True, auto_partition=True,
            broadcast_and_average_loss=True, param_init_fn=init,
        )  # fmt: skip
        loss = pipeline.run_train(**batch())
        grads = {name: gather_full(p.grad, spec_of(p)) for name, p in pipeline.local_named_parameters()}
        return loss, grads

    with comm.as_rank(Mesh(1), 0):
        whole = ParallelModel()
        with torch.no_grad():
            for module in whole.modules():
                init_of_the_release(module, torch.device("cpu"))
        loss = whole(**batch())
        loss.backward()
    expected = {name: param.grad for name, param in whole.named_parameters()}
    results = comm.threads.run(mesh, main)
    assert set().union(*(grads for _, grads in results)) == set(expected)
    for value, grads in results:
        assert error(value, loss.detach()) < 1e-10
        assert all(error(grad, expected[name]) < 1e-10 for name, grad in grads.items())


@pytest.mark.parametrize("init", [lambda module: None, lambda module, device: None], ids=["guide", "release"])
def test_what_param_init_fn_leaves_alone_is_nan(init: Any) -> None:
    """Not the memory's former content: a weight, or a buffer of frequencies, would be wrong in silence."""
    with comm.as_rank(Mesh(2, pp=2), 0):
        with torch.device("meta"):
            model = ParallelModel()
        pipeline = NxDPPModel(model, ParallelBlock, auto_partition=True, param_init_fn=init)
        tensors = [*pipeline.local_parameters(), *pipeline.local_buffers()]
    assert len(tensors) == 8 and all(tensor.isnan().all() for tensor in tensors)


def test_recording_is_always_put_off() -> None:
    """`_delay_tracing` asks for what happens anyway: nothing is recorded before the first batch."""
    with comm.as_rank(Mesh(2, pp=2), 0), pytest.warns(UserWarning, match="_delay_tracing=True has no effect here"):
        model = NxDPPModel(on_meta(False), Block, auto_partition=True, output_loss_value_spec=True, _delay_tracing=True)
    assert model.partitioned and not model._programs
