"""What a backend is: a factory of communicators, which start collectives on contiguous buffers.

The verbs in `comm/__init__.py` do everything that is the same everywhere (dims, dtypes, `out=`, recording, errors); a
backend implements the nine primitives below, and a better `start_coalesced` if it has one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from typing import Any, NoReturn, Protocol
from weakref import WeakValueDictionary

import torch
from torch.overrides import has_torch_function_unary

from ..axis_sizes import size_along
from ..call_site import call_site
from ..mesh import Mesh
from . import recording
from .errors import CommError
from .waiting import Operand, in_words, numbers, waits

__all__ = ["Backend", "Communicator", "DeviceGenerator", "Handle", "Works", "DONE", "TAGS"]

TAGS = 1 << 20  # of messages: 0 to this, which is left out


class WorkLike(Protocol):
    def wait(self) -> Any: ...


class Works:
    """Several pieces of work awaited as one, then `finish`."""

    def __init__(self, works: Sequence[WorkLike], finish: Callable[[], None] | None = None) -> None:
        self._works = works
        self._finish = finish

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._finish()


DONE = Works(())  # work that is complete when it is started

_numbers = itertools.count()
communicators: WeakValueDictionary[str, Communicator] = WeakValueDictionary()  # by key


class Communicator:
    """A group of ranks along an axis, seen from one of them.

    Attributes:
        axis: what the group is called in records and messages (`"tp"`, `"dp,cp"`).
        ranks: global ranks of the group, in the order of the axis.
        rank: this rank's index in the group.
        size: number of ranks in the group. While a checker is at work, it knows of which axes (`axis_sizes.py`).
        axis_sizes: the axes of the mesh that the group spans, with their sizes; none, if it is no group of an axis.
        global_rank: this rank's number in the job.
        key: names it in this process, and on all ranks of the group alike, for compiled code.
    """

    axis_sizes: Mapping[str, int] = {}

    def __init__(self, axis: str, ranks: Sequence[int], global_rank: int) -> None:
        self.axis = axis
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.global_rank = global_rank
        self._size = len(self.ranks)
        self.rank = self.ranks.index(global_rank)
        self.key = f"{axis}#{next(_numbers)}"
        communicators[self.key] = self

    @property
    def size(self) -> int:
        return size_along(self.axis_sizes, self._size)

    def coordinate(self, like: torch.Tensor) -> int | torch.Tensor:
        """`rank`, as computations on `like` should use it.

        Where they become one program for all ranks (XLA), that is a 0-dim int64 tensor on that device instead of a
        number. `select.py` holds the usual computations.
        """
        return self.rank

    # Buffers are contiguous; `gathered` and `scattered` have a leading dim of `size`. Each returns the work it started.
    def start_all_reduce(self, buffer: torch.Tensor, op: str) -> WorkLike:
        raise self._unsupported("all_reduce")

    def start_all_gather(self, gathered: torch.Tensor, x: torch.Tensor) -> WorkLike:
        raise self._unsupported("all_gather")

    def start_reduce_scatter(self, out: torch.Tensor, scattered: torch.Tensor, op: str) -> WorkLike:
        raise self._unsupported("reduce_scatter")

    def start_all_to_all(self, gathered: torch.Tensor, scattered: torch.Tensor) -> WorkLike:
        raise self._unsupported("all_to_all")

    def start_permute(self, out: torch.Tensor, x: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> WorkLike:
        raise self._unsupported("permute")

    def start_broadcast(self, buffer: torch.Tensor, src: int) -> WorkLike:
        raise self._unsupported("broadcast")

    def start_send(self, x: torch.Tensor, dst: int, tag: int) -> WorkLike:
        raise self._unsupported("send")

    def start_recv(self, out: torch.Tensor, src: int, tag: int) -> WorkLike:
        raise self._unsupported("recv")

    def start_exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> WorkLike:
        raise self._unsupported("exchange")

    def start_coalesced(
        self, verb: str, xs: Sequence[torch.Tensor], op: str, outs: Sequence[torch.Tensor | None]
    ) -> tuple[WorkLike, list[torch.Tensor]]:
        """all_reduce, all_gather or reduce_scatter of several tensors of one dtype, as one collective.

        Returns the work, and what is there once it is done: for each `x` of shape `s`, a tensor `s`, `[size, *s]` or
        `s[1:]`. Here these are views of one buffer, in which a copy of every tensor travels.
        `outs`: contiguous tensors of the verb's results, or None; a backend may fill some, and return these themselves.
        That of an all_reduce may be `x`, and the own part of that of an all_gather.
        """
        rows = self.size if verb == "reduce_scatter" else 1
        flat = torch.cat([x.reshape(rows, -1) for x in xs], dim=1)
        if verb == "all_reduce":
            result = flat[0]
            work = self.start_all_reduce(result, op)
        elif verb == "all_gather":
            result = flat.new_empty(self.size, flat.shape[1])
            work = self.start_all_gather(result, flat[0])
        else:
            result = flat.new_empty(flat.shape[1])
            work = self.start_reduce_scatter(result, flat, op)
        results, begin = [], 0
        for x in xs:  # not `split`: on XLA each piece of it that is used lowers all of them
            shape = (self.size, *x.shape) if verb == "all_gather" else x.shape[1 if verb == "reduce_scatter" else 0 :]
            results.append(result.narrow(-1, begin, x.numel() // rows).view(shape))
            begin += x.numel() // rows
        return work, results

    def gather_objects(self, obj: Any) -> list[Any]:
        raise self._unsupported("gather_objects")

    def waited(self, verb: str, x: Any, wait: Callable[[], Any]) -> Any:
        """`wait()`, which waits for other ranks: another thread can see for what, and an error says it.

        `x`: what is communicated, in a form that `waiting.in_words` takes.
        """
        thread = get_ident()
        waits[thread] = (next(numbers), verb, x, self)
        try:
            return wait()
        except RuntimeError as error:
            self.explain(in_words(verb, x), error)
        finally:
            waits.pop(thread, None)

    def explain(self, verb: str, error: BaseException) -> NoReturn:
        """Raises `error` again as a CommError that says what was being communicated, and where it was asked for."""
        if isinstance(error, CommError):
            raise error
        raise CommError(f"{self.describe(verb)} failed: {error}") from error

    def describe(self, verb: str, site: str = "") -> str:
        ranks = f"ranks {list(self.ranks)}, seen from rank {self.global_rank}"
        return f"{verb} over {self.axis} ({ranks}) at {site or call_site()}"

    def _unsupported(self, verb: str) -> CommError:
        return CommError(f"{type(self).__name__} has no {verb}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(axis={self.axis!r}, ranks={list(self.ranks)}, rank={self.rank})"

    def __deepcopy__(self, memo: Any) -> Communicator:
        return self  # a connection is not copied with the module that uses it


class Handle:
    """An asynchronous collective. `wait()` gives its result (a list for a list), and may be called again.

    Args:
        work: what was started; None: nothing has to be awaited.
        finish: makes the result when the work is done; None: it is `result`.
        operand: what is communicated, for messages.
        result: a tensor that was there from the start: the work fills it, or sends it.
    """

    __slots__ = ("_communicator", "_finish", "_operand", "_result", "_then", "_verb", "_work")

    def __init__(
        self,
        communicator: Communicator,
        verb: str,
        work: WorkLike | None,
        finish: Callable[[], Any] | None,
        operand: torch.Tensor | Operand | None = None,
        result: Any = None,
    ) -> None:
        self._communicator = communicator
        self._verb = verb
        self._operand = operand
        self._work = work
        self._finish = finish
        self._result = result
        self._then: Callable[[Any], Any] | None = None

    def then(self, callback: Callable[[Any], Any]) -> None:
        """`callback(result)` when there is one: at the first `wait()`. For modes, which see the start only."""
        if self._work is None and self._finish is None:
            callback(self._result)
        else:
            self._then = callback

    def wait(self) -> Any:
        """Blocks until the result is there (on CUDA: until the current stream may use it) and returns it.

        Raises:
            CommError: another rank failed, was lost, or did not take part in time.
        """
        work, finish = self._work, self._finish
        seen = has_torch_function_unary(None)  # a mode has seen the verb whole: this is its inside
        with torch._C.DisableTorchFunction() if seen else nullcontext():
            if work is not None:
                self._communicator.waited(self._verb, self._operand, work.wait)
            if finish is not None:
                self._result = finish()
        if work is not None and recording.recorders:
            recording.note(self._communicator, "wait:" + self._verb, self._result)
        self._work = self._finish = None
        if self._then is not None:
            callback, self._then = self._then, None
            callback(self._result)
        return self._result


class DeviceGenerator(Protocol):
    """The default random generator of devices that torch itself cannot ask for it."""

    device_type: str

    def get_state(self) -> torch.Tensor: ...

    def set_state(self, state: torch.Tensor) -> None: ...


class Backend:
    """Makes communicators. One object per rank.

    Attributes:
        has_messages: whether two ranks can exchange a message in which no other rank takes part (`send` and `recv`).
        generator: of the ranks' devices, where torch does not know it (XLA); else None.
        board: what ranks say of themselves (`board.Board`); None: they cannot, or are played one by one.
        device: where tensors are that it communicates, if nothing else says so.
        ranks_are_threads: of one process, which have torch's default generator in common.
    """

    name = "none"
    has_messages = True
    ranks_are_threads = False
    generator: DeviceGenerator | None = None
    board: Any = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def current_rank(self, mesh: Mesh, rank: int) -> int:
        """What `current().rank` is to be: the rank as it is, or as an int that notes who looks at it."""
        return rank

    def communicator(
        self, label: str, groups: Sequence[Sequence[int]], global_rank: int, own: bool = False
    ) -> Communicator:
        """The communicator of the group in `groups` that holds `global_rank`; every rank of the world calls this.

        Groups of equal ranks may share a connection, unless `own`.
        """
        raise CommError(f"backend {self.name} makes no communicators")

    def own_program(self) -> AbstractContextManager[None]:
        """What is communicated inside is a program of its own, where operations become programs (XLA)."""
        return nullcontext()

    def wrap(self, group: Any, global_rank: int) -> Communicator:
        """A communicator over a torch ProcessGroup that the user made."""
        raise TypeError(f"backend {self.name} takes no process groups (got {group!r}); name a mesh axis instead")

    def process_group(self, communicator: Communicator) -> Any:
        """The torch ProcessGroup of a communicator; the communicator itself where the backend has none."""
        return communicator

    def is_connected(self) -> bool:
        """Whether the groups that it made exist still."""
        return True

    def close(self) -> None:
        """Destroys what `communicator` made."""
