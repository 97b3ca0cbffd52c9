"""ZeRO-1 with `overlap=True`: the same bits, with collectives that start in backward and end in the next forward."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import LossScaler, NeuronZero1Optimizer
from neuronx_dist.parallel_layers import grads
from tests.checking.mutation import mutants
from tests.optimizer.overlap_training import (
    OPTIMIZERS,
    SMALL,
    Chain,
    backward,
    both,
    rows,
    steps,
    zero1,
)
from tests.optimizer.zero1_training import STEPS, weights_of
from tests.parity.mutation_cases import one_step
from tests.support import pipeline_models
from tests.support.call_sites import MUTATIONS, find_sites, mutate
from tests.support.llama_training import Case
from tests.support.pool import processes
from tests.support.synthetic import Model

# --- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "mesh",
    [Mesh(1), Mesh(2), Mesh(4), Mesh(2, cp=2), Mesh(4, cp=2), Mesh(4, tp=2), Mesh(4, pp=2), Mesh(8, tp=2, pp=2)],
    ids=str,
)
def test_weights_and_norms_are_those_without_overlap(mesh: Mesh, optimizer: str) -> None:
    """Sequence-parallel and tied weights too, of which `reduce_gradients` makes sums after backward."""

    def use(overlap: bool) -> dict[str, torch.Tensor]:
        model = Model(torch.float32)
        wrapped = zero1(model, overlap, optimizer, max_norm=2.5)
        norms = []
        for step in range(STEPS):
            wrapped.zero_grad()
            backward(model, step)
            grads.reduce_gradients(model, average_over_data=False)
            wrapped.step()
            norms.append(wrapped.grad_norm)
        return {**weights_of(model), "norms": torch.stack(norms)}

    both(mesh, use)


@pytest.mark.parametrize("options", [{"use_grad_acc_hook": True}, {"higher_cc_precision": True}, {}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype: torch.dtype, options: dict[str, Any]) -> None:
    def use(overlap: bool) -> dict[str, torch.Tensor]:
        model = Model(dtype)
        wrapped = zero1(model, overlap, "AdamW", **options)
        for step in range(STEPS):
            wrapped.zero_grad()
            with nxd.no_sync(model):
                backward(model, step)
            backward(model, step + 7)
            wrapped.step()
        return weights_of(model)

    both(Mesh(2), use)


@pytest.mark.slow
@pytest.mark.parametrize("order", range(20 if os.environ.get("NXD_FULL") else 3))
def test_the_order_of_ranks_changes_no_bit(order: int) -> None:
    """A race between backward's collectives and the next forward's would."""

    def use(overlap: bool) -> dict[str, torch.Tensor]:
        model = Chain()
        wrapped = zero1(model, overlap, "AdamW", max_norm=1.0)
        for step in range(STEPS):
            wrapped.zero_grad()
            model(rows(step)).backward()
            wrapped.step()
        return weights_of(model)

    both(Mesh(4), use, order=order)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dp", [2, 4])
def test_microbatches_and_missing_gradients(dp: int, optimizer: str) -> None:
    """A frozen layer; one that the last microbatch does not use, and ranks but one do not; one that nobody uses."""

    def use(overlap: bool) -> dict[str, torch.Tensor]:
        model = Chain()
        model.layers[0].requires_grad_(False)
        wrapped = zero1(model, overlap, optimizer)
        for step in range(STEPS):
            wrapped.zero_grad()
            with nxd.no_sync(model):
                for microbatch in range(2):
                    model(rows(10 * step + microbatch)).backward()
            model(rows(10 * step + 2), without=[1, *([2] if comm.rank("dp") and step > 2 else [])]).backward()
            wrapped.step()
            wrapped.zero_grad()
            model(rows(step), without=[1, 3]).backward()
            wrapped.step()
        return weights_of(model)

    both(Mesh(dp), use)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_and_tied_layers(reentrant: bool) -> None:
    """A layer that is used several times has its gradient when the last use has added to it."""

    def use(overlap: bool) -> dict[str, torch.Tensor]:
        model = Chain()
        if not reentrant:
            model.layers[2] = model.layers[0]
        wrapped = zero1(model, overlap)
        call = partial(checkpoint, use_reentrant=reentrant)
        steps(model, wrapped, lambda model, step: model(rows(step).requires_grad_(), layer=call))
        return weights_of(model)

    both(Mesh(2), use)


@pytest.mark.slow
def test_hybrid_sharding() -> None:
    """Pairs of a dp of 4, over whose replicas a shard is summed when its reduce-scatter is awaited."""

    def use(overlap: bool) -> dict[str, torch.Tensor]:
        model = Chain()
        steps(model, zero1(model, overlap, "AdamW", sharding_groups=[[0, 1], [2, 3]]))
        return weights_of(model)

    both(Mesh(4), use)


@pytest.mark.parametrize("options", [{"skip_nonfinite": True}, {"loss_scaler": True}], ids=str)
def test_a_step_that_is_skipped(options: dict[str, Any]) -> None:
    def use(overlap: bool) -> dict[str, torch.Tensor]:
        model = Chain()
        scaler = LossScaler(scale=8.0) if "loss_scaler" in options else None
        wrapped = zero1(model, overlap, loss_scaler=scaler, skip_nonfinite=scaler is None, max_norm=0.5)

        def loss(model: nn.Module, step: int) -> torch.Tensor:
            value = model(rows(step)) * (float("nan") if step == 2 and comm.rank("dp") else 1.0)
            return value if scaler is None else scaler.scaled(value)

        steps(model, wrapped, loss)
        assert wrapped.skipped_steps == 1
        return weights_of(model)

    both(Mesh(2), use)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "mesh, schedule",
    [
        (Mesh(2), "1f1b"),  # one stage, in whose backwards reductions could start
        *(pytest.param(Mesh(4, pp=2), name, marks=pytest.mark.slow) for name in ("1f1b", "interleaved", "zb_h1")),
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True])
def test_pipelines(mesh: Mesh, schedule: str, tied: bool) -> None:
    """`run_train` knows its last backward: nothing starts before it, and everything before the loss is reported."""
    model = pipeline_models.make(tied=tied)
    orders = []

    def use(overlap: bool) -> dict[str, torch.Tensor]:
        def train(pipeline: nxd.NxDPPModel) -> dict[str, torch.Tensor]:
            optimizer = NeuronZero1Optimizer(
                pipeline.local_parameters(), torch.optim.AdamW, lr=0.1, overlap=overlap, **SMALL
            )
            pieces = pipeline_models.cut(pipeline_models.batch(16), 4)
            for step in range(2):
                optimizer.zero_grad()
                with comm.record(waits=True) as calls:
                    with pipeline.no_sync():
                        pipeline.run_train(**pieces[2 * step])
                    assert all("reduce_scatter" not in call.verb for call in calls)
                    pipeline.run_train(**pieces[2 * step + 1])
                verbs = [call.verb for call in calls]
                if overlap:
                    first = verbs.index("reduce_scatter")
                    assert not {"send", "recv"} & {*verbs[first:]} and "wait:reduce_scatter" not in verbs
                    orders.append(verbs.count("reduce_scatter"))
                optimizer.step()
            return {name: param.detach().clone() for name, param in pipeline.local_named_parameters()}

        chunks = {"virtual_pipeline_size": 2} if schedule == "interleaved" else {}
        return pipeline_models.on_ranks(  # type: ignore[return-value]
            mesh,
            model,
            train,
            num_microbatches=2,
            output_loss_value_spec=True,
            use_zero1_optimizer=True,
            schedule=schedule,
            **chunks,
        )

    expected, found = use(False), use(True)
    assert orders and min(orders) > 1
    for one, other in zip(expected, found):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


# --- the type checker ------------------------------------------------------------------------------------------------


@pytest.fixture
def overlap_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """For programs of other tests, which do not name it."""
    monkeypatch.setitem(NeuronZero1Optimizer.__init__.__kwdefaults__, "overlap", True)


@pytest.mark.usefixtures("overlap_by_default")
@pytest.mark.parametrize("case", [Case(dp=2, optimizer="zero1"), Case(tp=2, dp=2, optimizer="zero1")], ids=str)
def test_a_llama_computes_what_one_process_does(case: Case) -> None:
    one_step(replace(case, sequence_parallel=case.tp > 1))


@pytest.mark.slow
@pytest.mark.usefixtures("overlap_by_default")
@pytest.mark.parametrize(
    "name",
    [
        "start_reduce_scatter:comm.reduce_scatter#1",
        pytest.param("start_all_gather:comm.all_gather#1", marks=pytest.mark.full),
    ],
)
def test_a_check_accepts_it_and_sees_what_is_dropped_or_doubled(name: str) -> None:
    program = mutants.PROGRAMS[mutants.PROGRAM_OF[name]]
    assert not program.check().problems
    for edit in mutants.some(mutants.edits_at(name)):
        assert mutants.checked.__wrapped__(name, edit).kind, edit.name


@pytest.mark.slow
@pytest.mark.usefixtures("overlap_by_default")
@pytest.mark.parametrize("site", ["start_reduce_scatter:comm.reduce_scatter#1", "start_all_gather:comm.all_gather#1"])
def test_values_show_what_is_dropped_doubled_or_scaled(site: str) -> None:
    for mutation in MUTATIONS:
        with mutate(find_sites()[site], mutation) as hits, pytest.raises(AssertionError):
            one_step(Case(dp=2, optimizer="zero1"))
        assert hits


# --- processes -------------------------------------------------------------------------------------------------------


def _on_processes() -> dict[str, torch.Tensor]:
    """Both sides of the size at which a tensor travels alone on gloo."""
    results: dict[bool, dict[str, torch.Tensor]] = {}
    for overlap in (False, True):
        generator = torch.Generator().manual_seed(0)
        model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(3)))
        for param in model.parameters():
            nn.init.normal_(param, std=0.1, generator=generator)
        optimizer = NeuronZero1Optimizer(
            model.parameters(), torch.optim.AdamW, lr=1e-2, overlap=overlap, bucket_cap_mb_reduce_scatter=0.1
        )
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(2, 200, generator=torch.Generator().manual_seed(10 * step + comm.rank("dp")))
            model(x).square().sum().backward()
            optimizer.step()
        results[overlap] = weights_of(model)
        if overlap:  # a step whose gathers nobody waits for
            model(x).square().sum().backward()
            optimizer.step()
    assert all(torch.equal(value, results[True][name]) for name, value in results[False].items())
    return results[True]


@pytest.mark.process
@pytest.mark.parametrize("dp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_on_processes(dp: int) -> None:
    first, *others = processes(dp).run(_on_processes, mesh={})
    assert all(torch.equal(value, other[name]) for other in others for name, value in first.items())
