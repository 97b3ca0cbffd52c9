"""Running a sharded layer on ranks-as-threads and putting what the ranks hold together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import ShardSpec, spec_of

TOLERANCE = 1e-12
F64 = torch.float64
IN, OUT = 8, 16  # features of the linear layers under test


def tp_mesh(tp: int) -> Mesh:
    return Mesh(tp, tp=tp)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal values from a generator of their own: threads share torch's."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def load(layer: nn.Module, full: dict[str, torch.Tensor]) -> None:
    """Gives this rank's layer its pieces of whole parameters."""
    with torch.no_grad():
        for name, param in layer.named_parameters():
            spec = spec_of(param)
            param.copy_(spec.local_slice(full[name], comm.rank(spec.axis or "tp")))


def gradients(layer: nn.Module) -> dict[str, tuple[ShardSpec, torch.Tensor]]:
    return {
        name: (spec_of(param), param.grad.clone()) for name, param in layer.named_parameters() if param.grad is not None
    }


def whole_gradients(ranks: Sequence[dict[str, tuple[ShardSpec, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """The whole parameters' gradients: shards joined, partial ones summed, and replicated ones checked to be equal."""
    whole = {}
    for name, (spec, first) in ranks[0].items():
        pieces = [rank[name][1] for rank in ranks]
        if spec.is_sharded:
            whole[name] = spec.assemble(pieces)
        elif spec.sequence_parallel:
            whole[name] = torch.stack(pieces).sum(0)
        else:
            assert all(torch.equal(piece, first) for piece in pieces), f"{name} differs between ranks"
            whole[name] = first
    return whole


def close(found: Any, expected: torch.Tensor, what: object = "", tolerance: float = TOLERANCE) -> None:
    assert isinstance(found, torch.Tensor) and found.shape == expected.shape, (what, getattr(found, "shape", None))
    found, expected = found.detach(), expected.detach()
    error = float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
    assert error <= tolerance, f"{what}: relative error {error:.2e}"


def linear_reference(
    x: torch.Tensor, full: dict[str, torch.Tensor], g: torch.Tensor, bias: bool = True
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Output, input gradient and parameter gradients of the unsharded linear layer."""
    x = x.clone().requires_grad_()
    weight = full["weight"].clone().requires_grad_()
    b = full["bias"].clone().requires_grad_() if bias else None
    out = F.linear(x, weight, b)
    out.backward(g)
    grads = {"weight": weight.grad} | ({"bias": b.grad} if bias else {})
    return out.detach(), x.grad, grads


def full_parameters(out: int = OUT, inp: int = IN, seed: int = 0) -> dict[str, torch.Tensor]:
    return {"weight": draw(out, inp, seed=seed), "bias": draw(out, seed=seed + 1)}


def split_features(x: torch.Tensor, stride: int, tp: int, rank: int) -> torch.Tensor:
    """This rank's part of the last dim."""
    return ShardSpec("tp", x.dim() - 1, stride, tp, tuple(x.shape)).local_slice(x, rank)


def join_features(pieces: Sequence[torch.Tensor], stride: int) -> torch.Tensor:
    shape = list(pieces[0].shape)
    shape[-1] *= len(pieces)
    return ShardSpec("tp", len(shape) - 1, stride, len(pieces), tuple(shape)).assemble(pieces)
