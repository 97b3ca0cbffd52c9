"""Queries and changes of the types of tensors, and the operators' aliases, under the names of `spmd_types`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..torch_internals.tensors import DisableTorchFunction
from . import collectives
from .axes import atoms_of
from .declarations import assert_type, get_local_type
from .errors import SpmdTypeError, dim_of
from .named_mesh import MeshAxis, axes_here, known_axes, normalize_axis, set_current_mesh
from .partition_spec import mesh_here
from .tensor_type import TensorType, note_of, write
from .types import SAME, I, P, R, Shard, SpmdType, V
from .watching import active

__all__ = [
    "TYPE_CHECKING",
    "Invariant",
    "Partial",
    "Replicate",
    "Varying",
    "assert_local_type_like",
    "assert_type_like",
    "get_axis_local_type",
    "invariant_to_replicate",
    "is_type_checking",
    "maybe_get_axis_local_type",
    "mutate_type",
    "reinterpret_mesh",
    "reinterpret_no_grad",
    "set_dist",
    "shard",
    "traceback_filtering",
    "unshard",
]

Replicate, Invariant, Varying, Partial = R, I, V, P


class _TypeChecking:
    """True while a type check is active in this thread."""

    def __bool__(self) -> bool:
        return is_type_checking()

    def __repr__(self) -> str:
        return f"TYPE_CHECKING({is_type_checking()})"


#: True while a type check is active in this thread.
TYPE_CHECKING = _TypeChecking()


def is_type_checking() -> bool:
    """Returns whether a type check is active in this thread, and not switched off."""
    return active() is not None


# --- aliases of operators


def shard(x: torch.Tensor, axis: Any, *, src: SpmdType, dst: SpmdType, **options: Any) -> torch.Tensor:
    """Returns this rank's piece of an R or I tensor: `convert` to S(dim)."""
    if src not in (R, I) or not isinstance(dst, Shard):
        raise SpmdTypeError(f"shard({src}, {dst}) does not exist: it takes R or I to S(dim)")
    return collectives.convert(x, axis, src=src, dst=dst, **options)


def unshard(x: torch.Tensor, axis: Any, *, src: SpmdType, dst: SpmdType, **options: Any) -> torch.Tensor:
    """Returns the tensor of which the ranks hold pieces: `all_gather` of S(dim)."""
    if not isinstance(src, Shard):
        raise SpmdTypeError(f"unshard({src}, {dst}) does not exist: it takes S(dim) to R or I")
    return collectives.all_gather(x, axis, src=src, dst=dst, **options)


def invariant_to_replicate(x: torch.Tensor, axis: Any, **options: Any) -> torch.Tensor:
    """Returns an I tensor as R: nothing forward, the sum backward (Megatron's f)."""
    return collectives.convert(x, axis, src=I, dst=R, **options)


# --- queries


def maybe_get_axis_local_type(x: torch.Tensor, axis: Any) -> SpmdType | None:
    """Returns the type on one axis; None: it has none there, or the axis has one rank.

    Raises:
        SpmdTypeError: the axis has parts on which the types differ.
    """
    note = note_of(x)
    found = set[Any]() if note is None else {note.type.get(atom) for atom in atoms_of(axis, mesh_here())}
    if len(found) > 1:
        raise SpmdTypeError(f"a tensor {list(x.shape)}: its type differs between the parts of {axis!r}: {found}")
    return found.pop() if found else None


def get_axis_local_type(x: torch.Tensor, axis: Any) -> SpmdType:
    """Returns the type on one axis.

    Raises:
        SpmdTypeError: it has none there.
    """
    found = maybe_get_axis_local_type(x, axis)
    if found is None:
        raise SpmdTypeError(f"a tensor {list(x.shape)} has no type on {axis!r}", rule="no_type")
    return found


# --- changes


def assert_type_like(x: torch.Tensor, source: torch.Tensor, overrides: Mapping[Any, SpmdType] | None = None) -> None:
    """Declares that a tensor has the type of another one, but on the axes of `overrides`."""
    changed = {atom: t for axis, t in (overrides or {}).items() for atom in atoms_of(axis, mesh_here())}
    types = {**get_local_type(source), **changed}
    if source.dim() != x.dim():  # whose dims are others
        types = {a: V if isinstance(t, Shard) and a not in changed else t for a, t in types.items()}
    assert_type(x, types)


def assert_local_type_like(
    x: torch.Tensor, source: torch.Tensor, overrides: Mapping[Any, SpmdType] | None = None
) -> None:
    """Declares that a tensor has the type of another one, without its sharded dims: S becomes V."""
    changed = {atom: t for axis, t in (overrides or {}).items() for atom in atoms_of(axis, mesh_here())}
    types = {axis: V if isinstance(t, Shard) else t for axis, t in get_local_type(source).items()}
    assert_type(x, {**types, **changed})


def mutate_type(
    x: torch.Tensor,
    axis: Any = None,
    *,
    src: SpmdType | Mapping[Any, SpmdType],
    dst: SpmdType | Mapping[Any, SpmdType],
) -> torch.Tensor:
    """Changes the type of a tensor, in place, where it is `src`; reports list it as trusted. Returns the tensor.

    Args:
        axis: the axis; None: the axes that `src` or `dst` name, or else all axes of the tensor.
        src, dst: the type before and after, of all these axes or for each. S(dim) matches V before.

    Raises:
        SpmdTypeError: the tensor has no type, or another type than `src` on one of the axes; `src` and `dst` name
            different axes.
    """
    mesh, note, mode = mesh_here(), note_of(x), active()
    named = [types for types in (src, dst) if isinstance(types, Mapping)]
    if named and axis is not None:
        raise SpmdTypeError("mutate_type: axis, and types by axis: pass one of them")
    if len(named) == 2 and set(named[0]) != set(named[1]):
        raise SpmdTypeError(
            f"mutate_type: src names {', '.join(map(str, named[0]))}, and dst {', '.join(map(str, named[1]))}"
        )
    if note is None:
        raise SpmdTypeError(f"mutate_type of a tensor {list(x.shape)}, which has no type", rule="no_type")
    axes = list(named[0]) if named else [axis] if axis is not None else list(note.type.types)
    types = dict(note.type.types)
    for name in axes:
        before: SpmdType = src[name] if isinstance(src, Mapping) else src
        after: SpmdType = dst[name] if isinstance(dst, Mapping) else dst
        if isinstance(after, Shard):
            after = Shard(dim_of(after, x.shape), after.stride)
        for atom in atoms_of(name, mesh):
            actual = note.type.get(atom)
            if actual is None or actual.base != before and actual.letter + before.letter not in ("SV", "VS", "SS"):
                raise SpmdTypeError(
                    f"mutate_type of a tensor {list(x.shape)} on {atom}", f"it is {actual}, not {before}", rule="assert"
                )
            types[atom] = after
    with DisableTorchFunction():
        write(x, TensorType.of(types, note.type.rest), None, note.session, note.extra)
    if mode is not None:
        mode.trust(f"mutate_type: {src} is {dst} on {', '.join(map(str, axes))}")
    return x


def reinterpret_no_grad(x: torch.Tensor, axis: Any, *, dst: SpmdType) -> torch.Tensor:
    """Changes R into I or I into R, in place, of a tensor that receives no gradient, so that both are one.

    Raises:
        ValueError: the tensor requires a gradient, or `dst` is neither R nor I.
        SpmdTypeError: the tensor is neither R nor I on the axis.
    """
    if x.requires_grad:
        raise ValueError("reinterpret_no_grad of a tensor that requires a gradient: use spmd.convert")
    if dst not in (R, I):
        raise ValueError(f"reinterpret_no_grad to {dst}: only R and I have the same values")
    if not atoms_of(axis, mesh_here()):
        return x
    before = get_axis_local_type(x, axis)
    if before.letter not in SAME:
        raise SpmdTypeError(f"reinterpret_no_grad of a tensor {list(x.shape)}: it is {before} on {axis!r}, not R or I")
    return mutate_type(x, axis, src=before, dst=dst)


# --- what has another place here


def set_dist(module: Any) -> None:
    """Raises NotImplementedError: a backend is chosen where a job is joined."""
    raise NotImplementedError(
        "set_dist: operators call neuronx_dist.comm, whose backend initialize_model_parallel chooses; "
        "comm.as_rank(mesh, rank, backend) takes another one for the time of a `with`"
    )


def traceback_filtering(mode: str = "auto") -> None:
    """Raises NotImplementedError: tracebacks are left alone, and messages name the line of the program."""
    raise NotImplementedError(
        "traceback_filtering: tracebacks are not filtered; the message of an SpmdTypeError names the program's line"
    )


# --- other views of the same ranks


def _pieces(axis: MeshAxis, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """Returns an axis as loops `(from, to)` over strides, cut at the strides `cuts`, the outermost first."""
    pieces = []
    for size, stride in axis.sizes_and_strides:
        inside = [
            cut for cut in cuts if stride < cut < size * stride and cut % stride == 0 and size * stride % cut == 0
        ]
        bounds = [stride, *sorted(inside), size * stride]
        pieces += [*zip(bounds, bounds[1:])][::-1]
    return pieces


def reinterpret_mesh(x: torch.Tensor, type: Any, *, inplace: bool = False) -> torch.Tensor:
    """Returns the tensor with its type written on other axes of the same ranks: (dp, cp) as dp_cp, or the reverse.

    Args:
        type: the axes (a mesh in any form of `set_current_mesh`), or the type on them, which must be the one that
            follows.
        inplace: `x` itself gets the type.

    Raises:
        SpmdTypeError: an axis consists of parts on which the types differ, or S of parts that are not in order.
    """
    note = note_of(x)
    if note is None:
        raise SpmdTypeError(f"reinterpret_mesh of a tensor {list(x.shape)}, which has no type", rule="no_type")
    declared = type if isinstance(type, Mapping) and all(hasattr(t, "letter") for t in type.values()) else None
    if declared is not None:
        target = {axis: normalize_axis(axis) for axis in declared}
    else:
        with set_current_mesh(type):
            target = axes_here() or {}
    known = known_axes()
    if missing := [name for name in note.type.types if name not in known]:
        raise SpmdTypeError(f"reinterpret_mesh: {', '.join(missing)} is no axis of a mesh that is entered here")
    source = {name: known[name] for name in note.type.types}
    cuts = {
        bound
        for axis in (*source.values(), *target.values())
        for s, t in axis.sizes_and_strides
        for bound in (t, s * t)
    }
    by_piece = {
        piece: (name, note.type.types[name]) for name, axis in source.items() for piece in _pieces(axis, [*cuts])
    }
    types: dict[str, SpmdType] = {}
    for name, axis in target.items():
        pieces = _pieces(axis, [*cuts])
        found = [by_piece.get(piece) for piece in pieces]
        on_pieces = {entry[1] for entry in found if entry is not None}
        if not pieces or not on_pieces:
            continue
        if len(on_pieces) > 1 or None in found:
            raise SpmdTypeError(
                f"reinterpret_mesh of a tensor {list(x.shape)} {note.type}",
                f"{name!r} consists of parts of {', '.join(source)}; its types there: {[e and e[1] for e in found]}",
                repairs=["convert it, so that it has one type on all of them"],
                rule="reinterpret_mesh",
            )
        types[str(name)] = on_pieces.pop()
    if declared is not None and any(types.get(str(name)) not in (wanted, None) for name, wanted in declared.items()):
        raise SpmdTypeError(f"reinterpret_mesh of a tensor {list(x.shape)}: its type is {types}, not {dict(declared)}")
    with DisableTorchFunction():
        result = x if inplace else x.view_as(x)
        write(result, TensorType.of(types, note.type.rest), note.origins, note.session)
    return result
