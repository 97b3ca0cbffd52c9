"""Values that a step reads on the host while it is lowered.

One that follows from the step's inputs alone can be had: the program up to there is executed. One behind a collective,
or one of the state that a step which was not executed would have left, cannot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..comm.select import in_one_program
from .programs import KINDS

__all__ = ["INSTEAD", "device_waits", "reads_guarded"]

INSTEAD = (
    ". On a cluster the host would wait for the device here; in a replay there is no value to be read. Return the "
    "tensor instead"
)
# Not `to`, which models call too, and recordings know by its identity; what it copies to the host is counted.
_READERS = ("__bool__", "__float__", "__int__", "__index__", "item", "tolist", "numpy", "cpu")


@contextmanager
def reads_guarded(state: Collection[int]) -> Iterator[list[int]]:
    """Reading a value that cannot be had raises, in every thread, where it is done.

    Args:
        state: buffers of the state's tensors.

    Yields:
        a list that gets, for every read that is possible, what it adds to `device_waits`.
    """
    reads: list[int] = []
    busy = threading.local()
    originals = {name: getattr(torch.Tensor, name) for name in _READERS}

    def guarded(name: str) -> Callable[..., Any]:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            inside = getattr(busy, "reading", False)  # a TorchFunctionMode calls again what it was told of
            if inside or not in_one_program(self) or isinstance(self, torch._subclasses.FakeTensor):
                return originals[name](self, *args, **kwargs)
            what = _unknown(self, state)
            if what:
                raise RuntimeError(f"{name}() read a value of a tensor on the host: {what}{INSTEAD}")
            before, busy.reading = device_waits(), True
            try:
                return originals[name](self, *args, **kwargs)
            finally:
                busy.reading = False
                reads.append(device_waits() - before)

        return read

    for name in _READERS:
        setattr(torch.Tensor, name, guarded(name))
    try:
        yield reads
    finally:
        for name in _READERS:
            delattr(torch.Tensor, name)


def device_waits() -> int:
    """Programs that this process has handed to the device, and tensors that it has fetched from there.

    (The metric `ExecuteTime` is written some time after the execution.)
    """
    from torch_xla.debug import metrics

    programs = sum(metrics.counter_value(name) or 0 for name in ("CachedCompile", "UncachedCompile"))
    fetched = metrics.metric_data("TransferFromDeviceTime")
    return programs + (int(fetched[0]) if fetched else 0)


def _unknown(tensor: torch.Tensor, state: Collection[int]) -> str:
    """What the value depends on that is not there; nothing if it can be computed."""
    import torch_xla

    text = torch_xla._XLAC._get_xla_tensors_hlo([tensor])
    matched_kind = next((matched_kind for matched_kind in KINDS if f" {matched_kind}(" in text), None)
    if matched_kind is not None:
        return f"it depends on the result of an {matched_kind}"
    _, data = torch_xla._XLAC._get_tensors_xla_device_data_node([tensor])
    if any(torch_xla._XLAC._unsafe_buffer_pointer(value) in state for value in data):
        return "it depends on what a program before would leave"
    return ""
