"""Reads by position: x[index], index_select, gather, take_along_dim, embedding, one_hot, and masks.

If the indexed dim is sharded, the tensor is not moved. An index that is sharded over the same ranks fetches its rows
from their owners (`moves/fetch.py`). With a replicated index each rank takes the rows that it owns, 0 elsewhere, and
the sum is reduced: a vocabulary-parallel embedding. The result is sharded as the index is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ... import comm, spmd
from ...comm import Communicator
from ...spmd import I, P, R, S, SpmdType, no_typecheck
from ...torch_internals.tensors import assert_async
from ..handlers import FUNCTIONS, UNHANDLED, composed, sharded
from ..labels import Labels, New, inside
from ..merged import on_single_mesh_dims
from ..moves.exchange import linked
from ..moves.fetch import ask, fetch, has_values
from ..moves.redistribute import redistributed
from ..placements import Placement, Replicate, Shard
from ..spec import ShardTensorSpec, make_spec
from ..tensor import ShardTensor, local_of, wrap
from ..typed import on_own_shard
from . import views
from .select import dim_of

__all__: list[str] = []

_T = torch.Tensor


# --- positions that a rank owns


@no_typecheck()  # each rank checks its positions
def check_positions(index: torch.Tensor, size: int, dim: int, what: str = "indices") -> None:
    """Raises an IndexError for a position outside of a dim, on the rank that has the position."""
    if not index.numel() or not has_values(index):
        return
    if index.device.type != "cpu":
        assert_async(((index >= 0) & (index < size)).all())
        return
    low, high = index.aminmax()
    if low < 0 or high >= size:
        raise IndexError(f"{what} range from {int(low)} to {int(high)}, but dim {dim} has {size} elements")


def own_positions(index: torch.Tensor, start: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns positions relative to a shard of `size` at `start` (0 outside of it), and the mask of those inside."""
    owned = (index >= start) & (index < start + size)
    return torch.where(owned, index - start, 0), owned


def sharded_along(x: Any, dim: int, spec: ShardTensorSpec) -> bool:
    """Returns True if `x` stays sharded along `dim` in an operation whose result is Partial there."""
    m = x._spec.mesh_dim_of.get(dim) if isinstance(x, ShardTensor) else None
    return m is not None and m in spec.partial


def _summands(spec: ShardTensorSpec) -> dict[Communicator, SpmdType]:
    """Types of rows that each rank took from its shard, with zeros elsewhere."""
    return {spec.mesh.communicator(m): P for m in spec.partial}


def in_layout_of(
    y: torch.Tensor, spec: ShardTensorSpec, like: Any, shift: Callable[[int], int], to: Placement | None = None
) -> ShardTensor:
    """Reduces a Partial result, sharded on each mesh dim as `like` is, or `to`; dim d of `like` is dim `shift(d)`."""
    placements: list[Placement] = list(spec.placements)
    sizes = list(spec.sizes)
    for m in spec.partial:
        placement = like._spec.placements[m] if isinstance(like, ShardTensor) else None
        placements[m] = to or Replicate()
        if isinstance(placement, Shard) and Shard(shift(placement.dim)) not in placements:
            placements[m], sizes[m] = Shard(shift(placement.dim)), like._spec.sizes[m]
    target = make_spec(spec.mesh, placements, spec.shape, sizes)
    if spec.partial and y.dtype is torch.bool:
        return wrap(redistributed(y.to(torch.uint8), spec, target).bool(), target)
    return wrap(redistributed(y, spec, target), target)


# --- positions along one dim


def _taken(x: torch.Size, index: torch.Size, dim: int) -> Labels:
    names = tuple(range(len(x)))
    positions = tuple(("index", i) for i in range(len(index)))
    return Labels(
        [(*names[:dim], "taken", *names[dim + 1 :]), positions], (*names[:dim], *positions, *names[dim + 1 :])
    )


@on_single_mesh_dims
def take(x: Any, dim: int, index: Any, to: Placement | None = None) -> ShardTensor:
    """Returns `x[:, .., index, .., :]` with an index of any shape at `dim`: [before, *index.shape, after].

    Args:
        to: the placement of the result where it is a sum over ranks; None: Replicate.
    """
    fetched = _fetched(x, dim, index)
    if fetched is not None:
        return fetched
    (local, positions), spec = inside(_taken, (x, index), dim)
    check_positions(positions, x.shape[dim], dim)
    shape = (*local.shape[:dim], *positions.shape, *local.shape[dim + 1 :])
    if not sharded_along(x, dim, spec):
        return wrap(local.index_select(dim, positions.reshape(-1)).reshape(shape), spec)

    def owned_rows(local: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if not local.shape[dim]:
            return linked(local.new_zeros(shape), local)
        positions, owned = own_positions(positions, x._spec.offsets[dim], local.shape[dim])
        rows = local.index_select(dim, positions.reshape(-1)).reshape(shape)
        return torch.where(owned.reshape(*owned.shape, *[1] * (x.dim() - dim - 1)), rows, rows.new_zeros(()))

    rows = on_own_shard(owned_rows, _summands(spec))(local, positions)
    return in_layout_of(rows, spec, index, lambda d: dim + d, to)


def _fetched(x: Any, dim: int, index: Any) -> ShardTensor | None:
    """Computes `take` if tensor and index are sharded over the same ranks, and not both over others; else None."""
    if not (isinstance(x, ShardTensor) and isinstance(index, ShardTensor)) or x._spec.mesh is not index._spec.mesh:
        return None
    spec, positions = x._spec, local_of(index)
    m = spec.mesh_dim_of.get(dim)
    if m is None or spec.partial or index._spec.partial or not has_values(positions):
        return None
    pairs = list(zip(spec.placements, index._spec.placements))
    if not isinstance(pairs[m][1], Shard):
        return None
    if any(isinstance(a, Shard) and isinstance(b, Shard) for i, (a, b) in enumerate(pairs) if i != m):
        return None
    local = local_of(x)
    placements: list[Placement] = []
    sizes = []
    for i, (of_x, of_index) in enumerate(pairs):
        if isinstance(of_index, Shard):
            placements.append(Shard(dim + of_index.dim))
            if i != m:
                local = spmd.convert(local, spec.mesh.communicator(i), src=I, dst=R)
        elif isinstance(of_x, Shard):
            placements.append(Shard(of_x.dim if of_x.dim < dim else of_x.dim + index.dim() - 1))
        else:
            placements.append(Replicate())
        sizes.append(index._spec.sizes[i] if isinstance(of_index, Shard) else spec.sizes[i])
    questions = ask(positions.reshape(-1), spec.sizes[m] or (), spec.mesh.communicator(m))
    rows = fetch(local.movedim(dim, 0), questions)
    rows = rows.movedim(0, dim).reshape((*local.shape[:dim], *positions.shape, *local.shape[dim + 1 :]))
    shape = (*spec.shape[:dim], *index.shape, *spec.shape[dim + 1 :])
    return wrap(rows, make_spec(spec.mesh, placements, shape, sizes))


@sharded(torch.index_select, _T.index_select)
def index_select(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: Any, dim: int, index: Any) -> Any:
        dim = dim_of(input, dim)
        return take(input, dim, index) if input.dim() else take(input.reshape(1), 0, index.reshape(1)).reshape(())

    return call(*args, **kwargs)


@sharded(F.embedding, torch.embedding)
def embedding(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    if func is torch.embedding:  # the weight comes first
        args = (args[1], args[0], *args[2:])

    def call(input: Any, weight: Any, padding_idx: int | None = None, *options: Any, **named: Any) -> Any:
        if any(options) or any(value for name, value in named.items() if name != "norm_type"):
            raise NotImplementedError(
                "embedding of ShardTensors does not support max_norm, scale_grad_by_freq and sparse"
            )
        rows = take(weight, 0, input, getattr(input, "_rows_to", None))
        if padding_idx is None or padding_idx == -1 and func is torch.embedding or not rows.requires_grad:
            return rows
        is_padding = (input == padding_idx % weight.shape[0]).unsqueeze(-1)
        return torch.where(is_padding, rows.detach(), rows)

    return call(*args, **kwargs)


def _one_hot(index: torch.Size, count: int) -> Labels:
    names = tuple(range(len(index)))
    return Labels([names], (*names, New(count)))


@sharded(F.one_hot)
def one_hot(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(tensor: ShardTensor, num_classes: int = -1) -> Any:
        count = int(tensor.max().item()) + 1 if num_classes < 0 else num_classes
        (local,), spec = inside(_one_hot, (tensor,), count)
        return wrap(F.one_hot(local, count), spec)

    return call(*args, **kwargs)


# --- positions for each element


def gathered_labels(x: torch.Size, index: torch.Size, dim: int) -> Labels:
    names = tuple(range(len(x)))
    entries = (*names[:dim], "index", *names[dim + 1 :])
    return Labels([(*names[:dim], "taken", *names[dim + 1 :]), entries], entries)


def shortened(x: Any, shape: Sequence[int], dim: int | None) -> Any:
    """Returns `x` cut to `shape` along all dims but `dim`."""
    for d, size in enumerate(shape):
        if d != dim and x.shape[d] > size:
            x = x.narrow(d, 0, size)
    return x


@sharded(torch.gather, _T.gather)
def gather(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
        dim = dim_of(input, dim)
        if not (input.dim() and index.dim()) and max(input.dim(), index.dim()) < 2:  # a scalar is a vector of one
            return torch.gather(input.reshape(-1), 0, index.reshape(-1)).reshape(index.shape)
        if input.dim() != index.dim() and not index.numel():
            return input.new_zeros(index.shape) + input.reshape(-1)[:0].sum()
        if input.dim() != index.dim():
            raise ValueError(
                f"gather: the tensor has {input.dim()} dims and the index {index.dim()}: both must have the same number"
            )
        x = shortened(input, index.shape, dim)
        (local, positions), spec = inside(gathered_labels, (x, index), dim)
        check_positions(positions, x.shape[dim], dim)
        if not sharded_along(x, dim, spec):
            return wrap(local.gather(dim, positions), spec)

        def owned_values(local: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            if not local.shape[dim]:
                return linked(local.new_zeros(positions.shape), local)
            positions, owned = own_positions(positions, x._spec.offsets[dim], local.shape[dim])
            return torch.where(owned, local.gather(dim, positions), local.new_zeros(()))

        values = on_own_shard(owned_values, _summands(spec))(local, positions)
        return in_layout_of(values, spec, index, lambda d: d)

    return call(*args, **kwargs)


@sharded(torch.take_along_dim, _T.take_along_dim)
def take_along_dim(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: Any, indices: Any, dim: int | None = None) -> Any:
        if dim is None:
            return torch.gather(input.reshape(-1), 0, indices.reshape(-1))
        dim = dim_of(input, dim)
        shape = torch.broadcast_shapes(
            *((*tensor.shape[:dim], 1, *tensor.shape[dim + 1 :]) for tensor in (input, indices))
        )
        x, index = (tensor.expand(*shape[:dim], tensor.shape[dim], *shape[dim + 1 :]) for tensor in (input, indices))
        return torch.gather(x, dim, torch.where(index < 0, index + x.shape[dim], index))

    return call(*args, **kwargs)


# --- x[...]


def expanded(index: Any, x: torch.Tensor) -> list[Any]:
    """Returns the entries of an index of `x`: Ellipsis replaced, lists as tensors, all tensors on the device of `x`."""
    entries = list(index) if isinstance(index, tuple) else [index]
    entries = [torch.tensor(entry) if isinstance(entry, list) else entry for entry in entries]
    entries = [entry.to(x.device) if isinstance(entry, torch.Tensor) else entry for entry in entries]
    entries = [int(entry) if type(entry).__name__ in ("int64", "int32") else entry for entry in entries]
    used = sum(entry.dim() if is_mask(entry) else 1 for entry in entries if entry is not None and entry is not Ellipsis)
    at = next((i for i, entry in enumerate(entries) if entry is Ellipsis), None)
    if at is None:
        return entries
    return [*entries[:at], *[slice(None)] * (x.dim() - used), *entries[at + 1 :]]


def is_mask(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8)


def is_basic(entries: Sequence[Any]) -> bool:
    return all(entry is None or entry is Ellipsis or type(entry) in (int, slice) for entry in entries)


@sharded(_T.__getitem__)
def getitem(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    x, index = args
    entries = list(index) if isinstance(index, tuple) else [index]
    if is_basic(entries):
        return views.basic_index(x, index)
    entries = expanded(index, x)
    if len(entries) == 1 and is_mask(entries[0]) and entries[0].dim():
        return _masked(x, entries[0])
    if any(is_mask(entry) or isinstance(entry, bool) or _is_odd(entry) for entry in entries):
        return FUNCTIONS[UNHANDLED](func, types, args, kwargs)
    basic = [slice(None) if isinstance(entry, torch.Tensor) else entry for entry in entries]
    if not all(entry == slice(None) for entry in basic if entry is not None) or None in basic:
        x = x[tuple(basic)]
    dims = [
        sum(not isinstance(other, int) for other in entries[:i])
        for i, entry in enumerate(entries)
        if isinstance(entry, torch.Tensor)
    ]
    indices = [entry for entry in entries if isinstance(entry, torch.Tensor)]
    if dims != list(range(dims[0], dims[0] + len(dims))):  # one after the other, in front
        x = torch.movedim(x, dims, list(range(len(dims))))
        dims = list(range(len(dims)))
    return _at_positions(x, dims[0], indices)


def _is_odd(x: Any) -> bool:
    return not (x is None or isinstance(x, (int, slice, torch.Tensor)))


def _at_positions(x: Any, dim: int, indices: Sequence[Any]) -> Any:
    """Returns `x` at an index for each of the dims from `dim` on, which are flattened into one."""
    flat = flat_positions(x, range(dim, dim + len(indices)), indices)
    if len(indices) > 1:
        x = x.flatten(dim, dim + len(indices) - 1)
    return take(x, dim, flat)


def flat_positions(x: Any, dims: Sequence[int], indices: Sequence[Any]) -> Any:
    """Returns the positions in several dims as positions in the one that these dims form.

    Raises:
        IndexError: a position is outside of its dim, where it would become another element.
    """
    flat: Any = 0
    for dim, index in zip(dims, indices):
        size = x.shape[dim]
        position = torch.where(index < 0, index + size, index)
        if len(indices) > 1:
            check_positions(local_of(position) if isinstance(position, ShardTensor) else position, size, dim)
        flat = flat * size + position
    return flat


# --- masks, whose results have as many elements as are True


def _aligned(x: torch.Size, mask: torch.Size) -> Labels:
    if tuple(mask) != tuple(x[: len(mask)]):
        raise IndexError(f"a mask of shape {tuple(mask)} does not match the first dims of a tensor of shape {tuple(x)}")
    names = tuple(range(len(x)))
    return Labels([names, names[: len(mask)]], names)


@on_single_mesh_dims
def _masked(x: Any, mask: Any) -> ShardTensor:
    """Returns `x[mask]`, sharded as `x` is: each rank has the True elements of its shard; counts are gathered."""
    (local, chosen), spec = inside(_aligned, (x, mask))
    if any(0 < dim < mask.dim() for _, dim in spec.sharded):  # elements of the ranks alternate: rows move first
        return _masked(x.flatten(0, mask.dim() - 1), mask.flatten())
    placements = [Shard(p.dim - mask.dim() + 1) if isinstance(p, Shard) and p.dim else p for p in spec.placements]
    types = {spec.mesh.communicator(m): S(p.dim) for m, p in enumerate(placements) if isinstance(p, Shard)}
    y = on_own_shard(lambda x, mask: x[mask.bool()], types)(local, chosen)
    sizes = list(spec.sizes)
    total = y.shape[0]
    along = spec.mesh_dim_of.get(0)
    if along is not None:
        with no_typecheck():  # gathers the counts, which all ranks then know
            counts = comm.all_gather(torch.tensor([total], device=y.device), spec.mesh.communicator(along), dim=0)
            sizes[along] = tuple(counts.tolist())
        total = sum(sizes[along] or ())
    return wrap(y, make_spec(spec.mesh, placements, (total, *spec.shape[mask.dim() :]), sizes))


@sharded(torch.masked_select, _T.masked_select)
def masked_select(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: Any, mask: Any) -> Any:
        shape = torch.broadcast_shapes(input.shape, mask.shape)
        return _masked(*(x if x.shape == shape else x.expand(shape) for x in (input, mask)))

    return call(*args, **kwargs)


# --- positions in all of a tensor


@composed(torch.take, _T.take)
def take_flat(input: Any, index: Any) -> Any:
    return input.reshape(-1)[index]


@composed(torch.put, _T.put)
def put(input: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    flat = torch.index_put(input.reshape(-1), (index.reshape(-1),), source.reshape(-1), accumulate)
    return flat.reshape(input.shape)


@composed(torch.masked_scatter, _T.masked_scatter)
def masked_scatter(input: Any, mask: Any, source: Any) -> Any:
    """Returns the values of `source` in order where the mask is True: they are counted over all ranks."""
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    mask = mask.expand(shape)
    numbers = mask.reshape(-1).to(torch.int64).cumsum(0) - 1
    if source.numel():
        values = source.reshape(-1)[numbers.clamp_min(0)].reshape(shape)
        return torch.where(mask, values, input)
    return torch.where(mask, torch.zeros_like(input), input)


# --- positions of values, which are sharded as the values are


@composed(torch.nonzero, _T.nonzero, torch.argwhere, _T.argwhere)
def nonzero(input: Any, *, as_tuple: bool = False) -> Any:
    flat = (input != 0).reshape(-1)
    at: Any = torch.arange(flat.shape[0], device=flat.device)[flat]
    columns: list[Any] = []
    for size in reversed(input.shape):
        columns.insert(0, at % size)
        at = torch.div(at, size, rounding_mode="floor")
    if as_tuple:
        return tuple(columns) if columns else (at,)
    return torch.stack(columns, 1) if columns else at.new_zeros((at.shape[0], 0))


@composed(torch.nonzero_static, _T.nonzero_static)
def nonzero_static(input: Any, *, size: int, fill_value: int = -1) -> Any:
    rows = torch.nonzero(input)
    missing = torch.full((max(0, size - rows.shape[0]), input.dim()), fill_value, device=rows.device)
    return torch.cat([rows[:size], missing])
