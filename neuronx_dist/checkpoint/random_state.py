"""State of all random generators of a rank: torch's of CPU and device, the named streams, Python's, NumPy's."""

from __future__ import annotations

import random
import sys
from typing import Any

from .. import comm
from ..comm.generators import State, get_state, set_state
from ..spmd.random import streams

__all__ = ["capture", "file_of", "restore"]

_AXES = ("dp", "cp", "tp", "pp")


def capture() -> dict[str, Any]:
    """Returns the state as plain data, for `restore`."""
    state: dict[str, Any] = {
        "mesh": {axis: comm.size(axis) for axis in _AXES},
        "default": get_state(),
        "streams": streams().get_states(),
        "python": random.getstate(),
    }
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, keys.tolist(), *rest)
    return state


def restore(state: dict[str, Any]) -> None:
    """Sets the state that `capture` returned.

    In another layout the named streams, which differ by rank, stay as this run has seeded them; so does the
    generator of another type of device.
    """
    if _same_device(state["default"], get_state()):
        set_state(state["default"])
    elif _same_device(state["default"][:1], get_state()):
        set_state(state["default"][:1])
    if state["mesh"] == {axis: comm.size(axis) for axis in _AXES}:
        here = get_state()
        saved = {name: stream for name, stream in state["streams"].items() if _same_device(stream, here)}
        streams().set_states({**streams().get_states(), **saved})
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "numpy" in state and "numpy" in sys.modules:
        name, keys, *rest = state["numpy"]
        numpy = sys.modules["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))


def file_of(files: Any = None) -> str:
    """The file of this rank's state; with the files of a checkpoint, the existing file of the corresponding rank.

    Along an axis that was shorter, rank `index` corresponds to rank `index % size`.
    """
    coordinates = {axis: comm.rank(axis) for axis in _AXES}
    if files is not None:
        saved = [path for path in files if path.startswith("random/")]
        for axis in _AXES:
            sizes = [int(path.partition(f"{axis}_rank_")[2].partition("_")[0].partition(".")[0]) for path in saved]
            coordinates[axis] %= max(sizes, default=0) + 1
    return "random/" + "_".join(f"{axis}_rank_{index:02d}" for axis, index in coordinates.items()) + ".pt"


def _same_device(first: State, second: State) -> bool:
    return [(tensor.dtype, tensor.shape) for tensor in first] == [(tensor.dtype, tensor.shape) for tensor in second]
