"""One rank of a job on fake tensors, which have shapes and no values: communicators that send nothing, and its model.

    with playing(mesh, rank, WireBackend(meter, device)), on_fakes(model, inputs, meter, device) as (model, inputs):
        run_step(model, inputs)

The memory that a step needs (`memory.py`) and what recomputation saves (`recompute.py`) are measured so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .. import comm
from ..comm.backends.c10d import C10dCommunicator
from ..comm.base import Backend, Communicator, WorkLike
from ..mesh import Mesh
from ..pipeline.model import NxDPPModel
from ..program.effects import tensors_in
from ..program.fake_mode import QuietFakeMode
from ..spmd import random
from ..torch_internals.tensors import pytree
from ..weights.partial_model import join, partial_model
from .meter import MemoryMeter

__all__ = ["BATCH", "MESSAGES", "PARAMETERS", "WireBackend", "on_fakes", "playing", "run_step"]

PARAMETERS, BATCH = "parameters", "batch"  # kinds of memory
MESSAGES = "messages"  # of tensors that stages send


@contextmanager
def playing(mesh: Mesh, rank: int, wires: WireBackend, states: dict[str, Any] | None = None) -> Iterator[None]:
    """Makes this thread the rank of a mesh, with random streams of these states."""
    with comm.as_rank(mesh, rank, wires):
        random.streams().set_states(states or {})
        if random.TENSOR_PARALLEL not in random.streams().get_states():
            random.streams().add(random.TENSOR_PARALLEL, 0)
        yield


@contextmanager
def on_fakes(
    model: nn.Module,
    inputs: Mapping[str, Any],
    meter: MemoryMeter,
    device: torch.device,
    prepare: Callable[[nn.Module], Any] = lambda model: None,
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Makes a copy of a model and of a batch on fake tensors that `meter` counts, as all tensors inside.

    The copy is in training. A pipeline is recorded, and takes as few microbatches as have the peak of all.

    Args:
        model, inputs: of any device; shapes and dtypes count.
        prepare: called with the copy before the recording.
    """
    fake = QuietFakeMode()  # it has grouped products (of experts) in float32, too
    with fake, meter:
        meter.kind = PARAMETERS
        played: Any = copy.deepcopy(model, _fakes_of(model, device))
        meter.kind = BATCH
        batch: dict[str, Any] = pytree.tree_map(
            lambda x: torch.empty(x.shape, dtype=x.dtype, device=device) if isinstance(x, torch.Tensor) else x,
            dict(inputs),
        )
    played.train()
    in_pipeline = isinstance(played, NxDPPModel)
    if in_pipeline:
        batch = _shorten(played, batch)
    prepare(played)
    with torch.enable_grad():
        if in_pipeline:
            played.open_channels()
            played.program(batch)  # recorded at the first step
        with fake, meter:
            yield played, batch


def run_step(model: Any, inputs: Mapping[str, Any]) -> None:
    """Runs forward and backward: of a pipeline its schedule."""
    if isinstance(model, NxDPPModel):
        model.run(model.training_schedule, inputs)
    else:
        torch.autograd.backward(_losses(model(**inputs)))


def _shorten(model: NxDPPModel, inputs: dict[str, Any]) -> dict[str, Any]:
    """Makes the model take as few microbatches as have the peak of all; returns these microbatches of the inputs."""
    num_microbatches = model.num_microbatches
    model.num_microbatches = model.training_schedule.microbatches_until_repeat(model.stage)
    model.trace_file_path = None

    def first(x: Any) -> Any:
        is_cut = isinstance(x, torch.Tensor) and x.ndim > 0 and x.shape[0] > 1
        return x[: x.shape[0] // num_microbatches * model.num_microbatches] if is_cut else x

    result: dict[str, Any] = pytree.tree_map(first, inputs)
    return result


def _losses(output: Any) -> list[torch.Tensor]:
    """Returns a module's loss or, without one, the sums of its results, of which backward is played."""
    loss = getattr(output, "loss", None)
    return [loss] if loss is not None else [x.sum() for x in tensors_in(output) if x.requires_grad]


def _fakes_of(model: nn.Module, device: torch.device) -> dict[int, Any]:
    """Returns fake tensors on `device` by the `id` of this rank's parameters and buffers: a memo for `copy.deepcopy`.

    Those of other ranks stand for themselves. To be called inside of the fake mode.
    """
    part = partial_model(model)
    fakes: dict[int, Any] = {}
    for prefix, module in part.original_module.named_modules(remove_duplicate=False):
        for name, x in (*module._parameters.items(), *module._buffers.items()):
            if x is None or fakes.setdefault(id(x), x) is not x:
                continue
            if part.is_local(join(prefix, name)):  # a tied weight has a name on each of several ranks
                fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
                if isinstance(x, nn.Parameter):
                    fake = nn.Parameter(fake, requires_grad=x.requires_grad)
                fake.__dict__.update(x.__dict__)
                fakes[id(x)] = fake
    return fakes


class _HoldingWork:
    """Finished work that holds its buffers until it is awaited, as the work of a real group does."""

    def __init__(self, *buffers: torch.Tensor) -> None:
        self.buffers = buffers

    def wait(self) -> None:
        return None


class _MeasuringCommunicator(C10dCommunicator):
    """A communicator without a group, which sends nothing and allocates the buffers of the real communicator."""

    def __init__(self, label: str, ranks: Sequence[int], global_rank: int, wires: WireBackend) -> None:
        Communicator.__init__(self, label, ranks, global_rank)
        self._gloo = wires.is_gloo
        self._meter = wires.meter
        self._communicates = wires.communicates

    def start_all_reduce(self, buffer: torch.Tensor, op: str) -> WorkLike:
        self._communicates(buffer.nbytes)
        return _HoldingWork(buffer)

    def start_all_gather(self, gathered: torch.Tensor, x: torch.Tensor) -> WorkLike:
        self._communicates(gathered.nbytes)
        return super().start_all_gather(gathered, x) if self._gloo else _HoldingWork(gathered, x)

    def start_reduce_scatter(self, out: torch.Tensor, scattered: torch.Tensor, op: str) -> WorkLike:
        self._communicates(scattered.nbytes)
        return super().start_reduce_scatter(out, scattered, op) if self._gloo else _HoldingWork(out, scattered)

    def start_all_to_all(self, gathered: torch.Tensor, scattered: torch.Tensor) -> WorkLike:
        self._communicates(gathered.nbytes)
        return _HoldingWork(gathered, scattered)

    def start_exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> WorkLike:
        self._communicates(sum(x.nbytes for x in received))
        return _HoldingWork(*received, *sent)

    def start_broadcast(self, buffer: torch.Tensor, src: int) -> WorkLike:
        return _HoldingWork(buffer)

    def start_send(self, x: torch.Tensor, dst: int, tag: int) -> WorkLike:
        return self._message(x)

    def start_recv(self, out: torch.Tensor, src: int, tag: int) -> WorkLike:
        return self._message(out)

    def _message(self, buffer: torch.Tensor) -> WorkLike:
        if self.axis.startswith("pp"):
            self._meter.label([buffer], MESSAGES)
        return _HoldingWork(buffer)


class WireBackend(Backend):
    """Communicators without a group, which allocate the buffers of gloo or NCCL, and label messages in `meter`.

    Args:
        communicates: called with the number of bytes of each collective that is started.
    """

    name = "wire"

    def __init__(
        self, meter: MemoryMeter, device: torch.device, communicates: Callable[[int], None] = lambda sent: None
    ) -> None:
        self.meter = meter
        self._device = device
        self.is_gloo = device.type == "cpu"
        self.communicates = communicates

    @property
    def device(self) -> torch.device:
        return self._device

    def communicator(
        self, label: str, groups: Sequence[Sequence[int]], global_rank: int, separate: bool = False
    ) -> Communicator:
        ranks = next(group for group in groups if global_rank in group)
        return _MeasuringCommunicator(label, ranks, global_rank, self)
