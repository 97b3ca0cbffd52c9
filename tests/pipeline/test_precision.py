"""bf16 models and autocast: a pipeline computes the bits of one process that runs the microbatches in turn."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline import NxDPPModel
from tests.support.pipeline_models import Block, batch, cut, make

pytestmark = pytest.mark.slow  # together more than the fast tier has room for

MICROBATCHES = 2


def surroundings(autocast: bool) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()


@pytest.mark.each_pair
@pytest.mark.parametrize("dtype,autocast", [(torch.bfloat16, False), (torch.float32, True)])
@pytest.mark.parametrize("options", [{}, {"virtual_pipeline_size": 2}, {"schedule": "zb_h1"}], ids=str)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_it_is_bit_equal(dtype: torch.dtype, autocast: bool, options: dict[str, Any], checkpointed: bool) -> None:
    model = make().to(dtype)
    whole = copy.deepcopy(model)
    losses = []
    for piece in cut(batch(), MICROBATCHES):
        with surroundings(autocast):
            loss = whole(**piece)
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())

    def main() -> Any:
        pipeline = NxDPPModel(
            copy.deepcopy(model), Block, MICROBATCHES, output_loss_value_spec=True, auto_partition=True,
            broadcast_and_average_loss=True, **options,
        )  # fmt: skip
        if checkpointed:
            nxd.recompute(pipeline)
        with surroundings(autocast):
            loss = pipeline.run_train(**batch())
        return loss, {name: param.grad for name, param in pipeline.local_named_parameters()}

    for loss, grads in comm.threads.run(Mesh(2, pp=2), main):
        assert torch.equal(loss, torch.stack(losses).mean())
        for name, grad in grads.items():
            assert grad.dtype == dtype and torch.equal(grad, whole.get_parameter(name).grad), name


def test_autocast_that_is_switched_is_recorded_anew() -> None:
    model = make().float()

    def main() -> Any:
        pipeline = NxDPPModel(
            copy.deepcopy(model), Block, output_loss_value_spec=True, auto_partition=True,
            broadcast_and_average_loss=True,
        )  # fmt: skip
        losses = []
        for autocast in (False, True, False, True):
            with surroundings(autocast):
                losses.append(pipeline.run_train(**batch()))
        return losses, len(pipeline._programs)

    expected = []
    for autocast in (False, True):
        with surroundings(autocast):
            expected.append(model(**batch()).detach())
    assert expected[0] != expected[1]
    for losses, programs in comm.threads.run(Mesh(2, pp=2), main):
        assert losses == expected * 2 and programs == 2


def test_accumulation_in_fp32_under_zero1() -> None:
    """Gradients of a bf16 model over two calls and two data-parallel ranks, added in `main_grad`."""
    model = make().to(torch.bfloat16)
    total: dict[str, Any] = dict.fromkeys([name for name, _ in model.named_parameters()], 0)
    whole = copy.deepcopy(model)
    for piece in cut(batch(), 8):
        whole.zero_grad()
        (whole(**piece) / 2).backward()
        for name, param in whole.named_parameters():
            total[name] = total[name] + param.grad.float() / 2
    expected = torch.stack([grad.norm() for grad in total.values()]).norm()

    def main() -> Any:
        pipeline = NxDPPModel(
            copy.deepcopy(model), Block, 2, output_loss_value_spec=True, auto_partition=True, use_zero1_optimizer=True
        )
        optimizer = nxd.NeuronZero1Optimizer(
            pipeline.local_parameters(), torch.optim.SGD, lr=0.1, use_grad_acc_hook=True, max_norm=float("inf")
        )
        pieces = cut(batch(), 4)
        with pipeline.no_sync():
            pipeline.run_train(**pieces[2 * comm.rank("dp")])
        pipeline.run_train(**pieces[2 * comm.rank("dp") + 1])
        optimizer.step()
        return optimizer.grad_norm

    for norm in comm.threads.run(Mesh(4, pp=2), main):
        assert abs(norm / expected - 1) < 1e-6
