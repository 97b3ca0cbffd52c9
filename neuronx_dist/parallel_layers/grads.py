"""NxD's import path of the gradient functions, which live in `neuronx_dist.gradients`."""

import torch

from ..gradients.norm import clip_grad_norm, clip_grads_with_norm, get_grad_norm
from ..gradients.reduce import (
    allreduce_context_parallel_gradients,
    allreduce_sequence_parallel_gradients,
    bucket_allreduce_gradients,
    global_num_items,
    reduce_gradients,
)


def param_is_not_shared(param: torch.Tensor) -> bool:
    """Returns whether a parameter is not marked as the copy of one that another stage counts."""
    return not getattr(param, "shared", False)


__all__ = [
    "allreduce_context_parallel_gradients",
    "allreduce_sequence_parallel_gradients",
    "bucket_allreduce_gradients",
    "clip_grad_norm",
    "clip_grads_with_norm",
    "get_grad_norm",
    "global_num_items",
    "param_is_not_shared",
    "reduce_gradients",
]
