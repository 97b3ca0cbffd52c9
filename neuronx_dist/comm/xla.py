"""XLA devices: every verb is an in-graph collective of torch_xla's lazy program, carrying all replica groups.

All ranks must build *one* program: a collective of a rank whose program differs waits for ever, or loads another
executable. Two rules follow. Replica groups are those of the whole axis, not of this rank. And a rank's place must not
become a number in the program: `coordinate` gives it as an input, a tensor on the device.

torch_xla orders collectives by a token that it computes from their results, as `token * result[0]`: one that holds
inf or NaN makes the token, and through it every later result, NaN. One program for all ranks has one order anyhow, so
each collective here starts with a token of its own.

Ranks are processes (torchrun on Neuron and TPU hosts), threads of one process (`torch_xla.launch` on TPU v2 and v3, or
on the CPU), or are played one after the other (`comm.as_rank`, as `neuronx_dist.xla_replay` does). In the last two
torch.distributed takes no part.
"""

from __future__ import annotations

import datetime
import os
import pickle
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..mesh import Mesh
from . import context
from .base import DONE, Backend, Communicator, WorkLike
from .errors import CommError
from .select import in_one_program, only_on

__all__ = [
    "DEVICE",
    "Issued",
    "XlaBackend",
    "XlaCommunicator",
    "connect",
    "disconnect",
    "in_use",
    "join",
    "rng_state",
    "run_program",
    "set_rng_state",
    "upload",
    "world",
]


DEVICE = "xla"


class Issued(NamedTuple):
    """One collective as a rank put it into its program; instructions made of it are named `nxd-<number>-`."""

    number: int
    verb: str
    axis: str
    groups: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    sites: tuple[str, ...]  # `file:line in function`, innermost first, without comm/ and torch


def upload(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A CPU tensor on an XLA device, as an input of programs, whatever its value.

    `tensor.to(device)` makes a 0-dim tensor of 0 or 1 a constant of the program: a learning rate that warms up from 0
    would be compiled twice.
    """
    if tensor.dim() or torch.device(device).type != DEVICE:
        return tensor.to(device)
    return tensor.reshape(1).to(device).reshape(())


class XlaCommunicator(Communicator):
    """Attributes as of every Communicator, and `groups`: the ranks of all groups along the axis."""

    def __init__(
        self, axis: str, groups: Sequence[Sequence[int]], global_rank: int, issued: list[Issued] | None = None
    ) -> None:
        super().__init__(axis, next(group for group in groups if global_rank in group), global_rank)
        self.groups = [list(group) for group in groups]
        self._issued = issued
        self._coordinates: dict[torch.device, torch.Tensor] = {}
        sizes = {len(group) for group in groups}
        if len(sizes) > 1:
            raise CommError(f"replica groups of {axis} have sizes {sorted(sizes)}; XLA needs one size: {self.groups}")

    def coordinate(self, like: torch.Tensor) -> int | torch.Tensor:
        if not in_one_program(like):
            return self.rank
        if like.device not in self._coordinates:
            self._coordinates[like.device] = upload(torch.tensor(self.rank, dtype=torch.int64), like.device)
        return self._coordinates[like.device]

    def start_all_reduce(self, buffer: torch.Tensor, op: str) -> WorkLike:
        xm = self._begin(buffer)
        result = xm.all_reduce(op, buffer, groups=self.groups, pin_layout=False)
        return self._end("all_reduce", buffer, result, buffer)

    def start_all_gather(self, gathered: torch.Tensor, x: torch.Tensor) -> WorkLike:
        xm = self._begin(x)
        result = xm.all_gather(x.unsqueeze(0), 0, groups=self.groups, pin_layout=False)
        return self._end("all_gather", x, result, gathered)

    def start_reduce_scatter(self, out: torch.Tensor, scattered: torch.Tensor, op: str) -> WorkLike:
        xm = self._begin(scattered)
        result = xm.reduce_scatter(op, scattered, 1.0, 0, self.size, groups=self.groups, pin_layout=False)
        return self._end("reduce_scatter", scattered, result, out)

    def start_all_to_all(self, gathered: torch.Tensor, scattered: torch.Tensor) -> WorkLike:
        xm = self._begin(scattered)
        result = xm.all_to_all(scattered, 0, 0, self.size, groups=self.groups, pin_layout=False)
        return self._end("all_to_all", scattered, result, gathered)

    def start_permute(self, out: torch.Tensor, x: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> WorkLike:
        xm = self._begin(x)
        everywhere = [[group[src], group[dst]] for group in self.groups for src, dst in pairs]
        return self._end("permute", x, xm.collective_permute(x, everywhere), out)

    def start_broadcast(self, buffer: torch.Tensor, src: int) -> WorkLike:
        # A selection, not a product with 0, by which torch_xla's broadcast spreads the NaN of another rank.
        xm = self._begin(buffer)
        wire = buffer.to(torch.int32) if buffer.dtype == torch.bool else buffer
        result = xm.all_reduce("sum", only_on(wire, self, src), groups=self.groups, pin_layout=False)
        return self._end("broadcast", buffer, result, buffer)

    def start_send(self, x: torch.Tensor, dst: int, tag: int) -> WorkLike:
        raise self._no_messages("send")

    def start_recv(self, out: torch.Tensor, src: int, tag: int) -> WorkLike:
        raise self._no_messages("recv")

    def _no_messages(self, verb: str) -> CommError:
        return CommError(
            f"{self.describe(verb)}: on XLA all ranks run one program, in which a message between two of them is a "
            "collective: use comm.permute with the pairs of the whole axis"
        )

    def gather_objects(self, obj: Any) -> list[Any]:
        """By torch_xla's rendezvous of all ranks of the job; every group of the axis is gathered at the same time."""
        import torch_xla.core.xla_model as xm

        payloads = xm.rendezvous(f"nxd.{self.axis}", pickle.dumps(obj))
        if len(payloads) <= max(self.ranks):
            raise CommError(f"{self.describe('gather_objects')}: {len(payloads)} ranks answered, not all of the job")
        # From the ranks of this job, which run this code too.
        return [pickle.loads(payloads[rank]) for rank in self.ranks]

    def _begin(self, x: torch.Tensor) -> Any:
        """torch_xla's collectives, with a fresh token."""
        import torch_xla
        import torch_xla.core.xla_model as xm

        if not in_one_program(x):
            raise CommError(f"{self.describe('a collective')}: the tensor is on {x.device}, not on an XLA device")
        torch_xla._XLAC._set_all_reduce_token(str(x.device), None)
        return xm

    def _end(self, verb: str, x: torch.Tensor, result: torch.Tensor, out: torch.Tensor) -> WorkLike:
        if self._issued is not None:
            import torch_xla

            number = len(self._issued)
            groups = tuple(tuple(group) for group in self.groups)
            self._issued.append(Issued(number, verb, self.axis, groups, tuple(x.shape), result.dtype, _sites()))
            torch_xla._XLAC._set_xla_custom_op_name_prefix(result, f"nxd-{number}-", 1)
        with torch.no_grad():
            out.copy_(result.view(out.shape))
        return DONE


class XlaBackend(Backend):
    """Communicators over XLA devices. `issued` collects the collectives that this rank puts into its programs."""

    name = DEVICE

    def __init__(self, issued: list[Issued] | None = None) -> None:
        self._issued = issued

    def communicator(
        self, label: str, groups: Sequence[Sequence[int]], global_rank: int, own: bool = False
    ) -> Communicator:
        own_group = next(group for group in groups if global_rank in group)
        if len(own_group) == 1:
            return Communicator(label, own_group, global_rank)
        # Ranks outside the wanted groups come as groups of one; XLA's groups are all of one size, or leave ranks out.
        return XlaCommunicator(label, [g for g in groups if len(g) > 1], global_rank, self._issued)

    def wrap(self, group: Any, global_rank: int) -> Communicator:
        """A communicator over a torch group of the `xla` backend, which knows all replica groups (`_mesh`)."""
        mesh = getattr(group, "_mesh", None)
        if mesh is None:
            raise TypeError(
                "on XLA an axis is a mesh axis name, a tuple of names, a Communicator, or a ProcessGroup made with "
                f"pg_options={{'xla_pg_options': {{'mesh': all_groups}}}}; got {group!r}"
            )
        return self.communicator(getattr(group, "group_desc", None) or "group", mesh, global_rank)


def in_use() -> bool:
    """Whether this job's ranks are XLA devices: `init_distributed("xla")`, or the script's process group, says so."""
    return "torch_xla" in sys.modules and (_chosen or _process_group_is_xla())


_chosen = False


def join(timeout: float | None = None) -> torch.device:
    """Joins the job that torchrun started on XLA devices, if it did, and returns this rank's device."""
    global _chosen
    import torch.distributed as dist
    import torch_xla

    _chosen = True
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        import torch_xla.distributed.xla_backend  # registers the backend

        options: dict[str, Any] = {"timeout": datetime.timedelta(seconds=timeout)} if timeout is not None else {}
        dist.init_process_group("xla", init_method="xla://", **options)
    device: torch.device = torch_xla.device()
    return device


def world() -> tuple[int, int]:
    """Number of ranks, and this one's.

    Raises:
        CommError: torch.distributed was initialized with another number of ranks than there are XLA devices.
    """
    import torch.distributed as dist
    import torch_xla.runtime as xr

    size, rank = xr.world_size(), xr.global_ordinal()
    if dist.is_initialized() and (dist.get_world_size(), dist.get_rank()) != (size, rank):
        raise CommError(
            f"torch.distributed says rank {dist.get_rank()} of {dist.get_world_size()}, torch_xla rank {rank} of "
            f"{size}: start one process for each XLA device, and initialize the group with init_process_group('xla', "
            "init_method='xla://')"
        )
    return size, rank if size > 1 else 0


def ranks_are_threads() -> bool:
    """Whether several ranks live in this process, each on a device of its own."""
    import torch_xla.runtime as xr

    return bool(xr.world_size() > 1 and xr.addressable_device_count() > 1)


def connect(mesh: Mesh) -> None:
    """Makes this process, or thread, a rank of `mesh`. Nothing is to be set up: collectives are in the program."""
    made = context.Context(mesh, world()[1], XlaBackend())
    if ranks_are_threads():
        context.set_of_thread(made, _ordinal)
    else:
        context.set_default(made)


def disconnect() -> None:
    if ranks_are_threads():
        context.set_of_thread(None, _ordinal)
    else:
        context.set_default(None)


def _ordinal() -> int:
    """The rank of this thread; in an autograd thread, of the device whose backward it runs."""
    import torch_xla.runtime as xr

    return int(xr.global_ordinal())


def run_program() -> None:
    """Hands the program of everything that is pending to the device; the host does not wait for it."""
    import torch_xla

    torch_xla.sync()


def rng_state() -> torch.Tensor:
    """`[1]`: the state of this device's generator, known without waiting for the device."""
    import torch_xla.core.xla_model as xm

    return torch.tensor([xm.get_rng_state()], dtype=torch.int64)


def set_rng_state(state: torch.Tensor) -> None:
    """Sets what `rng_state` gave. The state is an input of the program, so that ranks may differ in it."""
    import torch_xla.core.xla_model as xm

    xm.set_rng_state(int(state[0]))


def _process_group_is_xla() -> bool:
    import torch.distributed as dist

    return dist.is_initialized() and dist.get_backend() == "xla"


_SKIPPED = tuple(f"/{name}/" for name in ("neuronx_dist/comm", "neuronx_dist/xla_replay", "torch", "torch_xla"))


def _sites(depth: int = 6) -> tuple[str, ...]:
    """Where a collective was asked for: `file:line in function`, innermost first."""
    frames = [
        f"{frame.filename}:{frame.lineno} in {frame.name}"
        for frame in reversed(traceback.extract_stack(limit=64))
        if not any(part in frame.filename for part in _SKIPPED) and not frame.filename.startswith("<")
    ]
    return tuple(frames[:depth])
