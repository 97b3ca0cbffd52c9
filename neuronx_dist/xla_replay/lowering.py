"""The process that lowers: every rank in turn builds its program on one XLA device, and nothing of it is executed.

Collectives name all their replica groups, so one device is enough to build the program of any rank of any mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .. import comm
from ..comm.select import in_one_program
from ..comm.xla import Issued, XlaBackend, upload
from ..mesh import Mesh
from .execution import Array
from .host_reads import INSTEAD, executions, reads_guarded
from .programs import Program
from .worker import serve

__all__ = ["Lowered", "Request", "environment", "from_array", "lower", "to_array"]


def environment() -> dict[str, str]:
    return {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": "1",
        "XLA_IR_DEBUG": "1",  # instructions say which line they come from
        "XLA_HLO_DEBUG": "1",
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


@dataclass
class Request:
    """What to lower on every rank of a mesh.

    Attributes:
        function: `function(*arguments)` gives tensors; or, with `batches`, `(step, state)`.
        arguments: of each rank.
        batches: of each rank, for each step, the arguments of `step`. None: one program, of `function` itself.
    """

    mesh: Mesh
    function: Callable[..., Any]
    arguments: Sequence[Sequence[Any]]
    batches: Sequence[Sequence[Sequence[Any]]] | None = None


@dataclass
class Lowered:
    """One step of one rank.

    Attributes:
        parameters: of the program, in order: the name of a state tensor, or a value.
        results: the first results of the program: the state tensors that the step changes.
        output: what the step returned, with a `Slot` for a tensor that the program computes, `Before` for one that it
            was given.
        initial: values of state tensors before the step which no step has changed.
        before: what values of the state waited for before the step; on a cluster it is in the first step's program.
        host_reads: how often the step waited for the device to read a value.
    """

    program: Program
    parameters: list[str | Array]
    results: list[str]
    output: Any
    initial: dict[str, Array]
    host_reads: int
    before: Program | None


@dataclass(frozen=True)
class Slot:
    """Stands for the tensor that is the program's result number `index`."""

    index: int


@dataclass(frozen=True)
class Before:
    """Stands for a tensor of the state before the step."""

    name: str


def lower(request: Request) -> list[list[Lowered]]:
    """For each rank, its steps."""
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    device = torch.device("xla:0")
    found = []
    for rank in range(request.mesh.world_size):
        # A world of many in a process of one: what torch_xla says of itself is set to this rank's view.
        xr._WORLD_SIZE, xr._ORDINAL = request.mesh.world_size, rank
        torch.manual_seed(0)
        xm.set_rng_state(0, str(device))
        issued: list[Issued] = []
        with comm.as_rank(request.mesh, rank, XlaBackend(issued)):
            found.append(_lower_rank(request, rank, device, issued))
        xr._WORLD_SIZE, xr._ORDINAL = None, None
    return found


def _lower_rank(request: Request, rank: int, device: torch.device, issued: list[Issued]) -> list[Lowered]:
    arguments = _to_device(request.arguments[rank], device)
    if request.batches is None:
        return [_Recorder(dict, issued).lower(lambda: request.function(*arguments))]
    step, state = request.function(*arguments)
    recorder = _Recorder(state, issued)
    steps = []
    for batch in request.batches[rank]:
        on_device = _to_device(batch, device)
        steps.append(recorder.lower(lambda: step(*on_device)))  # noqa: B023 - called at once
    return steps


class _Recorder:
    """Lowers one step after the other, carrying the state from step to step without executing anything."""

    def __init__(self, state: Callable[[], Any], issued: list[Issued]) -> None:
        self._state = state
        self._issued = issued
        self._unknown: dict[str, torch.Tensor] = {}  # state that steps, which were not executed, have changed

    def lower(self, step: Callable[[], Any]) -> Lowered:
        import torch_xla

        before = self._named()
        unknown = {id(tensor) for tensor in self._unknown.values()}
        pending = [x for x in before.values() if _is_computed(x) and id(x) not in unknown]
        setup = Program(torch_xla._XLAC._get_xla_tensors_hlo(pending), b"", list(self._issued)) if pending else None
        if setup is not None and setup.collectives:
            raise RuntimeError(
                f"the state waits for a collective: communicate in the step, not before; {setup.collectives[0]}"
            )
        initial = self._materialize(before)
        self._issued.clear()
        torch_xla._XLAC._set_all_reduce_token(str(torch_xla.device()), None)
        names = {torch_xla._XLAC._unsafe_buffer_pointer(tensor): name for name, tensor in before.items()}
        executed = executions()
        with reads_guarded(names.keys()) as reads:
            output = step()
        if executions() != executed + sum(reads):
            raise RuntimeError(
                "the step executed a program while it was being lowered: it read a value on the host (x.to('cpu'), "
                "print(x)), or called torch_xla.sync()" + INSTEAD
            )
        after = self._named()
        changed = {name: tensor for name, tensor in after.items() if _is_computed(tensor)}
        leaves, spec = pytree.tree_flatten(output)
        results = list(changed.values())
        shown = []
        for leaf in leaves:
            if not _on_device(leaf):
                shown.append(leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf)
            elif _is_computed(leaf):
                shown.append(Slot(len(results)))
                results.append(leaf.detach())
            else:  # what came in goes out
                name = names.get(torch_xla._XLAC._unsafe_buffer_pointer(leaf))
                shown.append(Before(name) if name else from_array(to_array(leaf.cpu())))
        xlac = torch_xla._XLAC
        program = Program(
            xlac._get_xla_tensors_hlo(results), xlac._get_xla_tensors_hlo_proto(results), list(self._issued)
        )
        _, data = xlac._get_tensors_xla_device_data_node(results)
        parameters: list[str | Array] = [
            names.get(xlac._unsafe_buffer_pointer(tensor)) or to_array(tensor.cpu()) for tensor in data
        ]
        self._unknown.update(changed)
        output = pytree.tree_unflatten(shown, spec)
        return Lowered(program, parameters, list(changed), output, initial, len(reads), setup)

    def _named(self) -> dict[str, torch.Tensor]:
        """State tensors on the device, each once."""
        seen: dict[int, str] = {}
        named: dict[str, torch.Tensor] = {}
        for path, leaf in pytree.tree_flatten_with_path(self._state())[0]:
            if _on_device(leaf) and id(leaf) not in seen:
                seen[id(leaf)] = name = pytree.keystr(path)
                named[name] = leaf
        return named

    @torch.no_grad()
    def _materialize(self, state: dict[str, torch.Tensor]) -> dict[str, Array]:
        """Gives every state tensor a buffer of its own: the value it has, or, where a step that was not executed would
        give it, anything. Returns the values of the former.
        """
        import torch_xla

        pending = {name: tensor for name, tensor in state.items() if self._unknown.get(name) is tensor}
        for number, tensor in enumerate(pending.values(), 2):
            # Not all one value, and not as a scalar: torch_xla keeps one buffer of equal scalars, and 0 and 1 in none.
            filler = torch.full((max(1, tensor.numel()),), number, dtype=tensor.dtype)[: tensor.numel()]
            tensor.copy_(filler.to(tensor.device).view(tensor.shape))
        torch_xla._XLAC._xla_sync_multi(list(state.values()), [], True, True)
        return {name: to_array(tensor.detach().cpu()) for name, tensor in state.items() if name not in pending}


def to_array(tensor: torch.Tensor) -> Array:
    """A CPU tensor as numpy has it."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return "bfloat16", tensor.view(torch.int16).numpy().copy()
    return str(tensor.dtype)[6:], tensor.numpy().copy()


def from_array(value: Array) -> torch.Tensor:
    dtype, array = value
    tensor = torch.from_numpy(array.copy())
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def _on_device(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and in_one_program(leaf)


def _is_computed(tensor: torch.Tensor) -> bool:
    """Whether a tensor on the device waits for a program; one that has its value is no result of any."""
    import torch_xla

    return bool(torch_xla._XLAC._check_tensor_need_materialization([tensor])[0])


def _to_device(arguments: Any, device: torch.device) -> Any:
    def move(leaf: torch.Tensor) -> torch.Tensor:
        moved = upload(leaf.detach(), device)
        return moved.requires_grad_() if leaf.requires_grad else moved

    return pytree.tree_map_only(torch.Tensor, move, arguments)


def main() -> None:
    serve(lower)
