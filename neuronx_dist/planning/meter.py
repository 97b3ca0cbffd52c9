"""Measurement of a run's memory: every tensor that this thread makes counts until it is freed.

    with measure_peak(parameters=model.local_parameters()) as memory:
        ...
    memory.peak      # bytes

The peak is the largest number of bytes alive at one time; `memory.phases` divides it by kind and part of the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch

from ..torch_internals.operators import TorchDispatchMode
from ..torch_internals.tensors import storage_key

__all__ = ["MemoryMeter", "MemoryPhase", "measure_peak"]


@dataclass
class MemoryPhase:
    """Bytes alive during a part of a run.

    Attributes:
        peak: most bytes at one time.
        kinds: the bytes of each kind at that time.
        most: most bytes of each kind at one time, which may differ between kinds.
    """

    peak: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)


class _Live(ref[Any]):
    """A weak reference to a storage that is alive, with its bytes: counting keeps no memory alive."""

    __slots__ = ("key", "kind", "nbytes")
    key: int
    kind: str
    nbytes: int


class MemoryMeter(TorchDispatchMode):
    """Counts the bytes of all tensors that operators of this thread make, backward included, until they are freed.

    Views count once, and memory counts as long as anything (autograd, a running collective) holds it. Memory that
    another thread frees counts until this thread's next operator. Tensors on meta do not count; fake tensors count like
    real ones. Memory that an operator allocates only internally (the workspace of a matrix product) is not seen.

    Args:
        device_type: count the tensors of this type of device alone; None: of all.

    Attributes:
        kind: the kind under which new memory counts.
        current: bytes alive.
        phases: the phases by name; see `phase`.
    """

    def __init__(self, device_type: str | None = None) -> None:
        super().__init__()
        self._device_type = device_type
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
        """Begins a phase of this name, or continues it."""
        self._phase = self.phases.setdefault(name, MemoryPhase())
        for kind, nbytes in self._kinds.items():
            self._phase.most[kind] = max(self._phase.most.get(kind, 0), nbytes)
        self._settle()

    def reset(self, phase: str = "") -> None:
        """Deletes all phases, and begins one. Tensors that are alive stay counted."""
        self.phases = {}
        self.phase(phase)

    def label(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """Counts tensors under `kind`, including tensors that existed before."""
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
        """Returns the entry of a tensor's memory, which is made if missing; None for memory that does not count."""
        if tensor.device.type == "meta" or self._device_type not in (None, tensor.device.type):
            return None
        if tensor.layout is not torch.strided:
            return None
        self._drain()  # first, since the address of freed memory may be used again
        storage = tensor.untyped_storage()
        live = self._live.get(storage_key(storage))
        if live is None:
            live = self._live[storage_key(storage)] = _Live(storage, self._freed.append)
            live.key, live.kind, live.nbytes = storage_key(storage), kind, storage.nbytes()
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
        existing: existing tensors to count, by kind: `measure_peak(parameters=model.local_parameters())`.
    """
    meter = MemoryMeter()
    for kind, tensors in existing.items():
        meter.label(tensors, kind)
    meter.reset()
    with meter:
        yield meter
