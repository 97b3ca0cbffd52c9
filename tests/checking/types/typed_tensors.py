"""Tensors of given types, in a check of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends.observed import CheckBackend
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import R, get_local_type, typecheck

__all__ = ["MESH", "checked", "typed", "types"]

MESH = Mesh(4, tp=2)


@contextmanager
def checked() -> Iterator[Any]:
    """A check of rank 0 of dp 2 x tp 2."""
    with comm.as_rank(MESH, 0, CheckBackend()), typecheck() as mode:
        yield mode


def typed(*shape, grad=False, **types):
    """A tensor that is R where nothing is said."""
    with spmd.no_typecheck():
        x = torch.randn(*shape).requires_grad_(grad)
    return spmd.assert_type(x, {"dp": R, "tp": R, **types})


def types(x):
    return get_local_type(x)["dp"], get_local_type(x)["tp"]
