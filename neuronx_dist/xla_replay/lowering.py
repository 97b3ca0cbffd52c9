"""The lowering process: every rank in turn builds its programs on one XLA device, and no collective is executed.

Collectives name all their replica groups, so one device is enough to build the programs of any rank of any mesh.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .. import comm
from ..comm.backends.xla import Issued, XlaBackend
from ..comm.host import upload
from ..mesh import Mesh
from ..pipeline.cut.stage import add_place
from ..torch_internals.tensors import pytree
from .cutting import Cutter, on_device
from .host_reads import INSTEAD, device_waits, reads_guarded
from .traces import DeviceValue, LoweredStep, RankTrace
from .worker import serve

__all__ = ["LoweringRequest", "environment", "lower"]


def environment() -> dict[str, str]:
    return {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": "1",
        "XLA_IR_DEBUG": "1",  # instructions have source lines
        "XLA_HLO_DEBUG": "1",
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


@dataclass
class LoweringRequest:
    """Request to lower a function on every rank of a mesh.

    Attributes:
        function: `function(*arguments)` returns tensors; or, with `batches`, `(step, state)`.
        arguments: the arguments of each rank.
        batches: by rank and step, the arguments of `step`. None: one step, which is `function` itself.
    """

    mesh: Mesh
    function: Callable[..., Any]
    arguments: Sequence[Sequence[Any]]
    batches: Sequence[Sequence[Sequence[Any]]] | None = None


def lower(request: LoweringRequest) -> list[RankTrace]:
    """Lowers a request: returns the programs and values of each rank."""
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    device = torch.device("xla:0")
    lowered = []
    for rank in range(request.mesh.world_size):
        # One process plays all ranks: torch_xla's world size and ordinal are set to those of this rank.
        xr._WORLD_SIZE, xr._ORDINAL = request.mesh.world_size, rank
        torch.manual_seed(0)
        xm.set_rng_state(0, str(device))
        issued: list[Issued] = []
        try:
            cutter = Cutter(device, issued)
            with comm.as_rank(request.mesh, rank, XlaBackend(request.mesh, issued)), cutter.cutting():
                lowered.append(_lower_rank(request, rank, device, cutter))
                cutter.check_nothing_is_left()
        except Exception as error:
            add_place(error, f"rank {rank}")
            raise
        finally:
            xr._WORLD_SIZE, xr._ORDINAL = None, None
    return lowered


def _lower_rank(request: LoweringRequest, rank: int, device: torch.device, cutter: Cutter) -> RankTrace:
    arguments = _to_device(request.arguments[rank], device)
    if request.batches is None:
        alone = _lower_step(lambda: request.function(*arguments), dict, cutter, only_results=True)
        return RankTrace(cutter.known, LoweredStep([]), [alone])
    cutter.executing = True
    with _no_other_waits(cutter):
        functions = request.function(*arguments)
        if not (isinstance(functions, tuple) and len(functions) == 2 and all(map(callable, functions))):
            raise TypeError(f"the set-up returned {functions!r}; it must return two functions, (step, state)")
        step, state = functions
        gc.collect()  # tensors that the set-up dropped are no results of it
        cutter.cut()
    cutter.executing = False
    setup = LoweredStep(cutter.take(), None, _numbers(state, cutter))
    steps = []
    for number, batch in enumerate(request.batches[rank]):
        on_device = _to_device(batch, device)
        try:
            steps.append(_lower_step(lambda: step(*on_device), state, cutter))  # noqa: B023 - called at once
        except Exception as error:
            add_place(error, f"step {number}")
            raise
    return RankTrace(cutter.known, setup, steps)


def _lower_step(
    step: Callable[[], Any], state: Callable[[], Any], cutter: Cutter, only_results: bool = False
) -> LoweredStep:
    known = len(cutter.known)
    with _no_other_waits(cutter) as reads:
        output = step()
        gc.collect()
        leaves, spec = pytree.tree_flatten(output)
        cutter.cut([leaf for leaf in leaves if on_device(leaf)] if only_results else None)
    uploads = len(cutter.known) - known
    shown: list[Any] = []
    for leaf in leaves:
        if on_device(leaf):
            shown.append(DeviceValue(cutter.number(leaf)))
        else:
            shown.append(leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf)
    output = pytree.tree_unflatten(shown, spec)
    return LoweredStep(cutter.take(), output, _numbers(state, cutter), len(reads), uploads)


@contextmanager
def _no_other_waits(cutter: Cutter) -> Iterator[list[int]]:
    """Yields the reads of `reads_guarded`; raises if the device was waited for in any other way."""
    before = device_waits() - cutter.waits
    with reads_guarded(cutter.stand_ins) as reads:
        yield reads
        if device_waits() - cutter.waits != before + sum(reads):
            raise RuntimeError(
                "the host waited for the device while a program was being lowered: a value was copied to the host "
                "(x.to('cpu'), print(x), NxDPPModel without return_loss_on_cpu=False), or something other than "
                "torch_xla.sync() ended a program" + INSTEAD
            )


def _numbers(state: Callable[[], Any], cutter: Cutter) -> dict[str, int]:
    """Returns the value numbers of the state's tensors on the device, each tensor once, by name."""
    seen: set[int] = set()
    numbers: dict[str, int] = {}
    for path, leaf in pytree.tree_flatten_with_path(state())[0]:
        if on_device(leaf) and id(leaf) not in seen:
            seen.add(id(leaf))
            numbers[pytree.keystr(path)] = cutter.number(leaf)
    return numbers


def _to_device(arguments: Any, device: torch.device) -> Any:
    def move(leaf: torch.Tensor) -> torch.Tensor:
        moved = upload(leaf.detach(), device)
        return moved.requires_grad_() if leaf.requires_grad else moved

    return pytree.tree_map_only(torch.Tensor, move, arguments)


def main() -> None:
    serve(lower)
