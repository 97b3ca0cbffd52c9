"""torch.distributed process groups: gloo on CPU, NCCL on CUDA.

gloo's own collectives are used only where they are fast. Its reduce_scatter is a whole all-reduce and a copy of one
chunk: here it is an all_to_all and a sum in rank order, which is faster at every size. Its all_gather copies everything
twice and goes round a ring: here large ones are messages straight between the caller's buffers, and small ones an
all_to_all of equal pieces. (`benchmarks/gloo_collectives.py` compares them.)
"""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..base import Backend, Communicator, WorkLike, Works
from ..errors import CommError, CommTimeout, RemoteRankError
from ..failure import FailureMonitor

__all__ = ["C10dBackend", "C10dCommunicator"]

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 renamed these; the old names still work, and warn on every call.
_all_gather_single = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter_single = (
    dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
)
_KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters  # not in torch 2.9
_GLOO_DTYPES = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8}
_SMALL = 1 << 20  # bytes of an all_gather's result up to which gloo's all_to_all is faster than messages
_TAG = 1 << 20  # collectives made of messages use tags of their own, so that they never meet a user's send


class C10dCommunicator(Communicator):
    def __init__(
        self,
        group: dist.ProcessGroup,
        axis: str,
        ranks: Sequence[int],
        global_rank: int,
        monitor: FailureMonitor | None,
    ) -> None:
        super().__init__(axis, ranks, global_rank)
        self.group = group
        self._monitor = monitor
        self._gloo = dist.get_backend(group) == "gloo"

    def start_all_reduce(self, buffer: torch.Tensor, op: str) -> WorkLike:
        return dist.all_reduce(buffer, _OPS[op], group=self.group, async_op=True)

    def start_all_gather(self, gathered: torch.Tensor, x: torch.Tensor) -> WorkLike:
        if not self._gloo:
            return _all_gather_single(gathered, x, group=self.group, async_op=True)
        if gathered.nbytes <= _SMALL:
            return self.start_all_to_all(gathered, x.expand_as(gathered).contiguous())
        gathered[self.rank].copy_(x)
        works: list[WorkLike] = []
        for step in range(1, self.size):  # nearest neighbours first; receives before sends, so that nothing is buffered
            src, dst = (self.rank - step) % self.size, (self.rank + step) % self.size
            works.append(self.start_recv(gathered[src], src, _TAG))
            works.append(self.start_send(x, dst, _TAG))
        return Works(works)

    def start_reduce_scatter(self, out: torch.Tensor, scattered: torch.Tensor, op: str) -> WorkLike:
        if not self._gloo:
            return _reduce_scatter_single(out.view(-1), scattered.view(-1), _OPS[op], group=self.group, async_op=True)
        received = torch.empty_like(scattered)

        def reduce() -> None:
            if op == "sum":
                torch.sum(received, 0, out=out)
            else:
                (torch.amax if op == "max" else torch.amin)(received, 0, out=out)

        return Works([self.start_all_to_all(received, scattered)], reduce)

    def start_all_to_all(self, gathered: torch.Tensor, scattered: torch.Tensor) -> WorkLike:
        if self._gloo and gathered.dtype not in _GLOO_DTYPES:  # int16, float8: bytes are bytes
            gathered, scattered = gathered.view(-1).view(torch.uint8), scattered.view(-1).view(torch.uint8)
        return dist.all_to_all_single(gathered, scattered, group=self.group, async_op=True)

    def start_permute(self, out: torch.Tensor, x: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> WorkLike:
        out.zero_()
        ops: list[dist.P2POp] = []
        for src, dst in pairs:
            if src == dst == self.rank:
                out.copy_(x)
            elif src == self.rank:
                ops.append(dist.P2POp(dist.isend, x, group=self.group, tag=_TAG + 1, group_peer=dst))
            elif dst == self.rank:
                ops.append(dist.P2POp(dist.irecv, out, group=self.group, tag=_TAG + 1, group_peer=src))
        return Works(dist.batch_isend_irecv(ops) if ops else [])

    def start_broadcast(self, buffer: torch.Tensor, src: int) -> WorkLike:
        return dist.broadcast(buffer, group_src=src, group=self.group, async_op=True)

    def start_send(self, x: torch.Tensor, dst: int, tag: int) -> WorkLike:
        return dist.isend(x, group=self.group, group_dst=dst, tag=tag)  # type: ignore[return-value]

    def start_recv(self, out: torch.Tensor, src: int, tag: int) -> WorkLike:
        return dist.irecv(out, group=self.group, group_src=src, tag=tag)  # type: ignore[return-value]

    def gather_objects(self, obj: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, obj, group=self.group)
        return gathered

    def explain(self, verb: str, error: BaseException) -> NoReturn:
        if isinstance(error, CommError):
            raise error
        what = self.describe(verb)
        first = self._monitor.first_failure() if self._monitor is not None else None
        if first is not None:
            raise RemoteRankError(
                f"rank {first.rank} failed first: {first.message} (met in {what})", rank=first.rank
            ) from None
        text = str(error)
        if "imed out" in text or "timeout" in text.lower():
            raise CommTimeout(
                f"{what} timed out: some rank of the group did not take part. It is stuck, much slower, or went "
                f"another way through the program. ({text.splitlines()[0][:200]})"
            ) from error
        raise CommError(
            f"{what} failed: a rank of the group was lost without a message (killed, out of memory, or its host is "
            f"down). ({text.splitlines()[0][:200]})"
        ) from error


class C10dBackend(Backend):
    """Communicators over torch.distributed groups; needs `init_process_group` to have been called.

    Args:
        timeout: after which a collective gives up on a silent rank; None: that of `init_process_group`.
        monitor: knows whether another rank has failed.
        watch: gets every communicator that is made, and returns the one to use (`launch.connect` passes that of
            NEURONX_DIST_DEBUG).
    """

    name = "c10d"

    def __init__(
        self,
        timeout: datetime.timedelta | None = None,
        monitor: FailureMonitor | None = None,
        watch: Callable[[C10dCommunicator], C10dCommunicator] | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialized: call torch.distributed.init_process_group(backend=...) first"
            )
        self.timeout = timeout
        self.monitor = monitor
        self._watch = watch
        self._groups: list[dist.ProcessGroup] = []
        self._by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def communicator(
        self, label: str, groups: Sequence[Sequence[int]], global_rank: int, own: bool = False
    ) -> Communicator:
        # On NCCL a group is a stream of its own, in which messages of two directions can block each other; gloo has no
        # streams, and a group costs it a connection to every member.
        own = own and dist.get_backend() != "gloo"
        made_groups = [self._group(tuple(ranks), own) for ranks in groups]
        index = next(index for index, ranks in enumerate(groups) if global_rank in ranks)
        ranks = groups[index]
        if len(ranks) == 1:
            return Communicator(label, ranks, global_rank)
        group = made_groups[index]
        assert group is not None
        return self._join(group, label, ranks, global_rank)

    def wrap(self, group: Any, global_rank: int) -> Communicator:
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "axis must be a mesh axis name, a tuple of names, or a torch.distributed.ProcessGroup that holds this "
                f"rank; got {group!r}"
            )
        return self._join(group, group.group_desc or "group", dist.get_process_group_ranks(group), global_rank)

    def single(self, communicator: Communicator) -> dist.ProcessGroup:
        """A process group for a communicator of one rank, for scripts that hand it to torch.distributed."""
        ranks = communicator.ranks
        if ranks not in self._by_ranks:
            group = dist.new_group(list(ranks), timeout=self.timeout, use_local_synchronization=True)
            self._by_ranks[ranks] = self._keep(group)
        return self._by_ranks[ranks]

    def close(self) -> None:
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups.clear()
        self._by_ranks.clear()

    def _join(self, group: dist.ProcessGroup, label: str, ranks: Sequence[int], global_rank: int) -> C10dCommunicator:
        communicator = C10dCommunicator(group, label, ranks, global_rank, self.monitor)
        return communicator if self._watch is None else self._watch(communicator)

    def _group(self, ranks: tuple[int, ...], own: bool) -> dist.ProcessGroup | None:
        """The process group over `ranks`, made once unless `own`; None where there is no need of one.

        Every rank of the world takes part in making every group. (torch can make one among its members alone, but names
        it after its ranks, so that a second one, after the first was destroyed, meets the addresses of the first.)
        """
        if len(ranks) == 1:
            return None
        if not own and self.timeout is None and ranks == tuple(range(dist.get_world_size())):
            return dist.group.WORLD
        if own:
            return self._make(ranks)
        if ranks not in self._by_ranks:
            self._by_ranks[ranks] = self._make(ranks)
        return self._by_ranks[ranks]

    def _make(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        options: dict[str, Any] = {}
        if list(ranks) != sorted(ranks):  # torch would number the members in ascending order, whatever was asked for
            if not _KEEPS_ORDER:
                raise ValueError(
                    f"group {list(ranks)}: torch {torch.__version__} makes groups of ascending ranks only; use a newer "
                    f"torch, or the linear topology and merged axes named outermost first, as in ('pp', 'tp')"
                )
            options["sort_ranks"] = False
        return self._keep(dist.new_group(list(ranks), timeout=self.timeout, **options))

    def _keep(self, group: Any) -> dist.ProcessGroup:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            self._groups.append(group)
        return group
