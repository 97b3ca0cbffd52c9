"""`no_sync`: gradients of several backwards are reduced once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import grads
from tests.support.nxd_order import Block
from tests.support.pipeline_models import batch, cut, error, make, on_ranks, reference

CALLS = 3


def rows(call: int, data_rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * call + data_rank)
    return torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)


def block() -> nn.Module:
    with torch.device("meta"):
        model = Block()
    return nxd.materialize(model, seed=1)


def shard(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(comm.size("tp"), 1)[comm.rank("tp")]


@pytest.mark.parametrize("mesh", [Mesh(1), Mesh(2), Mesh(2, tp=2), Mesh(4, tp=2)], ids=str)
def test_a_model_without_a_pipeline(mesh: Mesh) -> None:
    """A loop whose step reduces, unchanged in the context: the sum of all calls, with the collectives of one."""

    def train(calls: int) -> tuple[nn.Module, list[Any]]:
        model = block()
        reductions = []

        def step(call: int) -> None:
            model(shard(rows(call, comm.rank("dp")))).square().sum().backward()
            with comm.record() as collectives:
                grads.reduce_gradients(model)
            reductions.append(len(collectives))

        with nxd.no_sync(model):
            for call in range(calls - 1):
                step(call)
        step(calls - 1)
        norm = grads.clip_grad_norm(model.parameters(), 1.0)
        return model, [norm, reductions]

    with comm.as_rank(Mesh(1), 0):
        alone = block()
        for data_rank in range(mesh.dp):
            for call in range(CALLS):
                (alone(rows(call, data_rank)).square().sum() / mesh.dp).backward()
        expected = nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
    for model, (norm, reductions) in comm.threads.run(mesh, train, CALLS):
        assert error(norm, expected) < 1e-12
        assert reductions[:-1] == [0] * (CALLS - 1) and (reductions[-1] > 0) == (mesh.world_size > 1)
        assert all(
            error(p.grad, alone.get_parameter(name).grad) < 1e-12
            for name, p in model.named_parameters()
            if p.shape == alone.get_parameter(name).shape
        )
    (_, (_, once)), *_ = comm.threads.run(mesh, train, 1)
    assert once[-1] == reductions[-1]


@pytest.mark.each_value
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("options", [{}, {"use_zero1_optimizer": True}], ids=str)
def test_calls_of_run_train(options: dict[str, Any], tied: bool) -> None:
    model, mesh = make(tied=tied), Mesh(4, pp=2)
    pieces = cut(batch(24), 2 * CALLS)

    def use(pipeline: nxd.NxDPPModel) -> Any:
        losses, counts = [], []
        for call in range(CALLS):
            with comm.record() as collectives:
                if call < CALLS - 1:
                    with pipeline.no_sync():
                        losses.append(pipeline.run_train(**pieces[CALLS * comm.rank("dp") + call]))
                else:
                    losses.append(pipeline.run_train(**pieces[CALLS * comm.rank("dp") + call]))
            counts.append(sum(collective.verb == "all_reduce" for collective in collectives))
        if options:
            grads.bucket_allreduce_gradients([p.grad for p in pipeline.local_parameters()])
        return losses, counts, {name: p.grad for name, p in pipeline.local_named_parameters()}

    results = on_ranks(mesh, model, use, num_microbatches=2, output_loss_value_spec=True, **options)
    expected, whole = reference(model, batch(24), 2 * CALLS)
    for _, counts, local in results:
        assert counts == [0, 0, tied + (not options)]
        assert all(error(grad / CALLS, whole[name]) < 1e-12 for name, grad in local.items())
    last = [loss for losses, _, _ in results if losses[0] is not None for loss in losses]
    assert error(torch.stack(last).mean(), expected) < 1e-12


def test_it_is_of_one_model_and_ends_with_the_context() -> None:
    def rank_main() -> None:
        model, other = nn.Linear(2, 2), nn.Linear(2, 2)
        with pytest.raises(ValueError, match="stop"), nxd.no_sync(model):
            with nxd.no_sync(model):
                pass
            for net in (model, other):
                net.weight.grad = torch.full((2, 2), 1.0 + comm.rank("dp"))
                grads.reduce_gradients(net)
            raise ValueError("stop")
        assert torch.equal(model.weight.grad, torch.full((2, 2), 1.0 + comm.rank("dp")))
        assert torch.equal(other.weight.grad, torch.full((2, 2), 1.5))
        grads.reduce_gradients(model)
        assert torch.equal(model.weight.grad, other.weight.grad)
        copied = copy.deepcopy(model)
        with nxd.no_sync(model):
            copied.weight.grad = torch.full((2, 2), 1.0 + comm.rank("dp"))
            grads.reduce_gradients(copied)
        assert torch.equal(copied.weight.grad, other.weight.grad)

    comm.threads.run(Mesh(2), rank_main)
