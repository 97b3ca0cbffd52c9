"""Views whose layout had to change: they hold a copy, and what is written into them goes to the tensor they are of.

`x[3]` of a sharded dim is gathered, so its memory is not that of `x`, as torch's would be. The storage of the copy
knows its source; all views of the copy share that storage. Whoever writes asks `copy_of(local)` before, which brings
the copy up to date, and calls its `write_back()` behind; ranks write the part of the source that they have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..comm.transforms import transforming
from ..spmd import no_typecheck
from .redistribute import redistributed
from .spec import ShardTensorSpec

__all__ = ["Copy", "copy_of", "redistributed_view"]


@dataclass(frozen=True)
class _Source:
    """What the storage of a copy knows. It holds no tensor of that storage, which would never be freed then."""

    local: torch.Tensor
    spec: ShardTensorSpec
    copied: ShardTensorSpec
    strides: tuple[int, ...]
    offset: int
    has_graph: bool


@dataclass(frozen=True)
class Copy:
    """A copy into which an operation writes."""

    written: torch.Tensor
    whole: torch.Tensor
    source: _Source

    def write_back(self) -> None:
        """Writes the copy into its source.

        Raises:
            RuntimeError: what was written has a graph.
        """
        if self.written.requires_grad and torch.is_grad_enabled():
            raise _refusal()
        source = self.source
        with torch.no_grad(), no_typecheck():
            above = copy_of(source.local)
            source.local.copy_(redistributed(self.whole, source.copied, source.spec))
        if above is not None:
            above.write_back()


def redistributed_view(local: torch.Tensor, spec: ShardTensorSpec, target: ShardTensorSpec) -> torch.Tensor:
    """`redistributed`, for a view: where it copies, the copy's storage knows what it is a copy of."""
    result = redistributed(local, spec, target)
    if result is local or transforming():
        return result
    storage: Any = result.untyped_storage()
    if storage._cdata != local.untyped_storage()._cdata:
        has_graph = result.requires_grad
        strides, offset = tuple(result.stride()), int(result.storage_offset())
        storage.source = _Source(local.detach(), spec, target, strides, offset, has_graph)
    return result


def copy_of(local: torch.Tensor) -> Copy | None:
    """The copy that `local` is part of, brought up to date; None for a tensor of its own.

    Raises:
        RuntimeError: the copy has a graph, which what is written would have to enter at its source.
    """
    if transforming():
        return None
    source: _Source | None = getattr(local.untyped_storage(), "source", None)
    if source is None:
        return None
    if source.has_graph and torch.is_grad_enabled():
        raise _refusal()
    with torch.no_grad(), no_typecheck():
        whole = local.detach().as_strided(source.copied.local_shape, source.strides, source.offset)
        copy_of(source.local)
        whole.copy_(redistributed(source.local, source.spec, source.copied))
    return Copy(local, whole, source)


def _refusal() -> RuntimeError:
    return RuntimeError(
        "in place on x[i], or another view, of a sharded dim, with gradients: it is a copy, and torch's would be a "
        "view of x. Write x[i] = value or x[i:i+1], write under torch.no_grad(), or clone() the view"
    )
