"""The same function on every rank, as threads and as one XLA program, and what they give beside each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.xla_replay import Replayed, replay

TOLERANCE = 2e-6  # ‖found - expected‖ / ‖expected‖, fp32
BF16_TOLERANCE = 4e-3  # one bit: sums of more than two depend on their order


def on_threads(function: Callable[..., Any], mesh: Mesh, arguments: Sequence[Sequence[Any]]) -> list[Any]:
    """`function(*arguments[rank])` on ranks that are threads; tensors copied, so that leaves collect no gradients."""

    def copied(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    def run() -> Any:
        return function(*pytree.tree_map_only(torch.Tensor, copied, arguments[comm.current().rank]))

    return threads.run(mesh, run)


def assert_close(found: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    """Two nestings of tensors: equal structure, shapes, dtypes; values up to a relative error (integers: equal)."""
    ours, spec = pytree.tree_flatten(found)
    theirs, expected_spec = pytree.tree_flatten(expected)
    assert spec == expected_spec
    names = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(expected)[0]]
    for name, a, b in zip(names, ours, theirs):
        assert a.shape == b.shape and a.dtype == b.dtype, (name, a.shape, b.shape, a.dtype, b.dtype)
        a, b = a.detach(), b.detach()
        if not a.is_floating_point() or tolerance == 0:
            assert torch.equal(a, b), (name, a, b)
            continue
        limit = max(tolerance, BF16_TOLERANCE) if a.dtype == torch.bfloat16 else tolerance
        error = float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))
        assert error <= limit, f"{name}: relative error {error:.1e}\n{a}\n{b}"


def same_as_threads(
    function: Callable[..., Any], mesh: Mesh, arguments: Sequence[Sequence[Any]], tolerance: float = TOLERANCE
) -> Replayed:
    """Asserts that every rank's outputs agree; one program for all ranks is part of replaying."""
    replayed = replay(function, mesh, arguments)
    for found, expected in zip(replayed.outputs, on_threads(function, mesh, arguments)):
        assert_close(found, expected, tolerance)
    return replayed


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + seed))
