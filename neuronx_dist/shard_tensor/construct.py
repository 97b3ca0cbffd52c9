"""Making ShardTensors: from a whole tensor, from a tensor of a single rank, and from sizes alone.

Random factories give the values of one process at any layout (`draws.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from .. import accelerator, comm
from ..torch_internals.operators import skip_in_compiler
from .device_mesh import DeviceMesh, as_mesh
from .draws import drawn, own_piece
from .local_views import graded
from .merged_mesh import number_in
from .moves.redistribute import steps
from .placements import Partial, Placement, Shard
from .spec import ShardTensorSpec, make_spec
from .tensor import ShardTensor, as_leaf, gradient_spec, local_of, wrap
from .typed import carried

__all__ = [
    "arange",
    "distribute_tensor",
    "empty",
    "empty_like",
    "full",
    "full_like",
    "linspace",
    "logspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "scatter_tensor",
    "shared_by_layers",
    "zeros",
    "zeros_like",
]


@skip_in_compiler
def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    sizes: Sequence[Sequence[int] | None] | None = None,
    src: int | None = 0,
    src_data_rank: int | None = 0,
) -> ShardTensor:
    """Distributes a tensor that all ranks have: a leaf of which each rank stores its part.

    Args:
        tensor: a leaf, of the same shape on all ranks; a meta tensor stays one, and nothing is communicated.
        device_mesh: None: that of the innermost `with mesh:`, else of the job (`current_mesh`).
        placements: None: Replicate everywhere.
        sizes: for each mesh dim the sizes of its shards, or None for chunks.
        src: the rank, by its index in `mesh.mesh.flatten()`, that sends each rank its part. None: all ranks have the
            same values, and nothing is sent.
        src_data_rank: DTensor's name of `src`: the same index along every mesh dim.

    Raises:
        RuntimeError: the tensor has a graph.
        ValueError: `src` is no rank of the mesh; and see `checked_placements` and `make_spec`.
    """
    if isinstance(tensor, ShardTensor):
        return tensor.redistribute(device_mesh, placements, sizes=sizes)
    if not tensor.is_leaf:
        raise RuntimeError(
            "distribute_tensor takes a leaf tensor; to preserve the autograd graph, use ShardTensor.from_local(x, "
            "mesh).redistribute(mesh, placements)"
        )
    mesh = as_mesh(device_mesh, tensor.device.type)
    if src_data_rank is None:
        src = None
    elif src_data_rank:
        src = sum(src_data_rank * prod(mesh.shape[m + 1 :]) for m in range(mesh.ndim))
    spec = make_spec(mesh, placements, tensor.shape, sizes)
    if spec.partial:
        raise ValueError(
            f"distribute_tensor: {list(spec.placements)} has a Partial: distribute with Replicate() instead, then "
            "redistribute() to Partial"
        )
    if src is not None and not 0 <= src < mesh.size():
        raise ValueError(
            f"distribute_tensor: src={src} is not one of the {mesh.size()} ranks of {mesh}, which count from 0"
        )
    if tensor.is_meta:
        local = torch.empty(spec.local_shape, dtype=tensor.dtype, device="meta")
    elif src is None:
        local = own_piece(tensor.detach(), spec).clone()
    else:
        local = _sent(tensor.detach(), spec, src, tensor.dtype, tensor.device)
    result = as_leaf(local, spec, tensor.requires_grad)
    carried(tensor, result._local)
    return result


@skip_in_compiler
def scatter_tensor(
    tensor: torch.Tensor | None,
    global_src: int,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    global_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    *,
    sizes: Sequence[Sequence[int] | None] | None = None,
) -> ShardTensor:
    """Distributes a tensor that one rank has: a leaf of which every rank receives its part only.

    Args:
        tensor: None on ranks other than `global_src`.
        global_src: the number in the job of the rank that has it.
        global_shape, dtype: of the tensor; None: the other ranks are told by `global_src`.
        sizes: for each mesh dim the sizes of its shards, or None for chunks.

    Raises:
        ValueError: `global_src` is no rank of the mesh, or has no tensor.
    """
    mesh = as_mesh(mesh)
    ranks = mesh.mesh.flatten().tolist()
    if global_src not in ranks:
        raise ValueError(f"scatter_tensor: global_src={global_src} is not one of the ranks {ranks} of {mesh}")
    src = ranks.index(global_src)
    is_source = mesh.get_rank() == global_src
    if global_shape is None or dtype is None:
        shape_and_dtype: Any = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        shape_and_dtype = _broadcast_object(shape_and_dtype, mesh, src)
        if shape_and_dtype is None:
            raise ValueError(
                f"scatter_tensor: tensor is None on rank {global_src}, which is global_src: pass the tensor on this "
                "rank"
            )
        global_shape, dtype = shape_and_dtype
    spec = make_spec(mesh, placements, global_shape, sizes)
    device = tensor.device if tensor is not None else torch.device(mesh.device_type)
    whole = None
    if is_source:
        assert tensor is not None
        whole = tensor.detach().to(dtype)
    return as_leaf(_sent(whole, spec, src, dtype, device), spec, requires_grad)


def shared_by_layers(x: ShardTensor) -> ShardTensor:
    """Returns `x` as Replicate for layers that shard their results: the gradients of all are reduced once, as a sum.

    Torch refuses to modify the result in place.
    """
    whole = x._spec.replicated()
    local = local_of(x)
    for step in steps(x._spec, whole, range(whole.mesh.ndim)):
        local = step(local)
    result = wrap(graded(local, whole, (Partial(),) * whole.mesh.ndim), whole)
    result._used = local
    return result


def _broadcast_object(obj: Any, mesh: DeviceMesh, src: int) -> Any:
    for m, index in enumerate(mesh.coordinate_of(src)):
        obj = comm.broadcast_object(obj, mesh.communicator(m), src=index)
    return obj


def _sent(
    whole: torch.Tensor | None, spec: ShardTensorSpec, src: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Returns this rank's part of the tensor on the rank with index `src` in `mesh.mesh.flatten()`.

    One mesh dim after the other: after each, the ranks that differ from `src` along the dims so far have their parts
    along these.
    """
    if spec.merged is not None:
        src, spec = number_in(spec.mesh, spec.groups, src), spec.merged
    mesh = spec.mesh
    coordinate, source = mesh.get_coordinate(), list(mesh.coordinate_of(src))
    if coordinate is None:
        return torch.empty(spec.local_shape, dtype=dtype, device=device)
    shape = list(spec.shape)
    part = whole if coordinate == source else None
    for m, placement in enumerate(spec.placements):
        group = mesh.communicator(m)
        takes_part = coordinate[m + 1 :] == source[m + 1 :]
        sizes = spec.sizes[m]
        if isinstance(placement, Shard):
            assert sizes is not None
            dim = placement.dim
            shape[dim] = sizes[coordinate[m]]
            if not takes_part:
                continue
            nothing = [torch.empty(0, dtype=dtype, device=device)] * len(sizes)
            sends, received = [*nothing], [*nothing]
            if coordinate[m] == source[m]:
                assert part is not None
                sends = list(part.split(list(sizes), dim))
                part, sends[coordinate[m]] = sends[coordinate[m]], nothing[0]
            else:
                part = received[source[m]] = torch.empty(shape, dtype=dtype, device=device)
            comm.exchange(sends, received, group)
        elif takes_part:
            buffer = torch.empty(shape, dtype=dtype, device=device) if part is None else part.contiguous()
            part = comm.broadcast(buffer, group, src=source[m])
    assert part is not None
    return part.clone(memory_format=torch.contiguous_format)


# --- factories


def _size(size: tuple[Any, ...]) -> torch.Size:
    return torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)


def _spec(
    shape: torch.Size,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    sizes: Sequence[Sequence[int] | None] | None,
) -> ShardTensorSpec:
    return make_spec(as_mesh(device_mesh), placements, shape, sizes)


def _leaf(
    make: Callable[[Sequence[int]], torch.Tensor],
    spec: ShardTensorSpec,
    requires_grad: bool,
    *,
    is_drawn: bool = False,
    generator: torch.Generator | None = None,
) -> ShardTensor:
    """Returns this rank's part of what `make` returns for a shape, which it draws by the generator, or fills."""
    local = drawn(make, spec, generator=generator) if is_drawn else make(spec.local_shape)
    return as_leaf(local, spec, requires_grad)


def _factory(function: Callable[..., torch.Tensor], *, is_drawn: bool = False) -> Callable[..., ShardTensor]:
    def factory(
        *size: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        sizes: Sequence[Sequence[int] | None] | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        **options: Any,
    ) -> ShardTensor:
        spec = _spec(_size(size), device_mesh, placements, sizes)
        make = partial(function, dtype=dtype, device=_device(spec.mesh), **options)
        return _leaf(make, spec, requires_grad, is_drawn=is_drawn, generator=options.get("generator"))

    factory.__name__ = factory.__qualname__ = function.__name__
    values = ", with the values of one process at any layout" if is_drawn else " of which each rank makes its part"
    factory.__doc__ = f"`torch.{function.__name__}`{values}."
    return factory


def _device(mesh: DeviceMesh) -> torch.device:
    return accelerator.current_device(mesh.device_type)


empty = _factory(torch.empty)
ones = _factory(torch.ones)
zeros = _factory(torch.zeros)
rand = _factory(torch.rand, is_drawn=True)
randn = _factory(torch.randn, is_drawn=True)


def full(
    size: Sequence[int],
    fill_value: float,
    *,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    sizes: Sequence[Sequence[int] | None] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> ShardTensor:
    """`torch.full`, of which each rank creates its part."""
    spec = _spec(torch.Size(size), device_mesh, placements, sizes)
    make = partial(torch.full, fill_value=fill_value, dtype=dtype, device=_device(spec.mesh))
    return _leaf(make, spec, requires_grad)


def randint(
    *bounds: int,
    size: Sequence[int],
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    sizes: Sequence[Sequence[int] | None] | None = None,
    dtype: torch.dtype | None = None,
) -> ShardTensor:
    """`torch.randint([low,] high, size=size)`, with the values of one process at any layout."""
    spec = _spec(torch.Size(size), device_mesh, placements, sizes)
    draw: Any = partial(torch.randint, *bounds, dtype=dtype, device=_device(spec.mesh))
    return wrap(drawn(lambda shape: draw(tuple(shape)), spec), spec)


def _in_order(make: Callable[..., torch.Tensor]) -> Callable[..., ShardTensor]:
    """A factory of values in order, of which each rank stores its part."""

    def factory(
        *arguments: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        sizes: Sequence[Sequence[int] | None] | None = None,
        requires_grad: bool = False,
        **options: Any,
    ) -> ShardTensor:
        mesh = as_mesh(device_mesh)
        whole = make(*arguments, **options, device=_device(mesh))
        spec = make_spec(mesh, placements, whole.shape, sizes)
        return as_leaf(own_piece(whole, spec).clone(), spec, requires_grad)

    factory.__name__ = factory.__qualname__ = make.__name__
    factory.__doc__ = f"`torch.{make.__name__}` in shards; the arguments are torch's."
    return factory


arange = _in_order(torch.arange)
linspace = _in_order(torch.linspace)
logspace = _in_order(torch.logspace)


def _like(make: Callable[..., torch.Tensor]) -> Callable[..., ShardTensor]:
    """A factory for the shape, and by default the dtype, of another tensor."""

    def factory(
        input: torch.Tensor,
        *arguments: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        sizes: Sequence[Sequence[int] | None] | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> ShardTensor:
        as_input = device_mesh is None and placements is None and sizes is None
        if isinstance(input, ShardTensor):
            device_mesh = device_mesh or input.device_mesh
        spec = _spec(input.shape, device_mesh, placements, sizes)
        if isinstance(input, ShardTensor) and as_input:
            spec = gradient_spec(input._spec)
        is_drawn = make in (torch.rand_like, torch.randn_like, torch.randint_like)

        def values(shape: Sequence[int]) -> torch.Tensor:
            blank = torch.empty(shape, dtype=input.dtype, device=_device(spec.mesh))
            return make(blank, *arguments, dtype=dtype)

        return _leaf(values, spec, requires_grad, is_drawn=is_drawn)

    factory.__name__ = factory.__qualname__ = make.__name__
    factory.__doc__ = (
        f"`torch.{make.__name__}` in the layout that is given: in that of `input`, if it is a ShardTensor and none is."
    )
    return factory


empty_like = _like(torch.empty_like)
full_like = _like(torch.full_like)
ones_like = _like(torch.ones_like)
rand_like = _like(torch.rand_like)
randint_like = _like(torch.randint_like)
randn_like = _like(torch.randn_like)
zeros_like = _like(torch.zeros_like)
