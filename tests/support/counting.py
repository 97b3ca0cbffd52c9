"""Counts of a program: FLOPs, and bytes of activations that are alive."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["Flops", "Storages"]


class Flops(TorchDispatchMode):
    """Counts FLOPs, as torch's counter does, which does not go with checkpoints."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.total += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


class Storages(TorchDispatchMode):
    """Knows the memory of all tensors that are made inside, and which of it is alive."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.add(x)
        return out

    def add(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        self._seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def forget(self, x: torch.Tensor) -> None:
        self._seen.pop(x.untyped_storage()._cdata, None)

    def alive(self) -> int:
        """Bytes."""
        self._seen = {key: storage for key, storage in self._seen.items() if not storage[0].expired()}
        return sum(size for _, size in self._seen.values())
