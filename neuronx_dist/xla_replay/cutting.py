"""Where one program ends and the next begins, while nothing is executed.

`torch_xla.sync()` makes a program of all that is pending, runs it, and every tensor that is alive has its value. Here
it only lowers the program; each of those tensors gets a buffer of its own that stands for the value, so that later
programs take it as an input, as they would there. To find them all, autograd's saved tensors are kept in Python too.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..comm.backends.xla import Issued
from ..comm.host import upload
from ..comm.select import in_one_program
from .host_reads import device_waits
from .programs import Program
from .traces import Array, Launch, to_array

__all__ = ["Cutter", "on_device"]


class Cutter:
    """Cuts what one rank does into programs.

    Attributes:
        launches: the programs since they were last taken from here.
        known: values that no program gives, by number.
        stand_ins: buffers that stand for values which are not there.
        executing: whether programs are run where they can be: that hold no collective, and whose inputs are all there.
        waits: what all this has added to `device_waits`.
    """

    def __init__(self, device: torch.device, issued: list[Issued]) -> None:
        self.launches: list[Launch] = []
        self.known: dict[int, Array] = {}
        self.stand_ins: set[int] = set()
        self.executing = False
        self.waits = 0
        self._device = device
        self._issued = issued
        self._numbers: dict[int, int] = {}  # of buffers, by address
        self._held: list[torch.Tensor] = []  # buffers with a number, whose address must not be used again
        self._programs: dict[Any, Program] = {}
        self._views: list[_View] = []

    def take(self) -> list[Launch]:
        """The launches until now."""
        launches, self.launches = self.launches, []
        return launches

    @contextmanager
    def cutting(self) -> Iterator[None]:
        """Inside, `torch_xla.sync()` cuts, and what autograd saves can be found."""
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
        gc.freeze()  # what is here now is not searched for tensors
        gc.disable()  # objects stay in the order in which they came about, the same at every step and on every rank
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
            RuntimeError: since the cut before a tensor was changed in place of which there is a view, or the view.
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
        """The value that a tensor on the device has, which is not pending."""
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
        # Not the tensor, which may be changed in place and let go of the buffer.
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
        """Makes sure that the next rank finds nothing of this one.

        Raises:
            RuntimeError: a tensor of this rank is alive after it, where another rank would find it.
        """
        import torch_xla

        gc.collect()
        held = {id(tensor) for tensor in self._held}
        for holder in _alive():
            tensor = _tensor(holder)
            if id(tensor) in held:
                continue
            if _is_pending(tensor) or torch_xla._XLAC._unsafe_buffer_pointer(tensor) in self.stand_ins:
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} is alive after its rank is done, where the next rank "
                    "would find it: is it kept in a module or a class? Keep it in the model, or in what the step holds"
                )

    @torch.no_grad()
    def _stand_in(self, aliases: Sequence[Sequence[torch.Tensor | _Saved]], alive: set[int]) -> list[int]:
        """Gives each group of tensors that are one a buffer, and its number."""
        import torch_xla

        for place, same in enumerate(aliases):
            first = _tensor(same[0])
            # Different values, small enough for every dtype: a mistake shows.
            filler = upload(torch.full(first.shape, place % 100, dtype=first.dtype), self._device)
            for holder in same:
                if isinstance(holder, _Saved):
                    holder.put(filler)
                    continue
                holder.data = filler
                base = holder._base
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

        It has no order with collectives of before, and random numbers from a seed that is an input. (It is another seed
        than there, where each sync changes it.)
        """
        import torch_xla
        import torch_xla.core.xla_model as xm

        torch_xla._XLAC._set_all_reduce_token(str(self._device), None)
        xm.set_rng_state(xm.get_rng_state(str(self._device)), str(self._device))


class _View:
    """A view and its base that were both alive at a cut: now each is a buffer of its own, so neither may change."""

    def __init__(self, view: torch.Tensor, base: torch.Tensor) -> None:
        self._view = weakref.ref(view, lambda _: self._look())
        self._base = weakref.ref(base)
        self._shapes = tuple(base.shape), tuple(view.shape)
        self._version = base._version  # they share it
        self._changed = False

    def _look(self) -> None:
        base = self._base()
        self._changed = self._changed or (base is not None and base._version != self._version)

    def check(self) -> None:
        if self._view() is not None:
            self._look()
        if self._changed:
            base, view = self._shapes
            raise RuntimeError(
                f"a tensor of shape {base} or its view of shape {view} was changed in place after the end of a program "
                "at which both were alive. On the device both would change; the replay cannot follow: take the view "
                "anew after torch_xla.sync()"
            )


class _Saved:
    """What autograd keeps of a tensor for backward, where it can be found."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.put(tensor)

    def put(self, tensor: torch.Tensor) -> None:
        self.tensor, self._version = tensor, tensor._version

    def get(self) -> torch.Tensor:
        if self.tensor._version != self._version:  # autograd's own check, which hooks switch off
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that backward needs was changed in place after it was "
                f"saved: it is at version {self.tensor._version}, expected {self._version}"
            )
        return self.tensor


def _alive() -> Iterator[torch.Tensor | _Saved]:
    """What holds a tensor on the device, of all that has come about since the search began; gradients too.

    So does the tensor of which one of these is a view, and which Python may not have met: a device stores it, too.
    """
    objects = gc.get_objects()
    saved = [holder for holder in objects if type(holder) is _Saved]
    seen = {id(holder.tensor) for holder in saved}
    yield from saved
    for holder in objects:
        if on_device(holder):
            both = [holder, holder.grad] if holder.is_leaf else [holder]
            for tensor in (*both, *(each._base for each in both if each is not None)):
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor


def _tensor(holder: torch.Tensor | _Saved) -> torch.Tensor:
    return holder.tensor if isinstance(holder, _Saved) else holder


def _is_pending(tensor: torch.Tensor) -> bool:
    """Whether a tensor on the device waits for a program; one that has its value is no result of any."""
    import torch_xla

    return bool(torch_xla._XLAC._check_tensor_need_materialization([tensor])[0])


def on_device(value: Any) -> bool:
    """Whether anything is a tensor with a value there. (By its type: `isinstance` may call code of any object.)"""
    return (
        issubclass(type(value), torch.Tensor)
        and in_one_program(value)
        and not issubclass(type(value), torch._subclasses.FakeTensor)
    )
