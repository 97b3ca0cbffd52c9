"""Base classes of a backend: a factory of communicators, which start collectives on contiguous buffers.

The verbs in `comm/__init__.py` do everything that all backends share (dims, dtypes, `out=`, recording, errors); a
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
from ..call_site import call_in_words
from ..mesh import Mesh
from ..torch_internals.tensors import DisableTorchFunction
from . import recording
from .errors import CommError
from .health.waiting import Operand, in_words, numbers, waits

__all__ = ["Backend", "Communicator", "DeviceGenerator", "Handle", "Works", "DONE", "TAGS"]

TAGS = 1 << 20  # of messages: 0 to this, which is left out


class WorkLike(Protocol):
    def wait(self) -> Any: ...


class Works:
    """Several pieces of work, awaited as one; then `finish` runs."""

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
        axis: name of the group in records and messages (`"tp"`, `"dp,cp"`).
        ranks: global ranks of the group, in the order of the axis.
        rank: this rank's index in the group.
        size: number of ranks in the group. Under a checker this int knows its axes (`axis_sizes.py`).
        axis_sizes: the axes of the mesh that the group spans, with their sizes; empty if the group lies along no axis.
        global_rank: this rank's number in the job.
        key: name of the communicator for compiled code, equal on all ranks of the group.
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
        """Returns `rank` in the form that computations on `like` need.

        On XLA, where all ranks share one program, the form is a 0-dim int64 tensor on the device instead of a
        number. `rank_selection.py` holds the usual computations.
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
        """Starts all_reduce, all_gather or reduce_scatter of several tensors of one dtype, as one collective.

        Returns the work, and the results, which are valid once the work is done: for each `x` of shape `s`, a tensor
        `s`, `[size, *s]` or `s[1:]`. Here the results are views of one buffer, in which a copy of every tensor travels.
        `outs`: contiguous tensors of the verb's results, or None; a backend may fill some of them and return these.
        For an all_reduce `out` may be `x`; for an all_gather the part of this rank may be `x`.
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
        for x in xs:  # not `split`: on XLA each of its pieces that is used lowers all of them
            shape = (self.size, *x.shape) if verb == "all_gather" else x.shape[1 if verb == "reduce_scatter" else 0 :]
            results.append(result.narrow(-1, begin, x.numel() // rows).view(shape))
            begin += x.numel() // rows
        return work, results

    def gather_objects(self, obj: Any) -> list[Any]:
        raise self._unsupported("gather_objects")

    def waited(self, verb: str, x: Any, wait: Callable[[], Any]) -> Any:
        """Calls `wait()`, which waits for other ranks; the wait is visible to other threads and named in errors.

        `x`: the operand that is communicated, in a form that `waiting.in_words` takes.
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
        """Raises `error` again as a CommError that names the operand and the line of the call."""
        if isinstance(error, CommError):
            raise error
        raise CommError(f"{self.describe(verb)} failed: {error}") from error

    def describe(self, verb: str, site: str = "") -> str:
        ranks = f"ranks {list(self.ranks)}, seen from rank {self.global_rank}"
        return f"{verb} over {self.axis} ({ranks}) at {site or call_in_words()}"

    def _unsupported(self, verb: str) -> CommError:
        return CommError(f"{type(self).__name__} has no {verb}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(axis={self.axis!r}, ranks={list(self.ranks)}, rank={self.rank})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self} belongs to the processes of this job and cannot be pickled: save the state_dict() of the module "
            "or optimizer that holds it, in place of the object"
        )

    def __deepcopy__(self, memo: Any) -> Communicator:
        return self  # a connection is not copied with the module that uses it


class Handle:
    """An asynchronous collective. `wait()` gives its result (a list for a list), and may be called again.

    Args:
        work: the work that was started; None: nothing has to be awaited.
        finish: makes the result when the work is done; None: it is `result`.
        operand: the operand that is communicated, for messages.
        result: a tensor that exists from the start: the work fills it, or sends it.
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
        """Registers `callback(result)`, called at the first `wait()`: for modes, which see only the start."""
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
        seen = has_torch_function_unary(None)  # a mode has intercepted the verb as one call: this is its inside
        with DisableTorchFunction() if seen else nullcontext():
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
        generator: random generator of the ranks' devices, where torch has no access to it (XLA); else None.
        board: where ranks publish texts (`board.Board`); None: they cannot, or are played one by one.
        device: default device of the tensors that it communicates.
    """

    name = "none"
    has_messages = True
    generator: DeviceGenerator | None = None
    board: Any = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def current_rank(self, mesh: Mesh, rank: int) -> int:
        """Returns the value of `current().rank`: the rank as an int, or as an int that reports its reads."""
        return rank

    def communicator(
        self, label: str, groups: Sequence[Sequence[int]], global_rank: int, separate: bool = False
    ) -> Communicator:
        """Returns the communicator of the group in `groups` that holds `global_rank`; all ranks of the world call this.

        Groups with equal ranks may share a connection, unless `separate` is set.
        """
        raise CommError(f"backend {self.name} makes no communicators")

    def own_program(self) -> AbstractContextManager[None]:
        """Makes the collectives inside the `with` a program of their own, on devices that run programs (XLA)."""
        return nullcontext()

    def wrap(self, group: Any, global_rank: int) -> Communicator:
        """Returns a communicator over a torch ProcessGroup that the user made."""
        raise TypeError(f"backend {self.name} takes no process groups (got {group!r}); name a mesh axis instead")

    def process_group(self, communicator: Communicator) -> Any:
        """Returns the torch ProcessGroup of a communicator; the communicator itself where the backend has none."""
        return communicator

    def is_connected(self) -> bool:
        """Returns whether the groups that this backend made still exist."""
        return True

    def close(self) -> None:
        """Destroys the groups that `communicator` made."""
