"""Hugging Face models: their layers swapped for parallel ones in place, and their weights in and out of any layout.

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)      # nothing is allocated
    swap(model, sequence_parallel=True)                       # parallel layers, Hugging Face's names
    load_pretrained(model, folder)                            # or materialize(model, seed)
    ...
    save_pretrained(model, out)                               # a folder for AutoModelForCausalLM.from_pretrained

`import neuronx_dist` does not import this package's dependency, transformers: a model brings it.

swap.py         `swap`: layers replaced in place; in_place.py: modules that stay; experts.py: whole experts
                over ep; sequence_parallel.py; context_parallel.py; dropout.py
model_plan.py   which layer becomes which; plan_reading.py: read from words; words.py: all words, and tables of ours
derived.py      a plan from the module's own forward: recorded_model.py, its layers; regions.py: what computes on
                shards; rank_proof.py: the calls of a rank
plan_consistency.py   words that do not go together
packed_rows.py  rows of packed documents, of which a token sees its document
loss.py         the causal language-model loss on vocabulary-parallel logits; deferred_logits.py: logits of training,
                computed where they are read
weights.py      `load_pretrained`, `save_pretrained`, `full_state_dict`; writing.py: safetensors files
sources.py      where weights are read from; gguf_file.py: GGUF files; conversion.py: names of checkpoint and model;
                mismatch.py: differences of the two
trainer/        transformers' `Trainer` and `TrainingArguments` on all ranks; imported when they are used
"""

from ..lazy_names import lazy_names
from ..weights.materialize import materialize
from ..weights.shard_spec import gather_full
from .loss import causal_lm_loss
from .model_plan import UnsupportedModelError, transformer_layer_class
from .sources import has_weights
from .swap import swap
from .weights import full_state_dict, load_pretrained, save_pretrained

__getattr__ = lazy_names(
    __name__,
    {
        "Accelerator": "trainer.accelerator",
        **dict.fromkeys(("ParallelTrainerMixin", "Trainer", "TrainingArguments"), "hf.trainer"),
    },
)

__all__ = [
    "Accelerator",
    "ParallelTrainerMixin",
    "Trainer",
    "TrainingArguments",
    "UnsupportedModelError",
    "causal_lm_loss",
    "full_state_dict",
    "gather_full",
    "has_weights",
    "load_pretrained",
    "materialize",
    "save_pretrained",
    "swap",
    "transformer_layer_class",
]
