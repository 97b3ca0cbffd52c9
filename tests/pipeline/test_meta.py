"""Models that take no memory until they are partitioned: every way to give a stage its values."""

from __future__ import annotations

import copy
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
from tests.hf.models import batch as llama_batch
from tests.hf.models import llama_config, reference_model
from tests.support.pipeline_models import Block, Model, batch, error, make, reference

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

    for way in WAYS:
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


def test_recording_is_always_put_off() -> None:
    """`_delay_tracing` asks for what happens anyway: nothing is recorded before the first batch."""
    with comm.as_rank(Mesh(2, pp=2), 0), pytest.warns(UserWarning, match="_delay_tracing=True has no effect here"):
        model = NxDPPModel(on_meta(False), Block, auto_partition=True, output_loss_value_spec=True, _delay_tracing=True)
    assert model.partitioned and not model._programs
