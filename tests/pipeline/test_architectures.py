"""Models as they are, tiny, on pipelines: loss and gradients equal one process's. `docs/models.md` is the list.

`make test` runs each in 4 pieces, with the same cuts: some on 4 stages, the others two pieces on each of 2 stages.
NXD_FULL=1 runs all in both ways, also on 2 stages, and in 8 pieces.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline import NxDPPModel
from tests.support.architectures import ARCHITECTURES, DOCUMENT, Architecture, document, packed, padded, raised, tokens
from tests.support.pipeline_models import error, on_ranks, reference

FULL = bool(os.environ.get("NXD_FULL"))
RECORDED = [architecture for architecture in ARCHITECTURES if not architecture.error]
REFUSED = [architecture for architecture in ARCHITECTURES if architecture.error]
ON_FOUR_STAGES = ("Llama", "Gemma 3", "T5", "Mixtral", "Mamba", "a U-net")  # one of each way to cross boundaries
MICROBATCHES = 2
pytestmark = pytest.mark.slow


def check(architecture: Architecture, pp: int, chunks: int, layers: int = 4) -> None:
    """Loss and every gradient, against one process's; every stage has some."""
    model, inputs, spec = architecture.make(layers), architecture.inputs(), architecture.spec
    loss, grads = reference(model, inputs, MICROBATCHES, spec)

    def use(pipeline: NxDPPModel) -> Any:
        pipeline.trace(kwargs=inputs)
        local = dict(pipeline.local_named_parameters())
        return pipeline.run_train(**inputs), {name: param.grad for name, param in local.items()}

    ranks = on_ranks(
        Mesh(pp, pp=pp), model, use, num_microbatches=MICROBATCHES, output_loss_value_spec=spec,
        input_names=list(inputs), transformer_layer_cls=list(architecture.layer_classes), virtual_pipeline_size=chunks,
    )  # fmt: skip
    assert error(ranks[-1][0], loss) < 1e-10
    for rank, (_, local) in enumerate(ranks):
        for name, grad in local.items():
            assert (grad is None) == (name not in grads), (rank, name)
            assert grad is None or error(grad, grads[name]) < 1e-10, (rank, name)
    names = {name for _, local in ranks for name in local}
    assert names >= {name for name, param in model.named_parameters() if param.requires_grad}
    assert all(any(name in local for name in grads) for _, local in ranks)


@pytest.mark.parametrize("pp,chunks", [(4, 1), (2, 2)] + [(2, 1)] * FULL)
@pytest.mark.parametrize("architecture", RECORDED, ids=lambda architecture: architecture.name)
def test_loss_and_gradients_are_those_of_one_process(architecture: Architecture, pp: int, chunks: int) -> None:
    if not FULL and (pp == 4) != (architecture.name in ON_FOUR_STAGES):
        pytest.skip("NXD_FULL=1")
    check(architecture, pp, chunks)


@pytest.mark.parametrize("architecture", RECORDED, ids=lambda architecture: architecture.name)
def test_four_stages_of_two_chunks(architecture: Architecture) -> None:
    if not FULL and architecture.name != "T5":
        pytest.skip("NXD_FULL=1")
    check(architecture, 4, 2, layers=8)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("inputs", [padded, packed])
@pytest.mark.parametrize(
    "architecture",
    [architecture for architecture in RECORDED if architecture.inputs is tokens],
    ids=lambda architecture: architecture.name,
)
def test_padded_and_packed_sequences(architecture: Architecture, inputs: Callable[[], Any]) -> None:
    """Masks that depend on the inputs' values are those of one process."""
    if not FULL and architecture.name not in ("Llama", "Gemma 3", "BERT (masked language model)", "T5"):
        pytest.skip("NXD_FULL=1")
    if inputs is packed and architecture.name in ("BLOOM", "T5", "Mamba"):
        pytest.skip("takes no position_ids")
    check(replace(architecture, inputs=inputs), 2, 1)


@pytest.mark.parametrize("architecture", REFUSED, ids=lambda architecture: architecture.name)
def test_what_cannot_be_cut_says_why(architecture: Architecture) -> None:
    assert raised(architecture).startswith(architecture.error)


def test_the_document_is_what_is_generated() -> None:
    """`make models` writes it."""
    assert DOCUMENT.read_text() == document()


def test_experts_on_a_kernel_whose_fake_implementation_takes_less() -> None:
    """The default of transformers for float32, grouped_mm, runs on values while it is recorded."""
    mixtral = next(architecture for architecture in ARCHITECTURES if architecture.name == "Mixtral")
    model, inputs = mixtral.make().float(), mixtral.inputs()
    model.config._experts_implementation = "grouped_mm"
    loss, grads = reference(model, inputs, MICROBATCHES, mixtral.spec)

    def use(pipeline: NxDPPModel) -> Any:
        loss = pipeline.run_train(**inputs)
        return loss, {name: param.grad for name, param in pipeline.local_named_parameters()}

    ranks = on_ranks(
        Mesh(2, pp=2), model, use, num_microbatches=MICROBATCHES, output_loss_value_spec=mixtral.spec,
        transformer_layer_cls=list(mixtral.layer_classes),
    )  # fmt: skip
    assert error(ranks[-1][0], loss) < 1e-6
    assert all(error(grad, grads[name]) < 1e-5 for _, local in ranks for name, grad in local.items())


def test_a_dropped_gradient_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison would notice: a weight read on two stages whose gradients are not summed."""
    monkeypatch.setattr(NxDPPModel, "tied_groups", lambda self: [])
    opt = next(architecture for architecture in ARCHITECTURES if architecture.name == "OPT")
    with pytest.raises(AssertionError):
        check(opt, 2, 1)
    assert torch.is_grad_enabled()
