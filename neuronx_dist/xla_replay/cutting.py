"""Cuts between programs that are lowered and not executed.

On a device, `torch_xla.sync()` makes a program of all pending operations, runs it, and gives every tensor that is alive
its value. Here it only lowers the program; each such tensor gets a separate buffer that stands for its value, so that
later programs take it as an input, as on the device. To find all of them, the tensors that autograd saves are held by
Python objects.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..comm.backends.xla import Issued
from ..comm.host import upload
from ..comm.rank_selection import in_one_program
from ..torch_internals.fake_tensors import FakeTensor
from ..torch_internals.tensors import base_of_view, version_of
from .host_reads import device_waits
from .programs import Program
from .traces import Array, Launch, to_array

__all__ = ["Cutter", "on_device"]

_LETTING_GO = 2.0  # seconds


class Cutter:
    """Cuts the operations of one rank into programs.

    Attributes:
        launches: the programs since the last `take`.
        known: values that no program computes, by number.
        stand_ins: buffers that stand for values which do not exist.
        executing: run programs if possible: if they have no collective, and all their inputs exist.
        waits: the increase of `device_waits` that this object caused.
    """

    def __init__(self, device: torch.device, issued: list[Issued]) -> None:
        self.launches: list[Launch] = []
        self.known: dict[int, Array] = {}
        self.stand_ins: set[int] = set()
        self.executing = False
        self.waits = 0
        self._device = device
        self._issued = issued
        self._numbers: dict[int, int] = {}  # numbers of buffers, by address
        self._held: list[torch.Tensor] = []  # buffers with a number, kept so that no address is used again
        self._programs: dict[Any, Program] = {}
        self._views: list[_View] = []

    def take(self) -> list[Launch]:
        """Returns and removes the launches so far."""
        launches, self.launches = self.launches, []
        return launches

    @contextmanager
    def cutting(self) -> Iterator[None]:
        """Makes `torch_xla.sync()` cut, and tensors that autograd saves findable."""
        import torch_xla

        def sync(*args: Any, **kwargs: Any) -> None:
            self.cut()

        def pack(x: torch.Tensor) -> torch.Tensor | _Saved:
            return _Saved(x.detach()) if on_device(x) else x

        def unpack(x: torch.Tensor | _Saved) -> torch.Tensor:
            return x.get() if isinstance(x, _Saved) else x

        module: Any = sys.modules["torch_xla.torch_xla"]  # where `torch_xla.step()` finds it
        original = torch_xla.sync
        gc.collect()
        gc.freeze()  # existing objects are not searched for tensors
        gc.disable()  # objects stay in order of creation, which is the same at every step and on every rank
        torch_xla.sync = module.sync = sync
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        finally:
            torch_xla.sync = module.sync = original
            gc.enable()
            gc.unfreeze()

    def cut(self, results: Sequence[torch.Tensor] | None = None) -> None:
        """Ends a program, if anything is pending.

        Args:
            results: the program's results; None: all tensors that are alive.

        Raises:
            RuntimeError: a tensor and its view were both alive at the previous cut, and one was changed in place since.
        """
        import torch_xla

        xlac = torch_xla._XLAC
        pending: dict[int, list[torch.Tensor | _Saved]] = {}
        for view in self._views:
            view.check()
        holders = list(_alive() if results is None else results)
        for holder in holders:
            if _is_pending(_tensor(holder)):
                pending.setdefault(xlac._xla_get_tensor_id(_tensor(holder)), []).append(holder)
        aliases = list(pending.values())
        if aliases:
            outputs = [_tensor(same[0]).detach() for same in aliases]
            program = self._program(outputs)
            _, data = xlac._get_tensors_xla_device_data_node(outputs)
            takes = [self.number(tensor) for tensor in data]
            if self.executing and not program.collectives and all(number in self.known for number in takes):
                self._run([_tensor(holder) for same in aliases for holder in same])
                gives = [self.number(output) for output in outputs]
            else:
                gives = self._stand_in(aliases, {id(holder) for holder in holders})
            self.launches.append(Launch(program, takes, gives))
        self._issued.clear()
        self._begin_program()

    def number(self, tensor: torch.Tensor) -> int:
        """Returns the number of the value of a tensor on the device, which must not be pending."""
        import torch_xla

        address = torch_xla._XLAC._unsafe_buffer_pointer(tensor)
        if address not in self._numbers:
            number = self._new_number(tensor, address)
            before = device_waits()
            self.known[number] = to_array(torch_xla._XLAC._xla_get_cpu_tensors([tensor.detach()])[0])
            self.waits += device_waits() - before
        return self._numbers[address]

    def _new_number(self, tensor: torch.Tensor, address: int) -> int:
        import torch_xla

        self._numbers[address] = number = len(self._held)
        # Holds the buffer and not the tensor, which may be changed in place and then has another buffer.
        self._held += torch_xla._XLAC._get_tensors_xla_device_data_node([tensor])[1]
        assert len(self._held) == number + 1
        return number

    def _program(self, outputs: list[torch.Tensor]) -> Program:
        import torch_xla

        text, issued = torch_xla._XLAC._get_xla_tensors_hlo(outputs), list(self._issued)
        key = (Program(text, b"", issued).fingerprint, tuple(issued))
        if key not in self._programs:
            proto = torch_xla._XLAC._get_xla_tensors_hlo_proto(outputs)
            self._programs[key] = Program(text, proto, issued)
        return self._programs[key]

    def check_nothing_is_left(self) -> None:
        """Raises a RuntimeError if a tensor of this rank is still alive, where the next rank would find it."""
        deadline = time.monotonic() + _LETTING_GO
        while (shape := self._left()) is not None and time.monotonic() < deadline:
            time.sleep(0.02)  # autograd's thread for the device may hold a gradient for a moment more
        if shape is not None:
            raise RuntimeError(
                f"a tensor of shape {shape} is still alive after its rank's replay, so the next rank "
                "would see it. Store it in the model or in the step's state, not in a Python module or a class"
            )

    def _left(self) -> tuple[int, ...] | None:
        """Returns the shape of a tensor of this rank that is still alive; None: there is none."""
        import torch_xla

        gc.collect()
        held = {id(tensor) for tensor in self._held}
        for holder in _alive():
            tensor = _tensor(holder)
            if id(tensor) in held:
                continue
            if _is_pending(tensor) or torch_xla._XLAC._unsafe_buffer_pointer(tensor) in self.stand_ins:
                return tuple(tensor.shape)
        return None

    @torch.no_grad()
    def _stand_in(self, aliases: Sequence[Sequence[torch.Tensor | _Saved]], alive: set[int]) -> list[int]:
        """Gives each group of aliases a buffer, and returns the buffers' numbers."""
        import torch_xla

        for place, same in enumerate(aliases):
            first = _tensor(same[0])
            # Different values, small enough for every dtype, so that a mistake is visible.
            filler = upload(torch.full(first.shape, place % 100, dtype=first.dtype), self._device)
            for holder in same:
                if isinstance(holder, _Saved):
                    holder.put(filler)
                    continue
                holder.data = filler
                base = base_of_view(holder)
                if base is not None and id(base) in alive:
                    self._views.append(_View(holder, base))
        self._run([_tensor(holder) for same in aliases for holder in same])
        gives = []
        for same in aliases:
            address = torch_xla._XLAC._unsafe_buffer_pointer(_tensor(same[0]))
            self.stand_ins.add(address)
            gives.append(self._new_number(_tensor(same[0]), address))
        return gives

    def _run(self, tensors: list[torch.Tensor]) -> None:
        import torch_xla

        before = device_waits()
        torch_xla._XLAC._xla_sync_multi(tensors, [], True, False)
        self.waits += device_waits() - before

    def _begin_program(self) -> None:
        """Begins a program as `torch_xla.sync()` does.

        The program has no order with earlier collectives, and its random numbers come from a seed that is an input. (On
        a device the seed is another one, which each sync changes.)
        """
        import torch_xla
        import torch_xla.core.xla_model as xm

        torch_xla._XLAC._set_all_reduce_token(str(self._device), None)
        xm.set_rng_state(xm.get_rng_state(str(self._device)), str(self._device))


class _View:
    """A view and its base that were both alive at a cut: they have separate buffers now, so neither may change."""

    def __init__(self, view: torch.Tensor, base: torch.Tensor) -> None:
        self._view = weakref.ref(view, lambda _: self._look())
        self._base = weakref.ref(base)
        self._shapes = tuple(base.shape), tuple(view.shape)
        self._version = version_of(base)  # view and base share it
        self._changed = False

    def _look(self) -> None:
        base = self._base()
        self._changed = self._changed or (base is not None and version_of(base) != self._version)

    def check(self) -> None:
        if self._view() is not None:
            self._look()
        if self._changed:
            base, view = self._shapes
            raise RuntimeError(
                f"a tensor of shape {base} or its view of shape {view} was changed in place after the end of a program "
                "at which both were alive. On the device both would change, which the replay cannot model: make the "
                "view again after torch_xla.sync()"
            )


class _Saved:
    """Holder of a tensor that autograd saves for backward, which a search of Python's objects finds."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.put(tensor)

    def put(self, tensor: torch.Tensor) -> None:
        self.tensor, self._version = tensor, version_of(tensor)

    def get(self) -> torch.Tensor:
        if version_of(self.tensor) != self._version:  # autograd's check, which hooks switch off
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that backward needs was changed in place after it was "
                f"saved: it is at version {version_of(self.tensor)}, expected {self._version}"
            )
        return self.tensor


def _alive() -> Iterator[torch.Tensor | _Saved]:
    """Yields all holders of a tensor on the device that were created since `gc.freeze`, gradients included.

    The bases of views are yielded too: a device stores them, even if no Python object refers to them.
    """
    objects = gc.get_objects()
    saved = [holder for holder in objects if type(holder) is _Saved]
    seen = {id(holder.tensor) for holder in saved}
    yield from saved
    for holder in objects:
        if on_device(holder):
            both = [holder, holder.grad] if holder.is_leaf else [holder]
            for tensor in (*both, *(base_of_view(view) for view in both if view is not None)):
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor


def _tensor(holder: torch.Tensor | _Saved) -> torch.Tensor:
    return holder.tensor if isinstance(holder, _Saved) else holder


def _is_pending(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor on the device is the result of operations that no program has computed yet."""
    import torch_xla

    return bool(torch_xla._XLAC._check_tensor_need_materialization([tensor])[0])


def on_device(value: Any) -> bool:
    """Returns whether an object is a tensor on the device, by its type: `isinstance` may run the object's code."""
    return issubclass(type(value), torch.Tensor) and in_one_program(value) and not issubclass(type(value), FakeTensor)
