"""Values that a step reads on the host while it is lowered.

A value that follows from the step's inputs only is computed: the program up to there is executed. A value that depends
on a collective, or on the state after a step that was not executed, cannot be computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..comm.rank_selection import in_one_program
from ..torch_internals.fake_tensors import FakeTensor
from .programs import KINDS

__all__ = ["INSTEAD", "device_waits", "reads_guarded"]

INSTEAD = (
    ". On a cluster the host would wait for the device here; in a replay there is no value to be read. Return the "
    "tensor instead"
)
# `to` is not guarded: models call it for other reasons, and recordings compare its identity; its copies are counted.
_READERS = ("__bool__", "__float__", "__int__", "__index__", "item", "tolist", "numpy", "cpu")


@contextmanager
def reads_guarded(state: Collection[int]) -> Iterator[list[int]]:
    """Makes a read of a value that cannot be computed raise, in every thread, at the line of the read.

    Args:
        state: buffers of the state's tensors.

    Yields:
        a list that receives, for every allowed read, the increase of `device_waits`.
    """
    reads: list[int] = []
    busy = threading.local()
    originals = {name: getattr(torch.Tensor, name) for name in _READERS}

    def guarded(name: str) -> Callable[..., Any]:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            inside = getattr(busy, "reading", False)  # a TorchFunctionMode calls the function that it intercepts
            if inside or not in_one_program(self) or isinstance(self, FakeTensor):
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
    """Number of programs that this process sent to the device, plus tensors that it fetched from there.

    (The metric `ExecuteTime` is not used: it is written some time after the execution.)
    """
    from torch_xla.debug import metrics

    programs = sum(metrics.counter_value(name) or 0 for name in ("CachedCompile", "UncachedCompile"))
    fetched = metrics.metric_data("TransferFromDeviceTime")
    return programs + (int(fetched[0]) if fetched else 0)


def _unknown(tensor: torch.Tensor, state: Collection[int]) -> str:
    """Returns the reason why a value cannot be computed; "" if it can."""
    import torch_xla

    text = torch_xla._XLAC._get_xla_tensors_hlo([tensor])
    matched_kind = next((matched_kind for matched_kind in KINDS if f" {matched_kind}(" in text), None)
    if matched_kind is not None:
        return f"it depends on the result of an {matched_kind}"
    _, data = torch_xla._XLAC._get_tensors_xla_device_data_node([tensor])
    if any(torch_xla._XLAC._unsafe_buffer_pointer(value) in state for value in data):
        return "it depends on a result of an earlier program"
    return ""
