"""NeuronX Distributed's parallel layers, by its names.

linear.py            column and row layers; fused_columns.py: on one input; autograd_linear.py: their formulas
conv.py              convolutions sharded over channels
transposed_linear.py GPT-2's linear layer, whose weight is transposed
embedding.py         `ParallelEmbedding`; layer_norm.py: norms; loss_functions.py: `parallel_cross_entropy`
linear_cross_entropy.py  output layer and loss in one; logprobs.py: log-probabilities of tokens
mappings.py          region functions (`copy_to_...`, `gather_from_...`); local_pieces.py: without gradients
parallel_state.py    `initialize_model_parallel`, and the getters; model_groups.py: groups that a model asks for
rank_orders.py       NxD's choice of a rank order; comm.py: collectives by torch_xla's arguments
replace.py           a model's layers replaced by a list of `LayerPlan`; pad.py: padded heads, repeated ones;
                     pad_groups.py: those of grouped-query attention
activation_checkpoint.py   layers that are recomputed in backward; checkpointed_calls.py: functions, inputs on the host
checkpointing.py     NxD's files of one layout; random.py: seeds; utils.py: small functions
signatures.py        the positional orders of NxD's release and guide; attributes.py: attributes that scripts read;
                     layers.py, layers_utils.py, grads.py: NxD's import paths
neuron_only.py       names for Neuron devices alone: an error at use
misfits.py           errors for inputs that do not fit a layer; first_batch.py: for ranks that have different data
"""

from ..lazy_names import lazy_names
from . import mappings, parallel_state
from .embedding import ParallelEmbedding
from .linear import ColumnParallelLinear, RowParallelLinear
from .loss_functions import parallel_cross_entropy
from .mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from .parallel_state import initialize_model_parallel

#: Classes of layers with sharded weights (names of NxD).
PARALLEL_MODULES = [ColumnParallelLinear, RowParallelLinear, ParallelEmbedding]
#: Functions of sharded tensors (names of NxD).
PARALLEL_FUNCTIONS = [
    parallel_cross_entropy,
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
]

# Loaded at the first use, so that importing the package stays quick.
_LAZY = {
    **dict.fromkeys(("LayerNorm", "RMSNorm"), "parallel_layers.layer_norm"),
    "fuse_columns": "parallel_layers.fused_columns",
    **{f"parallel_linear_{name}": "parallel_layers.linear_cross_entropy" for name in ("cross_entropy", "logprobs")},
    **dict.fromkeys(("load", "save"), "parallel_layers.checkpointing"),
    "clip_grad_norm": "gradients.norm",
    **dict.fromkeys(("get_xla_rng_tracker", "model_parallel_xla_manual_seed"), "parallel_layers.random"),
    **dict.fromkeys(
        (
            "copy_tensor_model_parallel_attributes",
            "move_model_to_device",
            "set_defaults_if_not_set_tensor_model_parallel_attributes",
            "set_tensor_model_parallel_attributes",
            "split_tensor_along_last_dim",
        ),
        "parallel_layers.utils",
    ),
    **dict.fromkeys(("checkpointing", "grads", "layers", "pad", "random", "utils"), "parallel_layers"),
}
__getattr__ = lazy_names(__name__, _LAZY)

__all__ = [
    "ColumnParallelLinear",
    "PARALLEL_FUNCTIONS",
    "PARALLEL_MODULES",
    "ParallelEmbedding",
    "RowParallelLinear",
    "copy_to_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "initialize_model_parallel",
    "mappings",
    "parallel_cross_entropy",
    "parallel_state",
    "reduce_from_tensor_model_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    *_LAZY,
]
