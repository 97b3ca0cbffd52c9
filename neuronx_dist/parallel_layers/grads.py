"""NxD's import path of the gradient functions, which live in `neuronx_dist.gradients`."""

from ..gradients.norm import clip_grad_norm, clip_grads_with_norm, get_grad_norm
from ..gradients.reduce import (
    allreduce_context_parallel_gradients,
    allreduce_sequence_parallel_gradients,
    bucket_allreduce_gradients,
    global_num_items,
    reduce_gradients,
)

__all__ = [
    "allreduce_context_parallel_gradients",
    "allreduce_sequence_parallel_gradients",
    "bucket_allreduce_gradients",
    "clip_grad_norm",
    "clip_grads_with_norm",
    "get_grad_norm",
    "global_num_items",
    "reduce_gradients",
]
