"""The published package `spmd_types` run on the same programs: what it says of each step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import spmd_types as published
import torch
import torch.distributed as dist
from spmd_types.checker import typecheck
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from neuronx_dist.spmd.types import Shard
from tests.checking.types.soundness.program import BUILTINS, Program, Step, local_inputs


def _type(kind: Any) -> Any:
    if isinstance(kind, Shard):
        return published.S(kind.dim)
    return {"R": published.R, "I": published.I, "V": published.V, "P": published.P}[kind.letter]


def _operator(name: str) -> Any:
    def call(x: Any, axis: str, *, src: Any, dst: Any, **options: Any) -> Any:
        return getattr(published, name)(x, axis, src=_type(src), dst=_type(dst), **options)

    return call


_OPERATORS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "convert", "reinterpret")
NAMES = {**BUILTINS, "spmd": SimpleNamespace(**{name: _operator(name) for name in _OPERATORS})}


@contextmanager
def world(size: int) -> Iterator[Any]:
    """A process group of which this process is rank 0, and nobody else is there."""
    dist.init_process_group(backend="fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def judge(program: Program, more: Step | None, mesh: Any, local: bool) -> Iterator[tuple[Step, str, dict[str, str]]]:
    """Each step with the error that it is for the published package ("": none), and the types of all names after it.

    Ends at the first error. `more`: one step after the last one.
    """
    names: dict[str, Any] = dict(local_inputs(program, program.seed, 1)[0])
    for x in program.inputs:
        names[x.name].requires_grad_(x.grad)
    with published.set_current_mesh(mesh), typecheck(strict_mode="strict", local=local):
        for x in program.inputs:
            published.assert_type(names[x.name], {"tp": _type(x.claim.get("tp"))})
        for step in [*program.steps, *([more] if more is not None else [])]:
            error = ""
            try:
                exec(compile(step.text, "<program>", "exec"), NAMES, names)
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
            yield step, error, {} if error else types_of(names)
            if error:
                return


def types_of(names: dict[str, Any]) -> dict[str, str]:
    """Letters on tp."""
    found = {}
    for name, x in names.items():
        if isinstance(x, torch.Tensor):
            kind = published.maybe_get_axis_local_type(x, "tp")
            if kind is not None:
                found[name] = kind.name if hasattr(kind, "name") else str(kind)[-1]
    return found
