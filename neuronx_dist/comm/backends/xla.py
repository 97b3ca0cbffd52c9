"""XLA devices: every verb is an in-graph collective of torch_xla's lazy program, carrying all replica groups.

All ranks must build *one* program: a collective of a rank whose program differs waits for ever, or loads another
executable. Two rules follow. Replica groups are those of the whole axis, not of this rank. And a rank's place must not
become a number in the program: `coordinate` gives it as an input, a tensor on the device.

torch_xla orders collectives by a token that it computes from their results, as `token * result[0]`: one that holds
inf or NaN makes the token, and through it every later result, NaN. One program for all ranks has one order in any case,
so each collective here starts with a fresh token.

Stages of a pipeline have different programs. A collective between ranks of several stages is therefore a program of its
own (`own_program`), which contains only operations of all of them: pending operations are cut off before and after it.

Ranks are processes (torchrun on Neuron and TPU hosts), threads of one process (`torch_xla.launch` on TPU v2 and v3, or
on the CPU), or are played one after the other (`comm.as_rank`, as `neuronx_dist.xla_replay` does). In the last two
torch.distributed takes no part.
"""

from __future__ import annotations

import datetime
import os
import pickle
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...call_site import LIBRARY, TRANSPORT, frames, line_of
from ...mesh import Mesh
from ...torch_internals.distributed import default_store
from .. import context
from ..base import DONE, Backend, Communicator, WorkLike
from ..errors import CommError
from ..health.board import StoreBoard
from ..host import upload
from ..rank_selection import XLA, in_one_program, only_on
from ..recording import shape_of
from .torch_job import connection_number
from .xla_groups import check_launched, process_group, replica_groups
from .xla_transfer import how_to_transfer, rows_of

__all__ = [
    "Issued",
    "XlaBackend",
    "XlaCommunicator",
    "connect",
    "disconnect",
    "in_use",
    "join",
    "own_program",
    "run_program",
    "world",
]


class Issued(NamedTuple):
    """One collective that a rank put into its program; its instructions are named `nxd-<number>-`."""

    number: int
    verb: str
    axis: str
    groups: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    sites: tuple[str, ...]  # `file:line in function`, innermost first, without comm/ and torch


class XlaCommunicator(Communicator):
    """A communicator whose collectives become instructions of a program.

    Attributes:
        groups: ranks of all groups along the axis.
        crosses_stages: whether ranks of several pipeline stages, which have different programs, are in one of them.
    """

    def __init__(
        self,
        axis: str,
        groups: Sequence[Sequence[int]],
        global_rank: int,
        issued: list[Issued] | None = None,
        crosses_stages: bool = False,
    ) -> None:
        super().__init__(axis, next(group for group in groups if global_rank in group), global_rank)
        self.groups = [list(group) for group in groups]
        self.crosses_stages = crosses_stages
        self._issued = issued
        self._coordinates: dict[torch.device, torch.Tensor] = {}
        self._sources: dict[tuple[torch.device, tuple[tuple[int, int], ...]], torch.Tensor] = {}
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

    def start_coalesced(
        self, verb: str, xs: Sequence[torch.Tensor], op: str, outs: Sequence[torch.Tensor | None]
    ) -> tuple[WorkLike, list[torch.Tensor]]:
        """Starts one instruction with an operand for each tensor, without copies; none exists for reduce-scatter."""
        if verb == "reduce_scatter":
            work, views = super().start_coalesced(verb, xs, op, outs)
            return work, [view.clone() for view in views]  # writing to a view is lowered as writing the whole buffer
        xm = self._begin(xs[0])
        if verb == "all_reduce":
            results = xm.all_reduce(op, [x.clone() for x in xs], groups=self.groups, pin_layout=False)
        else:
            results = xm.all_gather([x.unsqueeze(0) for x in xs], 0, groups=self.groups, pin_layout=False)
        self._note(verb, xs, results[0], self.groups)
        self._cut()
        return DONE, results

    def start_all_to_all(self, gathered: torch.Tensor, scattered: torch.Tensor) -> WorkLike:
        xm = self._begin(scattered)
        result = xm.all_to_all(scattered, 0, 0, self.size, groups=self.groups, pin_layout=False)
        return self._end("all_to_all", scattered, result, gathered)

    def start_permute(self, out: torch.Tensor, x: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> WorkLike:
        """Starts a collective-permute, or all-gathers from which a rank selects (comm/backends/xla_transfer.py)."""
        if how_to_transfer() == "permute":
            xm = self._begin(x)
            everywhere = [[group[src], group[dst]] for group in self.groups for src, dst in pairs]
            return self._end("permute", x, xm.collective_permute(x, everywhere), out)
        rows = rows_of(pairs, self.size)
        order = [index for row in rows for group in row for index in group if self.rank in group]
        source = self._source(x.device, pairs, order)
        xm = self._begin(x)
        row_of_x = torch.stack([x])  # not a view: torch_xla computes one of an expanded tensor from the unexpanded
        gathered = []
        for row in rows:
            groups = [[group[index] for index in part] for group in self.groups for part in row]
            gathered.append(xm.all_gather(row_of_x, 0, groups=groups, pin_layout=False))
            self._note("permute", x, gathered[-1], groups)
        # A selection: ranks that are no source may hold any values.
        rows_and_none = torch.cat([*gathered, torch.zeros_like(row_of_x)])
        return self._deliver(rows_and_none.index_select(0, source).squeeze(0), out)

    def _source(self, device: torch.device, pairs: Sequence[tuple[int, int]], order: Sequence[int]) -> torch.Tensor:
        """`[1]`, an input of programs: position of the source in `order` (the gathered indices), or its length."""
        key = (device, tuple(pairs))
        if key not in self._sources:
            index = next((order.index(src) for src, dst in pairs if dst == self.rank), len(order))
            self._sources[key] = torch.tensor([index], dtype=torch.int64).to(device)
        return self._sources[key]

    def start_exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> WorkLike:
        """Starts a collective-permute around the axis for each distance at which this rank sends or receives.

        A rank at an end, which has no neighbour on one side, sends and receives values there that nobody reads: its
        program must equal the others'.

        Raises:
            CommError: the sizes sent and received at some distance differ: then ranks would have different programs.
        """
        for distance in range(1, self.size):
            dst, src = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            x, out = sent[dst], received[src]
            if x.numel() and out.numel() and x.numel() != out.numel():
                raise CommError(
                    f"{self.describe('exchange')}: this rank sends {x.numel()} elements to the rank {distance} "
                    f"above, and receives {out.numel()} from the rank {distance} below; on XLA all ranks run one "
                    "program, so shards must be equal: redistribute the tensor to shards of one size"
                )
            if x.numel() or out.numel():
                wire = x if x.numel() else torch.zeros_like(out)
                pairs = [(index, (index + distance) % self.size) for index in range(self.size)]
                self.start_permute(out if out.numel() else torch.empty_like(wire), wire, pairs)
        return DONE

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
            f"{self.describe(verb)}: on XLA all ranks run one program, so a message between two of them is not "
            "possible: use comm.permute with the pairs of all ranks of the axis"
        )

    def gather_objects(self, obj: Any) -> list[Any]:
        """Gathers objects by torch_xla's rendezvous of all ranks of the job; all groups of the axis at once."""
        import torch_xla.core.xla_model as xm

        payloads = xm.rendezvous(f"nxd.{self.axis}", pickle.dumps(obj))
        if len(payloads) <= max(self.ranks):
            raise CommError(f"{self.describe('gather_objects')}: {len(payloads)} ranks answered, not all of the job")
        # From the ranks of this job, which run this code, too.
        return [pickle.loads(payloads[rank]) for rank in self.ranks]

    def _begin(self, x: torch.Tensor) -> Any:
        """Gives torch_xla's collectives a fresh token, and a program of their own if the ranks' programs differ."""
        import torch_xla
        import torch_xla.core.xla_model as xm

        if not in_one_program(x):
            raise CommError(f"{self.describe('a collective')}: the tensor is on {x.device}, not on an XLA device")
        self._cut()
        torch_xla._XLAC._set_all_reduce_token(str(x.device), None)
        return xm

    def _end(self, verb: str, x: torch.Tensor, result: torch.Tensor, out: torch.Tensor) -> WorkLike:
        self._note(verb, x, result, self.groups)
        return self._deliver(result, out)

    def _note(
        self,
        verb: str,
        x: torch.Tensor | Sequence[torch.Tensor],
        result: torch.Tensor,
        groups: Sequence[Sequence[int]],
    ) -> None:
        if self._issued is not None:
            import torch_xla

            number = len(self._issued)
            replica_groups = tuple(tuple(group) for group in groups)
            self._issued.append(Issued(number, verb, self.axis, replica_groups, shape_of(x), result.dtype, _sites()))
            torch_xla._XLAC._set_xla_custom_op_name_prefix(result, f"nxd-{number}-", 1)

    def _deliver(self, result: torch.Tensor, out: torch.Tensor) -> WorkLike:
        with torch.no_grad():
            out.copy_(result.view(out.shape))
        self._cut()
        return DONE

    def _cut(self) -> None:
        if self.crosses_stages and not _current_program.depth:
            run_program()


class _OwnProgram(threading.local):
    depth = 0


_current_program = _OwnProgram()


@contextmanager
def own_program() -> Iterator[None]:
    """Makes the operations inside a program of their own; inside another `own_program`, a part of that one."""
    if not _current_program.depth:
        run_program()
    _current_program.depth += 1
    try:
        yield
    finally:
        _current_program.depth -= 1
    if not _current_program.depth:
        run_program()


class _XlaGenerator:
    """Default generator of this rank's device."""

    device_type = XLA

    def get_state(self) -> torch.Tensor:
        """`[1]`, known without waiting for the device."""
        import torch_xla.core.xla_model as xm

        state = xm.get_rng_state()  # unsigned 64 bits, from which no tensor can be made
        return torch.tensor([state - 2**64 if state >= 2**63 else state], dtype=torch.int64)

    def set_state(self, state: torch.Tensor) -> None:
        """Sets the state that `get_state` returned: an input of the program, so that ranks may differ in it."""
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(int(state[0]) % 2**64)


class XlaBackend(Backend):
    """Communicators over XLA devices.

    Args:
        mesh: determines the ranks that share a program, those of one pipeline stage; None: all.
        issued: collects the collectives that this rank puts into its programs.
    """

    name = XLA
    has_messages = False
    generator = _XlaGenerator()
    device = torch.device(XLA)

    def __init__(self, mesh: Mesh | None = None, issued: list[Issued] | None = None) -> None:
        self._mesh = mesh
        self._issued = issued

    def communicator(
        self, label: str, groups: Sequence[Sequence[int]], global_rank: int, separate: bool = False
    ) -> Communicator:
        group_of_rank = next(group for group in groups if global_rank in group)
        if len(group_of_rank) == 1:
            return Communicator(label, group_of_rank, global_rank)
        # Ranks outside the wanted groups are passed as groups of one; XLA's groups have equal sizes, or omit ranks.
        several = [group for group in groups if len(group) > 1]
        return XlaCommunicator(label, several, global_rank, self._issued, self._crosses_stages(several))

    def _crosses_stages(self, groups: Sequence[Sequence[int]]) -> bool:
        mesh = self._mesh
        if mesh is None or mesh.pp == 1:
            return False
        return any(len({mesh.coordinate("pp", rank) for rank in group}) > 1 for group in groups)

    def own_program(self) -> AbstractContextManager[None]:
        return own_program()

    def wrap(self, group: Any, global_rank: int) -> Communicator:
        """Returns a communicator over a torch group of the `xla` backend, which knows all replica groups (`_mesh`)."""
        return self.communicator("group", replica_groups(group), global_rank)

    def process_group(self, communicator: Communicator) -> Any:
        return process_group(communicator)


def in_use() -> bool:
    """Returns whether this job's ranks are XLA devices, by `init_distributed("xla")` or the script's process group."""
    return "torch_xla" in sys.modules and (_chosen or _process_group_is_xla())


_chosen = False


def join(timeout: float | None = None) -> torch.device:
    """Joins the job that torchrun started on XLA devices, if any; returns this rank's device. Raises as `world`."""
    global _chosen
    import torch_xla

    _chosen = True
    if "RANK" in os.environ and not dist.is_initialized():
        import torch_xla.distributed.xla_backend  # registers the backend

        options: dict[str, Any] = {"timeout": datetime.timedelta(seconds=timeout)} if timeout is not None else {}
        dist.init_process_group("xla", init_method="xla://", **options)
    world()
    device: torch.device = torch_xla.device()
    return device


def world() -> tuple[int, int]:
    """Returns the number of ranks, and the number of this rank.

    Raises:
        CommError: torch.distributed was initialized with another number of ranks than there are XLA devices.
    """
    import torch_xla.runtime as xr

    size, rank = xr.world_size(), xr.global_ordinal()
    check_launched(size)
    if dist.is_initialized() and (dist.get_world_size(), dist.get_rank()) != (size, rank):
        raise CommError(
            f"torch.distributed says rank {dist.get_rank()} of {dist.get_world_size()}, torch_xla rank {rank} of "
            f"{size}: start one process for each XLA device, and initialize the group with init_process_group('xla', "
            "init_method='xla://')"
        )
    return size, rank if size > 1 else 0


def ranks_are_threads() -> bool:
    """Returns whether several ranks live in this process, each on another device."""
    import torch_xla.runtime as xr

    return bool(xr.world_size() > 1 and xr.addressable_device_count() > 1)


def connect(mesh: Mesh) -> None:
    """Makes this process, or thread, a rank of `mesh`. No group is set up: collectives are in the program.

    Ranks that torch.distributed does not know (started by torch_xla) have no store for a board.
    """
    size, rank = world()
    backend = XlaBackend(mesh)
    if size > 1 and dist.is_initialized():
        store = default_store()
        backend.board = StoreBoard(store, rank, connection_number(store, rank))
    rank_context = context.Context(mesh, rank, backend)
    if ranks_are_threads():
        context.set_of_thread(rank_context, _ordinal)
    else:
        context.set_default(rank_context)


def disconnect() -> None:
    if ranks_are_threads():
        context.set_of_thread(None, _ordinal)
    else:
        context.set_default(None)


def _ordinal() -> int:
    """Returns the rank of this thread; in an autograd thread, the rank of the device whose backward it runs."""
    import torch_xla.runtime as xr

    return int(xr.global_ordinal())


def run_program() -> None:
    """Starts the program of all pending operations on the device; the host does not wait for it."""
    import torch_xla

    torch_xla.sync()


def _process_group_is_xla() -> bool:
    return dist.is_initialized() and dist.get_backend() == "xla"


def _sites(depth: int = 8) -> tuple[str, ...]:
    """Lines that called a collective: `file:line in function`, innermost first."""
    outside = (frame for owner, frame in frames() if owner not in (LIBRARY, TRANSPORT))
    return tuple(f"{line_of(frame)} in {frame.f_code.co_name}" for frame in islice(outside, depth))
