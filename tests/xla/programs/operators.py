"""The function that the replayed ranks run: in a separate module, without pytest."""

from __future__ import annotations

import torch

from neuronx_dist import comm
from tests.support.conformance import CONFORMANCE


def every_operator(x: list[torch.Tensor], g: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Result and gradient of every row of the conformance table, contiguous and strided."""
    found = []
    for (_, operator, src, dst, options, *_), given, grad in zip(CONFORMANCE, x, g):
        for strided in (False, True):
            leaf = given.detach().clone().requires_grad_()
            value = torch.stack([leaf, leaf], -1)[..., 0] if strided else leaf
            cotangent = torch.stack([grad, grad], -1)[..., 0] if strided else grad
            result = operator(value, "tp", src=src, dst=dst, **options)
            result.backward(cotangent)
            found.append({"y": result.detach(), "gx": leaf.grad})
    return found


def every_verb(x: torch.Tensor, scalar: torch.Tensor, half: torch.Tensor, count: torch.Tensor, flag: torch.Tensor):
    """Verbs that no typed operator uses, dtypes, scalars, `out=`, and groups of merged axes."""
    size = comm.size("tp")
    poisoned = torch.where(torch.as_tensor(comm.communicator("tp").coordinate(x) == 1), x, torch.nan)
    held = x.clone()
    comm.all_reduce(held, "tp", out=held)
    aside = torch.empty(x.shape[0], x.shape[1] * size, device=x.device)
    comm.all_gather(x, "tp", dim=1, out=aside)
    return {
        "max": comm.all_reduce(x, "tp", op="max"),
        "min": comm.all_reduce(x, "tp", op="min"),
        "scalar": comm.all_reduce(scalar, ("dp", "tp")),
        "int": comm.all_reduce(count, "dp"),
        "half": comm.all_reduce(half, "tp"),
        "half in fp32": comm.all_reduce(half, "tp", reduce_dtype=torch.float32),
        "half scattered in fp32": comm.reduce_scatter(half, "tp", dim=1, reduce_dtype=torch.float32),
        "half gathered": comm.all_gather(half, "tp", dim=0),
        "in place": held,
        "gathered aside": aside,
        "broadcast": comm.broadcast(poisoned, "tp", src=1),
        "broadcast flag": comm.broadcast(flag, "dp", src=0),
        "shifted": comm.permute(x, "tp", [(i, (i + 1) % size) for i in range(size)]),
        "half shifted": comm.permute(x, "tp", [(0, 1)]),
        "transposed": comm.all_to_all(x, "tp", split_dim=1, concat_dim=0),
        "column": comm.all_gather(x.t()[1:], "tp", dim=1),
        "asynchronous": comm.all_reduce(x, "dp", async_op=True).wait(),
    }


def after_a_nan(x: torch.Tensor, poison: torch.Tensor) -> list[torch.Tensor]:
    """A collective of inf and NaN, and others of every kind after it, which have nothing to do with it."""
    bad = comm.all_reduce(poison, "tp")
    bad_piece = comm.reduce_scatter(poison, "tp", dim=0)
    return [
        bad,
        bad_piece,
        comm.reduce_scatter(x, "tp", dim=0),
        comm.all_gather(x, "tp"),
        comm.all_to_all(x, "tp"),
        comm.all_reduce(x, "tp"),
        comm.permute(x, "tp", [(0, 1), (1, 0)]),
    ]
