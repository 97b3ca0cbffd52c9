"""NeuronX Distributed's training API on any device PyTorch reaches, with SPMD-typed communication.

The names here are what a training script imports; `docs/architecture.md` says where everything lives.
"""

from . import comm, parallel_layers, spmd
from .lazy_names import lazy_names
from .mesh import Mesh
from .parallel_layers import parallel_state
from .parallel_layers.embedding import ParallelEmbedding
from .parallel_layers.linear import ColumnParallelLinear, RowParallelLinear
from .parallel_layers.loss_functions import parallel_cross_entropy
from .parallel_layers.parallel_state import destroy_model_parallel, initialize_model_parallel

#: The version of this package.
__version__ = "0.1.0"

# Name -> its module. Loaded when first asked for, so that importing the package stays quick.
_LAZY = {
    "CheckpointError": "checkpoint.errors",
    "CheckpointIOState": "checkpoint.background",
    "Layout": "planning.layout",
    "MasterWeightsOptimizer": "optimizer",
    "NxDModel": "trainer",
    "NxDOptimizer": "trainer",
    "NeuronZero1Optimizer": "optimizer",
    "NxDPPModel": "pipeline.model",
    "apply_activation_checkpointing": "parallel_layers.activation_checkpoint",
    "checkpoint_wrapper": "parallel_layers.activation_checkpoint",
    "clip_grad_norm": "gradients.norm",
    "get_batch_on_this_context_parallel_rank": "attention.batch",
    "global_num_items": "gradients.reduce",
    **dict.fromkeys(
        ("initialize_parallel_model", "initialize_parallel_optimizer", "neuronx_distributed_config"), "trainer"
    ),
    "init_distributed": "comm.launch",
    "init_on_device": "weights.init_device",
    "materialize": "weights.materialize",
    **dict.fromkeys(("LayerNorm", "RMSNorm"), "parallel_layers.layer_norm"),
    "model_parallel_manual_seed": "parallel_layers.random",
    "move_model_to_device": "parallel_layers.utils",
    "no_sync": "gradients.accumulation",
    **dict.fromkeys(("pad_model", "unpad_model"), "parallel_layers.pad"),
    "parallel_entropy": "parallel_layers.logprobs",
    **{f"parallel_linear_{name}": "parallel_layers.linear_cross_entropy" for name in ("cross_entropy", "logprobs")},
    "plan": "planner.plans",
    "recompute": "planning.recompute",
    "reduce_gradients": "gradients.reduce",
    **dict.fromkeys(("ring_attention", "ulysses_attention"), "attention.context_parallel"),
    **dict.fromkeys(("data", "hf", "metrics", "pipeline", "trainer"), ""),
    **{f"{verb}_checkpoint": "checkpoint.api" for verb in ("save", "load", "has", "finalize")},
}

__all__ = [
    "ColumnParallelLinear",
    "Mesh",
    "ParallelEmbedding",
    "RowParallelLinear",
    "__version__",
    "comm",
    "destroy_model_parallel",
    "initialize_model_parallel",
    "parallel_cross_entropy",
    "parallel_layers",
    "parallel_state",
    "spmd",
    *_LAZY,
]


__getattr__ = lazy_names(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted(__all__)
