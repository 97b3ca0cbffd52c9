"""Comparison of the first batch over the ranks of tensor parallelism, which must all have the same batch.

A data loader that divides the data over all ranks, as samplers do by default, gives these ranks different batches: the
loss falls, but results are not those of one process. So the first ids, labels and input of a linear layer are compared,
through the job's store, without a collective (later ones are not), and shards of weights, which must differ.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from .. import comm, spmd, weights
from ..comm.rank_selection import in_one_program
from ..comm.verbs.transformed_tensors import transforming

__all__ = ["compare_noted", "note_first"]

_NOTED = "first_batch"  # in the extras of a context: statements by what they are of; None: compared

_TOLERANCE = 0.05  # of projections, whose difference is about 1 between two batches; rounding errors are below 0.01
_PROJECTIONS = 4
_VALUES = 1 << 16  # of a float tensor, at most: as many are projected
_OTHER_BATCH = (
    "These ranks take the same batch: divide the data by neuronx_dist.parallel_state.get_data_parallel_rank(), as in "
    "DistributedSampler(data, num_replicas=get_data_parallel_size(), rank=get_data_parallel_rank()), and seed equally"
)
_OTHER_WEIGHTS = "Their input ids are equal: seed torch equally before the model is made, or load one checkpoint"


def note_first(x: torch.Tensor, communicator: comm.Communicator, what: str, shard: torch.Tensor | None = None) -> None:
    """Records a tensor for `compare_noted`, at the first call for `what` on this mesh.

    Args:
        x: ids or labels, compared exactly, or activations, which ranks may round differently.
        communicator: the ranks; only those of the mesh's "tp" are compared.
        what: plural noun for messages.
        shard: this rank's shard of a weight, of which other ranks have other values; None: there is none.
    """
    if torch.compiler.is_compiling():
        return
    context = comm.current()
    noted: dict[str, Any] = context.extras.setdefault(_NOTED, {})
    if what in noted or context.backend.board is None:  # None: ranks are played one by one
        return
    if communicator.axis == "tp" and communicator.size > 1 and _has_values(x):
        noted[what] = {**_statement(x), "shard": weights.equal_shards.digest(shard)}


def compare_noted(communicator: comm.Communicator) -> None:
    """Compares the tensors recorded since the last call; to be called where all ranks of the communicator meet.

    Raises:
        ValueError: ranks have different tensors; the message has the values and says what to do.
    """
    if torch.compiler.is_compiling():
        return
    context = comm.current()
    noted: dict[str, Any] = context.extras.get(_NOTED, {})
    for what in [what for what, statement in noted.items() if statement is not None]:
        statement, noted[what], ids_equal = noted[what], None, noted.get("input ids", "") is None
        first_rank, *others = ranks = communicator.ranks
        topic = f"the first {what} of tensor-parallel ranks {first_rank}"
        statements = context.backend.board.exchange_values(topic, statement, ranks)
        weights.equal_shards.warn_if_equal(statements, context.rank)
        for rank in others:
            if not _equal(statements[first_rank], statements[rank]):
                raise ValueError(
                    f"ranks {first_rank} and {rank} are in one tensor-parallel group, and have different {what} in the "
                    f"first batch: {_text(statements[first_rank])} and {_text(statements[rank])}. "
                    f"{_OTHER_WEIGHTS if ids_equal else _OTHER_BATCH}"
                )


def _has_values(x: torch.Tensor) -> bool:
    return type(x) is torch.Tensor and not (x.is_meta or in_one_program(x) or transforming()) and x.numel() > 0


@spmd.no_typecheck()  # each rank reads its own tensor
@torch.no_grad()
def _statement(x: torch.Tensor) -> dict[str, Any]:
    facts: dict[str, Any] = {"shape": [*x.shape], "dtype": str(x.dtype)}
    values = x.detach().cpu()
    if not x.is_floating_point():
        return {**facts, "values": values.flatten()[:8].tolist(), "digest": zlib.crc32(str(values.tolist()).encode())}
    values = values.flatten()[:_VALUES].double()
    waves = torch.sin(torch.outer(torch.arange(1.0, _PROJECTIONS + 1), torch.arange(1.0, len(values) + 1) ** 1.5))
    projections = waves.double() @ values / values.norm().clamp(min=1e-30)
    return {**facts, "values": values[:8].tolist(), "projections": projections.tolist()}


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if any(one.get(name) != other.get(name) for name in ("shape", "dtype", "digest")):
        return False
    return not any(abs(a - b) > _TOLERANCE for a, b in zip(one.get("projections", ()), other.get("projections", ())))


def _text(statement: dict[str, Any]) -> str:
    values = ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in statement["values"])
    return f"{statement['shape']} of {statement['dtype']}, [{values}, ..]"
