"""Options of `NxDPPModel`: memory of sent tensors, returned values, changes for a second kind of input."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline import NxDPPModel
from tests.support.pipeline_models import (
    HIDDEN,
    Block,
    Model,
    batch,
    check_parity,
    cut,
    error,
    make,
    on_ranks,
    reference,
    train,
)  # fmt: skip

pytestmark = pytest.mark.slow  # together more than the fast tier has room for


def alive_at_each_forward(pipeline: NxDPPModel) -> list[int]:
    """Number of tensors sent earlier by this stage that still have memory after each forward."""
    sent: list[StorageWeakRef] = []
    counts: list[int] = []

    def count(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if type(output) is torch.Tensor:  # not while it is recorded
            counts.append(sum(not message.expired() for message in sent))
            sent.append(StorageWeakRef(output.untyped_storage()))

    layers = [module for module in pipeline.local_modules() if isinstance(module, Block)]
    layers[-1].register_forward_hook(count)
    pipeline.run_train(**batch())
    return counts


@pytest.mark.parametrize("deallocate,peaks", [(False, [4, 3, 2, 0]), (True, [2, 2, 2, 0])])
def test_deallocate_pipeline_outputs_frees_what_was_sent(deallocate: bool, peaks: list[int]) -> None:
    options = {"num_microbatches": 8, "output_loss_value_spec": True, "deallocate_pipeline_outputs": deallocate}
    found = on_ranks(Mesh(4, pp=4), make(), alive_at_each_forward, **options)
    assert [max(counts) for counts in found] == peaks
    assert all(len(counts) == 8 for counts in found)


def test_it_computes_the_same() -> None:
    check_parity(Mesh(4, pp=4), make(), batch(), 8, deallocate_pipeline_outputs=True)

    def use(pipeline: NxDPPModel) -> Any:
        return pipeline.run_eval(**batch())

    options = {"num_microbatches": 8, "output_loss_value_spec": True, "deallocate_pipeline_outputs": True}
    assert error(on_ranks(Mesh(4, pp=4), make(), use, **options)[3], reference(make(), batch())[0]) < 1e-10


def test_the_loss_of_context_parallel_ranks_is_averaged_and_on_every_stage() -> None:
    def use(pipeline: NxDPPModel) -> Any:
        return pipeline.run_train(**cut(batch(), 2)[comm.rank("cp")])

    options = {"num_microbatches": 2, "output_loss_value_spec": True, "broadcast_and_average_loss": True}
    for loss in on_ranks(Mesh(4, pp=2, cp=2), make(), use, **options):
        assert error(loss, reference(make(), batch())[0]) < 1e-10


def test_without_input_names_any_inputs_are_taken() -> None:
    class Optional(Model):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor, scale: float = 1.0) -> Any:
            return super().forward(ids, labels) * scale

    model = make(Optional)
    for inputs in (batch(), {**batch(), "scale": 3.0}):
        losses, _ = train(Mesh(2, pp=2), model, inputs, 2, input_names=None)
        assert error(losses[1], reference(model, inputs, 2)[0]) < 1e-10


# --- what flows between stages ----------------------------------------------------------------------------------------


class DetachedLater(Model):
    """The last layer uses the first one's result only detached: no gradient comes back for it."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        y = self.layers[2](self.layers[1](first))
        return self.layers[3](y + first.detach())


class WrittenByName(Model):
    """A tensor is changed by `out=`, and seen through a view that was made before."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.zeros(x.shape, dtype=x.dtype)
        row = seen[:, :1]
        torch.mul(x.detach(), 0.5, out=seen)
        return super().body(x) + row


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("model_class", [DetachedLater, WrittenByName])
def test_parity(model_class: type[Model], pp: int) -> None:
    check_parity(Mesh(pp, pp=pp), make(model_class), batch(), 4)


def test_what_needs_no_gradient_is_received_without_asking_for_one() -> None:
    class Guided(Model):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            guide = (x @ x.mT).detach()
            for layer in self.layers:
                x = layer(x, mask=guide)
            return x

    def use(pipeline: NxDPPModel) -> Any:
        asked: list[tuple[bool, bool]] = []

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            if type(args[0]) is torch.Tensor:
                asked.append((args[0].requires_grad, kwargs["mask"].requires_grad))

        [layer for layer in pipeline.local_modules() if isinstance(layer, Block)][0].register_forward_pre_hook(
            note, with_kwargs=True
        )
        pipeline.run_train(**batch())
        pipeline.run_eval(**batch())
        return asked

    for asked in on_ranks(Mesh(4, pp=4), make(Guided), use, output_loss_value_spec=True):
        assert asked == [(True, False), (False, False)]


# --- which inputs are served by which recording -----------------------------------------------------------------------


class Biased(Model):
    """An input is used on the first and on the last stage."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor) -> Any:
        shift = bias.sin()
        return self.loss(self.body(self.embed(ids) + shift) * shift, labels)


def test_an_input_that_requires_a_gradient_is_recorded_anew() -> None:
    """Then what depends on it is computed on one stage, whose copy of the input gets the whole gradient."""
    model, bias = make(Biased), torch.linspace(0.1, 1.0, 8 * HIDDEN, dtype=torch.float64).view(8, 1, HIDDEN)

    def use(pipeline: NxDPPModel) -> Any:
        pipeline.run_train(**batch(), bias=bias)
        pipeline.zero_grad()
        mine = bias.clone().requires_grad_()
        loss = pipeline.run_train(**batch(), bias=mine)
        return loss, mine.grad

    first, last = on_ranks(Mesh(2, pp=2), model, use, num_microbatches=2, output_loss_value_spec=True)
    whole = bias.clone().requires_grad_()
    loss = torch.stack([copy.deepcopy(model)(**piece) for piece in cut({**batch(), "bias": whole}, 2)]).mean()
    loss.backward()
    assert error(last[0], loss.detach()) < 1e-10 and last[1] is None
    assert error(first[1], whole.grad) < 1e-10


def test_numbers_that_are_equal_and_of_another_type_are_recorded_anew() -> None:
    class Scaled(Model):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor, scale: Any) -> Any:
            return super().forward(ids, labels) * {bool: 2, int: 3, float: 5}[type(scale)]

    def use(pipeline: NxDPPModel) -> Any:
        return [pipeline.run_eval(**batch(), scale=scale) for scale in (1, True, 1.0, 1)]

    losses = on_ranks(Mesh(2, pp=2), make(Scaled), use, output_loss_value_spec=True)[1]
    expected = reference(make(), batch())[0]
    assert all(error(loss, expected * factor) < 1e-10 for loss, factor in zip(losses, (3, 2, 5, 3)))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_h1", "zb_v"])
def test_a_step_leaves_no_tensor_to_the_collection_of_cycles(schedule: str) -> None:
    """On XLA what is alive is a result of the program, so that a step with another number of them compiles anew."""

    def use(pipeline: NxDPPModel) -> int:
        pipeline.run_train(**batch())  # recorded
        pipeline.zero_grad()
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            pipeline.run_train(**batch())
            gc.collect()
            return sum(isinstance(x, torch.Tensor) for x in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()

    options = {"num_microbatches": 4, "output_loss_value_spec": True, "schedule": schedule}
    chunks = 2 if schedule in ("interleaved", "zb_v") else 1
    assert on_ranks(Mesh(1), make(), use, virtual_pipeline_size=chunks, **options) == [0]
