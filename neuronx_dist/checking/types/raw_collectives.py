"""`torch.distributed` on typed tensors: refused while types are checked.

A raw collective takes a process group in place of an axis, writes in place where types do not see it, and has no
derivative. While a mode is entered, the methods of `ProcessGroup`, through which all of `torch.distributed` goes (also
functions that were imported by name), look for typed tensors in their arguments; functional collectives arrive in the
mode itself. Calls by `neuronx_dist.comm`, whose verbs are typed, pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ... import comm
from ...call_site import LIBRARY, TRANSPORT, call_site, frames
from ...comm.ranks.rank_numbers import concrete
from ...mesh import Mesh
from ...spmd.axes import atoms_of
from ...spmd.errors import SpmdTypeError
from ...spmd.tensor_type import note_of, tensors_in
from ...spmd.watching import active
from .messages.explain import shown
from .messages.provenance import name_operands

__all__ = ["install", "refuse", "refuse_raw_collective", "remove"]

# method of ProcessGroup -> ours
_VERBS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "reduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "gather": "all_gather",
    "gather_single": "all_gather",
    "gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "scatter": "broadcast",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
    "new_window": "send",  # other ranks read and write the tensor, one-sided
}
_NAMESPACES = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem", "_dtensor")

_originals: dict[str, Any] = {}


def _is_raw(func: Any) -> bool:
    """Returns whether a function that a mode received is a functional collective, or one of `torch.distributed`."""
    module: str = getattr(func, "__module__", None) or ""
    return module.startswith("torch.distributed.") or str(func).partition(".")[0] in _NAMESPACES


def refuse(name: str, arguments: Any, verb: str = "", group: Any = None) -> None:
    """Raises if any of the arguments is typed.

    Args:
        group: the process group, or a communicator that stands for one; None: the default group.

    Raises:
        SpmdTypeError: with the verb to use instead.
    """
    typed = [(x, note) for x in tensors_in(arguments) if (note := note_of(x)) is not None]
    typed.sort(key=lambda item: not item[1][0].types)  # an empty buffer to write to says little
    for x, note in typed[:1]:
        if not verb:
            base = name.replace("isend", "send").replace("irecv", "recv").strip("_")
            verb = next((verb for verb in sorted({*_VERBS.values()}) if base.startswith(verb)), "all_reduce")
        label, code, _ = name_operands([x])[0]
        axes, atom = _axis_of(group)
        axis = '"' + '", "'.join(axes) + '"' if axes else "axis"
        axis = f"({axis})" if len(axes) > 1 else axis
        repairs = []
        if label.endswith(".grad") and set(axes) <= {"dp", "cp", "edp", "world"} and verb == "all_reduce":
            repairs.append("nxd.reduce_gradients(model) after the last backward, in place of the loop over gradients")
        out = f", out={code}" if verb in ("all_reduce", "broadcast") else ""  # torch's writes in place
        repairs.append(f"comm.{verb}({code}, {axis}{out})")
        if verb in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            repairs.append(f"spmd.{verb}({code}, {axis}, src=..., dst=...), where a gradient goes through it")
        repairs.append("with spmd.no_typecheck(): around it; what it writes then has no type")
        raise SpmdTypeError(
            f"torch.distributed's {name} at {call_site()} got {shown(x, note.type, label)}",
            "the checker does not see what torch.distributed writes, and the call has no derivative",
            repairs=repairs,
            axis=atom or next(iter(note.type.types), "tp"),
            rule="raw",
        )


def _axis_of(group: Any) -> tuple[tuple[str, ...], str]:
    """The names of the axis of a process group, and the first of its atoms; empty for a group that is no axis."""
    mode = active()
    mesh: Mesh | None = mode.mesh if mode is not None else None
    if mesh is None or not comm.is_initialized():
        return (), ""
    if group is None:
        names: tuple[str, ...] = ("world",)
    else:
        axis = mesh.axis_of([concrete(rank) for rank in comm.communicator(group).ranks])
        names = (axis,) if isinstance(axis, str) else tuple(axis or ())
    return names, next(iter(atoms_of(names, mesh)), "") if names else ""


def _called_by_comm() -> bool:
    """Returns whether `neuronx_dist.comm` called `torch.distributed`."""
    for owner, frame in frames():
        module: str = frame.f_globals.get("__name__", "")
        if owner != LIBRARY and module != __name__ and not module.startswith(("contextlib", "functools")):
            return owner == TRANSPORT
    return False


def _guarded(original: Callable[..., Any], method: str) -> Callable[..., Any]:
    verb = _VERBS[method]

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if active() is not None and not _called_by_comm():
            refuse(verb, (args, tuple(kwargs.values())), verb, self)
        return original(self, *args, **kwargs)

    return call


def install() -> None:
    """Makes `torch.distributed` refuse typed tensors, in threads that check types."""
    for method in _VERBS if dist.is_available() else ():
        original = dist.ProcessGroup.__dict__.get(method)
        if original is not None:
            _originals[method] = original
            setattr(dist.ProcessGroup, method, _guarded(original, method))


def remove() -> None:
    """Gives `torch.distributed` its own methods back."""
    for method, original in _originals.items():
        setattr(dist.ProcessGroup, method, original)
    _originals.clear()


def refuse_raw_collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses a function that a mode received, and that has no rule, if it is a collective of torch.distributed.

    Raises:
        SpmdTypeError: it is one, with typed tensors as arguments.
    """
    if _is_raw(func):
        name = getattr(func, "__name__", str(func)).removeprefix("_c10d_functional.")
        groups = (dist.ProcessGroup, comm.Communicator)
        group = next((value for value in (*args, *kwargs.values()) if isinstance(value, groups)), None)
        refuse(name, (args, tuple(kwargs.values())), group=group)
