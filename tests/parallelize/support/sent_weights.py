"""Weights and states that go from the ranks that have them to the others, compared with what was sent."""

from __future__ import annotations

from typing import Any

import torch

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallelize.config import ComputeConfig
from neuronx_dist.parallelize.train.broadcast import broadcast_weights
from neuronx_dist.parallelize.train.optimizer import build_optimizer
from neuronx_dist.parallelize.train.parallel_module import Container
from neuronx_dist.parallelize.train.state_dicts import deduped_state_dict, load_deduped_state_dict
from tests.parallelize.support.training import ADAMW, close, loss_of, parallel, whole

__all__ = ["a_receiver_without_values", "a_sender_without_values", "deduped", "from_rank_0"]


def a_sender_without_values() -> None:
    """`broadcast_weights` of two ranks that send, of which one has a buffer without a value: refused on both."""

    def program() -> str:
        module = Container()
        module._buffers["table"] = torch.zeros(2)
        if comm.current().rank == 1:
            module.__dict__["_uninitialised"]["table"] = "table"
        try:
            broadcast_weights(module, 2)
        except RuntimeError as error:
            return str(error)
        return ""

    for text in comm.threads.run(Mesh(2), program):
        assert "buffer 'table' of rank 1, which sends its weights, has no value: make the module with" in text


def a_receiver_without_values() -> None:
    """`broadcast_weights` of rank 0 to a rank with a buffer without a value, which has the value afterwards."""

    def program() -> list[float]:
        module = Container()
        rank = comm.current().rank
        module._buffers["table"] = torch.full((2,), float(rank))
        if rank == 1:
            module.__dict__["_uninitialised"]["table"] = "table"
        broadcast_weights(module, 1)
        return [*module._buffers["table"].tolist(), len(module.__dict__["_uninitialised"])]

    assert comm.threads.run(Mesh(2), program) == [[0.0, 0.0, 0]] * 2


def from_rank_0() -> None:
    """`broadcast_weights` of a plain module."""

    def program() -> torch.Tensor:
        module = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(module.weight, 1.0 + comm.current().rank)
        torch.nn.init.constant_(module.bias, 1.0)
        broadcast_weights(module)
        return module.weight.detach()

    for weight in comm.threads.run(Mesh(2), program):
        close(weight, torch.ones(2, 2))


def deduped() -> None:
    """Deduped states of two units, loaded into modules and optimizers of other values."""
    config = ComputeConfig(1, 2)
    with parallel(config) as make:

        def program() -> tuple[Any, Any]:
            module = make()
            optimizer = build_optimizer(module, ADAMW)
            generator = torch.Generator().manual_seed(0)
            loss_of(
                module, {name: torch.randn(4, 8, generator=generator).double() for name in ("x", "target")}
            ).backward()
            optimizer.step()
            expected = whole(module), optimizer.state_dict()["state"]
            states = deduped_state_dict(module, optimizer)
            other = make()
            other_optimizer = build_optimizer(other, ADAMW)
            load_deduped_state_dict(other, states[0], other_optimizer, states[1])
            return (whole(other), other_optimizer.state_dict()["state"]), expected

        for found, expected in comm.threads.run(config.mesh(), program):
            close(found, expected)
