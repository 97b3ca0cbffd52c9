"""Random streams as the replayed ranks use them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import neuronx_dist as nxd
from neuronx_dist.spmd.random import checkpoint, streams


def masks(seed: int, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Dropout from the default stream, twice from the tensor-parallel one, and from the default one again."""
    nxd.model_parallel_manual_seed(seed)
    found = {"default": F.dropout(x, 0.5)}
    for name in ("first", "second"):
        with streams().fork():
            found[name] = F.dropout(x, 0.5)
    found["default again"] = F.dropout(x, 0.5)
    nxd.model_parallel_manual_seed(seed)
    with streams().fork():
        found["first, repeated"] = F.dropout(x, 0.5)
    return found


def recomputed(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients with and without activation checkpointing, of functions that draw from both streams."""

    def function(leaf: torch.Tensor) -> torch.Tensor:
        with streams().fork():
            inner = F.dropout(leaf.sin(), 0.5)
        return F.dropout(inner * leaf, 0.5).square()

    found = {}
    for name, call in (("plain", function), ("checkpointed", lambda leaf: checkpoint(function, leaf))):
        nxd.model_parallel_manual_seed(3)
        leaf = x.detach().clone().requires_grad_()
        call(leaf).sum().backward()
        found[name] = leaf.grad
        found[name + ", next"] = F.dropout(x, 0.5)
    return found


# --- on one device ---


def states() -> dict[str, bool]:
    """Streams put back to where they were, over steps and in the middle of one; seeds of everything."""
    import random as pythons

    import numpy as np

    from neuronx_dist.comm.launch import end_step
    from neuronx_dist.parallel_layers import random

    device = "xla:0"

    def draw() -> list[float]:
        drawn = torch.rand(4, device=device)
        with random.get_xla_rng_tracker().fork():
            return [*drawn.tolist(), *torch.rand(4, device=device).tolist()]

    def drawn_by_all() -> tuple[object, ...]:
        return (*draw(), pythons.random(), float(np.random.rand()), float(torch.rand(())))

    found = {}
    random.model_parallel_xla_manual_seed(11)
    for _ in range(3):  # by sync torch_xla's state becomes one of 64 bits
        draw()
        end_step()
    saved = (random.get_rng_state(), random.get_xla_rng_tracker().get_states())
    first = draw()
    end_step()
    found["goes on"] = draw() != first
    random.set_rng_state(saved[0])
    random.get_xla_rng_tracker().set_states(saved[1])
    found["put back"] = draw() == first
    random.set_random_seed(12)
    everything = drawn_by_all()
    found["seeded anew, other numbers"] = drawn_by_all() != everything
    random.set_random_seed(12)
    found["seeded alike"] = drawn_by_all() == everything
    found["all bits"] = True
    generator = nxd.comm.current().backend.generator
    assert generator is not None
    for state in (2**64 - 1, 2**63, 2**63 - 1, 0):
        generator.set_state(torch.tensor([state - 2**64 if state >= 2**63 else state]))
        before = generator.get_state()
        numbers = torch.rand(4, device=device).tolist()
        generator.set_state(before)
        found["all bits"] &= torch.rand(4, device=device).tolist() == numbers
    try:
        random.set_rng_state([torch.get_rng_state()])
    except ValueError as error:
        found["of a CPU"] = "a device other than XLA cannot be set on an XLA device" in str(error)
    return found
