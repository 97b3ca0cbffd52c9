"""`Trainer`: transformers' Trainer, whose model is distributed over tp, pp, cp, ep and dp.

    from neuronx_dist.hf import Trainer, TrainingArguments
    args = TrainingArguments(output_dir, tp=2, pp=2, zero1=True, microbatches=4, ...)
    Trainer(model=AutoModelForCausalLM.from_pretrained(folder), args=args, train_dataset=dataset).train()

Trainer's loop stays as it is. Replaced are the places where it meets the world:

    create_accelerator_and_postprocess   mesh, swapped model, pipeline; accelerate counts data-parallel ranks alone
    create_optimizer, _clip_grad_norm    ZeRO-1 or masters, which clip in their step
    training_step, prediction_step       forward and backward, of a pipeline too; the reduction of gradients
    _get_num_items_in_batch              labels of all data-parallel ranks
    save_model, _save_..., _load_...     `hf.save_pretrained` and `save_checkpoint` (trainer_checkpoints.py)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from inspect import signature
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import nn

from ... import comm
from ...attention.batch import get_batch_on_this_context_parallel_rank
from ...gradients.accumulation import no_sync
from ...gradients.reduce import reduce_gradients
from ...modules.lora.model import adapters_of
from ...optimizer import MasterWeightsOptimizer, NeuronZero1Optimizer
from ...parallel_layers.random import model_parallel_manual_seed
from ...parallel_layers.utils import move_model_to_device
from ...pipeline.model import NxDPPModel
from ...planning.recompute import recompute
from ...trainer.accelerator import rows_of_all
from ..loss import causal_lm_loss
from ..model_plan import UnsupportedModelError, transformer_layer_class
from ..swap import is_swapped, return_whole_logits, swap
from .chosen_layout import choose_layout
from .exchanges import LabelShare, by_data_rank, compare_batches, from_last_stage, mean_over_data, whole_logits
from .trainer_checkpoints import CheckpointsMixin
from .training_arguments import TrainingArguments

__all__ = ["ParallelTrainerMixin", "Trainer"]

_COMPARED_STEPS = 3  # the first of an epoch, in which the rows of a replica are compared


class DataParallelAccelerator(Accelerator):
    """An Accelerator that counts data-parallel ranks: what it divides, and gathers, are rows."""

    @property
    def num_processes(self) -> int:
        return comm.size("dp")

    @property
    def process_index(self) -> int:
        return int(comm.rank("dp"))

    def gather(self, tensor: Any) -> Any:
        """Gathers tensors over dp, along dim 0; a 0-dim tensor becomes `[dp]`."""
        return recursively_apply(rows_of_all, tensor, error_on_other_type=True)


class ParallelTrainerMixin(CheckpointsMixin):
    """Distributes a Trainer: `class Mine(ParallelTrainerMixin, transformers.Trainer)`.

    Attributes:
        pipeline: the `NxDPPModel` around `model`; None without a pipeline.
    """

    pipeline: Any = None
    optimizer: Any
    label_smoother: Any
    _tr_loss: torch.Tensor
    current_flos: float
    _has_local_means: bool  # a loss of the user's may be a mean over a rank's labels, whatever count of labels it gets
    _has_label_share = False
    _counts_local_labels = False  # in evaluation, of such a loss
    _compared: tuple[Any, int] = (None, 0)  # an epoch's batches, and the steps in which they were compared

    def __init__(self, model: Any = None, *args: Any, **kwargs: Any) -> None:
        model = self._without_adapters(model)
        self._choose_layout(model, *args, **kwargs)
        super().__init__(model, *args, **kwargs)
        self.is_distributed_loading_by_transformers = True  # accelerate wraps the model in no DistributedDataParallel
        if self._has_parallel_loss(self.model):
            self.label_smoother = None  # the loss smooths labels itself
        outside = {
            "compute_loss_func": self.compute_loss_func is not None,
            "label_smoothing_factor": self.label_smoother is not None,
            "compute_loss of a subclass": self._computes_loss(),
        }
        run: Any = self.args
        model = type(self.model).__name__
        refused = [name for name, is_there in outside.items() if is_there]
        self._has_local_means = run.cp == 1 and (outside["compute_loss_func"] or outside["compute_loss of a subclass"])
        self.model_accepts_loss_kwargs |= self._has_label_share
        if refused and (run.pp > 1 or run.cp > 1):
            raise ValueError(
                f"Trainer: {', '.join(refused)} computes the loss of {model} from logits, which no rank has at "
                f"pp={run.pp}, cp={run.cp}: use tp, or set model.loss_function"
            )
        if run.tp > 1 and "forward" in vars(self.model):
            raise ValueError(
                f"Trainer: the forward of this {model} was replaced, as TRL does, and may read weights, of which a "
                f"rank has shards: use tp=1 in place of tp={run.tp}"
            )

    def _choose_layout(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Chooses what `layout="auto"` leaves open, without what this Trainer or its model would be refused with."""
        given = signature(super().__init__).bind_partial(model, *args, **kwargs).arguments
        run = given.get("args")
        if getattr(run, "layout", None) is None:
            return
        limits: dict[str, Any] = {}
        if self._computes_loss() or given.get("compute_loss_func") is not None:
            limits |= dict(pp=1, cp=1)
        if "forward" in vars(model or self):
            limits |= dict(tp=1)
        if self.lora_config is not None or hasattr(model, "peft_config"):
            limits |= dict(tp=1, pp=1, cp=1, ep=1)
        choose_layout(run, model, given.get("train_dataset"), **limits)

    # --- the model

    def create_accelerator_and_postprocess(self) -> None:
        args = self.args
        if not isinstance(args, TrainingArguments):
            raise TypeError(
                f"Trainer: args is a {type(args).__module__}.{type(args).__qualname__}; pass neuronx_dist.hf."
                "TrainingArguments (or a subclass of it), which has tp, pp, cp, ep"
            )
        args.start()
        model_parallel_manual_seed(args.seed)  # Trainer has seeded the default stream so; masks of shards have another
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = DataParallelAccelerator  # made by Trainer's code, which takes no class
        self.accelerator.device_placement = False  # models are placed here, and batches in `_prepare_inputs`
        if self.model is not None:
            self._distribute(self.model)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        model = self._without_adapters(super().call_model_init(trial))
        self._distribute(model)
        return model

    def _distribute(self, model: Any) -> None:
        """Swaps layers in place, and cuts the model into stages.

        Raises:
            UnsupportedModelError: swap has no plan for the model, and a degree or option needs one.
        """
        args = self.args
        if getattr(model, "is_distributed_loading_by_transformers", False):
            raise ValueError(
                "Trainer: this model was sharded by transformers' distributed_config: load it without, and pass tp=..."
            )
        is_needed = args.tp * args.cp * args.ep * args.pp > 1
        if adapters_of(model) and self.lora_config is None or is_needed and hasattr(model, "peft_config"):
            raise ValueError(
                f"Trainer: this {type(model).__name__} has adapters, which the LoraModel around it saves: pass the "
                "result of get_lora_model(hf.swap(model), LoraConfig(...)), which takes PEFT's config too"
            )
        self._parameter_count = model.num_parameters(exclude_embeddings=True) if hasattr(model, "num_parameters") else 0
        options = {name: getattr(args, name) for name in ("sequence_parallel", "pad_heads", "pad_vocab", "fused_loss")}
        is_needed = args.tp * args.cp * args.ep > 1 or any(options.values())
        if not is_swapped(model) and (is_needed or isinstance(model, transformers.PreTrainedModel)):
            try:
                swap(model, context_parallel=args.context_parallel, **options)
            except UnsupportedModelError:
                if is_needed:
                    raise
        if args.label_smoothing_factor and self._has_parallel_loss(model):
            model.loss_function = partial(model.loss_function, label_smoothing=args.label_smoothing_factor)
        if self._computes_loss() and self._has_parallel_loss(model) and args.tp > 1:
            return_whole_logits(model)  # it may read them beside the loss, as a distillation does
        takes_count = self._has_parallel_loss(model) and getattr(model, "accepts_loss_kwargs", True)
        if not takes_count and args.cp == 1 and not type(model).__name__.endswith("ForCTC"):
            LabelShare(model, lambda: self._loss_shifts_labels)
            self._has_label_share = True
        if args.recompute:
            recompute(model, args.recompute)
        self.pipeline = None
        if args.pp > 1:
            model.generate = partial(_refuse_generate, args.pp)
            self.pipeline = NxDPPModel(
                model,
                transformer_layer_cls=transformer_layer_class(model),
                num_microbatches=args.microbatches or args.per_device_train_batch_size,
                virtual_pipeline_size=args.virtual_pipeline_size,
                schedule=args.schedule,
                auto_partition=True,
                output_loss_value_spec={"loss": True},
                broadcast_and_average_loss=True,
                use_zero1_optimizer=args.zero1,
            )

    def _computes_loss(self) -> bool:
        return type(self).compute_loss is not transformers.Trainer.compute_loss

    def _has_parallel_loss(self, model: Any) -> bool:
        """Returns whether the model's loss is that of logits that are sharded over tp."""
        return getattr(getattr(model, "loss_function", None), "func", None) is causal_lm_loss

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        move_model_to_device(self.pipeline or model, device)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return self.pipeline if training and self.pipeline is not None else model

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Does nothing: equal seeds make equal weights, and `_distribute` slices them."""

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """Returns this rank's share of the operations of its replica: all ranks together have those of one process."""
        ids = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        if ids is None:
            return 0
        return 6 * ids.numel() * self._parameter_count / comm.size(("pp", "cp", "tp"))

    def store_flos(self) -> None:
        """Adds the operations of all ranks, without the calls that not every backend has."""
        self.state.total_flos += sum(comm.gather_objects(self.current_flos))
        self.current_flos = 0

    # --- the optimizer

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            chosen, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            if not isinstance(chosen, type) or {"params", "model", "optimizer_dict"} & set(options):
                raise ValueError(
                    f"Trainer: the optimizer of optim={self.args.optim} chooses parameters by layers, which are "
                    "sharded here: use adamw_torch, sgd or another elementwise optimizer"
                )
            decaying = self.get_decay_parameter_names(self.model)
            local = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad and not p.is_meta]
            groups = [
                {"params": [p for name, p in local if name in decaying], "weight_decay": self.args.weight_decay},
                {"params": [p for name, p in local if name not in decaying], "weight_decay": 0.0},
            ]
            wrapper = NeuronZero1Optimizer if self.args.zero1 else MasterWeightsOptimizer
            self.optimizer = wrapper(groups, chosen, max_norm=self.args.max_grad_norm or math.inf, **options)
        elif not isinstance(self.optimizer, NeuronZero1Optimizer):
            raise ValueError(
                f"Trainer: optimizers has a {type(self.optimizer).__name__}, made for the model as it was before its "
                "layers were replaced: pass optimizer_cls_and_kwargs=(class, options) instead"
            )
        prepared: Any = self.optimizer
        prepared._is_accelerate_prepared = True  # its wrapper would copy the state to the device and back
        prepared.step_was_skipped = False
        return prepared

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Does nothing: the optimizer clips in its step, which knows the norm of all shards."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Does nothing, as `_clip_grad_norm`."""

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(tr_loss, self.optimizer.grad_norm, *args, **kwargs)

    def _finalize_training(self, *args: Any) -> Any:
        self._tr_loss = mean_over_data(self._tr_loss)
        return super()._finalize_training(*args)

    # --- batches

    def get_total_train_batch_size(self, args: Any) -> int:
        return self._train_batch_size * args.gradient_accumulation_steps * comm.size("dp")

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Returns Trainer's loader, whose workers draw equal numbers on the ranks of a replica."""
        loader = super()._get_dataloader(*args, **kwargs)
        if loader.num_workers:
            loader.generator = torch.Generator().manual_seed(self.args.seed)
            if loader.worker_init_fn is not None:
                loader.worker_init_fn = partial(loader.worker_init_fn, rank=comm.rank("dp"))
        return loader

    def get_batch_samples(self, epoch_iterator: Any, *args: Any) -> tuple[list[Any], Any]:
        batches, count = super().get_batch_samples(epoch_iterator, *args)
        of_epoch, steps = self._compared
        self._compared = epoch_iterator, steps + 1 if of_epoch is epoch_iterator else 1
        if self._compared[1] <= _COMPARED_STEPS:
            compare_batches(batches, self.state.global_step + 1)
        return batches, count

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | None:
        """Returns the labels of the global batch by data-parallel rank, as gradients are means over these ranks."""
        count = super()._get_num_items_in_batch(batch_samples, device)
        if count is None:
            return None
        dtype = torch.promote_types(torch.float32, next(self.model.parameters()).dtype)
        count = torch.as_tensor(count, device=device, dtype=dtype)
        return count if self._counts_local_labels else by_data_rank(count)

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[Callable[[], Any], dict[str, Any]]:
        """Returns this rank's part of the sequences, and remembers their places."""
        if comm.size("cp") > 1:
            ids = inputs["input_ids"]
            places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
            causal = self._loss_shifts_labels
            inputs = get_batch_on_this_context_parallel_rank({**inputs, "places": places}, "zigzag", causal=causal)
            self._places = inputs.pop("places")[0]
        return nullcontext, inputs

    # --- steps

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        if self.pipeline is None:
            with nullcontext() if self.accelerator.sync_gradients else no_sync(self.model):
                loss = super().training_step(model, inputs, num_items_in_batch)
                reduce_gradients(self.model, average_over_data=not self.args.zero1)
            return loss
        steps = self.args.gradient_accumulation_steps
        if num_items_in_batch is None and steps > 1:
            raise ValueError(
                f"Trainer: batches of {type(self.model).__name__} have no labels to count, so that the losses of "
                f"gradient_accumulation_steps={steps} have no common divisor in a pipeline: use more microbatches"
            )
        self.pipeline.train()
        inputs = self._pipeline_inputs(inputs, num_items_in_batch)
        with self.accelerator.autocast(), nullcontext() if self.accelerator.sync_gradients else self.pipeline.no_sync():
            loss = self.pipeline.run_train(**inputs)
        return loss.to(self.args.device)

    def _pipeline_inputs(self, inputs: dict[str, Any], num_items_in_batch: Any) -> dict[str, Any]:
        """Returns a batch for the pipeline, and sets the number of its microbatches."""
        _, inputs = self._prepare_context_parallel_inputs(self.model, inputs)
        inputs = dict(self._prepare_inputs(inputs))
        rows = next(len(x) for x in inputs.values() if isinstance(x, torch.Tensor) and x.ndim)
        self.pipeline.num_microbatches = math.gcd(rows, self.args.microbatches or rows)
        if num_items_in_batch is not None and self.model_accepts_loss_kwargs:
            inputs["num_items_in_batch"] = num_items_in_batch / self.pipeline.num_microbatches
        return inputs

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        has_labels = all(inputs.get(name) is not None for name in self.label_names) and bool(self.label_names)
        if comm.size("cp") > 1 and not has_labels:
            raise ValueError(
                f"Trainer: predictions at cp={comm.size('cp')} need {', '.join(self.label_names)} in the batch: "
                "without them sequences are not divided; add labels (of -100), or predict at cp=1"
            )
        inputs = self._without_repeated_labels(inputs)
        self._counts_local_labels = has_labels and self._has_local_means
        try:
            if self.pipeline is None:
                result = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
                loss, logits, labels = result
                if logits is not None:
                    logits = self._whole_logits(logits, has_labels)
            else:
                loss, logits, labels = self._predict_in_pipeline(inputs, prediction_loss_only, has_labels)
            return None if loss is None else self._mean_loss(loss, inputs), logits, labels
        finally:
            self._counts_local_labels = False

    def _mean_loss(self, loss: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """Returns the mean of the ranks' losses; where each is a mean over local labels, by their number."""
        count = self._get_num_items_in_batch([inputs], loss.device) if self._counts_local_labels else None
        if count is None:
            return mean_over_data(loss)
        total = mean_over_data(torch.where(count > 0, loss * count, 0.0))  # a mean of no labels is NaN
        return total / mean_over_data(count)

    def _predict_in_pipeline(
        self, inputs: dict[str, Any], prediction_loss_only: bool, has_labels: bool
    ) -> tuple[Any, Any, Any]:
        labels = tuple(self._prepare_input(inputs[name]) for name in self.label_names) if has_labels else None
        count = self._get_num_items_in_batch([inputs], self.args.device) if has_labels else None
        inputs = self._pipeline_inputs(inputs, count)
        pipeline, spec = self.pipeline, self.pipeline.output_loss_value_spec
        pipeline.output_loss_value_spec = spec if has_labels else None
        try:
            with self.accelerator.autocast():
                if prediction_loss_only and has_labels:
                    loss, outputs = pipeline.run_eval(**inputs), None
                else:
                    loss, outputs = pipeline.run_eval(return_outputs=True, **inputs)
        finally:
            pipeline.output_loss_value_spec = spec
        loss = None if loss is None else loss.to(self.args.device)  # the pipeline returns it on the CPU
        if prediction_loss_only and has_labels:
            return loss, None, None
        logits = None
        if outputs is not None:
            logits = self._whole_logits(torch.cat([output["logits"] for output in outputs]), has_labels)
        return loss, from_last_stage(logits, pipeline.last_stage, self.args.device), labels and labels[0]

    def _whole_logits(self, logits: Any, has_labels: bool) -> Any:
        """Returns the logits `[b, s, vocab]` of a causal LM's shards over tp and cp; other outputs as they are."""
        if not (has_labels and self._has_parallel_loss(self.model)):
            return logits
        if isinstance(logits, tuple):
            return (self._whole_logits(logits[0], has_labels), *logits[1:])
        vocabulary = self.model.config.get_text_config().vocab_size
        return whole_logits(logits, vocabulary, self._places if comm.size("cp") > 1 else None)

    def _without_repeated_labels(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns a batch whose rows that only complete the last one have no part in the loss."""
        state, labels = self.accelerator.gradient_state, inputs.get("labels")
        if state.end_of_dataloader and state.remainder == -1 and comm.size("dp") == 1:
            # A stream has no length, of which accelerate would know the rows of the last batch.
            state.active_dataloader.remainder = next(len(x) for x in inputs.values() if isinstance(x, torch.Tensor))
        if labels is None or labels.is_floating_point() or not state.end_of_dataloader or state.remainder <= 0:
            return inputs
        positions, size = inputs.get("position_ids"), self.args.eval_batch_size
        if len(labels) == 1 < size and positions is not None:  # of DataCollatorWithFlattening: rows one after another
            rows = torch.cat([torch.zeros(1), (positions[0].cpu().diff() != 1).cumsum(0)]) + comm.rank("dp") * size
        else:
            rows = torch.arange(len(labels)).reshape(-1, *[1] * (labels.ndim - 1)) + comm.rank("dp") * len(labels)
        return {**inputs, "labels": labels.masked_fill((rows >= state.remainder).to(labels.device), -100)}


def _refuse_generate(stages: int, *args: Any, **kwargs: Any) -> None:
    """Stands in the place of the model's `generate`, for which a stage has no layers of the others."""
    raise RuntimeError(
        f"Trainer: generate at pp={stages}: a rank has the layers of its stage alone: call trainer.save_model(folder), "
        "and generate with the model of that folder, in one process or at tp"
    )


class Trainer(ParallelTrainerMixin, transformers.Trainer):
    """Trains a model of transformers on all ranks, with the arguments and methods of transformers' `Trainer`.

    Each rank passes the same whole model, or `model_init`; its layers are replaced in place. The module's first lines
    say what is replaced, and docs/trainer.md what is refused.

    Raises:
        ValueError: an option that would be wrong in this layout, with the reason.
        TypeError: `args` are transformers' own.
    """
