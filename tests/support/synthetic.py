"""A model that is only parameters and gradients: sharded, replicated, sequence-parallel, tied, and of awkward sizes.

Each rank gets its pieces of gradients that are known as a whole, so that one process can say what must come out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.weights.shard_spec import ShardSpec, set_spec


@dataclass(frozen=True)
class Layout:
    shape: tuple[int, ...]
    dim: int | None = None  # sharded over tp
    sequence_parallel: bool = False
    tied: bool = False  # held by the first and the last stage


LAYOUTS = {
    "embedding": Layout((8, 3), dim=0, tied=True),
    "norm": Layout((5,), sequence_parallel=True),
    "column": Layout((8, 5), dim=0),
    "row": Layout((3, 8), dim=1),
    "row_bias": Layout((3,), sequence_parallel=True),
    "scalar": Layout(()),
    "one": Layout((1, 7)),
    "norm_last": Layout((6,), sequence_parallel=True),
}
NAMES = list(LAYOUTS)


def stages(name: str, pp: int) -> tuple[int, ...]:
    """The stages that hold a parameter, the one that owns it first."""
    if LAYOUTS[name].tied and pp > 1:
        return (0, pp - 1)
    return (NAMES.index(name) * pp // len(NAMES),)


def draw(*key: int | str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Normal values that depend on the key only, whatever the thread."""
    number = 0
    for part in key:
        number = (number * 1000003 + (NAMES.index(part) + 11 if isinstance(part, str) else part + 7)) % (2**31)
    return torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64).to(dtype)


def weight(name: str, dtype: torch.dtype) -> torch.Tensor:
    return draw(name, -1, shape=LAYOUTS[name].shape, dtype=dtype)


def whole_gradient(name: str, step: int, data_rank: int, dtype: torch.dtype) -> torch.Tensor:
    return draw(name, step, data_rank, shape=LAYOUTS[name].shape, dtype=dtype)


def mean_gradient(name: str, step: int, mesh: Mesh, dtype: torch.dtype) -> torch.Tensor:
    """Returns the gradient after all reductions."""
    num = mesh.dp * mesh.cp
    return sum(whole_gradient(name, step, data_rank, dtype) for data_rank in range(num)) / num


def share(total: torch.Tensor, index: int, count: int, *key: int | str) -> torch.Tensor:
    """Piece `index` of `count` that add up to `total`."""
    pieces = [draw(*key, i, shape=tuple(total.shape), dtype=total.dtype) for i in range(count - 1)]
    return pieces[index] if index < count - 1 else total - sum(pieces)


class Model(nn.Module):
    """The parameters of the current rank: a `PartialModel` that has nothing of other ranks."""

    partitioned = tied_weights_synced = True

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.mesh = comm.current().mesh
        for name, layout in LAYOUTS.items():
            holders = stages(name, self.mesh.pp)
            if comm.rank("pp") not in holders:
                continue
            value = weight(name, dtype)
            if layout.dim is not None:
                value = value.chunk(self.mesh.tp, layout.dim)[comm.rank("tp")]
            setattr(self, name, nn.Parameter(value.contiguous().clone()))
            set_spec(
                self,
                name,
                ShardSpec(
                    axis=None if layout.dim is None else "tp",
                    dim=layout.dim,
                    num_partitions=1 if layout.dim is None else self.mesh.tp,
                    full_shape=layout.shape,
                    sequence_parallel=layout.sequence_parallel,
                ),
            )
            if comm.rank("pp") != holders[0]:
                getattr(self, name).shared = True
        ends = [sorted({group[0], group[-1]}) for group in self.mesh.groups("pp")]
        self._tied = comm.new_group(ends, "tied") if self.mesh.pp > 1 else None

    @property
    def original_module(self) -> nn.Module:
        return self

    def is_local(self, name: str) -> bool:
        return True

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return self.named_modules()

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.named_parameters()

    def tied_groups(self) -> list[tuple[nn.Parameter, comm.Communicator]]:
        if self._tied is None:
            return []
        return [(param, self._tied) for name, param in self.named_parameters() if LAYOUTS[name].tied]

    def set_gradients(self, step: int) -> None:
        """Sets gradients as backward leaves them: local to the data, partial over tp or over stages where they are."""
        for name, param in self.named_parameters():
            layout = LAYOUTS[name]
            grad = whole_gradient(name, step, comm.rank(("dp", "cp")), param.dtype)
            holders = stages(name, self.mesh.pp)
            if len(holders) > 1:
                grad = share(grad, holders.index(comm.rank("pp")), len(holders), name, step, 500)
            if layout.dim is not None:
                grad = grad.chunk(self.mesh.tp, layout.dim)[comm.rank("tp")].contiguous()
            if layout.sequence_parallel:
                grad = share(grad, comm.rank("tp"), self.mesh.tp, name, step, 900)
            param.grad = grad.clone()


def assemble(mesh: Mesh, results: list[dict[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors from every rank's, after checking that ranks which hold the same piece hold the same bits."""
    for name, layout in LAYOUTS.items():
        pieces: list[torch.Tensor] = []
        for tp_rank in range(mesh.tp):
            copies = [
                result[name]
                for rank, result in enumerate(results)
                if name in result and (layout.dim is None or mesh.coordinate("tp", rank) == tp_rank)
            ]
            assert copies and all(torch.equal(copy, copies[0]) for copy in copies), f"{name}: ranks disagree"
            pieces.append(copies[0])
        yield name, pieces[0] if layout.dim is None else torch.cat(pieces, layout.dim)


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


# Every axis alone, then together; B3 of NxD is cp without ZeRO-1.
MESHES = [
    Mesh(1), Mesh(2), Mesh(4), Mesh(2, tp=2), Mesh(4, tp=4), Mesh(2, pp=2), Mesh(4, pp=4), Mesh(2, cp=2), Mesh(4, cp=2),
    Mesh(4, tp=2), Mesh(4, pp=2), Mesh(8, tp=2, pp=2), Mesh(8, tp=2, cp=2), Mesh(8, pp=2, cp=2), Mesh(8, tp=4),
    Mesh(8, pp=4),
]  # fmt: skip
