"""torch.linalg.lstsq: systems of a batch, and columns of right-hand sides, may be sharded; matrices are used whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..handlers import FUNCTIONS, UNHANDLED, sharded
from ..labels import Labels, New, inside
from ..placements import Placement, Replicate, Shard
from ..spec import ShardTensorSpec, make_spec
from ..tensor import ShardTensor, wrap
from ..windows.local_windows import nonempty

__all__: list[str] = []


def _systems(a: torch.Size, b: torch.Size) -> Labels:
    """Returns the labels of `a`, [*batch, m, n], and `b`, [*batch, m, k]; the solution is [*batch, n, k]."""
    batch = tuple(range(len(a) - 2))
    return Labels([(*batch, "m", "n"), (*batch, "m", "k")], (*batch, New(a[-1]), "k"), whole=frozenset("mn"))


def _wrapped(x: torch.Tensor, spec: ShardTensorSpec, dims: tuple[int, ...]) -> ShardTensor:
    """Wraps a result whose first dims are these dims of the solution, sharded as the solution is, and others whole."""
    placements: list[Placement] = [
        Shard(dims.index(p.dim)) if isinstance(p, Shard) and p.dim in dims else Replicate() for p in spec.placements
    ]
    sizes = [size if isinstance(p, Shard) else None for p, size in zip(placements, spec.sizes)]
    shape = [*(spec.shape[dim] for dim in dims), *x.shape[len(dims) :]]
    return wrap(x, make_spec(spec.mesh, placements, shape, sizes))


@sharded(torch.linalg.lstsq)
def lstsq(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Solves this rank's systems, for its columns.

    Where a driver computes ranks, there are residuals if all matrices have full rank: systems of all ranks decide.
    """

    def call(A: Any, B: Any, rcond: Any = None, *, driver: str | None = None) -> Any:
        is_vector = B.dim() == 1 or (B.dim() == A.dim() - 1 and B.shape == A.shape[:-1])
        right = B.unsqueeze(-1) if is_vector else B
        if A.dim() < 2 or right.shape[:-1] != A.shape[:-1]:  # a batch is broadcast, or the shapes do not fit
            return FUNCTIONS[UNHANDLED](func, types, args, kwargs)
        driver = driver or ("gelsy" if A.device.type == "cpu" else "gels")
        (a, b), spec = inside(_systems, (A, right))
        batch = tuple(range(A.dim() - 2))
        x, rests, ranks, values = torch.linalg.lstsq(a, nonempty(b, len(batch) + 1), rcond, driver=driver)
        solution: Any = wrap(x.narrow(-1, 0, b.shape[-1]), spec)
        rank: Any = _wrapped(ranks, spec, () if driver == "gels" else batch)
        m, n = A.shape[-2:]
        if m > n and driver != "gelsy" and (driver == "gels" or bool((rank == n).all())):
            residuals = _wrapped(rests.narrow(-1, 0, b.shape[-1]), spec, (*batch, len(batch) + 1))
        else:
            residuals = _wrapped(rests.reshape(-1)[:0], spec, ())
        values = _wrapped(values, spec, batch if driver in ("gelsd", "gelss") else ())
        solution = solution.squeeze(-1) if is_vector else solution
        named: Any = torch.return_types  # its annotations have no linalg_lstsq
        return named.linalg_lstsq((solution, residuals, rank, values))

    return call(*args, **kwargs)
