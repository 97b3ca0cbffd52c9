"""One parameter's part in ZeRO-1: the rank's rows, in the optimizer's dtype.

    parameter   [rows, ...]                           on every rank of the sharding group, of size `degree`
    padded      [degree * ceil(rows / degree), ...]   zeros at the end; only while it is communicated
    master      [ceil(rows / degree), ...]            this rank's rows: a parameter of the base optimizer

Collectives send a parameter as `[degree, columns]`, whose row r is the shard of rank r. One reduce-scatter of a list of
these returns a rank's shards, one all-gather of a list of shards returns all rows.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from .. import spmd
from ..comm.rank_selection import own_slot
from ..gradients.gradient import ParameterGradient
from ..torch_internals.tensors import is_alias_of
from ..weights.partial_model import install_parameter
from .sharding import Sharding

__all__ = ["ParameterShard"]


class ParameterShard:
    """This rank's shard of a parameter.

    Attributes:
        gradient: of the model's parameter, which is `param`.
        group: the ranks that share it, `degree` of them.
        replicas: the ranks that have the same rows: this rank alone, except with hybrid sharding.
        scale: factor of the sum of their gradients.
        grad_dtype: dtype in which its gradient is communicated.
        nbytes: bytes of the parameter's gradient while it is communicated: `[degree, columns]`, twice where a copy is
            padded, cast or (fp16) divided first. Buckets of the all-gather are cut by it too.
        master: the shard that the base optimizer updates.
        is_param: the master is the parameter itself, because nothing distinguishes them: one rank, one dtype.
        is_view: the master is this rank's rows in the memory of the parameter, so that a write to one changes the
            other: the dtypes are equal, and no row is padded.
    """

    def __init__(
        self, gradient: ParameterGradient, sharding: Sharding, dtype: torch.dtype, grad_dtype: torch.dtype
    ) -> None:
        param = gradient.param
        self.gradient = gradient
        self.group, self.replicas, self.scale = sharding
        self.degree = self.group.size
        self.grad_dtype = grad_dtype
        is_sent_as_it_is = self.rows is not None and grad_dtype == gradient.dtype != torch.float16
        self.nbytes = self.degree * self.columns * grad_dtype.itemsize * (1 if is_sent_as_it_is else 2)
        self.is_param = self.is_alone and self.scale == 1.0 and param.dtype == dtype and not hasattr(param, "main_grad")
        self.is_view = False
        if self.is_param:
            self.master = param
        else:
            self.master = nn.Parameter(self._rows_or_copy(dtype))
            spmd.mark_shard(self.master, param, self.group)

    @property
    def param(self) -> torch.Tensor:
        """The model's parameter."""
        return self.gradient.param

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the shard."""
        rows, *rest = self.param.shape or (1,)  # a 0-dim parameter is one row
        return (-(-rows // self.degree), *rest)

    @property
    def columns(self) -> int:
        """Number of elements of the shard."""
        return math.prod(self.shape)

    @property
    def own_rows(self) -> range:
        """This rank's rows of the parameter, without padding: the last ranks may have fewer, or none."""
        rows, rows_per_rank = (self.param.shape or (1,))[0], self.shape[0]
        begin = min(self.group.rank * rows_per_rank, rows)
        return range(begin, min(begin + rows_per_rank, rows))

    @property
    def is_alone(self) -> bool:
        """Returns whether the gradient is on this rank alone: no other has a shard or a replica of the parameter."""
        return self.degree == 1 and self.replicas.size == 1

    @property
    def rows(self) -> torch.Tensor | None:
        """The parameter as `[degree, columns]`, in its own memory; None where its rows are padded or not contiguous."""
        if not self.param.is_contiguous() or self.param.numel() != self.degree * self.columns:
            return None
        return spmd.local(self.param.detach()).view(self.degree, self.columns)

    def _rows_or_copy(self, dtype: torch.dtype) -> torch.Tensor:
        """This rank's rows in the parameter's memory if a master can be there, else a copy of them; sets `is_view`."""
        rows, rank = self.rows, self.group.coordinate(self.param)
        if rows is not None and self.param.dtype == dtype and isinstance(rank, int):
            self.is_view = True
            return rows.select(0, rank).view(self.shape)
        self.is_view = False
        copy = own_slot(self.split(self.param), self.group, 0).view(self.shape)
        return copy.to(dtype, copy=True)

    @torch.no_grad()
    def pull(self) -> None:
        """Sets the master to the parameter's present value; one that was made on meta gets memory."""
        if self.master.is_meta and not self.param.is_meta:
            install_parameter(self.master, self._rows_or_copy(self.master.dtype))
        elif not self.is_param and not self.is_view:
            self.master.copy_(own_slot(self.split(self.param), self.group, 0).view(self.shape))

    @torch.no_grad()
    def set_master(self, value: torch.Tensor) -> None:
        """Sets the master to values that may differ from the parameter's; the next step writes them to the parameter.

        A master in the parameter's memory is moved to separate memory first. Otherwise the parameter would have new
        rows of this rank beside old rows of other ranks until that step.
        """
        if self.is_view and not value.is_meta and not torch.equal(value.to(self.master), self.master):
            self.is_view = False
            self.master.data = value.to(self.master, copy=True)
        else:
            self.master.copy_(value)

    def follow(self) -> None:
        """Moves the master to the parameter's new memory, where it was a view and `param.data` was assigned.

        The master gets the present value, as if that had been written into the parameter.
        """
        if self.is_view and not is_alias_of(self.master, self.param):
            self.master.data = self._rows_or_copy(self.master.dtype)

    @torch.no_grad()
    def push(self, block: torch.Tensor) -> None:
        """Sets the parameter from the shards of all ranks, `[degree, columns]`."""
        rows = self.rows
        if rows is None:
            self.param.copy_(block.reshape(-1)[: self.param.numel()].view(self.param.shape))
        elif block is not rows:
            rows.copy_(block)

    def split(self, full: torch.Tensor) -> torch.Tensor:
        """Splits a whole tensor, `[rows, ...] -> [degree, columns]`, zero-padded; a view where there is no padding."""
        flat = spmd.local(full.detach()).reshape(-1)
        missing = self.degree * self.columns - flat.numel()
        return (F.pad(flat, (0, missing)) if missing else flat).view(self.degree, self.columns)

    @property
    def own_grad(self) -> torch.Tensor | None:
        """This rank's gradient of the whole parameter.

        Raises:
            ValueError: it is sparse.
        """
        grad = self.gradient.tensor
        if grad is not None and grad.layout is not torch.strided:
            raise ValueError(
                f"the gradient of a parameter of shape {tuple(self.param.shape)} is sparse ({grad.layout}), but "
                "shards are dense: create its layer with sparse=False"
            )
        return grad

    def take_own_grad(self) -> None:
        """Copies this rank's gradient to the master, where no other rank has one: clipping may write the copy."""
        grad = self.own_grad
        if not self.is_param:
            self.master.grad = None if grad is None else grad.reshape(self.shape).to(self.master.dtype, copy=True)
            if self.master.grad is not None and self.scale != 1.0:
                self.master.grad.mul_(self.scale)
