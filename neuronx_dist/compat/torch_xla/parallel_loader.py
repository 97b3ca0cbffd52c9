"""torch_xla.distributed.parallel_loader: a loader whose batches are on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .xla_model import send_cpu_data_to_device

__all__ = ["MpDeviceLoader", "ParallelLoader"]


class MpDeviceLoader:
    """Yields the batches of a loader, moved to a device; attributes are the loader's.

    Args:
        loader: anything that yields nested containers of tensors, with a length.
        device: where tensors go.
        kwargs: settings of torch_xla's threads, without effect.
    """

    def __init__(self, loader: Any, device: Any, **kwargs: Any) -> None:
        self._loader = loader
        self._device = torch.device(device)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield send_cpu_data_to_device(batch, self._device)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def close(self) -> None:
        """Does nothing: there are no threads."""


class ParallelLoader:
    """The older name: `ParallelLoader(loader, [device]).per_device_loader(device)`."""

    def __init__(self, loader: Any, devices: Any, **kwargs: Any) -> None:
        self._loader = loader

    def per_device_loader(self, device: Any) -> MpDeviceLoader:
        """Returns the loader whose batches are on `device`."""
        return MpDeviceLoader(self._loader, device)

    def close(self) -> None:
        """Does nothing: there are no threads."""
