"""Checkpoints serve both halves of a backward; outside of such forwards torch's own are as they were."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils import checkpoint as torch_checkpoint

from neuronx_dist.pipeline.run.halves import divide
from neuronx_dist.pipeline.run.recomputation import seen_checkpoints
from tests.support.counting import Storages

NAMES = ("_checkpoint_hook", "CheckpointFunction")


def functions_of_torch() -> list[Any]:
    return [getattr(torch_checkpoint, name) for name in NAMES]


def test_torch_is_as_it_was_afterwards() -> None:
    """After the last of several forwards, also if it raises."""
    before = functions_of_torch()
    with seen_checkpoints():
        with pytest.raises(ValueError, match="no"), seen_checkpoints():
            raise ValueError("no")
        assert all(now is not then for now, then in zip(functions_of_torch(), before))
    assert functions_of_torch() == before


def test_what_others_put_in_place_of_torchs_own_is_used_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    hook: Any = torch_checkpoint._checkpoint_hook  # type: ignore[attr-defined]
    function: Any = torch_checkpoint.CheckpointFunction
    used: list[str] = []

    class Hook(hook):  # type: ignore[misc]
        def __init__(self, frame: Any) -> None:
            used.append("hook")
            super().__init__(frame)

    class Function(function):  # type: ignore[misc]
        @classmethod
        def apply(cls, *args: Any) -> Any:
            used.append("function")
            return function.apply(*args)

    monkeypatch.setattr(torch_checkpoint, "_checkpoint_hook", Hook)
    monkeypatch.setattr(torch_checkpoint, "CheckpointFunction", Function)
    x = torch.ones(2, requires_grad=True)
    with seen_checkpoints(), seen_checkpoints() as seen:
        torch_checkpoint.checkpoint(torch.exp, x, use_reentrant=False)
        thread = threading.Thread(
            target=torch_checkpoint.checkpoint, args=(torch.exp, x), kwargs={"use_reentrant": True}
        )
        thread.start()
        thread.join()
    assert used == ["hook", "function"] and seen.any
    assert functions_of_torch() == [Hook, Function]


def test_other_threads_are_left_alone() -> None:
    """Checkpoints of other threads recompute for each backward, and reentrant ones stay reentrant, in the meantime."""
    layer = nn.Linear(3, 3)
    names: list[str] = []

    def other() -> None:
        for reentrant in (False, True):
            x = torch.ones(2, 3, requires_grad=True)
            y = torch_checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
            names.append(type(y.grad_fn).__name__)
            y.sum().backward()

    with seen_checkpoints() as seen:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert names == ["AddmmBackward0", "CheckpointFunctionBackward"] and not seen.any


def test_between_the_halves_the_inputs_of_layers_are_kept_and_nothing_else() -> None:
    """And the gradients that arrived at the layers; of what was recomputed, what the activation function saved goes."""
    layers = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 3)]).double()

    def forward(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layers[1](F.gelu(layers[0](x)))
        return result

    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    storages = Storages()
    with storages:
        with seen_checkpoints() as seen:
            y = torch_checkpoint.checkpoint(forward, x, use_reentrant=False)
        assert seen.any
        roots, grad = [get_gradient_edge(y)], torch.ones_like(y)
        del y
        for leaf in (x, grad, *layers.parameters()):
            storages.forget(leaf)
        assert storages.alive() == 0
        grads, half = divide(roots, [grad], [get_gradient_edge(x)], recomputes=seen.any)
        del roots, grads
        for leaf in (x, grad, *layers.parameters()):
            storages.forget(leaf)
        assert storages.alive() == 8 * (2 * 5 + 2 * 5)  # the second layer's input, the first one's gradient
        half.run()
    assert all(param.grad is not None for param in layers.parameters())
