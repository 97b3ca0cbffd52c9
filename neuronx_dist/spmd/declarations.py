"""Declarations of users and layers about the types of tensors.

In compiled code declarations do nothing, and no tensor has a type: under the checker compiled functions run as eager
ones (`checking/types/surroundings.py`), so that they are checked, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..comm import context
from ..lazy_names import lazy_names
from ..mesh import Mesh
from ..torch_internals.tensors import DisableTorchFunction
from ..weights.shard_spec import spec_of
from .axes import atoms_of
from .errors import SpmdTypeError, dim_of
from .local_holders import holds_local, local_tensor
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


_late = lazy_names(__name__, {"assert_merged": "spmd.partition_spec", "local_code": "spmd.boundaries"})
SHARD_OF = "_spmd_shard_of"  # key of the tensors' `__dict__`: (the parameter, the group of its pieces)


def has_local_type(x: torch.Tensor) -> bool:
    """Returns whether a tensor has a type."""
    return not is_dynamo_compiling() and note_of(x) is not None


def get_local_type(x: torch.Tensor) -> dict[Any, SpmdType]:
    """Returns the type of a tensor by axis: `{"tp": I}`. {} for a tensor made of constants, which is R everywhere.

    Raises:
        SpmdTypeError: the tensor has no type.
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
    return {axis: _declared(spmd_type) for axis, spmd_type in note.type}


def _declared(spmd_type: SpmdType) -> SpmdType:
    """Returns a type in the form that users declare: a part of a shard is a shard, a constant is R."""
    if isinstance(spmd_type, Shard):
        return replace(spmd_type, part=None)
    if spmd_type.letter == "V":
        return scaled(V, spmd_type.scale)
    return scaled(R, spmd_type.scale) if spmd_type.letter in "R0" else spmd_type


def assert_type(x: torch.Tensor, *types: Any, partition_spec: Any = None) -> torch.Tensor:
    """Declares the type of a tensor, or of each in a list, or asserts it if the tensor has one; returns the tensor.

    Args:
        types: axis -> type; a single type holds for all axes of the mesh. An axis is a name, a tuple of names, a
            ProcessGroup or a Communicator; axes of one rank are left out. V may become S(dim), and, as an assertion
            that nothing can check, V may become P. Several parts are merged: see `merge_types`.

    Raises:
        SpmdTypeError: the tensor has another type on one of these axes; it lacks the dim of S(dim); two entries for one
            axis contradict each other.
        ValueError: `types` contains something that is no type.

    Example:
        >>> t = torch.ones(20)
        >>> assert_type(t, {"tp": I}) is t
        True
        >>> get_local_type(t)
        {'tp': I}
    """
    if is_dynamo_compiling():
        return x
    if len(types) != 1 or partition_spec is not None or not isinstance(types[0], (Mapping, LocalType, Shard)):
        return _late("assert_merged")(x, types, partition_spec)
    mode = active()
    with DisableTorchFunction():
        for item in x if isinstance(x, (list, tuple)) else (x,):
            _assert_type(mode, local_tensor(item), types[0])
    return x


def types_by_atom(
    types: Mapping[Any, SpmdType] | SpmdType, mesh: Mesh | None, shape: Sequence[int], level: str = "G"
) -> dict[str, SpmdType]:
    """Returns a declaration for a tensor of `shape` as atom -> type, with dims counted from the front.

    At level "L" S becomes V.

    Raises:
        SpmdTypeError: S(dim) of a dim that does not exist; two entries for one axis contradict each other.
        ValueError: something in it is no type; or one type for all axes, without a mesh.
    """
    if isinstance(types, (LocalType, Shard)):
        if mesh is None:
            raise ValueError(f"{types!r} for all axes: there is no mesh, name the axes: {{'tp': {types!r}}}")
        types = {"world": types}
    declared: dict[str, SpmdType] = {}
    named_by: dict[str, Any] = {}
    for axis, spmd_type in types.items():
        if isinstance(spmd_type, Shard):
            spmd_type = replace(spmd_type, dim=dim_of(spmd_type, shape), part=None, scale=0)
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
    if local := getattr(mode, "local_axes", ()):
        declared = {axis: V if axis in local and t.letter == "S" else t for axis, t in declared.items()}
    known = note_of(x) is not None
    note = note_of(x) if mode is None else mode.note(x, "assert_type") if known or _has_layout(x, mode) else None
    old = note.type if note is not None else TensorType.of({})
    new, origins = dict(old.types), note.origins if note is not None else None
    fresh = note is not None and note.extra == FRESH
    for axis, spmd_type in declared.items():
        before = old.get(axis)
        before = _declared(before) if before is not None and before.base is V else before
        if fresh or before is None or before is ZERO or (before is UNIFORM and spmd_type.letter in SAME):
            new[axis] = spmd_type
        elif _declared(before) == spmd_type or (
            before.letter == "S" and (spmd_type is V or _same_dim(before, spmd_type))
        ):
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
    """Returns whether a parameter's layout was stated, so that it has a type before any call uses it."""
    return mode.mesh is not None and isinstance(x, torch.nn.Parameter) and spec_of(x).axis is not None


def _same_dim(before: SpmdType, declared: SpmdType) -> bool:
    """Returns whether a shard equals the declared one, apart from merged dims, which nobody declares."""
    if not isinstance(before, Shard) or not isinstance(declared, Shard) or declared.extent is not None:
        return False
    return replace(before, extent=None, part=None) == declared


assert_local_type = assert_type


# Claims that `trust` accepts: declared type -> letters of the types that the checker may have inferred before.
_MAY_BE_TRUSTED: dict[SpmdType, frozenset[str]] = {
    V: frozenset("R0"),  # computed from numbers that types see as equal, and from the offset of this rank's piece
    P: frozenset("RIV0"),  # zeros outside of this rank's part, so that the sum over the ranks is the value
    R: frozenset("PV"),  # a count of each rank's data, if all ranks count the same number
}


def trust(x: torch.Tensor, axis: Any, kind: SpmdType, claim: str = "") -> torch.Tensor:
    """Declares a type that the checker cannot infer, and returns `x`.

    The claims: a value is V (a position counted from this rank's offset); a varying value is P (zeros outside of this
    rank's part); a count without a gradient is R (each rank counted the same number). Reports list it by `claim`, the
    assumption in words; empty: the shape and the type.

    Does nothing outside of a check. Unlike `reinterpret` it adds no node to autograd's graph.
    """
    mode = active()
    if mode is not None and holds_local(x):
        trust(local_tensor(x), axis, kind, claim)
        return x
    note = _present(mode, x) if mode is not None else None
    if mode is None or note is None:
        return x
    with DisableTorchFunction():
        type_ = note.type
        believable = _MAY_BE_TRUSTED.get(kind.base, _MAY_BE_TRUSTED[P])
        if x.requires_grad:  # the gradient of an I is one value; of its parts it would be several
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


def local(x: Any = None) -> Any:
    """Returns the tensor as a local one: the checker stops following the dims along which it is sharded.

    For code that works on the local part on purpose, such as packing it into a buffer. Reports list it: the code after
    it is not compared with the unsharded program. Does nothing outside of a check. `with local():` does so for all
    tensors used inside.
    """
    mode = active()
    if x is None:
        return _late("local_code")()
    note = _present(mode, x) if mode is not None else None
    if mode is None or note is None or not note.type.sharded:
        return x
    axes = [axis for axis, spmd_type in note.type if isinstance(spmd_type, Shard)]
    mode.trust(f"local: sharding over {', '.join(axes)} is not followed")
    return _forgotten(x, note, axes)


def _forgotten(x: torch.Tensor, note: Note, axes: Sequence[str]) -> torch.Tensor:
    """Returns the tensor with type V on these axes."""
    types = {axis: V if axis in axes else spmd_type for axis, spmd_type in note.type}
    with DisableTorchFunction():
        result = x.view_as(x)
        write(result, TensorType.of(types, note.type.rest), note.origins, note.session)
    return result


def gradient(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Tells the checker that backward accumulates the gradient of `param` in `grad`, and returns `grad`.

    For accumulators other than `param.grad`, which the checker knows.
    """
    mode = active()
    if mode is not None:
        with DisableTorchFunction():
            mode.adopt(param, grad)
    return grad


def _present(mode: Any, x: torch.Tensor) -> Note | None:
    """Returns the current note of a tensor.

    A write through another view of its memory may have changed it; an unused parameter has the type of its layout.
    """
    if is_dynamo_compiling():
        return None
    untouched = note_of(x) is None and not (isinstance(x, torch.nn.Parameter) and mode is not None and mode.mesh)
    if mode is None or untouched:
        return note_of(x)
    with DisableTorchFunction():
        note: Note | None = mode.note(x, "a declaration")
    return note


def mark_shard(shard: torch.Tensor, param: torch.Tensor, group: Any) -> None:
    """Declares that `shard` is this rank's piece of `param` among the ranks of `group`, so that it varies over them."""
    shard.__dict__[SHARD_OF] = (param, group)


def forget(x: torch.Tensor, axis: Any) -> torch.Tensor:
    """Returns the tensor without the knowledge along which dim it is sharded over `axis`: S becomes V.

    For tensors that are local on purpose although a dim is sharded, such as a block-diagonal weight: each rank's block
    times its piece is the result, and no sum over the ranks is missing.
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
