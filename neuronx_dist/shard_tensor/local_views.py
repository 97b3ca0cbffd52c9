"""The local tensor of a ShardTensor for other code, by `to_local` and as torch's DTensor; it keeps its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import spmd
from ..spmd import I, R
from ..spmd.watching import active
from ..torch_internals.autograd import apply_without_transforms
from ..torch_internals.transforms import transforms_active
from .device_mesh import as_mesh
from .local_shapes import local_spec
from .moves.redistribute import redistributed
from .placements import Partial, Placement, Replicate
from .spec import ShardTensorSpec, make_spec

__all__ = ["dtensor_of", "graded", "local_of_dtensor", "local_view"]


class _ReadOnlyView(torch.autograd.Function):
    """Makes a view of a local tensor that torch refuses to modify in place: the wrapper's graph would not know."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor) -> torch.Tensor:
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


_read_only: Callable[..., torch.Tensor] = apply_without_transforms(_ReadOnlyView)


def local_view(local: torch.Tensor, spec: ShardTensorSpec, grad_placements: Sequence[Placement] | None) -> torch.Tensor:
    """Returns the local tensor of a layout for foreign code; `grad_placements` as in `ShardTensor.to_local`.

    Raises:
        ValueError: the gradient is of a layout that cannot be brought to that of the tensor without communication.
    """
    if spec.partial:
        local = local.clone()
    elif local.grad_fn is not None and torch.is_grad_enabled() and active() is None and not transforms_active():
        local = _read_only(local)
    if grad_placements is None:
        return local
    wanted = make_spec(spec.mesh, grad_placements, spec.shape, None)
    for m, (placement, grad) in enumerate(zip(spec.placements, wanted.placements)):
        if isinstance(placement, Replicate) and isinstance(grad, Partial):
            local = spmd.convert(local, spec.mesh.communicator(m), src=I, dst=R)
        elif placement != grad and not (isinstance(placement, Partial) and isinstance(grad, Replicate)):
            raise ValueError(
                f"to_local: grad_placements has {grad!r} on mesh dim {m}, where the tensor is {placement!r}: "
                "redistribute() the tensor to the gradient's placement first"
            )
    return local


def graded(local: torch.Tensor, spec: ShardTensorSpec, grad_placements: Sequence[Placement]) -> torch.Tensor:
    """Returns a local tensor as one of a layout (I where that is Replicate), whose gradient is of `grad_placements`.

    Raises:
        ValueError: the gradient is of a layout that cannot be brought to that of the tensor without communication.
    """
    wanted = make_spec(spec.mesh, grad_placements, spec.shape, None)
    for m, (placement, grad) in enumerate(zip(spec.placements, wanted.placements)):
        if isinstance(placement, Replicate) and isinstance(grad, Partial):
            local = spmd.reinterpret(local, spec.mesh.communicator(m), src=R, dst=I, expert_mode=True)
        elif placement != grad and not (isinstance(placement, Partial) and isinstance(grad, Replicate)):
            raise ValueError(
                f"from_local: grad_placements has {grad!r} on mesh dim {m}, where the tensor is {placement!r}: leave "
                "grad_placements out, and redistribute() the ShardTensor"
            )
    return local


def local_of_dtensor(x: DTensor) -> tuple[torch.Tensor, ShardTensorSpec]:
    """Returns the local tensor of a torch DTensor, and its layout.

    Raises:
        ValueError: mesh dims split a tensor dim in another order than theirs.
    """
    order: Sequence[Any] = getattr(x._spec, "shard_order", None) or ()  # torch 2.9 has no other order
    if any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in order):
        raise ValueError(
            f"from_dtensor: {x.placements} of shape {tuple(x.shape)} splits a dim over mesh dims in another order than "
            "theirs: redistribute() the DTensor to Replicate on one of them first"
        )
    mesh = as_mesh(x.device_mesh)
    local = x.to_local()
    spec = make_spec(mesh, x.placements, x.shape)
    if local.shape != spec.local_shape:
        spec = local_spec(local.shape, mesh, x.placements, "infer", x.shape)
    return local, spec


def dtensor_of(local: torch.Tensor, spec: ShardTensorSpec) -> Any:
    """Returns the tensor as a torch DTensor, in chunks."""
    return DTensor.from_local(
        redistributed(local, spec, make_spec(spec.mesh, spec.placements, spec.shape)),
        spec.mesh,
        spec.placements,
        run_check=False,
        shape=spec.shape,
        stride=torch.empty(spec.shape, device="meta").stride(),
    )
