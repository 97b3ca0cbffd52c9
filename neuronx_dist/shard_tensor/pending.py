"""A ShardTensor whose layout is known before its values are: they come when they are first asked for."""

from __future__ import annotations

from abc import abstractmethod
from typing import Self

import torch

from .spec import ShardTensorSpec
from .tensor import ShardTensor, written

__all__ = ["Pending"]


class Pending(ShardTensor):
    """A ShardTensor without a local tensor yet. It is a plain ShardTensor once that has been asked for."""

    __slots__ = ()

    @abstractmethod
    def _values(self) -> torch.Tensor:
        """The local tensor; called once."""

    @classmethod
    def outlined(cls, source: torch.Tensor, spec: ShardTensorSpec) -> Self:
        """One of `spec`, with the dtype and device of `source`."""
        result: Self = torch.Tensor._make_wrapper_subclass(cls, spec.shape, dtype=source.dtype, device=source.device)
        result._spec = spec
        return result

    @property
    def _local(self) -> torch.Tensor:  # type: ignore[override]
        local = self._values()
        self.__class__ = ShardTensor  # type: ignore[assignment]
        self._local = local  # type: ignore[misc]
        with torch.enable_grad():
            written(self)
        return local
