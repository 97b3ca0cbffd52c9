"""Types of the typed operators: the handler that the checker calls for them.

An operator is judged by its row: the tensor must have the type `src`, and the result has the type `dst`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .... import comm
from ....call_site import call_site
from ....spmd import collectives
from ....spmd.axes import atoms_of, order_of
from ....spmd.errors import SpmdTypeError
from ....spmd.rows import ROWS
from ....spmd.tensor_type import Foreign, Note, Origin, Stacked, TensorType
from ....spmd.types import SAME, UNIFORM, VARYING, P, R, Shard, SpmdType, V, repeated, scaled
from ....spmd.watching import HANDLERS
from ..messages.explain import operator_error
from ..messages.provenance import module_path
from ..piece_order import Jumbled, gathered
from ..session import Session
from .one_rank import claim_stage
from .own_rows import gathered_rows
from .vmapped import refuse_inside

__all__ = ["check_masked", "cut", "joined"]

_REDUCTIONS = ("all_reduce", "reduce_scatter")


def _operator(mode: Session, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, axis = args[0], args[1] if len(args) > 1 else kwargs["axis"]
    name = func.__name__
    note = mode.note(x, name)
    if note is None:  # a backward pass through native code
        with mode.pause():
            return func(*args, **kwargs)
    src, dst = kwargs["src"], kwargs["dst"]
    if note.extra is not None:
        refuse_inside(name, [note])
    axes = mode.known.get(axis) if axis.__class__ is str else atoms_of(axis, mode.mesh)
    if axes is None:
        axes = mode.known[axis] = atoms_of(axis, mode.mesh)
    row = ROWS.get((name, src.letter, dst.letter))
    if row is None or (row.expert and not kwargs.get("expert_mode", True)):
        with mode.pause():
            try:
                return func(*args, **kwargs)
            except SpmdTypeError as error:
                known = next((atom for atom in axes if note.type.get(atom) is not None), None)
                if known is None:
                    raise
                raise operator_error(mode, name, x, note, known, src, dst, str(error), "pair") from None
    stack: Any = kwargs.get("gather_dim", kwargs.get("scatter_dim"))
    if "split_dim" in kwargs or "concat_dim" in kwargs:
        stack = kwargs.get("split_dim"), kwargs.get("concat_dim")
    routed = kwargs.get("input_split_sizes") is not None  # rows go to other ranks: what is there is no shard
    if routed:
        src = dst = V
    count = comm.communicator(axis).size if isinstance(src, Shard) or isinstance(dst, Shard) else 0
    key = (func, note.type, axes, src, dst, x.shape, x.requires_grad, torch.is_grad_enabled(), stack, count, routed)
    result_type = mode.known.get(key)
    if result_type is None:
        num_assumptions = mode.num_assumptions
        dims = collectives.operator_dims(func, x, src, dst, stack)
        for atom in axes:
            _check_source(mode, x, note, atom, name, src, dst)
        if name == "reinterpret" and src is V and axes:
            for atom in axes:
                check_masked(mode, name, x, note, atom, src, dst)
            mode.trust(f"reinterpret({src}, {dst}): the values of the ranks of {', '.join(axes)} are summands")
        elif row.expert and axes:
            mode.trust(f"{name}({src}, {dst})")
        result_type = _operated(mode, x, note.type, axes, name, src, dst, dims, count)
        if routed:
            types = {a: scaled(V, t.scale) if isinstance(t, Shard) and t.dim == 0 else t for a, t in result_type}
            result_type = TensorType.of(types, result_type.rest)
        if num_assumptions == mode.num_assumptions:  # else it is to be assumed again at every call
            mode.known[key] = result_type
    mode.operators += 1
    if row.communicates and axes:
        mode.collectives += 1
    with mode.pause():
        result = func(*args, **kwargs)
    origins = note.origins
    if dst.letter in "PIRV" and axes:
        origin = Origin(f"{name}({src}, {dst})", call_site(), module_path(mode.modules), dst.letter)
        origins = {**(origins or {}), **dict.fromkeys(axes, origin)}
    extra: Any = _stacked(mode, x, note, axes, name, src, stack)
    if name == "all_gather" and src == Shard(0):
        extra = gathered_rows(x, note, axis, axes, result)
    mode.stamp(result, result_type, origins, extra)
    return result


def _stacked(
    mode: Session, x: Tensor, note: Note, axes: Sequence[str], name: str, src: SpmdType, stack: int | None
) -> Stacked | None:
    """`Note.extra` of the result of a gather that stacks shards."""
    shards = [note.type.get(axis) for axis in axes]
    if name != "all_gather" or src is not V or mode.level != "G" or not shards:
        return None
    dims = {shard.dim if isinstance(shard, Shard) and shard == Shard(shard.dim) else None for shard in shards}
    if len(dims) > 1 or None in dims:
        return None
    dim, ranks = dims.pop() or 0, (stack or 0) % (x.dim() + 1)
    return Stacked(",".join(axes), ranks, dim + (dim >= ranks))


def _operated(
    mode: Session,
    x: Tensor,
    type_: TensorType,
    axes: Sequence[str],
    name: str,
    src: SpmdType,
    dst: SpmdType,
    dims: tuple[int, int],
    count: int,
) -> TensorType:
    """The type that an operator over `axes`, of `count` ranks, gives a tensor."""
    if not axes:
        return type_
    src_dim, dst_dim = dims
    stack = src_dim if src is V else dst_dim
    types = _renumbered(type_.types, src, dst, name, stack, x.dim())
    if isinstance(src, Shard):
        joined(types, axes, src_dim, count)
    new = dst
    if isinstance(dst, Shard):
        new = cut(types, axes, dst_dim, count) if mode.level == "G" else V
    rest = type_.rest
    if rest is not None:
        rest = _renumbered({"": rest}, src, dst, name, stack, x.dim())[""]
    if name not in ("all_reduce", "reinterpret") and src.letter + dst.letter not in ("IR", "RI"):
        # Pieces of constants, and zeros between them, are no constant.
        types = {axis: R if old is UNIFORM else old for axis, old in types.items()}
        rest = R if rest is UNIFORM else rest
    for axis in axes:
        old = type_.get(axis) or R
        scale = old.scale - (0 if old.base is UNIFORM else src.scale)  # the mean of ones is 1, their sum a count
        if old.base is V and name not in (*_REDUCTIONS, "reinterpret"):
            scale = 0  # a guess for a value that counts as a summand
        if name == "reinterpret" and src.letter in SAME and new.letter == "P":
            scale += 1 - new.scale  # it is its own mean
        types[axis] = scaled(new, scale) if src.letter != "S" else gathered(old, scaled(new, scale)) or new
    return TensorType.of(types, rest)


def _check_source(mode: Session, x: Tensor, note: Note, atom: str, name: str, src: SpmdType, dst: SpmdType) -> None:
    """Checks that the type of `x` on one axis is `src`."""
    actual = note.type.get(atom)
    if actual is None:
        raise operator_error(mode, name, x, note, atom, src, dst, f"it has no type on {atom}", "no_type")
    if src.scale and actual.letter == "P" and actual is not src:
        why = f"it is {actual}, not {src}: its mean would be the result divided by the size of {atom} too often"
        raise operator_error(mode, name, x, note, atom, src, dst, why, "source")
    actual, src = actual.base, src.base
    if isinstance(actual, Jumbled) and name != "forget":
        why = f"it is {actual}: its pieces are in the order of the ranks"
        raise operator_error(mode, name, x, note, atom, src, dst, why, "jumbled")
    if actual.letter == "0" or actual is UNIFORM:  # constants are of any type
        return
    fixed = not (x.requires_grad and torch.is_grad_enabled())
    declared = src.letter
    if declared in SAME:
        if actual.letter == declared or (fixed and actual.letter in SAME):
            return
    elif declared in "PV" and name in _REDUCTIONS:
        if declared == "P" and actual is P:
            return
        if actual is V:
            check_masked(mode, name, x, note, atom, src, dst)
            claim_stage(mode, name, note.type.get(atom))
            mode.assume(f"{name}: the values that vary over {atom} are summands")
            return
        if declared == "V" and isinstance(actual, Shard):
            why = f"its pieces along dim {actual.dim} are added up: all_gather is what puts them together"
            raise operator_error(mode, name, x, note, atom, src, dst, why, "sum_of_shards")
    elif declared == "P":
        if actual is P:
            return
    elif declared == "V":
        if name == "all_gather" and isinstance(actual, Shard) and actual.order is None:
            text = f"all_gather: that the pieces of dim {actual.dim}, stacked over {atom}, are put together "
            mode.assume(text + "in the order of the sharding")
        if actual.letter in VARYING:
            return
    elif isinstance(src, Shard):
        if isinstance(dst, Shard) and dst.dim % x.dim() == src.dim % x.dim():
            why = f"it is {src} already, and an exchange along the same dim puts its pieces in another order"
            raise operator_error(mode, name, x, note, atom, src, dst, why, "source")
        if actual is V:
            mode.assume(f"{name}: what varies over {atom} is sharded on dim {src.dim % x.dim()}")
            return
        if isinstance(actual, Shard) and actual.dim == src.dim % x.dim():
            if actual.stride == 1 and (actual.order is None or actual.order.in_order):
                return
            if name == "all_gather" and actual.order is not None and gathered(actual, dst) is not None:
                return
            if actual.order is not None:
                why = (
                    f"the ranks hold its {actual.order}, and a concatenation in the order of the ranks leaves them in "
                    "that order"
                )
                raise operator_error(mode, name, x, note, atom, src, dst, why, "dealt")
            why = (
                f"dim {actual.dim} is {actual.stride} blocks, each sharded by itself: a concatenation of the ranks' "
                "pieces has them in another order"
            )
            raise operator_error(mode, name, x, note, atom, src, dst, why, "stride")
    raise operator_error(mode, name, x, note, atom, src, dst, f"it is {actual}, not {src}", "source")


def check_masked(mode: Session, name: str, x: Tensor, note: Note, atom: str, src: Any, dst: Any) -> None:
    """Refuses to take rows that were looked up in a shard for summands, unless they were masked."""
    if isinstance(note.extra, Foreign) and atom in note.extra.axes:
        why = "it was looked up in a shard by positions of which other ranks hold some, and these are not masked: each "
        why += "rank would add a wrong value for them"
        raise operator_error(mode, name, x, note, atom, src, dst, why, "foreign")


def _renumbered(
    types: Mapping[str, SpmdType], src: SpmdType, dst: SpmdType, name: str, stack: int, ndim: int
) -> dict[str, SpmdType]:
    """The types with their dims renumbered, where V is stacked on a new dim or unbound from one."""
    step = 0
    if src is V and name in ("all_gather", "convert"):
        step = 1
    elif dst is V and name in ("reduce_scatter", "convert"):
        step = -1
    renumbered = dict(types)
    touched = {spmd_type.dim % ndim for spmd_type in (src, dst) if isinstance(spmd_type, Shard)} | (
        {stack} if V in (src, dst) else set()
    )
    for axis, spmd_type in types.items():
        along = getattr(spmd_type, "along", None)
        if along and not isinstance(spmd_type, Shard):  # other ranks hold another number there
            left = (dim for dim in along if step > 0 or dim not in touched)
            repeats = repeated(frozenset(dim + step if dim >= stack and step else dim for dim in left))
            renumbered[axis] = scaled(repeats, spmd_type.scale)
        elif step and isinstance(spmd_type, Shard):
            if step < 0 and spmd_type.dim == stack:
                renumbered[axis] = scaled(V, spmd_type.scale)
            elif spmd_type.dim >= stack:
                renumbered[axis] = replace(spmd_type, dim=spmd_type.dim + step)
    return renumbered


# --- several axes over one dim: by convention the outer axis of the mesh has the outer factor ---


def _inside(axis: str, axes: Sequence[str]) -> bool | None:
    """Returns whether `axis` comes after all of `axes` in the order of the mesh, or (False) before; None: neither."""
    is_inner = {order_of(axis) > order_of(atom) for atom in axes}
    return is_inner.pop() if len(is_inner) == 1 else None


def joined(types: dict[str, SpmdType], axes: Sequence[str], dim: int, count: int, copies: bool = False) -> None:
    """Updates, in place, the types on other axes after `dim` is concatenated over `axes`."""
    for axis, spmd_type in types.items():
        if dim in getattr(spmd_type, "along", ()):
            types[axis] = scaled(repeated(spmd_type.along - {dim}), spmd_type.scale)  # type: ignore[union-attr]
        if axis in axes or not isinstance(spmd_type, Shard) or spmd_type.dim != dim:
            continue
        inside = True if copies or spmd_type.stride > 1 else _inside(axis, axes)
        unknown = inside is None or spmd_type.part is not None or spmd_type.order is not None
        whole = V if unknown else Shard(dim, spmd_type.stride * count if inside else 1)
        types[axis] = scaled(whole, spmd_type.scale)


def cut(types: dict[str, SpmdType], axes: Sequence[str], dim: int, count: int) -> SpmdType:
    """The type on `axes` when `dim` is cut into `count` pieces over them; those of other axes are changed with it.

    V where the pieces are no shard of the global tensor: another axis of the same dim then has the outer factor,
    against the convention.
    """
    result: SpmdType = Shard(dim)
    for axis, spmd_type in types.items():
        if axis in axes or not isinstance(spmd_type, Shard) or spmd_type.dim != dim:
            continue
        blocks = spmd_type.stride // count
        if (spmd_type.stride > 1 and spmd_type.stride % count) or spmd_type.part or spmd_type.order:
            types[axis], result = scaled(V, spmd_type.scale), V
        elif spmd_type.stride == 1:
            types[axis] = scaled(Shard(dim), spmd_type.scale)
            result = result if _inside(axis, axes) is False else V
        else:
            types[axis] = scaled(Shard(dim, blocks), spmd_type.scale)
            result = result if blocks > 1 or _inside(axis, axes) else V
    return result


HANDLERS.update(dict.fromkeys([getattr(collectives, name) for name, *_ in ROWS], _operator))
