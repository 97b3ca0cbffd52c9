"""How much memory a run really takes: every tensor that this thread makes, until it is freed.

    with measure_peak(parameters=model.local_parameters()) as memory:
        ...
    memory.peak      # bytes

The peak is the most that was alive at one time; `memory.phases` says of what kinds, and in which part of the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["MemoryMeter", "MemoryPhase", "measure_peak"]


@dataclass
class MemoryPhase:
    """What was alive during a part of a run, in bytes.

    Attributes:
        peak: most at one time.
        kinds: what that was made of.
        most: most of each kind at one time, whenever that was.
    """

    peak: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)


class _Live(ref[Any]):
    """A storage that is alive. It is its own weak reference: nothing is kept alive by being counted."""

    __slots__ = ("key", "kind", "nbytes")
    key: int
    kind: str
    nbytes: int


class MemoryMeter(TorchDispatchMode):
    """Counts the bytes of all tensors that operators of this thread make, backward included, until they are freed.

    Views count once, and memory counts as long as anything (autograd, a collective under way) holds it. What another
    thread frees counts as freed at this thread's next operator. Tensors on meta are not counted; fake tensors are, as
    if they were real. What an operator allocates for itself only (the workspace of a matrix product) is not seen.

    Attributes:
        kind: what new memory is called from now on.
        current: bytes alive.
        phases: by name; see `phase`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind = "other"
        self.current = 0
        self.phases: dict[str, MemoryPhase] = {}
        self._kinds: dict[str, int] = {}
        self._live: dict[int, _Live] = {}
        self._freed: deque[_Live] = deque()  # filled wherever memory is freed, emptied by this thread
        self.phase("")

    @property
    def peak(self) -> int:
        """Most bytes alive at one time, in any phase."""
        return max(phase.peak for phase in self.phases.values())

    def phase(self, name: str) -> None:
        """What follows is recorded under this name."""
        self._phase = self.phases.setdefault(name, MemoryPhase())
        for kind, nbytes in self._kinds.items():
            self._phase.most[kind] = max(self._phase.most.get(kind, 0), nbytes)
        self._settle()

    def reset(self, phase: str = "") -> None:
        """Forgets all phases, and starts one. What is alive stays counted."""
        self.phases = {}
        self.phase(phase)

    def label(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """Counts tensors under `kind`, those too that existed before."""
        for tensor in tensors:
            live = None if tensor is None else self._note(tensor, kind)
            if live is not None and live.kind != kind:
                self._count(live.kind, -live.nbytes)
                self._count(kind, live.nbytes)
                live.kind = kind
        self._settle()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            for tensor in item if isinstance(item, (tuple, list)) else (item,):
                if isinstance(tensor, torch.Tensor):
                    self._note(tensor, self.kind)
        self._settle()
        return result

    def _note(self, tensor: torch.Tensor, kind: str) -> _Live | None:
        """The entry of a tensor's memory, made if there is none."""
        if tensor.device.type == "meta" or tensor.layout is not torch.strided:
            return None
        self._drain()  # first: an address may be used again
        storage = tensor.untyped_storage()
        live = self._live.get(storage._cdata)
        if live is None:
            live = self._live[storage._cdata] = _Live(storage, self._freed.append)
            live.key, live.kind, live.nbytes = storage._cdata, kind, storage.nbytes()
            self._count(kind, live.nbytes)
        return live

    def _drain(self) -> None:
        while self._freed:
            live = self._freed.popleft()
            del self._live[live.key]
            self._count(live.kind, -live.nbytes)

    def _count(self, kind: str, nbytes: int) -> None:
        self.current += nbytes
        self._kinds[kind] = now = self._kinds.get(kind, 0) + nbytes
        if now > self._phase.most.get(kind, 0):
            self._phase.most[kind] = now

    def _settle(self) -> None:
        self._drain()
        if self.current > self._phase.peak:
            self._phase.peak = self.current
            self._phase.kinds = {kind: nbytes for kind, nbytes in self._kinds.items() if nbytes}


@contextmanager
def measure_peak(**existing: Iterable[torch.Tensor | None]) -> Iterator[MemoryMeter]:
    """Measures the peak of the memory of tensors in this thread.

    Args:
        existing: tensors that are there already and are to count, by what to call them:
            `measure_peak(parameters=model.local_parameters())`.
    """
    meter = MemoryMeter()
    for kind, tensors in existing.items():
        meter.label(tensors, kind)
    meter.reset()
    with meter:
        yield meter
