"""What users and layers declare about the types of tensors.

In compiled code declarations do nothing, and no tensor has a type: under the checker what was compiled runs as it is
written (`checking/types/surroundings.py`), so it is checked all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..comm import context
from ..mesh import Mesh
from .axes import atoms_of
from .errors import SpmdTypeError
from .tensor_type import FRESH, NAME, TensorType, note_of, write
from .types import SAME, UNIFORM, ZERO, I, LocalType, P, R, Shard, SpmdType, V
from .watching import active

__all__ = [
    "assert_local_type",
    "assert_type",
    "forget",
    "get_local_type",
    "gradient",
    "has_local_type",
    "local",
    "mark_shard",
    "trust",
]


SHARD_OF = "_spmd_shard_of"  # key of the tensors' `__dict__`: (the parameter, the group of its pieces)


def has_local_type(x: torch.Tensor) -> bool:
    """Whether a tensor has a type."""
    return not is_dynamo_compiling() and note_of(x) is not None


def get_local_type(x: torch.Tensor) -> dict[Any, SpmdType]:
    """The type of a tensor by axis: `{"tp": I}`. Of what a program made of constants: {}, it is R everywhere.

    Raises:
        SpmdTypeError: it has none.
    """
    mode = active()
    note = _present(mode, x)
    if note is None:
        raise SpmdTypeError(
            f"a tensor of shape {list(x.shape)} has no type",
            "nobody declared one, and it was made outside of a type check",
            repairs=['assert_type(x, {"tp": R}) declares it'],
            rule="no_type",
        )
    return {axis: R if spmd_type.letter in "R0" else spmd_type for axis, spmd_type in note.type}


def assert_type(x: torch.Tensor, types: Mapping[Any, SpmdType]) -> torch.Tensor:
    """Declares the type of a tensor, or asserts it where it has one. Returns the tensor.

    Args:
        types: axis -> type. An axis is a name, a tuple of names, a ProcessGroup or a Communicator; axes of one rank are
            left out. V may become S(dim), and, as an assertion that nothing can check, V may become P.

    Raises:
        SpmdTypeError: it has another type on one of these axes.
        ValueError: what is given is no type, or S(dim) of a dim that it does not have.

    Example:
        >>> t = torch.ones(20)
        >>> assert_type(t, {"tp": I}) is t
        True
        >>> get_local_type(t)
        {'tp': I}
    """
    if is_dynamo_compiling():
        return x
    mode = active()
    with torch._C.DisableTorchFunction():
        return _assert_type(mode, x, types)


def _assert_type(mode: Any, x: torch.Tensor, types: Mapping[Any, SpmdType]) -> torch.Tensor:
    mesh = mode.mesh if mode is not None else _current_mesh()
    declared: dict[str, SpmdType] = {}
    for axis, spmd_type in types.items():
        if isinstance(spmd_type, Shard):
            if not -x.dim() <= spmd_type.dim < x.dim():
                raise ValueError(
                    f"{spmd_type} on {axis!r}: a tensor of shape {list(x.shape)} has no dim {spmd_type.dim}"
                )
            spmd_type = Shard(spmd_type.dim % x.dim(), spmd_type.stride, spmd_type.extent)
            if mode is not None and mode.level == "L":
                spmd_type = V
        elif not isinstance(spmd_type, LocalType):
            raise ValueError(f"{spmd_type!r} on axis {axis!r} is not an SPMD type: use R, I, V, P or S(dim)")
        declared.update(dict.fromkeys(atoms_of(axis, mesh), spmd_type))
    note = note_of(x) if mode is None else mode.note(x, "assert_type") if note_of(x) is not None else None
    old = note.type if note is not None else TensorType.of({})
    new, origins = dict(old.types), note.origins if note is not None else None
    fresh = note is not None and note.extra == FRESH
    for axis, spmd_type in declared.items():
        before = old.get(axis)
        if fresh or before is None or before is ZERO or (before is UNIFORM and spmd_type.letter in SAME):
            new[axis] = spmd_type
        elif before == spmd_type or (before.letter == "S" and spmd_type is V):
            continue
        elif before is V and (isinstance(spmd_type, Shard) or spmd_type is P):
            if mode is not None:
                mode.trust(f"assert_type: V is {spmd_type} on {axis}")
            new[axis] = spmd_type
        elif before is R and spmd_type is I and not x.requires_grad:
            new[axis] = spmd_type
        else:
            name = x.__dict__.get(NAME, "")
            raise SpmdTypeError(
                f"assert_type of {name or 'a tensor'} {list(x.shape)}",
                f"it is {before} on {axis}, not {spmd_type}",
                where_from=_since(origins, axis, before),
                repairs=[f"redistribute(x, {axis!r}, src={before}, dst={spmd_type}) changes it", f"assert {before}"],
                axis=axis,
                rule="assert",
            )
    write(
        x,
        TensorType.of(new, old.rest),
        origins,
        note.session if note is not None else mode.session if mode is not None else 0,
    )
    return x


assert_local_type = assert_type


# What `trust` believes: the declared type -> letters of the types that the checker may know a tensor by until then.
_MAY_BE_TRUSTED: dict[SpmdType, frozenset[str]] = {
    V: frozenset("R0"),  # computed from equal numbers, as far as types see, and from the offset of this rank's piece
    P: frozenset("RIV0"),  # zeros but for what this rank holds, so that the sum over the ranks is the value
}


def trust(x: torch.Tensor, axis: Any, kind: SpmdType) -> torch.Tensor:
    """Tells the checker what it cannot know, and returns `x`.

    Namely that a value is V (a position that was counted from this rank's own offset), or that what varies is P (zeros,
    but for what this rank holds). Reports list it.

    Nothing is done where no check is under way. Unlike `reinterpret` it leaves no trace in autograd.
    """
    mode = active()
    note = _present(mode, x) if mode is not None else None
    if mode is None or note is None:
        return x
    with torch._C.DisableTorchFunction():
        type_ = note.type
        believable = _MAY_BE_TRUSTED.get(kind, _MAY_BE_TRUSTED[P])
        if x.requires_grad:  # the gradient of an I is one value, of its parts it would be several
            believable -= {"I"}
        atoms = atoms_of(axis, mode.mesh)
        for atom in atoms:
            before = type_.get(atom)
            if before is not kind and before is not None and before.letter in believable:
                type_ = type_.with_axis(atom, kind)
        if type_ is not note.type:
            mode.trust(f"that {list(x.shape)} is {kind} on {', '.join(atoms)}")
            write(x, type_, note.origins, note.session, note.extra)
    return x


def local(x: torch.Tensor) -> torch.Tensor:
    """The same tensor as this rank's own numbers: along which dims it is sharded is not followed any further.

    For code that works on the local part by intention, such as packing it into a buffer. Nothing is done where no
    check is under way.
    """
    mode = active()
    note = _present(mode, x) if mode is not None else None
    if mode is None or note is None or not note.type.sharded:
        return x
    with torch._C.DisableTorchFunction():
        result = x.view_as(x)
        types = {axis: V if isinstance(spmd_type, Shard) else spmd_type for axis, spmd_type in note.type}
        write(result, TensorType.of(types, note.type.rest), note.origins, note.session)
    return result


def gradient(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Tells the checker that backward accumulates the gradient of `param` in `grad`, and returns `grad`.

    For accumulators other than `param.grad`, of which it knows.
    """
    mode = active()
    if mode is not None:
        with torch._C.DisableTorchFunction():
            mode.adopt(param, grad)
    return grad


def _present(mode: Any, x: torch.Tensor) -> Any:
    """What is known of a tensor now: a write through another view of its memory may have changed it."""
    if is_dynamo_compiling():
        return None
    if mode is None or note_of(x) is None:
        return note_of(x)
    with torch._C.DisableTorchFunction():
        return mode.note(x, "a declaration")


def mark_shard(shard: torch.Tensor, param: torch.Tensor, group: Any) -> None:
    """Says that `shard` is this rank's piece, among the ranks of `group`, of `param`: it varies over them."""
    shard.__dict__[SHARD_OF] = (param, group)


def forget(x: torch.Tensor, axis: Any) -> torch.Tensor:
    """The same tensor, of which it is no longer known along which dim it is sharded over `axis`: S becomes V.

    For what is meant to be local although a dim is sharded, such as a block-diagonal weight: each rank's block times
    its own piece is the result, and no sum over the ranks is missing.
    """
    mode = active()
    note = _present(mode, x)
    if note is None:
        return x
    with torch._C.DisableTorchFunction():
        result = x.view_as(x)
    type_ = note.type
    for atom in atoms_of(axis, mode.mesh if mode is not None else _current_mesh()):
        if isinstance(type_.get(atom), Shard):
            type_ = type_.with_axis(atom, V)
            if mode is not None:
                mode.trust(f"forget: sharding over {atom} is not followed")
    with torch._C.DisableTorchFunction():
        write(result, type_, note.origins, note.session)
    return result


def _since(origins: Any, axis: str, spmd_type: SpmdType) -> list[str]:
    origin = (origins or {}).get(axis)
    return [f"{spmd_type} on {axis} since {origin}"] if origin is not None and origin.letter == spmd_type.letter else []


def _current_mesh() -> Mesh | None:
    return context.current().mesh if context.is_initialized() else None
