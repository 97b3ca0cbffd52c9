"""Refusals of the names of torch's DTensor: styles, `local_map`, merged and split meshes; as in `refusals.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from neuronx_dist.shard_tensor import (
    DeviceMesh,
    Partial,
    Replicate,
    Shard,
    ShardTensor,
    distribute_tensor,
    init_device_mesh,
)
from neuronx_dist.shard_tensor.experimental import local_map
from neuronx_dist.shard_tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

__all__ = ["NAME_REFUSALS"]


def _named() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("x",))


def _prepared(mesh: DeviceMesh, style: ParallelStyle, *inputs: Any) -> None:
    parallelize_module(nn.Identity(), mesh, style)(*inputs)


def _row(mesh: DeviceMesh, *shape: int, layout: Any = None) -> None:
    style = RowwiseParallel(output_layouts=layout)
    parallelize_module(nn.Linear(5, 2), mesh, style)(torch.ones(*shape))


def _rows(mesh: DeviceMesh, *sizes: int) -> Any:
    return distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], sizes=[sizes] if sizes else None)


_IN = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Shard(0))
_OUT = PrepareModuleOutput(output_layouts=(Shard(0), None), desired_output_layouts=(Shard(0), None))
_ALL: list[tuple[Callable[[DeviceMesh], Any], type[Exception], str]] = [
    (
        lambda mesh: ShardTensor.from_local(torch.ones(2), mesh, [Shard(0)], grad_placements=[Replicate()]),
        ValueError,
        r"grad_placements has Replicate\(\) on mesh dim 0, where the tensor is Shard",
    ),
    (lambda mesh: DeviceMesh("cpu", [[0, 1]])._flatten(), ValueError, "_flatten needs mesh_dim_names"),
    (
        lambda mesh: _named()._unflatten("x", (3,), ("a",)),
        ValueError,
        r"product is 2, .* sizes are \(3,\), names \('a',\)",
    ),
    (
        lambda mesh: parallelize_module(nn.Conv1d(2, 2, 1), mesh, ColwiseParallel()),
        NotImplementedError,
        "ColwiseParallel supports nn.Linear and nn.Embedding, not Conv1d: apply it",
    ),
    (
        lambda mesh: parallelize_module(nn.Linear(2, 2), DeviceMesh("cpu", [[0, 1]]), ColwiseParallel()),
        ValueError,
        r'has 2 dims: pass one of them, as mesh\["tp"\]',
    ),
    (
        lambda mesh: parallelize_module(nn.Linear(2, 2), mesh, [ColwiseParallel()]),
        TypeError,
        "must be a ParallelStyle or a dict of them, not a list",
    ),
    (
        lambda mesh: PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=Replicate()),
        ValueError,
        "input_layouts=.* and desired_input_layouts=.* must have the same length",
    ),
    (
        lambda mesh: _row(mesh, 2, 5, 3 - mesh.get_rank(), layout=Shard(1)),
        ValueError,
        r"has parts of sizes \[3, 2\], .* pass use_local_output=False",
    ),
    (lambda mesh: _row(mesh, 2, 4), ValueError, r"the local tensor has shape \(2, 4\), but its layout requires"),
    (lambda mesh: _prepared(mesh, _IN, 3), TypeError, "with the layout Shard.* must be a tensor, not a int"),
    (lambda mesh: _prepared(mesh, _IN), ValueError, "Identity has 0 inputs, but input_layouts is"),
    (lambda mesh: _prepared(mesh, _OUT, torch.ones(1)), ValueError, "Identity has 1 outputs, but output_layouts is"),
    (
        lambda mesh: local_map(torch.sin, [Shard(1)], ([Shard(1)],))(_rows(mesh)),
        ValueError,
        r"argument 0 is \[Shard\(dim=0\)\], and in_placements has",
    ),
    (
        lambda mesh: local_map(torch.sin, [Shard(0)], ([Shard(0)], None))(_rows(mesh)),
        ValueError,
        "in_placements has 2 entries for 1 arguments",
    ),
    (lambda mesh: local_map(torch.aminmax, [Partial()])(_rows(mesh)), ValueError, "2 results, but out_placements"),
    (lambda mesh: local_map(len, [Shard(0)])(_rows(mesh)), ValueError, "a result of type int has out_placements"),
    (
        lambda mesh: local_map(lambda part: torch.ones(2), [Shard(0)])(_rows(mesh, 3, 1)),
        ValueError,
        "the local tensor has shape .* but its layout requires",
    ),
]
NAME_REFUSALS = {words: (function, kind, words) for function, kind, words in _ALL}
