"""What users and layers declare about the types of tensors.

In compiled code declarations do nothing, and no tensor has a type: under the checker what was compiled runs as it is
written (`checking/types/surroundings.py`), so it is checked all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..comm import context
from ..mesh import Mesh
from ..weights.shard_spec import spec_of
from .axes import atoms_of
from .errors import SpmdTypeError, dim_of
from .held import holds_local, local_tensor
from .tensor_type import FRESH, NAME, Foreign, Note, Offset, TensorType, note_of, write
from .types import SAME, UNIFORM, ZERO, I, LocalType, P, R, Shard, SpmdType, V, scaled
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
    "types_by_atom",
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
    x = local_tensor(x)
    note = _present(mode, x)
    if note is None:
        raise SpmdTypeError(
            f"a tensor of shape {list(x.shape)} has no type",
            "nobody declared one, and it was made outside of a type check",
            repairs=['assert_type(x, {"tp": R}) declares it'],
            rule="no_type",
        )
    return {axis: _told(spmd_type) for axis, spmd_type in note.type}


def _told(spmd_type: SpmdType) -> SpmdType:
    """A type as users declare it: a part of a shard is a shard, a constant is R."""
    if isinstance(spmd_type, Shard):
        return replace(spmd_type, part=None)
    return scaled(R, spmd_type.scale) if spmd_type.letter in "R0" else spmd_type


def assert_type(x: torch.Tensor, types: Mapping[Any, SpmdType] | SpmdType) -> torch.Tensor:
    """Declares the type of a tensor, or asserts it where it has one. Returns the tensor.

    Args:
        types: axis -> type; one type alone is that on all axes of the mesh. An axis is a name, a tuple of names, a
            ProcessGroup or a Communicator; axes of one rank are left out. V may become S(dim), and, as an assertion
            that nothing can check, V may become P.

    Raises:
        SpmdTypeError: it has another type on one of these axes; S(dim) of a dim that it does not have; two entries that
            are about one axis contradict each other.
        ValueError: what is given is no type.

    Example:
        >>> t = torch.ones(20)
        >>> assert_type(t, {"tp": I}) is t
        True
        >>> get_local_type(t)
        {'tp': I}
    """
    if is_dynamo_compiling():
        return x
    mode, local = active(), local_tensor(x)
    with torch._C.DisableTorchFunction():
        _assert_type(mode, local, types)
    return x


def types_by_atom(
    types: Mapping[Any, SpmdType] | SpmdType, mesh: Mesh | None, shape: Sequence[int], level: str = "G"
) -> dict[str, SpmdType]:
    """A declaration for a tensor of `shape`: atom -> type, with dims counted from the front.

    At level "L" what is sharded varies.

    Raises:
        SpmdTypeError: S(dim) of a dim that there is not; two entries that are about one axis contradict each other.
        ValueError: what is given is no type; or one type for all axes, without a mesh.
    """
    if isinstance(types, (LocalType, Shard)):
        if mesh is None:
            raise ValueError(f"{types!r} for all axes: there is no mesh, name the axes: {{'tp': {types!r}}}")
        types = {"world": types}
    declared: dict[str, SpmdType] = {}
    named_by: dict[str, Any] = {}
    for axis, spmd_type in types.items():
        if isinstance(spmd_type, Shard):
            spmd_type = Shard(dim_of(spmd_type, shape), spmd_type.stride, spmd_type.extent)
            spmd_type = V if level == "L" else spmd_type
        elif not isinstance(spmd_type, LocalType):
            raise ValueError(f"{spmd_type!r} on axis {axis!r} is not an SPMD type: use R, I, V, P or S(dim)")
        for atom in atoms_of(axis, mesh):
            if declared.setdefault(atom, spmd_type) != spmd_type:
                raise SpmdTypeError(
                    f"a declaration for a tensor {list(shape)}",
                    f"{named_by[atom]!r} says {declared[atom]} and {axis!r} says {spmd_type}: both are about {atom}",
                    repairs=[f"leave one of {named_by[atom]!r} and {axis!r} out", "name each axis once"],
                    axis=atom,
                    rule="declaration",
                )
            named_by.setdefault(atom, axis)
    return declared


def _assert_type(mode: Any, x: torch.Tensor, types: Mapping[Any, SpmdType] | SpmdType) -> None:
    mesh = mode.mesh if mode is not None else _current_mesh()
    declared = types_by_atom(types, mesh, x.shape, mode.level if mode is not None else "G")
    known = note_of(x) is not None
    note = note_of(x) if mode is None else mode.note(x, "assert_type") if known or _has_layout(x, mode) else None
    old = note.type if note is not None else TensorType.of({})
    new, origins = dict(old.types), note.origins if note is not None else None
    fresh = note is not None and note.extra == FRESH
    for axis, spmd_type in declared.items():
        before = old.get(axis)
        if fresh or before is None or before is ZERO or (before is UNIFORM and spmd_type.letter in SAME):
            new[axis] = spmd_type
        elif _told(before) == spmd_type or (before.letter == "S" and (spmd_type is V or _same_dim(before, spmd_type))):
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
                repairs=[
                    f'spmd.redistribute({name or "x"}, "{axis}", src=spmd.{before}, dst=spmd.{spmd_type}) changes it',
                    f'spmd.assert_type({name or "x"}, {{"{axis}": spmd.{before}}})',
                ],
                axis=axis,
                rule="assert",
            )
    write(
        x,
        TensorType.of(new, old.rest),
        origins,
        note.session if note is not None else mode.session if mode is not None else 0,
    )


def _has_layout(x: torch.Tensor, mode: Any) -> bool:
    """Whether a parameter's layout was stated, so that it has a type though no call has used it yet."""
    return mode.mesh is not None and isinstance(x, torch.nn.Parameter) and spec_of(x).axis is not None


def _same_dim(before: SpmdType, declared: SpmdType) -> bool:
    """Whether a shard is the declared one, but for the dims that it was merged of, which nobody declares."""
    if not isinstance(before, Shard) or not isinstance(declared, Shard) or declared.extent is not None:
        return False
    return (before.dim, before.stride, before.scale) == (declared.dim, declared.stride, declared.scale)


assert_local_type = assert_type


# What `trust` believes: the declared type -> letters of the types that the checker may know a tensor by until then.
_MAY_BE_TRUSTED: dict[SpmdType, frozenset[str]] = {
    V: frozenset("R0"),  # computed from equal numbers, as far as types see, and from the offset of this rank's piece
    P: frozenset("RIV0"),  # zeros but for what this rank holds, so that the sum over the ranks is the value
    R: frozenset("PV"),  # what each rank counted of its own data, if all come to the same number
}


def trust(x: torch.Tensor, axis: Any, kind: SpmdType, claim: str = "") -> torch.Tensor:
    """Tells the checker what it cannot know, and returns `x`.

    Namely that a value is V (a position that was counted from this rank's own offset), that what varies is P (zeros,
    but for what this rank holds), or that a count without a gradient is R (each rank counted as many). Reports list it,
    by `claim`: what is believed, in words; empty: the shape and the type.

    Nothing is done where no check is under way. Unlike `reinterpret` it leaves no trace in autograd.
    """
    mode = active()
    if mode is not None and holds_local(x):
        trust(local_tensor(x), axis, kind, claim)
        return x
    note = _present(mode, x) if mode is not None else None
    if mode is None or note is None:
        return x
    with torch._C.DisableTorchFunction():
        type_ = note.type
        believable = _MAY_BE_TRUSTED.get(kind.base, _MAY_BE_TRUSTED[P])
        if x.requires_grad:  # the gradient of an I is one value, of its parts it would be several
            believable = frozenset() if kind.base is R else believable - {"I"}
        atoms = atoms_of(axis, mode.mesh)
        for atom in atoms:
            before = type_.get(atom)
            if before is not kind and before is not None and before.letter in believable:
                type_ = type_.with_axis(atom, kind)
        if type_ is not note.type:
            mode.trust(f"{claim or f'that {list(x.shape)} is {kind}'} on {', '.join(atoms)}")
            extra = None if isinstance(note.extra, Foreign) else note.extra
            if kind is V and extra is None:
                extra = Offset(frozenset(atoms))
            write(x, type_, note.origins, note.session, extra)
    return x


def local(x: torch.Tensor) -> torch.Tensor:
    """The same tensor as this rank's own numbers: along which dims it is sharded is not followed any further.

    For code that works on the local part by intention, such as packing it into a buffer. Reports list it: what follows
    is not compared with the unsharded program. Nothing is done where no check is under way.
    """
    mode = active()
    note = _present(mode, x) if mode is not None else None
    if mode is None or note is None or not note.type.sharded:
        return x
    axes = [axis for axis, spmd_type in note.type if isinstance(spmd_type, Shard)]
    mode.trust(f"local: sharding over {', '.join(axes)} is not followed")
    return _forgotten(x, note, axes)


def _forgotten(x: torch.Tensor, note: Note, axes: Sequence[str]) -> torch.Tensor:
    """The same tensor, V on these axes."""
    types = {axis: V if axis in axes else spmd_type for axis, spmd_type in note.type}
    with torch._C.DisableTorchFunction():
        result = x.view_as(x)
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


def _present(mode: Any, x: torch.Tensor) -> Note | None:
    """What is known of a tensor now.

    A write through another view of its memory may have changed it; a parameter that nothing has touched is what its
    layout says.
    """
    if is_dynamo_compiling():
        return None
    untouched = note_of(x) is None and not (isinstance(x, torch.nn.Parameter) and mode is not None and mode.mesh)
    if mode is None or untouched:
        return note_of(x)
    with torch._C.DisableTorchFunction():
        note: Note | None = mode.note(x, "a declaration")
    return note


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
    atoms = atoms_of(axis, mode.mesh if mode is not None else _current_mesh())
    axes = [atom for atom in atoms if isinstance(note.type.get(atom), Shard)]
    if mode is not None and axes:
        mode.trust(f"forget: sharding over {', '.join(axes)} is not followed")
    return _forgotten(x, note, axes)


def _since(origins: Any, axis: str, spmd_type: SpmdType) -> list[str]:
    origin = (origins or {}).get(axis)
    return [f"{spmd_type} on {axis} since {origin}"] if origin is not None and origin.letter == spmd_type.letter else []


def _current_mesh() -> Mesh | None:
    return context.current().typed_mesh if context.is_initialized() else None
