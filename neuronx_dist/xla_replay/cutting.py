"""Where one program ends and the next begins, while nothing is executed.

`torch_xla.sync()` makes a program of all that is pending, runs it, and every tensor that is alive has its value. Here
it only lowers the program; each of those tensors gets a buffer of its own that stands for the value, so that later
programs take it as an input, as they would there. To find them all, autograd's saved tensors are kept in Python too.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..comm.select import in_one_program
from ..comm.xla import Issued, upload
from .host_reads import executions
from .programs import Program
from .traces import Array, Launch, to_array

__all__ = ["Cutter", "is_computed"]


def is_computed(tensor: torch.Tensor) -> bool:
    """Whether a tensor on the device waits for a program; one that has its value is no result of any."""
    import torch_xla

    return bool(torch_xla._XLAC._check_tensor_need_materialization([tensor])[0])


class Cutter:
    """Cuts what one rank does into programs.

    Attributes:
        launches: the programs since they were last taken from here.
        known: values that no program gives, by number.
        stand_ins: buffers that stand for values which are not there.
        executed: programs executed on the way, all of this class's own.
    """

    def __init__(self, device: torch.device, issued: list[Issued]) -> None:
        self.launches: list[Launch] = []
        self.known: dict[int, Array] = {}
        self.stand_ins: set[int] = set()
        self.executed = 0
        self._device = device
        self._issued = issued
        self._numbers: dict[int, int] = {}  # of buffers, by address
        self._held: list[torch.Tensor] = []  # buffers with a number, whose address must not be used again
        self._programs: dict[Any, Program] = {}

    @contextmanager
    def cutting(self) -> Iterator[None]:
        """Inside, `torch_xla.sync()` cuts, and what autograd saves can be found."""
        import torch_xla

        def sync(*args: Any, **kwargs: Any) -> None:
            self.cut()

        def pack(x: torch.Tensor) -> torch.Tensor | _Saved:
            return _Saved(x.detach()) if _on_device(x) else x

        def unpack(x: torch.Tensor | _Saved) -> torch.Tensor:
            return x.tensor if isinstance(x, _Saved) else x

        original = torch_xla.sync
        gc.collect()
        gc.freeze()  # what is here now is not searched for tensors
        gc.disable()  # objects stay in the order in which they came about, the same at every step and on every rank
        torch_xla.sync = sync
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        finally:
            torch_xla.sync = original
            gc.enable()
            gc.unfreeze()

    def cut(self, results: Sequence[torch.Tensor] | None = None, execute: bool = False) -> None:
        """Ends a program, if anything is pending.

        Args:
            results: the program's results, with others that are the same tensor; None: all tensors that are alive.
            execute: runs it if it can be run here: if it holds no collective, and all its inputs are there.
        """
        import torch_xla

        xlac = torch_xla._XLAC
        pending: dict[int, list[torch.Tensor | _Saved]] = {}
        for holder in _alive() if results is None else results:
            if is_computed(_tensor(holder)):
                pending.setdefault(xlac._xla_get_tensor_id(_tensor(holder)), []).append(holder)
        aliases = list(pending.values())
        if aliases:
            outputs = [_tensor(same[0]).detach() for same in aliases]
            program = self._program(outputs)
            _, data = xlac._get_tensors_xla_device_data_node(outputs)
            takes = [self.number(tensor) for tensor in data]
            if execute and not program.collectives and all(number in self.known for number in takes):
                self._run([_tensor(holder) for same in aliases for holder in same])
                gives = [self.number(output) for output in outputs]
            else:
                gives = self._stand_in(aliases)
            self.launches.append(Launch(program, takes, gives))
        self._issued.clear()
        self._begin_program()

    def number(self, tensor: torch.Tensor) -> int:
        """The value that a tensor on the device has, which is not pending."""
        import torch_xla

        address = torch_xla._XLAC._unsafe_buffer_pointer(tensor)
        if address not in self._numbers:
            number = self._new_number(tensor, address)
            self.known[number] = to_array(torch_xla._XLAC._xla_get_cpu_tensors([tensor.detach()])[0])
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

    @torch.no_grad()
    def _stand_in(self, aliases: Sequence[Sequence[torch.Tensor | _Saved]]) -> list[int]:
        """Gives each group of tensors that are one a buffer, and its number."""
        import torch_xla

        for place, same in enumerate(aliases):
            first = _tensor(same[0])
            filler = upload(torch.full(first.shape, place % 100, dtype=first.dtype), self._device)
            for holder in same:
                if isinstance(holder, _Saved):
                    holder.tensor = filler
                elif len(same) == 1 and holder.is_leaf and not holder._is_view():
                    holder.copy_(filler)  # its views stay views of it
                else:
                    holder.data = filler
        self._run([_tensor(holder) for same in aliases for holder in same])
        gives = []
        for same in aliases:
            address = torch_xla._XLAC._unsafe_buffer_pointer(_tensor(same[0]))
            self.stand_ins.add(address)
            gives.append(self._new_number(_tensor(same[0]), address))
        return gives

    def _run(self, tensors: list[torch.Tensor]) -> None:
        import torch_xla

        before = executions()
        torch_xla._XLAC._xla_sync_multi(tensors, [], True, False)
        self.executed += executions() - before

    def _begin_program(self) -> None:
        """As `torch_xla.sync()` does: no order with collectives of before, and random numbers from a seed that is an
        input.
        """
        import torch_xla
        import torch_xla.core.xla_model as xm

        torch_xla._XLAC._set_all_reduce_token(str(self._device), None)
        xm.set_rng_state(xm.get_rng_state(str(self._device)), str(self._device))


class _Saved:
    """What autograd keeps of a tensor for backward, where it can be found."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _alive() -> Iterator[torch.Tensor | _Saved]:
    """What holds a tensor on the device, of all that has come about since the search began; gradients too."""
    found = gc.get_objects()
    saved = [holder for holder in found if type(holder) is _Saved]
    seen = {id(holder.tensor) for holder in saved}
    yield from saved
    for holder in found:
        if _on_device(holder):
            for tensor in (holder, holder.grad if holder.is_leaf else None):
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor


def _tensor(holder: torch.Tensor | _Saved) -> torch.Tensor:
    return holder.tensor if isinstance(holder, _Saved) else holder


def _on_device(found: Any) -> bool:
    return (
        issubclass(type(found), torch.Tensor)
        and in_one_program(found)
        and not issubclass(type(found), torch._subclasses.FakeTensor)
    )
