"""Scripts for NxD call the reductions of its optimizer wrapper after `run_train`: each is done once, whoever asks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import neuronx_dist
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.weights.shard_spec import gather_full, spec_of
from tests.support.nxd_order import MAX_NORM, batch, build_model, make_optimizer, own_rows, step

pytestmark = pytest.mark.slow  # together more than the fast tier has room for

STEPS = 3
WRAPPERS = ["use_optimizer_wrapper", "use_zero1_optimizer", ""]
MESHES = [Mesh(2), Mesh(2, cp=2), Mesh(2, tp=2), Mesh(8, pp=2, tp=2), Mesh(8, tp=2, cp=2), Mesh(8, pp=2, cp=2)]


def model_and_optimizer(wrapper: str) -> tuple[Any, Any]:
    model = build_model(wrapper)
    neuronx_dist.materialize(model, seed=5)
    return model, make_optimizer(model)


def train(wrapper: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """This rank's losses, and the whole weights of its stage after the last step."""
    model, optimizer = model_and_optimizer(wrapper)
    losses = [float(step(model, optimizer, own_rows(batch(number)))) for number in range(STEPS)]
    weights = {name: gather_full(p.detach(), spec_of(p)) for name, p in model.local_named_parameters()}
    return losses, weights


@functools.cache
def alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    """One process, by torch alone but for the layers: one loss, one backward, torch's own clipping."""
    with comm.as_rank(Mesh(1), 0):
        model = build_model("", num_microbatches=1)
        neuronx_dist.materialize(model, seed=5)
        module: Any = model.original_module
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        losses = []
        for number in range(STEPS):
            loss = module(**batch(number))
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
            assert norm > 2 * MAX_NORM  # so that clipping matters
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses, {name: p.detach() for name, p in module.named_parameters()}


@functools.cache
def both_batches() -> Any:
    """The module in one process, with the gradients of two batches."""
    with comm.as_rank(Mesh(1), 0):
        model = build_model("", num_microbatches=1)
        neuronx_dist.materialize(model, seed=5)
        for number in range(2):
            model.original_module(**batch(number)).backward()
    return model.original_module


@pytest.mark.each_value
@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper or "run_train averages")
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_nxds_order_of_reductions_trains_as_one_process(mesh: Mesh, wrapper: str) -> None:
    expected_losses, expected = alone()
    trained = set()
    for losses, weights in comm.threads.run(mesh, train, wrapper):
        assert losses == pytest.approx(expected_losses, rel=1e-12)
        for name, weight in weights.items():
            trained.add(name)
            assert (weight - expected[name]).norm() < 1e-10 * expected[name].norm(), name
    assert trained == set(expected)


@pytest.mark.parametrize("wrapper", WRAPPERS[:1] + WRAPPERS[2:], ids=lambda wrapper: wrapper or "run_train averages")
@pytest.mark.parametrize("twice", ["cp", "tp", "data"])
def test_a_reduction_that_the_script_doubles_is_refused(twice: str, wrapper: str) -> None:
    def rank_main() -> None:
        model, optimizer = model_and_optimizer(wrapper)
        with pytest.raises(RuntimeError, match=f"second call for '{twice}'.*zero_grad before the next step"):
            step(model, optimizer, own_rows(batch()), twice=twice)

    comm.threads.run(Mesh(4, tp=2, cp=2), rank_main)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_two_steps_without_zero_grad_add_up_or_are_refused(mesh: Mesh) -> None:
    """A second sum over tp of what was summed before would count it tp times; a second mean changes nothing."""

    def rank_main() -> dict[str, torch.Tensor] | None:
        model, _ = model_and_optimizer("")
        for number in range(2):
            model.run_train(**own_rows(batch(number)))
            model.zero_grad(set_to_none=False)  # which makes a new start too
        model.zero_grad()
        model.run_train(**own_rows(batch(0)))
        if mesh.tp > 1:
            with pytest.raises(
                RuntimeError, match="would scale them. Call zero_grad before the next step. .* more micro.* no_sync"
            ):
                model.run_train(**own_rows(batch(1)))
            return None
        model.run_train(**own_rows(batch(1)))
        return {name: p.grad for name, p in model.local_named_parameters()}

    module = both_batches()
    for gradients in comm.threads.run(mesh, rank_main):
        for name, grad in (gradients or {}).items():
            expected = module.get_parameter(name).grad
            assert (grad - expected).norm() < 1e-10 * expected.norm(), name


def test_what_run_train_did_is_not_communicated_again() -> None:
    def rank_main() -> list[list[str]]:
        axes = []
        for wrapper in ("use_optimizer_wrapper", ""):
            model, optimizer = model_and_optimizer(wrapper)
            rows = own_rows(batch())
            with comm.record() as calls:
                step(model, optimizer, rows)
            axes.append([call.axis for call in calls if call.verb == "all_reduce" and call.shape])
        return axes

    for wrapped, averaged in comm.threads.run(Mesh(8, tp=2, cp=2), rank_main):
        assert wrapped == ["tp", "cp", "dp"]  # the sum over tp by run_train, the rest as the script says
        assert averaged == ["tp", "dp,cp"]  # all by run_train
