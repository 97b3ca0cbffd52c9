"""NxD's and Megatron's region functions, each one line of typed collectives.

A *region* is a part of the program where the tensor has a type on the tensor-parallel axis: `copy_to` enters it (I ->
R), `reduce_from` leaves it (P -> I), `scatter_to` and `gather_from` shard and unshard (I <-> S). Two rows of the spmd
quick start's Megatron table are not what Megatron does; these follow Megatron:
`scatter_to_tensor_model_parallel_region` splits (backward all-gather), and `gather_from_tensor_model_parallel_region`
gathers (backward split).

`process_group`: a mesh axis name, a ProcessGroup or a Communicator; None: the tensor-parallel axis.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import comm, spmd
from ..lazy_names import lazy_names
from ..spmd import I, P, R, S, V
from .signatures import ignore

# Loaded at the first use, so that importing the package stays quick.
_LAZY = {
    "local_pieces": "nonzero_partition_dim_swap _reduce _split_along_dim _split_along_first_dim _split_along_last_dim "
    "_gather_along_dim _gather_along_first_dim _gather_along_last_dim _reduce_scatter_along_dim "
    "_reduce_scatter_along_first_dim _reduce_scatter_along_last_dim",
    "neuron_only": "round_robin_scatter_to_process_group_spmd scatter_to_process_group_spmd",
}
__getattr__ = lazy_names(
    __name__, {x: f"parallel_layers.{file}" for file, names in _LAZY.items() for x in names.split()}
)


def copy_to_tensor_model_parallel_region(input_: torch.Tensor, process_group: Any = None) -> torch.Tensor:
    """Identity forward, all-reduce backward."""
    return spmd.convert(input_, process_group or "tp", src=I, dst=R)


def reduce_from_tensor_model_parallel_region(input_: torch.Tensor, process_group: Any = None) -> torch.Tensor:
    """All-reduce forward, identity backward."""
    return spmd.all_reduce(input_, process_group or "tp", src=P, dst=I)


def scatter_to_tensor_model_parallel_region(input_: torch.Tensor, process_group: Any = None) -> torch.Tensor:
    """Local piece of the last dim forward, all-gather backward."""
    return spmd.convert(input_, process_group or "tp", src=I, dst=S(-1))


def gather_from_tensor_model_parallel_region(input_: torch.Tensor, process_group: Any = None) -> torch.Tensor:
    """All-gather of the last dim forward, local piece backward."""
    return spmd.all_gather(input_, process_group or "tp", src=S(-1), dst=I)


def scatter_to_sequence_parallel_region(
    input_: torch.Tensor, sequence_dimension: int = 0, process_group: Any = None
) -> torch.Tensor:
    """Local piece of the sequence forward, all-gather backward."""
    return spmd.convert(input_, process_group or "tp", src=I, dst=S(sequence_dimension))


def gather_from_sequence_parallel_region(
    input_: torch.Tensor,
    sequence_dimension: int = 0,
    to_model_parallel: bool = True,
    process_group: Any = None,
    tile_cc: bool = False,
    *,
    tensor_parallel_output_grad: bool | None = None,
) -> torch.Tensor:
    """All-gather of the sequence forward; backward reduce-scatter, or the local piece if not `to_model_parallel`.

    `tensor_parallel_output_grad` is Megatron's name of `to_model_parallel`. `tile_cc` is ignored, with a warning: it
    tiles a collective for Neuron's compiler.

    Raises:
        TypeError: `sequence_dimension` is a bool: pass Megatron's second argument by keyword.
    """
    if isinstance(sequence_dimension, bool):
        raise TypeError(
            f"gather_from_sequence_parallel_region: sequence_dimension must be an integer, got {sequence_dimension}; "
            "NxD's order is (input_, sequence_dimension, to_model_parallel, process_group), Megatron's (input_, "
            "tensor_parallel_output_grad, group): pass to_model_parallel or tensor_parallel_output_grad by keyword"
        )
    if tile_cc:
        ignore("tile_cc", tile_cc)
    if tensor_parallel_output_grad is not None:
        to_model_parallel = tensor_parallel_output_grad
    return spmd.all_gather(input_, process_group or "tp", src=S(sequence_dimension), dst=R if to_model_parallel else I)


def reduce_scatter_to_sequence_parallel_region(
    input_: torch.Tensor, sequence_dimension: int = 0, process_group: Any = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Reduce-scatter along the sequence forward (in `dtype`), all-gather backward."""
    return spmd.reduce_scatter(input_, process_group or "tp", src=P, dst=S(sequence_dimension), reduce_dtype=dtype)


def reduce_scatter_to_tensor_model_parallel_region_with_dim(
    input_: torch.Tensor, partition_dim: int, process_group: Any = None
) -> torch.Tensor:
    """Reduce-scatter along a dim forward, all-gather backward."""
    return spmd.reduce_scatter(input_, process_group or "tp", src=P, dst=S(partition_dim))


def gather_from_tensor_model_parallel_region_with_dim(
    input_: torch.Tensor, gather_dim: int, process_group: Any = None
) -> torch.Tensor:
    """All-gather along a dim forward, local piece backward."""
    return spmd.all_gather(input_, process_group or "tp", src=S(gather_dim), dst=I)


def scatter_input_channels_to_tensor_model_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """Local piece of dim 1 (channels of `[batch, channels, height, width]`) forward, all-gather backward."""
    return spmd.convert(input_, "tp", src=I, dst=S(1))


def all_gather_last_dim_from_tensor_parallel_region(input_: torch.Tensor, process_group: Any = None) -> torch.Tensor:
    """All-gather of the last dim forward, reduce-scatter backward."""
    return spmd.all_gather(input_, process_group or "tp", src=S(-1), dst=R)


def reduce_scatter_last_dim_to_tensor_parallel_region(input_: torch.Tensor, process_group: Any = None) -> torch.Tensor:
    """Reduce-scatter of the last dim forward, all-gather backward."""
    return spmd.reduce_scatter(input_, process_group or "tp", src=P, dst=S(-1))


def reduce_from_context_model_parallel_region(input_: torch.Tensor, process_group: Any = None) -> torch.Tensor:
    """All-reduce over cp forward, identity backward."""
    return spmd.all_reduce(input_, process_group or "cp", src=P, dst=I)


def all_to_all(group: Any, x: torch.Tensor) -> torch.Tensor:
    """Megatron's even all_to_all: piece i of dim 0 goes to rank i of the group; backward the same."""
    pieces = x.unflatten(0, (-1, x.shape[0] // comm.communicator(group).size))
    return spmd.all_to_all(pieces, group, src=V, dst=V).flatten(0, 1)


def enter_expert_parallel_region(x: torch.Tensor, scatter_gather: bool = False) -> torch.Tensor:
    """`[e, c, h] -> [e/ep, ep, c, h]`: every expert's tokens come to the rank that holds the expert.

    With `scatter_gather` each tensor-parallel rank first takes its piece of the capacity `c`, which is gathered again
    afterwards, so that tokens that all tp ranks hold are sent once.
    """
    experts, capacity, hidden = x.shape
    x = x.view(experts, -1, capacity, hidden)  # dim 1 is that of the ranks: of ep, where each has its own tokens
    if scatter_gather:
        x = spmd.convert(x, "tp", src=I, dst=S(2))
    x = spmd.all_to_all(x, "ep", src=S(1), dst=S(0))
    return spmd.all_gather(x, "tp", src=S(2), dst=I) if scatter_gather else x


def exit_expert_parallel_region(x: torch.Tensor, scatter_gather: bool = False) -> torch.Tensor:
    """`[e/ep, ep, c, h] -> [e, c, h]`: tokens return to the ranks from which they were sent."""
    if scatter_gather:
        x = spmd.convert(x, "tp", src=I, dst=S(2))
    x = spmd.all_to_all(x, "ep", src=S(0), dst=S(1))
    return (spmd.all_gather(x, "tp", src=S(2), dst=I) if scatter_gather else x).flatten(1, 2)
