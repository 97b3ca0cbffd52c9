"""`TrainingArguments`: transformers' arguments, and the degrees and options of a parallel run."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import transformers

from ... import comm
from ...comm.launch import init_distributed
from ...parallel_layers.parallel_state import initialize_model_parallel
from ...planning.layout import Layout
from .chosen_layout import kept_arguments

__all__ = ["TrainingArguments"]

# Arguments of transformers that a run here would not obey: why not, and the way.
_REFUSED = {
    "deepspeed": "the model is sharded by this package: use zero1=True, tp, pp",
    "fsdp": "the model is sharded by this package: use zero1=True, tp, pp",
    "parallelism_config": "it describes accelerate's parallelism: use tp, pp, cp, ep",
    "fp16": "accelerate's gradient scaler looks for infinities in a rank's shard alone: use bf16=True",
    "fp16_full_eval": "use bf16=True, which evaluation obeys too",
    "bf16_full_eval": "it would convert the weights for good: use bf16=True, which evaluation obeys too",
    "auto_find_batch_size": "one rank would change its batch size alone: set per_device_train_batch_size",
    "torch_compile": "compiled code computes the logits of all tokens: compile layers of the model before it is passed",
    "push_to_hub": "upload the folder of save_model() after training",
    "use_liger_kernel": "its loss replaces that of sharded logits: leave it out; fused_loss does the same",
    "neftune_noise_alpha": "its hook does not know sharded embeddings: leave it out",
    "save_on_each_node": "a checkpoint is one folder that all hosts see: leave it out",
    "eval_use_gather_object": "predictions are gathered as tensors: leave it out",
}
_REFUSED_CONFIG = ("split_batches", "dispatch_batches", "gradient_accumulation_kwargs")  # of accelerator_config


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """Arguments of transformers' `Trainer`, and how its model is distributed over the ranks that torchrun started.

    `per_device_train_batch_size` is that of a data-parallel rank: of the tp x pp x cp ranks that hold one replica. What
    is left of the world is dp.

    Args:
        tp, pp, cp, ep: ranks over which layers, stages, sequences and experts are divided; ep is a part of dp.
        sequence_parallel, pad_heads, pad_vocab, fused_loss, context_parallel: as in `hf.swap`.
        zero1: shard the optimizer's state over the data-parallel ranks.
        schedule, virtual_pipeline_size: of the pipeline, as in `NxDPPModel`.
        microbatches: into which a pipeline divides each batch; None: one for each row. A batch that it does not divide
            (the last of an epoch, one of evaluation) has the largest number of microbatches that divides both.
        recompute: "full", "attention", "norms" or a class of modules: what backward computes again; None: nothing.
        layout: "auto": `Trainer` sets all of these, but those that are not their defaults, as `nxd.plan` predicts the
            fastest step of `per_device_train_batch_size` x `gradient_accumulation_steps` x ranks rows, and logs why.
            `microbatches` must be None then. None: they stay as they are.

    Raises:
        ValueError: an argument of transformers that a parallel run does not obey, with the reason and the way; or one
            that contradicts `layout`.
    """

    tp: int = field(default=1, metadata={"help": "Ranks over which each layer is divided."})
    pp: int = field(default=1, metadata={"help": "Pipeline stages."})
    cp: int = field(default=1, metadata={"help": "Ranks over which each sequence is divided."})
    ep: int = field(default=1, metadata={"help": "Data-parallel ranks over which experts are distributed."})
    sequence_parallel: bool = field(default=False, metadata={"help": "Divide activations between layers over tp."})
    zero1: bool = field(default=False, metadata={"help": "Shard the optimizer's state over data-parallel ranks."})
    schedule: str | None = field(default=None, metadata={"help": "Of the pipeline: 1f1b, gpipe, interleaved, ..."})
    virtual_pipeline_size: int = field(default=1, metadata={"help": "Pieces of the model on each stage."})
    microbatches: int | None = field(default=None, metadata={"help": "Of a batch, in a pipeline; None: its rows."})
    fused_loss: bool | None = field(default=None, metadata={"help": "Compute the loss without the whole logits."})
    recompute: str | None = field(default=None, metadata={"help": "full, attention, norms, or a class of modules."})
    context_parallel: str = field(default="auto", metadata={"help": "Attention over cp: auto, ring, ulysses, ..."})
    pad_heads: bool = field(default=False, metadata={"help": "Add heads of zeros where tp does not divide them."})
    pad_vocab: bool = field(default=False, metadata={"help": "Add rows of zeros where tp does not divide the words."})
    layout: str | None = field(default=None, metadata={"help": "auto: the layout that is predicted to be the fastest."})

    def __post_init__(self) -> None:
        for name, reason in _REFUSED.items():
            if value := getattr(self, name):
                raise ValueError(f"TrainingArguments: {name}={value!r} is not supported here: {reason}")
        if self.train_sampling_strategy == "batch_rebalance":
            raise ValueError(
                "TrainingArguments: train_sampling_strategy='batch_rebalance' is not supported here: it divides "
                "batches over the whole world: use 'group_by_length'"
            )
        if self.layout not in (None, "auto"):
            raise ValueError(
                f"TrainingArguments: layout={self.layout!r}: use 'auto', or None and tp, pp, cp, ep, zero1"
            )
        if self.microbatches is not None and self.microbatches < 1:
            raise ValueError(f"TrainingArguments: microbatches={self.microbatches} is to be at least 1, or None")
        if transformers.utils.is_torch_xla_available():
            raise ValueError(
                "TrainingArguments: transformers' Trainer would use torch_xla, which is installed: set "
                "USE_TORCH_XLA=0, or write the loop yourself (docs/xla.md)"
            )
        if "RANK" in os.environ or self.use_cpu:  # torchrun's job; else accelerate finds the device of one process
            device = init_distributed("cpu" if self.use_cpu else "auto")
            if device.type == "cpu":
                self.__dict__["use_cpu"] = True  # accelerate joins a job of CPUs only then
        self.average_tokens_across_devices = False  # the count that Trainer passes on is that of all ranks
        super().__post_init__()
        config = self.accelerator_config
        for name in _REFUSED_CONFIG:
            if getattr(config, name):
                raise ValueError(
                    f"TrainingArguments: accelerator_config with {name}={getattr(config, name)!r} is not supported "
                    "here: every data-parallel rank loads its rows itself"
                )
        if not config.even_batches:
            raise ValueError(
                "TrainingArguments: accelerator_config with even_batches=False is not supported here: data-parallel "
                "ranks need the same number of batches: use dataloader_drop_last=True"
            )
        if self.layout is not None:
            kept_arguments(self)

    def start(self) -> None:
        """Joins the job, and lays its ranks out as these degrees say; a second call changes nothing.

        Raises:
            ValueError: the degrees do not divide the world, with the nearest that do, or are not chosen yet.
            RuntimeError: another layout is there already, or accelerate does not know this device.
        """
        if self.layout is not None:
            raise ValueError("TrainingArguments: layout='auto' is chosen by Trainer: pass tp, pp, ... to start before")
        init_distributed(self.device.type)
        Layout(self.world_size, self.tp, self.pp, self.cp, self.ep, global_batch=self.world_size).check()
        initialize_model_parallel(self.tp, self.pp, self.cp, self.ep)
        if self.world_size != comm.size("world"):
            raise RuntimeError(
                f"accelerate counts {self.world_size} processes on {self.device}, and the job has "
                f"{comm.size('world')}: it does not know this kind of device; write the loop yourself, or pass "
                "use_cpu=True"
            )
