"""Accelerate's `Accelerator` for models with tensor-parallel layers: data, gradients and files go by our mesh.

    accelerator = nxd.hf.Accelerator(tp=2, gradient_accumulation_steps=2)
    model, optimizer, loader, scheduler = accelerator.prepare(nxd.hf.swap(model), optimizer, loader, scheduler)

Who imports this file has the package accelerate.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.data_loader import SeedableRandomSampler, SkipBatchSampler, get_sampler
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, recursively_apply
from accelerate.utils import reduce as reduce_over_job
from torch import nn

from .. import comm
from ..checkpoint.api import load_checkpoint, save_checkpoint
from ..gradients.accumulation import adding_to_reduced, no_sync
from ..gradients.gradient import DATA_AXES
from ..gradients.norm import clip_grad_norm
from ..gradients.reduce import reduce_gradients, refuse_accumulation
from ..hf.dropout import add_missing_stream
from ..hf.weights import full_state_dict
from ..parallel_layers import parallel_state
from ..weights.partial_model import is_partial

__all__ = ["Accelerator", "rows_of_all"]

_OTHERS = (
    *("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin"),
    *("parallelism_config", "torch_tp_plugin"),
)


class Accelerator(accelerate.Accelerator):
    """An `accelerate.Accelerator` over a mesh: `prepare` leaves shards alone, and gives a replica's ranks equal data.

    `backward` reduces gradients over the mesh, where `accumulate` ends a step; `clip_grad_norm_` takes the whole
    model's norm; `gather` and `gather_for_metrics` go over dp, `reduce` over dp and cp; `save_state` writes a
    checkpoint that loads into any layout. A `NeuronZero1Optimizer` is prepared as any other, with
    `grad_clipping=False` where `clip_grad_norm_` clips.

    Args:
        tp, cp, ep: degrees of tensor, context and expert parallelism; the rest of the ranks is dp. None: of the mesh
            that there is, else 1.
        options: accelerate's, as `mixed_precision="bf16"`, `gradient_accumulation_steps`, `project_config`.

    Attributes:
        num_processes, process_index: number and index of the data-parallel rank.

    Raises:
        ValueError: plugins of other kinds of parallelism, fp16, or loaders that one rank reads for all.
    """

    flag_tensor: torch.Tensor | None

    def __init__(
        self, *, tp: int | None = None, cp: int | None = None, ep: int | None = None, cpu: bool = False, **options: Any
    ) -> None:
        for name in _OTHERS:
            if options.get(name) is not None:
                raise ValueError(
                    f"neuronx_dist.hf.Accelerator({name}=) is another kind of parallelism: leave it out, and pass tp, "
                    "cp, ep"
                )
        if not torch.distributed.is_initialized():
            comm.launch.init_distributed("cpu" if cpu else "auto")
        if not parallel_state.model_parallel_is_initialized() or any(size is not None for size in (tp, cp, ep)):
            parallel_state.initialize_model_parallel(
                tp or 1, context_parallel_size=cp or 1, expert_model_parallel_size=ep or 1
            )
        if comm.size("pp") > 1:
            raise ValueError(
                f"neuronx_dist.hf.Accelerator at pp={comm.size('pp')}: backward(loss) has no place in a pipeline, "
                "whose run_train computes the gradients: use a loop of your own, or neuronx_dist.lightning.NxDStrategy"
            )
        super().__init__(cpu=cpu, **options)
        if self.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            raise ValueError(
                "neuronx_dist.hf.Accelerator was launched with accelerate's configuration for "
                f"{self.distributed_type}: launch it by torchrun, or with a configuration without FSDP, "
                "DeepSpeed and Megatron-LM"
            )
        if self.scaler is not None:
            raise ValueError('neuronx_dist.hf.Accelerator(mixed_precision="fp16"): use "bf16", which needs no scale')
        if self.dispatch_batches:
            raise ValueError(
                "neuronx_dist.hf.Accelerator: dispatch_batches=True sends other rows to each rank of a replica: leave "
                "it out, each data-parallel rank reads its rows"
            )
        self.dataloader_config.dispatch_batches = False

    @property
    def num_processes(self) -> int:
        return comm.size("dp")

    @property
    def process_index(self) -> int:
        return comm.rank("dp")

    # --- prepare ---

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Moves the model to the device, and applies mixed precision; `backward` reduces its gradients.

        Raises:
            TypeError: a pipeline model.
        """
        if is_partial(model):
            raise TypeError(
                f"neuronx_dist.hf.Accelerator.prepare: a {type(model).__name__} trains by its run_train, not by "
                "backward(loss): use a loop of your own, or NxDStrategy of neuronx_dist.lightning"
            )
        add_missing_stream()  # for dropout of shards, after `set_seed`
        return super().prepare_model(model, device_placement, evaluation_mode=True)  # without DistributedDataParallel

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        prepared = super().prepare_scheduler(scheduler)
        if type(prepared) is AcceleratedScheduler:
            prepared.__class__ = _Scheduler
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Returns a loader without its first batches; `gather_for_metrics` knows its last batch, too."""
        skipped = super().skip_first_batches(dataloader, num_batches)
        for name in ("sampler", "batch_sampler"):
            sampler = getattr(skipped, name, None)
            if isinstance(sampler, SkipBatchSampler):  # without sizes of its own
                for size in {"batch_size", "num_processes", "split_batches"} & vars(sampler.batch_sampler).keys():
                    setattr(sampler, size, getattr(sampler.batch_sampler, size))
        return skipped

    # --- a step ---

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Computes gradients of `loss / gradient_accumulation_steps`, and reduces them at the end of a step.

        They are added to those of earlier calls, of another loss or another model, which are reduced already.

        Raises:
            RuntimeError: inside of `accumulate`, gradients of the step before are still there and would be scaled.
        """
        with ExitStack() as stack:
            for model in self._models:
                stack.enter_context(adding_to_reduced(model))
                refuse_accumulation(model)
            super().backward(loss, **kwargs)
            if self.sync_gradients:
                for model in self._models:
                    reduce_gradients(model)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with no_sync(model):
            yield

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clips by the norm of the whole model's gradients, which it returns; all ranks call it."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        return clip_grad_norm(parameters, max_norm, norm_type)

    # --- metrics ---

    def gather(self, tensor: Any) -> Any:
        """Returns tensors of all data-parallel ranks, concatenated along dim 0."""
        return recursively_apply(rows_of_all, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Returns the results of all data-parallel ranks, without the rows that fill the last batch."""
        try:
            recursively_apply(lambda x: x, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        if not use_gather_object:
            return super().gather_for_metrics(input_data)
        data = [entry for part in comm.gather_objects(input_data, "dp") for entry in part]
        rest = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else 0
        return data[:rest] if rest > 0 else data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Returns the sum or the mean of tensors over dp and cp, as losses are reduced, times `scale`."""
        factor = scale / comm.size(DATA_AXES) if reduction == "mean" else scale

        def summed(x: torch.Tensor) -> torch.Tensor:
            return comm.all_reduce(x, DATA_AXES) * factor

        return tensor if reduction == "none" else recursively_apply(summed, tensor, error_on_other_type=True)

    def check_trigger(self) -> bool:
        """Returns whether any rank of the job has called `set_trigger`, and resets it; all ranks call it."""
        flag = torch.tensor(0, device=self.device) if self.flag_tensor is None else self.flag_tensor
        is_set = bool(reduce_over_job(flag, "sum") > 0)
        if is_set or self.flag_tensor is None:
            self.flag_tensor = torch.tensor(0, device=self.device)
        return is_set

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Any:
        """Refuses: accelerate's gives each rank of a replica another part.

        Raises:
            NotImplementedError: always; the message has the way.
        """
        raise NotImplementedError(
            "neuronx_dist.hf.Accelerator.split_between_processes: take inputs[accelerator.process_index :: "
            "accelerator.num_processes], the part of this data-parallel rank"
        )

    # --- files ---

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Returns all weights, gathered over tp, on every rank; all ranks call it."""
        return full_state_dict(self.unwrap_model(model))

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any) -> str:
        """Saves the model, the optimizer, schedulers, samplers, registered objects and random states as a folder.

        Raises:
            ValueError: there is no `output_dir`; several models or optimizers; hooks of saving.
        """
        if self._save_model_state_pre_hook or save_model_func_kwargs:
            raise ValueError(
                "neuronx_dist.hf.Accelerator.save_state writes shards, without hooks and save_model_func_kwargs: leave "
                "them out"
            )
        project, keep = self.project_configuration, None
        if project.automatic_checkpoint_naming:
            output_dir = Path(self.project_dir, "checkpoints", f"checkpoint_{self.save_iteration}")
            keep = project.total_limit
            project.iteration += 1
        path = self._path(output_dir, "save_state")
        model, optimizer = self._model_and_optimizer("save_state")
        content = {
            "step": self.step,
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
            "samplers": [[sampler.epoch, sampler.initial_seed] for sampler in self._samplers()],
            "custom_objects": [custom.state_dict() for custom in self._custom_objects],
        }
        save_checkpoint(path.parent, path.name, model, optimizer, user_content=content, num_kept_ckpts=keep)
        return str(path)

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **load_model_func_kwargs: Any) -> None:
        """Loads what `save_state` saved, in any layout.

        Raises:
            ValueError: there is no `input_dir`; the folder is another's; hooks of loading.
        """
        if self._load_model_state_pre_hook or load_model_func_kwargs:
            raise ValueError("neuronx_dist.hf.Accelerator.load_state has no hooks and load_model_func_kwargs")
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            input_dir = Path(self.project_dir, "checkpoints", f"checkpoint_{self.save_iteration - 1}")
        path = self._path(input_dir, "load_state")
        content = load_checkpoint(path.parent, path.name, *self._model_and_optimizer("load_state"))
        if not isinstance(content, dict) or "custom_objects" not in content:
            raise ValueError(f"{path} was not saved by neuronx_dist.hf.Accelerator.save_state: use load_checkpoint")
        self.step = content["step"]
        for scheduler, state in zip(self._schedulers, content["schedulers"]):
            scheduler.load_state_dict(state)
        for sampler, (epoch, seed) in zip(self._samplers(), content["samplers"]):
            sampler.epoch, sampler.initial_seed = epoch, seed
        for custom, state in zip(self._custom_objects, content["custom_objects"]):
            custom.load_state_dict(state)

    def _path(self, folder: Any, call: str) -> Path:
        if folder is None:
            raise ValueError(
                f"neuronx_dist.hf.Accelerator.{call}: pass a folder, or ProjectConfiguration("
                "automatic_checkpoint_naming=True)"
            )
        return Path(os.path.abspath(folder))

    def _model_and_optimizer(self, call: str) -> tuple[nn.Module, torch.optim.Optimizer | None]:
        if len(self._models) != 1 or len(self._optimizers) > 1:
            raise ValueError(
                f"neuronx_dist.hf.Accelerator.{call}: {len(self._models)} models and {len(self._optimizers)} "
                "optimizers are prepared, and a checkpoint has one of each: call neuronx_dist.save_checkpoint for each"
            )
        optimizer = self._optimizers[0].optimizer if self._optimizers else None
        return self.unwrap_model(self._models[0]), optimizer

    def _samplers(self) -> list[Any]:
        samplers = map(get_sampler, self._dataloaders)
        return [sampler for sampler in samplers if isinstance(sampler, SeedableRandomSampler)]


class _Scheduler(AcceleratedScheduler):
    """Steps once for each data-parallel rank, where accelerate's steps once for each process."""

    split_batches: bool

    def step(self, *args: Any, **kwargs: Any) -> None:
        steps = 1 if self.split_batches or not self.gradient_state.sync_gradients else comm.size("dp")
        once, self.split_batches = self.split_batches, True
        try:
            for _ in range(steps if self.step_with_optimizer else 1):
                if self.scheduler.last_epoch < getattr(self.scheduler, "total_steps", float("inf")):  # of OneCycleLR
                    super().step(*args, **kwargs)
        finally:
            self.split_batches = once


def rows_of_all(x: torch.Tensor) -> torch.Tensor:
    """Gathers rows over dp, `[b, ...]` -> `[dp * b, ...]`; a 0-dim tensor becomes `[dp]`."""
    return comm.all_gather(x[None] if x.ndim == 0 else x.contiguous(), "dp")
