"""Embedding tables sharded over the vocabulary, or over the embedding dim.

    vocabulary      W[V/t, H]: a rank looks up the ids it holds, zeros for the others: a partial sum, all-reduced
    embedding dim   W[V, H/t]: every rank looks up its columns: sharded on the last dim, all-gathered

With sequence parallelism the output is sharded along the sequence instead: the partial sum is reduce-scattered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import handle_torch_function

from .. import comm, spmd
from ..comm.context import AxisLike
from ..lazy_names import lazy_names
from ..sharded_functions.vocabulary import check_ids, embedding, local_positions
from ..spmd import I, P, S, ShardSpec, set_spec
from ..spmd.local_holders import holds_local
from .attributes import EmbeddingAttributes
from .first_batch import compare_noted, note_first
from .signatures import accepts

__all__ = ["ParallelEmbedding", "own_rows"]

_late = lazy_names(__name__, dict.fromkeys(("refuse_ids", "refuse_sequence"), "parallel_layers.misfits"))


class ParallelEmbedding(EmbeddingAttributes):
    """`torch.nn.Embedding`, sharded over tensor-parallel ranks: ids `[batch, seq] -> [batch, seq, hidden]`.

    Args:
        num_embeddings, embedding_dim: rows and columns of the whole table.
        padding_idx: the index of a row that is initialised to zero and gets no gradient.
        max_norm, norm_type: rows are renormalised when looked up (vocabulary sharding only).
        sparse: sparse weight gradients.
        init_method: fills the whole table `[V, H]` in place.
        shard_across_embedding: shard the embedding dim instead of the vocabulary.
        pad: add rows of zeros to the table, or columns with `shard_across_embedding`, until tp divides it.
        sequence_parallel_enabled: return this rank's piece of the sequence.
        sequence_dimension: the output's dim that is sharded: 0 or None gives `[seq/tp, batch, hidden]`, 1 keeps
            `[batch, seq/tp, hidden]`.
        collect_output: False returns the partial sum (or, sharded over the embedding dim, this rank's columns) as it
            is.
        tensor_model_parallel_group: an axis or a group other than "tp".

    Raises:
        ValueError: the sharded size is not divisible by tp; an option that is impossible with this sharding.
        IndexError: (when called) an id is outside the vocabulary; checked on CPU.
    """

    weight: nn.Parameter

    @accepts("ParallelEmbedding")
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: Callable[[torch.Tensor], Any] = nn.init.normal_,
        device: Any = None,
        dtype: torch.dtype = torch.float32,
        shard_across_embedding: bool = False,
        pad: bool = False,
        *,
        sequence_parallel_enabled: bool = False,
        tensor_model_parallel_group: Any = None,
        sequence_dimension: int | None = None,
        collect_output: bool = True,
        reduce_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        super().__init__()
        self.axis: AxisLike = tensor_model_parallel_group or "tp"
        size = comm.communicator(self.axis).size
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(
                f"ParallelEmbedding: padding_idx {padding_idx} is out of range for {num_embeddings} embeddings"
            )
        self.padding_idx = padding_idx % num_embeddings if padding_idx is not None else None
        self.max_norm, self.norm_type, self.sparse = max_norm, norm_type, sparse
        self.scale_grad_by_freq = scale_grad_by_freq
        self.shard_across_embedding = shard_across_embedding
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        self.collect_output = collect_output
        self.reduce_dtype = reduce_dtype
        self.init_method = init_method
        if size > 1 and max_norm is not None and shard_across_embedding:
            raise ValueError(
                "ParallelEmbedding: max_norm needs whole rows; shard the vocabulary instead of the embedding dim"
            )
        if size > 1 and scale_grad_by_freq and not shard_across_embedding:
            raise ValueError(
                "ParallelEmbedding: scale_grad_by_freq needs all ids on one rank; use shard_across_embedding=True"
            )
        if sequence_parallel_enabled and self.sequence_dimension not in (0, 1):
            raise ValueError(f"ParallelEmbedding: sequence_dimension must be 0 or 1, got {sequence_dimension}")
        shard_dim = 1 if shard_across_embedding else 0
        full = (num_embeddings, embedding_dim)
        unpadded = full[shard_dim]
        self.pad, self.pad_size = pad, -unpadded % size if pad else 0
        if (unpadded + self.pad_size) % size:
            name = "embedding_dim" if shard_across_embedding else "num_embeddings"
            raise ValueError(
                f"ParallelEmbedding: {name} {full[shard_dim]} is not divisible by the tensor parallel size "
                f"{size}; the next size that is: "
                f"{full[shard_dim] + -full[shard_dim] % size}"
            )
        layout_axis = self.axis if isinstance(self.axis, str) else "tp"
        full = (
            (num_embeddings, embedding_dim + self.pad_size)
            if shard_dim
            else (num_embeddings + self.pad_size, embedding_dim)
        )
        spec = ShardSpec(layout_axis, shard_dim, 1, size, full, unpadded if self.pad_size else None)
        target = torch.device(device) if device is not None else torch.get_default_device()
        self.weight = nn.Parameter(torch.empty(spec.local_shape, dtype=dtype, device=target))
        set_spec(self, "weight", spec)
        if target.type != "meta":
            self.init_weight_cpu()

    @property
    def first_id(self) -> int:
        """The first id whose row this rank holds."""
        return 0 if self.shard_across_embedding else comm.communicator(self.axis).rank * self.weight.shape[0]

    def full_module(self, device: Any = "meta") -> nn.Embedding:
        """The unsharded table, for initialisers."""
        full = nn.Embedding(
            self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta", dtype=self.weight.dtype
        )
        return full if torch.device(device).type == "meta" else full.to_empty(device=device)

    @torch.no_grad()
    def init_weight_cpu(self) -> None:
        """Draws the unsharded weight from the global CPU generator, and stores this rank's slice."""
        spec = spmd.spec_of(self.weight)
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        whole = torch.empty(spec.unpadded_shape, dtype=dtype, device="cpu")
        self.init_method(whole)
        if self.padding_idx is not None:
            whole[self.padding_idx].zero_()
        self.weight.copy_(spec.local_slice(whole, comm.communicator(self.axis).rank))

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """`[batch, seq] -> [batch, seq, hidden]`, or this rank's piece of the sequence."""
        communicator = comm.communicator(self.axis)
        size = communicator.size
        note_first(input_, communicator, "input ids", self.weight)
        compare_noted(communicator)
        sequence_dim = None
        if self.sequence_parallel_enabled:
            if input_.dim() < 2:
                _late("refuse_sequence")(self, input_)
            sequence_dim = self.sequence_dimension
        try:
            has_all_rows = size == 1 or self.shard_across_embedding
            out = self._lookup(input_) if has_all_rows else own_rows(input_, self.weight, self)
        except RuntimeError as error:
            _late("refuse_ids")(self, input_, error)
            raise
        if sequence_dim == 0:
            out = out.transpose(0, 1).contiguous()
        if size == 1 or not self.collect_output:
            return out
        if self.shard_across_embedding:
            if sequence_dim is None:
                out = spmd.all_gather(out, self.axis, src=S(-1), dst=I)
            else:
                out = spmd.all_to_all(out, self.axis, src=S(-1), dst=S(sequence_dim))
            return out.narrow(-1, 0, self.embedding_dim) if self.pad_size else out
        if sequence_dim is None:
            return spmd.all_reduce(out, self.axis, src=P, dst=I, reduce_dtype=self.reduce_dtype, inplace=True)
        return spmd.reduce_scatter(out, self.axis, src=P, dst=S(sequence_dim), reduce_dtype=self.reduce_dtype)

    def _lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns this rank's columns of the rows of all ids."""
        return F.embedding(
            ids, self.weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )

    def rows_of(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns the rows of the ids that this rank holds, zeros for the other ids."""
        on_cpu = type(ids) is torch.Tensor and ids.device.type == "cpu"  # where it costs no synchronisation
        if on_cpu and not ids.is_floating_point():  # floats are refused by the lookup
            check_ids(ids, self.num_embeddings, None, "ParallelEmbedding: id")
        if self.max_norm is not None:
            self._renormalise(ids, weight, self.max_norm)
        return embedding(ids, weight, self.padding_idx, axis=self.axis, sparse=self.sparse)

    @torch.no_grad()
    def _renormalise(self, ids: torch.Tensor, weight: torch.Tensor, max_norm: float) -> None:
        """Scales rows of these ids whose norm is above `max_norm` down to that norm."""
        if not isinstance(comm.communicator(self.axis).coordinate(ids), int):
            raise ValueError(
                "ParallelEmbedding: max_norm needs shapes that depend on the ids, which XLA does not support"
            )
        local, elsewhere = local_positions(ids, weight.shape[0], self.axis)
        has_values = type(local) is torch.Tensor and not local.is_meta
        torch.embedding_renorm_(weight, local[~elsewhere] if has_values else local, max_norm, self.norm_type)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, local_weight={list(self.weight.shape)}"


def own_rows(ids: torch.Tensor, weight: torch.Tensor, layer: ParallelEmbedding) -> torch.Tensor:
    """Calls `layer.rows_of(ids, weight)`; tensors that hold a local tensor have a handler for this function."""
    if holds_local(ids, weight):
        result: torch.Tensor = handle_torch_function(own_rows, (ids, weight), ids, weight, layer)
        return result
    return layer.rows_of(ids, weight)
