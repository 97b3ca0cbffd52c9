"""torch.distributed process groups: gloo on CPU, NCCL on CUDA.

gloo's own collectives are used only where they are fast. Its reduce_scatter is a whole all-reduce and a copy of one
chunk: here it is an all_to_all and a sum in rank order, which is faster at every size. Its all_gather copies everything
twice and goes round a ring: here large ones are messages straight between the caller's buffers, and small ones an
all_to_all of equal pieces. (`benchmarks/gloo_collectives.py` compares them.)
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ... import accelerator
from ...call_site import call_site
from ...mesh import Groups
from ...torch_internals.distributed import (
    backend_timeout,
    default_group,
    default_store,
    device_types,
    is_registered,
    make_group,
    set_ranks,
)
from ..base import TAGS, Backend, Communicator, WorkLike, Works
from ..errors import ALL_RANKS, CommError, CommTimeout, RemoteRankError
from ..health.board import StoreBoard
from ..health.failure import FailureMonitor
from ..health.waiting import noted
from .capabilities import advice_on_missing, capabilities_of, is_missing_call
from .message_lists import LARGE, exchange, start_alone
from .substitutes import OPS, Substitutes, pairs_in_order

__all__ = [
    "DEFAULT_TIMEOUT",
    "C10dBackend",
    "C10dCommunicator",
    "SubstitutingCommunicator",
    "let_go_of_groups",
    "ranks_of_group",
]

DEFAULT_TIMEOUT = datetime.timedelta(minutes=10)  # torch's default is 30 minutes on gloo, and this on NCCL

# torch 2.13 renamed these; the old names still work, and warn on every call.
_all_gather_single = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter_single = (
    dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
)


def _started(options: Any, op: str | None = None) -> Any:
    """Returns options of a collective that is awaited later."""
    options.asyncOp = True
    if op is not None:
        options.reduceOp = OPS[op]
    return options


_REDUCTIONS = {op: _started(dist.AllreduceOptions(), op) for op in OPS}
_ALL_TO_ALL = _started(dist.AllToAllOptions())
_GLOO_DTYPES = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8}
_SMALL = 1 << 20  # bytes of an all_gather's result up to which gloo's all_to_all is faster than messages
_TAG = TAGS  # collectives made of messages use tags of their own, so that they never meet a user's send
_TAGS = 2 * _TAG  # tags of one communicator
_SHARERS = 2**31 // _TAGS  # communicators of one group that gloo's 32 bits of a tag keep apart
_LOST = re.compile(r"connect|closed|reset|broken pipe|socket|errno|peer|remote|abort|terminat", re.IGNORECASE)
_on_gloo: WeakSet[C10dCommunicator] = WeakSet()  # all communicators of this process on gloo


def let_go_of_groups() -> None:
    """Removes the process groups from all communicators on gloo, which cannot be used after this.

    A group has threads as long as it is referenced, and models and optimizers reference communicators.
    """
    for communicator in _on_gloo:
        del communicator.group


class C10dCommunicator(Communicator):
    def __init__(
        self,
        group: dist.ProcessGroup,
        axis: str,
        ranks: Sequence[int],
        global_rank: int,
        monitor: FailureMonitor | None,
        first_tag: int = 0,
    ) -> None:
        super().__init__(axis, ranks, global_rank)
        self.group = group
        self._monitor = monitor
        self._gloo = dist.get_backend(group) == "gloo"
        if self._gloo:
            _on_gloo.add(self)
        self._first_tag = first_tag  # added to all tags: a group may be shared, and messages must not meet in it

    # On gloo all_reduce and all_to_all are the calls that those of torch.distributed end in, after a dozen Python calls
    # and tests of arguments that are correct here: 20 to 30 us less CPU time, where the sum of a few numbers takes 30.
    def start_all_reduce(self, buffer: torch.Tensor, op: str) -> WorkLike:
        if self._gloo and not buffer.is_complex():  # torch refuses a maximum of complex numbers
            return self.group.allreduce([buffer], _REDUCTIONS[op])
        return dist.all_reduce(buffer, OPS[op], group=self.group, async_op=True)

    def start_all_gather(self, gathered: torch.Tensor, x: torch.Tensor) -> WorkLike:
        if not self._gloo:
            return _all_gather_single(gathered, x, group=self.group, async_op=True)
        if gathered.nbytes <= _SMALL:
            return self.start_all_to_all(gathered, x.expand_as(gathered).contiguous())
        return start_alone(self, "all_gather", x, "", gathered, _TAG)[0]

    def start_reduce_scatter(self, out: torch.Tensor, scattered: torch.Tensor, op: str) -> WorkLike:
        if not self._gloo:
            return _reduce_scatter_single(out.view(-1), scattered.view(-1), OPS[op], group=self.group, async_op=True)
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
        if self._gloo:
            return self.group.alltoall_base(gathered, scattered, [], [], _ALL_TO_ALL)
        return dist.all_to_all_single(gathered, scattered, group=self.group, async_op=True)

    def start_coalesced(
        self, verb: str, xs: Sequence[torch.Tensor], op: str, outs: Sequence[torch.Tensor | None]
    ) -> tuple[WorkLike, list[torch.Tensor]]:
        """On gloo each large tensor travels alone, and only the others are packed."""
        rows = self.size if verb == "reduce_scatter" else 1
        alone = [self._gloo and x.nbytes >= LARGE[verb] * rows and x.dtype in _GLOO_DTYPES for x in xs]
        if not any(alone):
            return super().start_coalesced(verb, xs, op, outs)
        works: list[WorkLike] = []
        results: list[Any] = [None] * len(xs)
        packed = [index for index, is_alone in enumerate(alone) if not is_alone]
        if packed:
            work, parts = super().start_coalesced(verb, [xs[i] for i in packed], op, [outs[i] for i in packed])
            works.append(work)
            for index, part in zip(packed, parts):
                results[index] = part
        for index, is_alone in enumerate(alone):
            if is_alone:
                work, results[index] = start_alone(self, verb, xs[index].contiguous(), op, outs[index], _TAG)
                works.append(work)
        return Works(works), results

    def start_permute(self, out: torch.Tensor, x: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> WorkLike:
        out.zero_()
        ops: list[dist.P2POp] = []
        tag = self._first_tag + _TAG + 1
        for src, dst in pairs:
            if src == dst == self.rank:
                out.copy_(x)
            elif src == self.rank:
                ops.append(dist.P2POp(dist.isend, x, group=self.group, tag=tag, group_peer=dst))
            elif dst == self.rank:
                ops.append(dist.P2POp(dist.irecv, out, group=self.group, tag=tag, group_peer=src))
        return Works(dist.batch_isend_irecv(ops) if ops else [])

    def start_exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> WorkLike:
        """A message for each pair of ranks that has something to send; on NCCL all of them as one operation."""
        if self._gloo:
            return Works(exchange(self, sent, received, _TAG + 2))
        ops = [
            dist.P2POp(op, x, group=self.group, group_peer=peer)
            for op, xs in ((dist.isend, sent), (dist.irecv, received))
            for peer, x in enumerate(xs)
            if x.numel()
        ]
        return Works(dist.batch_isend_irecv(ops) if ops else [])

    def start_broadcast(self, buffer: torch.Tensor, src: int) -> WorkLike:
        return dist.broadcast(buffer, group_src=src, group=self.group, async_op=True)

    def start_send(self, x: torch.Tensor, dst: int, tag: int) -> WorkLike:
        # The call that `dist.isend` ends in, after a dozen Python calls.
        return self.group.send([torch.view_as_real(x) if x.dtype.is_complex else x], dst, self._first_tag + tag)

    def start_recv(self, out: torch.Tensor, src: int, tag: int) -> WorkLike:
        return self.group.recv([torch.view_as_real(out) if out.dtype.is_complex else out], src, self._first_tag + tag)

    def gather_objects(self, obj: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, obj, group=self.group)
        return gathered

    def explain(self, verb: str, error: BaseException) -> NoReturn:
        if isinstance(error, CommError):
            raise error
        what = self.describe(verb)
        text = str(error)
        if is_missing_call(error):
            advice = advice_on_missing(dist.get_backend(self.group), verb.split()[0])
            raise CommError(f"{what} failed: {_first_line(text)}. {advice}") from error
        timed_out = "imed out" in text or "timeout" in text.lower()
        monitor = self._monitor
        first = None if monitor is None else monitor.first_failure() if timed_out else monitor.find_lost()
        if first is not None:
            raise RemoteRankError(
                f"rank {first.rank} failed first: {first.message} (met in {what})", rank=first.rank
            ) from None
        if timed_out:
            raise CommTimeout(
                f"{what} timed out: a rank of the group did not join this collective. It hangs, is much slower, or "
                f"took a different path through the program. {ALL_RANKS}. ({_first_line(text)})"
            ) from error
        reason = _first_line(text)
        if _LOST.search(text):
            reason = f"the connection to another rank of the group was lost. ({reason})"
        raise CommError(f"{what} failed: {reason}") from error


class SubstitutingCommunicator(Substitutes, C10dCommunicator):
    """Communicator on a group whose backend lacks some collectives."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._gloo = False  # gloo's ways need messages, and may be among what is missing


class C10dBackend(Backend):
    """Communicators over torch.distributed groups; needs `init_process_group` to have been called.

    A rank makes only groups that it is a member of, and waits for no other ranks. Where the world is bound to a device
    (`init_process_group("nccl", device_id=...)`), NCCL splits groups from it, in which all ranks take part at once.

    Args:
        timeout: time after which a collective gives up on a silent rank; None: the timeout of `init_process_group`, or
            `DEFAULT_TIMEOUT`. The group of the whole world keeps the timeout of `init_process_group`.
        monitor: knows whether another rank has failed.
        watch: receives every new communicator, and returns the one to use (`launch.connect` passes the watcher of
            NEURONX_DIST_DEBUG).
        number: index of the backend among those of this job, equal on all ranks: a part of the groups' names.
    """

    name = "c10d"

    def __init__(
        self,
        timeout: datetime.timedelta | None = None,
        monitor: FailureMonitor | None = None,
        watch: Callable[[C10dCommunicator], C10dCommunicator] | None = None,
        number: int = 0,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialized: call torch.distributed.init_process_group(backend=...) first"
            )
        self.timeout = timeout or _timeout_of_world() or DEFAULT_TIMEOUT
        self.monitor = monitor
        self._shares_world = timeout is None
        self._watch = watch
        self._number = number
        self._counts: dict[tuple[int, ...], int] = {}
        self._sharers: Counter[tuple[int, ...]] = Counter()
        self._groups: list[dist.ProcessGroup] = []
        self._by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._pairs: dict[tuple[int, ...], C10dCommunicator] = {}
        self._object_numbers: dict[str, Iterator[int]] = {}  # by the name of a group
        self.capabilities = capabilities_of(default_group())
        self.has_messages = self.capabilities.has_messages
        if not self.capabilities.is_whole:
            self.name = self.capabilities.backend
        if dist.get_world_size() > 1:
            store = default_store()
            seconds = self.timeout.total_seconds()
            self.board = StoreBoard(store, dist.get_rank(), number, timeout=seconds, monitor=monitor)

    @property
    def device(self) -> torch.device:
        types = device_types(default_group())
        if torch.device("cpu") in types:
            return torch.device("cpu")
        device_type = types[0].type if types else accelerator.current_type() or "cpu"
        return _device_of_world() or accelerator.current_device(device_type)

    def communicator(
        self, label: str, groups: Sequence[Sequence[int]], global_rank: int, separate: bool = False
    ) -> Communicator:
        if isinstance(groups, Groups):
            ranks = tuple(groups.of(global_rank))
        else:
            ranks = tuple(next(group for group in groups if global_rank in group))
        if len(ranks) == 1:
            if _device_of_world() is not None and (other := next((g for g in groups if len(g) > 1), None)):
                self._make(tuple(other), label)  # the others split the world, in which this rank has to take part
            return Communicator(label, ranks, global_rank)
        self.capabilities.check()
        self.capabilities.check_order(ranks, label)
        # On NCCL a group is a stream of its own, in which messages of two directions can block each other. Gloo has no
        # streams, and a group costs it a connection to every member: there tags keep messages apart.
        if separate and dist.get_backend() == "gloo":
            separate = False
            self._sharers[ranks] += 1
            first_tag = (1 + (self._sharers[ranks] - 1) % (_SHARERS - 1)) * _TAGS  # 0 is the number of the plain group
        else:
            first_tag = 0
        group = self._group(ranks, separate, label)
        one_way: Sequence[C10dCommunicator] = ()
        if separate and not self.has_messages:
            one_way = self._in_place_of_messages(label, ranks, global_rank)
        return self._join(group, label, ranks, global_rank, first_tag, one_way)

    def wrap(self, group: Any, global_rank: int) -> Communicator:
        ranks = ranks_of_group(group)
        return self._join(group, group.group_desc or "group", ranks, global_rank)

    def process_group(self, communicator: Communicator) -> dist.ProcessGroup:
        if isinstance(communicator, C10dCommunicator):
            return communicator.group
        return self._group(communicator.ranks, False, communicator.axis)  # of one rank

    def is_connected(self) -> bool:
        return all(map(_exists, self._by_ranks.values()))

    def close(self) -> None:
        if self.monitor is not None:
            self.monitor.stop()
        for group in filter(_exists, self._groups):
            dist.destroy_process_group(group)
        self._groups.clear()
        self._by_ranks.clear()
        self._pairs.clear()

    def _join(
        self,
        group: dist.ProcessGroup,
        label: str,
        ranks: Sequence[int],
        global_rank: int,
        first_tag: int = 0,
        one_way: Sequence[C10dCommunicator] = (),
    ) -> C10dCommunicator:
        capabilities = capabilities_of(group)
        capabilities.check()
        place = group, label, ranks, global_rank, self.monitor, first_tag
        if capabilities.is_whole:
            communicator = C10dCommunicator(*place)
        else:
            communicator = SubstitutingCommunicator(*place)
            communicator.capabilities = capabilities
            communicator.board = self.board
            communicator.object_numbers = self._object_numbers.setdefault(group.group_name, itertools.count())
            communicator.pair = lambda low, high: self._pair((ranks[low], ranks[high]), label, global_rank)
            communicator.one_way = one_way
        return communicator if self._watch is None else self._watch(communicator)

    def _in_place_of_messages(self, label: str, ranks: tuple[int, ...], global_rank: int) -> list[C10dCommunicator]:
        """Makes the groups of a new communicator on which broadcasts replace messages; returns its `one_way`.

        Two ranks get a group for each direction. More ranks get groups of neighbours, round the ends: a pipeline's
        transfers are between these. Other pairs get a group at their first `permute`, which all ranks of the group
        start together.
        """
        if len(ranks) == 2:
            ways = [self._make(ranks, f"{label} from rank {sender}") for sender in ranks]
            return [self._join(group, label, ranks, global_rank) for group in ways]
        rank = ranks.index(global_rank)
        for pair in pairs_in_order([(index, (index + 1) % len(ranks)) for index in range(len(ranks))]):
            if rank in pair:
                self._pair((ranks[min(pair)], ranks[max(pair)]), label, global_rank)
        return []

    def _pair(self, pair: tuple[int, int], label: str, global_rank: int) -> C10dCommunicator:
        if pair not in self._pairs:
            label = f"{label}, two ranks"
            self.capabilities.check_order(pair, label)
            self._pairs[pair] = self._join(self._group(pair, False, label), label, pair, global_rank)
        return self._pairs[pair]

    def _group(self, ranks: tuple[int, ...], separate: bool, label: str) -> dist.ProcessGroup:
        """Returns the process group over `ranks`, made once unless `separate` is set."""
        if separate:
            return self._make(ranks, label)
        if ranks not in self._by_ranks:
            is_world = self._shares_world and ranks == tuple(range(dist.get_world_size()))
            self._by_ranks[ranks] = default_group() if is_world else self._make(ranks, label)
        return self._by_ranks[ranks]

    def _make(self, ranks: tuple[int, ...], label: str) -> dist.ProcessGroup:
        """Makes a new group, by its members alone.

        The name, under which members find one another in the store, contains the ranks and the number of groups that
        these ranks have made: all members know both, and no name occurs twice. `new_group` among members alone names a
        group after its ranks and the number of groups that this rank is in, which differs between members, and repeats
        after a group was destroyed. It also sorts the ranks (torch 2.9).
        """
        count = self._counts[ranks] = self._counts.get(ranks, -1) + 1
        digest = hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()
        indices = {rank: index for index, rank in enumerate(ranks)}
        name: Any = f"neuronx_dist.{self._number}.{digest}.{count}"
        what = f"creating the group {label} (ranks {list(ranks)}, seen from rank {dist.get_rank()})"
        with noted(what):
            try:
                group = make_group(ranks, name, _device_of_world(), timeout=self.timeout, group_desc=label)
            except RuntimeError as error:
                raise CommError(
                    f"{what} failed at {call_site()}: not all of these ranks create it, or they create their groups "
                    f"in different orders. ({_first_line(str(error))})"
                ) from error
        if dist.get_rank() in indices:
            set_ranks(group, indices)
            self._groups.append(group)
        return group


def _first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")[:200]


def ranks_of_group(group: Any) -> list[int]:
    """Returns the ranks of a torch ProcessGroup.

    Raises:
        TypeError: `group` is no ProcessGroup.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "axis must be a mesh axis name, a tuple of names, or a torch.distributed.ProcessGroup that holds this "
            f"rank; got {group!r}"
        )
    return dist.get_process_group_ranks(group)


def _exists(group: dist.ProcessGroup) -> bool:
    """Returns whether a group still exists: not destroyed, alone or with all others."""
    return is_registered(group)


def _device_of_world() -> torch.device | None:
    """Returns the device that was passed to `init_process_group`."""
    return default_group().bound_device_id


def _timeout_of_world() -> datetime.timedelta | None:
    """Returns the timeout that was passed to `init_process_group`; None: none, or unknown."""
    timeout = backend_timeout(default_group())
    return None if timeout == default_pg_timeout else timeout
