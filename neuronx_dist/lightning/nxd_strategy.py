"""Lightning's strategy for any `LightningModule` with parallel layers, a swapped Hugging Face model or a pipeline."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.nn.functional import pad
from torchmetrics import Metric

from .. import comm
from ..checkpoint.api import load_checkpoint, save_checkpoint
from ..gradients.accumulation import no_sync, scale_gradients
from ..gradients.gradient import parameters_of
from ..gradients.norm import clip_grad_norm
from ..gradients.reduce import complete_reduction, reduce_gradients
from ..hf.dropout import add_missing_stream
from ..hf.model_plan import transformer_layer_class
from ..hf.swap import swap
from ..parallel_layers.utils import move_model_to_device
from ..pipeline.model import NxDPPModel
from ..weights.shard_spec import spec_of
from .checkpoint_io import plain_hyperparameters
from .mesh_strategy import MeshStrategy
from .zero1 import use_zero1

__all__ = ["NxDStrategy"]


class NxDStrategy(MeshStrategy):
    """Trains over a mesh of tensor, pipeline, context, expert and data parallelism, on any device.

        Trainer(strategy=NxDStrategy(tp=2), precision="bf16-true", gradient_clip_val=1.0).fit(module, loader)

    The job is one of torchrun or `neuronx-dist run`. The module builds its parallel
    model in `configure_model`, where the mesh exists; `configure_optimizers` returns any torch optimizer of
    `self.parameters()`. Samplers are divided over the data-parallel ranks, `self.log(sync_dist=True)`, `all_gather` and
    metrics of torchmetrics reduce over them. A checkpoint is a folder that loads into any layout.

    In a pipeline a child of the module is an `NxDPPModel`, and `training_step` returns `self.model.run_train(**batch)`,
    the loss of the global batch on every rank.

    Args:
        tp, pp, cp, ep: degrees of tensor, pipeline, context and expert parallelism; the rest of the ranks is dp.
        zero1: divide the optimizer's state over the data-parallel ranks, with fp32 masters for bf16 weights; False: the
            optimizer stays as it is, and gradients are averaged.
        device: as of `init_distributed`.
        swap: make parallel models of the Hugging Face models that are children of the module, and pipelines at
            `pp > 1`. The following are for these alone.
        sequence_parallel: divide activations between the layers over tp.
        microbatches: into which a pipeline cuts a batch.
        schedule: of `NxDPPModel`; None: 1F1B.

    Attributes:
        pipeline: the module's `NxDPPModel`; None: there is none.

    Raises:
        ValueError: an option for `swap` without it. At set-up, from `Trainer`: see the message.
    """

    optimizers: list[Any]

    def __init__(
        self,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        ep: int = 1,
        *,
        zero1: bool = True,
        device: str = "auto",
        swap: bool = False,
        sequence_parallel: bool = False,
        microbatches: int = 1,
        schedule: Any = None,
    ) -> None:
        options = {"sequence_parallel": sequence_parallel, "microbatches": microbatches, "schedule": schedule}
        unused = [name for name, value in options.items() if value not in (False, 1, None)]
        if unused and not swap:
            raise ValueError(
                f"{type(self).__name__}({unused[0]}={options[unused[0]]!r}) is for swap=True: pass it to the layers, "
                "hf.swap or NxDPPModel that configure_model builds"
            )
        super().__init__(tp, pp, cp, ep, device=device)
        self.zero1, self.swap, self.swap_options = zero1, swap, options
        self.pipeline: NxDPPModel | None = None
        self._swapped: WeakSet[nn.Module] = WeakSet()
        self._is_reduced = False  # gradients of the step
        self._has_stepped = True  # gradients are of an earlier step
        self._set_aside: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    # --- model and optimizer ---

    def setup(self, trainer: Any) -> None:
        """Prepares the module's models and its optimizer; refuses by name what would train wrongly."""
        module = self.lightning_module
        assert module is not None
        if self._layer_sync is not None:
            raise ValueError("NxDStrategy: Trainer(sync_batchnorm=True) is not supported: leave it out")
        if self.swap:
            self._swap_children(module)
        self.pipeline = self._find_pipeline(module)
        add_missing_stream()  # for dropout of shards, after `seed_everything`
        if self.tp > 1 and all(spec_of(param).axis is None for param in module.parameters()):
            raise ValueError(
                f"NxDStrategy(tp={self.tp}): no parameter of {type(module).__name__} is divided over tp: build it of "
                "parallel layers or by hf.swap in configure_model, or pass swap=True for a Hugging Face model"
            )
        for metric in module.modules():
            if isinstance(metric, Metric) and metric.process_group is None and metric.dist_sync_fn is None:
                metric.dist_sync_fn = _gather_over_data  # a module with a group in it could not be copied
        super().setup(trainer)

    def _swap_children(self, module: nn.Module) -> None:
        found = False
        for name, model in [*module.named_children()]:
            if model in self._swapped:
                found = True
            elif hasattr(model, "base_model_prefix") and hasattr(model, "config"):
                parallel: Any = swap(model, sequence_parallel=self.swap_options["sequence_parallel"])
                if self.pp > 1:
                    parallel = NxDPPModel(
                        parallel,
                        transformer_layer_cls=transformer_layer_class(parallel),
                        num_microbatches=self.swap_options["microbatches"],
                        schedule=self.swap_options["schedule"],
                        auto_partition=True,
                        output_loss_value_spec={"loss": True},
                    )
                    setattr(module, name, parallel)
                self._swapped.add(parallel)
                found = True
        if not found:
            raise ValueError(
                f"NxDStrategy(swap=True): {type(module).__name__} has no child that is a model of transformers, as "
                "self.model: leave swap out, and build parallel layers in configure_model"
            )

    def _find_pipeline(self, module: nn.Module) -> NxDPPModel | None:
        pipelines = [model for model in module.modules() if isinstance(model, NxDPPModel)]
        if len(pipelines) > 1 or (self.pp > 1 and not pipelines):
            raise ValueError(
                f"NxDStrategy(pp={self.pp}): {type(module).__name__} has {len(pipelines)} NxDPPModels: build one in "
                "configure_model, as self.model, and return self.model.run_train(**batch) from training_step"
            )
        if not pipelines:
            return None
        (pipeline,) = pipelines
        if pipeline.return_mb_loss:
            raise ValueError("NxDStrategy: NxDPPModel(return_mb_loss=True) has no loss to log: leave it out")
        inside = {*map(id, pipeline.parameters())}
        outside = [name for name, param in module.named_parameters() if id(param) not in inside]
        if outside:
            raise ValueError(
                f"NxDStrategy(pp={self.pp}): {outside[0]} of {type(module).__name__} is a parameter outside of its "
                "NxDPPModel, whose gradient no stage would get: put it into the model of the pipeline"
            )
        pipeline.broadcast_and_average_loss = True
        return pipeline

    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        for model in self.lightning_module.children():
            move_model_to_device(model, self.root_device)
        self.lightning_module.to(self.root_device)  # all else, and `self.device`

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes ZeRO-1 of the optimizer that `configure_optimizers` returns.

        Raises:
            ValueError: several optimizers, or one with state.
            TypeError: an optimizer that reduces gradients by itself.
        """
        super().setup_optimizers(trainer)
        if len(self.optimizers) > 1:
            raise ValueError(
                f"NxDStrategy: configure_optimizers returned {len(self.optimizers)} optimizers, and a checkpoint has "
                "one: return one, with a parameter group for each"
            )
        for optimizer in self.optimizers:
            if getattr(optimizer, "averages_over_data", False) or hasattr(type(optimizer), "wrapped_attribute"):
                raise TypeError(
                    f"NxDStrategy: configure_optimizers returned a {type(optimizer).__name__}: return the torch "
                    "optimizer; zero1=True makes ZeRO-1 of it, and the strategy reduces its gradients"
                )
            for group in optimizer.param_groups:
                group["params"] = [param for param in group["params"] if not param.is_meta]  # of this stage
            if self.zero1 and optimizer.param_groups:  # Lightning's, where a module has no optimizer, has none
                schedulers = [config.scheduler for config in self.lr_scheduler_configs]
                self.optimizers = [use_zero1(optimizer, schedulers)]
        self._has_stepped = True

    # --- a step ---

    @property
    def _uses_run_train(self) -> bool:
        """Whether `training_step` computes gradients, which Lightning expects of `backward`."""
        assert self.lightning_module is not None
        return self.pipeline is not None and bool(self.lightning_module.automatic_optimization)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's step; the gradients of a pipeline are kept for `backward`, after Lightning's zero_grad."""
        if self.pipeline is None:
            return super().training_step(*args, **kwargs)
        if not self._uses_run_train:
            with _apart_from_data():
                return super().training_step(*args, **kwargs)
        if self._has_stepped:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self._has_stepped = False
        with no_sync(self.pipeline), _apart_from_data():
            result = super().training_step(*args, **kwargs)
        self._set_aside = []
        for param in self.pipeline.local_parameters():
            if param.grad is not None:
                self._set_aside.append((param, param.grad))
                param.grad = None
        return result

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._set_aside is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        for param, grad in self._set_aside:
            param.grad = grad
        self._set_aside = None
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Computes gradients, reduces them over the mesh, and steps."""

        def reduced() -> Any:
            result = closure()
            self._reduce_gradients(optimizer)
            return result

        try:
            return super().optimizer_step(optimizer, reduced, model, **kwargs)
        finally:
            self._is_reduced, self._has_stepped = False, True
            if self.zero1:
                optimizer.grad_clipping = False  # unless the next step asks for it

    @property
    def _shows_means(self) -> bool:
        """Whether gradients are averaged before ZeRO-1 does so again, without effect: for hooks that see them."""
        module = self.lightning_module
        assert module is not None
        hooks = [("on_before_optimizer_step", hooked) for hooked in (module, *module.trainer.callbacks)]
        hooks += [("on_before_zero_grad", hooked) for hooked in (module, *module.trainer.callbacks)]
        hooks += [("configure_gradient_clipping", module)]
        return module.trainer.gradient_clip_algorithm == "value" or any(is_overridden(*hook) for hook in hooks)

    def _reduce_gradients(self, optimizer: Any, show_means: bool = False) -> None:
        """Reduces the gradients of a step, once; ZeRO-1's `step` averages over the data those that no hook sees."""
        if self._is_reduced:
            return
        average = not self.zero1 or (self.ep == 1 and (show_means or self._shows_means))  # it sums experts' over edp
        if self._uses_run_train:
            assert self.pipeline is not None and self.lightning_module is not None
            accumulated = self.lightning_module.trainer.accumulate_grad_batches
            if accumulated > 1:
                scale_gradients(self.pipeline, 1 / accumulated)
            reduce_gradients(self.pipeline, average_over_data=average)
        else:
            complete_reduction(parameters_of(optimizer), average_over_data=average)
        self._is_reduced = True

    def clip_gradients(self, optimizer: Any, clip_val: Any = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Clips by the norm of the whole model's gradients, or by value.

        Raises:
            ValueError: by value under ZeRO-1 at ep > 1, where gradients are averaged later.
        """
        if not clip_val or clip_val <= 0:
            return
        if isinstance(optimizer, LightningOptimizer):  # of manual optimization
            optimizer = optimizer.optimizer
        if gradient_clip_algorithm == "norm" and self.zero1:
            optimizer.grad_clipping, optimizer.max_norm = True, float(clip_val)  # of the step that follows
            return
        if self.zero1 and self.ep > 1:
            raise ValueError(
                f"Trainer(gradient_clip_val={clip_val}, gradient_clip_algorithm='value'): under ZeRO-1 at ep={self.ep} "
                "gradients are averaged in the step, after clipping: pass NxDStrategy(zero1=False), or clip by norm"
            )
        self._reduce_gradients(optimizer, show_means=True)  # manual optimization clips before the step
        if gradient_clip_algorithm == "norm":
            clip_grad_norm(parameters_of(optimizer), float(clip_val))
        else:
            nn.utils.clip_grad_value_(parameters_of(optimizer), float(clip_val))

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin or Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None:
            scaled = isinstance(plugin, MixedPrecision) and plugin.scaler is not None
            if scaled or type(plugin) not in (Precision, DoublePrecision, HalfPrecision, MixedPrecision):
                raise TypeError(
                    f"NxDStrategy: Trainer(precision={plugin.precision!r}) ({type(plugin).__name__}) is not supported: "
                    "use '32-true', 'bf16-true' (ZeRO-1 has fp32 masters), 'bf16-mixed' or '64-true'"
                )
            plugin.clip_gradients = self.clip_gradients  # of this object alone
        self._precision_plugin = plugin

    # --- checkpoints ---

    @property
    def checkpoint_io(self) -> CheckpointIO:
        return super().checkpoint_io  # removes checkpoints

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        if io is not None:
            raise TypeError(
                f"NxDStrategy: the plugin {type(io).__name__} is not supported: checkpoints are written by "
                "neuronx_dist.save_checkpoint"
            )
        self._checkpoint_io = None

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # into the parallel model, and ZeRO-1's shards

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # `save_checkpoint` saves the model

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Does nothing: `load_checkpoint` has loaded the model."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Does nothing: `load_checkpoint` has loaded the optimizer."""

    @property
    def saved_model(self) -> nn.Module:
        """The model whose weights a checkpoint has: the child with all of the module's state, or the module.

        So names are equal with and without a pipeline, and those of Hugging Face.
        """
        module = self.lightning_module
        assert module is not None
        if self.pipeline is not None:
            return self.pipeline
        names = {name.partition(".")[0] for name in module.state_dict()}
        only = getattr(module, next(iter(names))) if len(names) == 1 else None
        return only if isinstance(only, nn.Module) else module

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves model, optimizer, Lightning's state and random states as a folder; all ranks call it.

        Raises:
            TypeError: `storage_options` are passed.
            ValueError: a hook puts weights into the checkpoint.
        """
        if storage_options is not None:
            raise TypeError("NxDStrategy has no storage_options: Trainer.save_checkpoint takes a folder of all ranks")
        path = _visible(self.broadcast(os.fspath(filepath)))
        if checkpoint.get("state_dict"):
            raise ValueError(
                f"NxDStrategy: on_save_checkpoint of a callback (WeightAveraging?) or of the module puts "
                f"{len(checkpoint['state_dict'])} weights into checkpoint['state_dict'], which are this rank's, while "
                "the strategy saves the model's: leave the hook out, or train without checkpoints"
            )
        content = plain_hyperparameters(checkpoint)
        states = content.pop("optimizer_states", None)
        optimizer = self.optimizers[0] if states else None
        save_checkpoint(path.parent, path.name, self.saved_model, optimizer, user_content=content)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(_visible(filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads model and, to go on with `fit`, optimizer and random states; returns Lightning's state.

        Raises:
            ValueError: the checkpoint is another's.
        """
        path = _visible(self.broadcast(os.fspath(checkpoint_path)))
        if path.is_file():
            raise ValueError(
                f"NxDStrategy: {path} is a file of Lightning's, with the weights of one process: load them in "
                "configure_model (module.load_state_dict, or hf.load_pretrained for a swapped model)"
            )
        assert self.lightning_module is not None
        is_fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        optimizer = self.optimizers[0] if is_fitting and self.optimizers else None
        content = load_checkpoint(path.parent, path.name, self.saved_model, optimizer)
        if not isinstance(content, dict) or "pytorch-lightning_version" not in content:
            raise ValueError(
                f"NxDStrategy: {path} was not saved by Trainer: load it by neuronx_dist.load_checkpoint in "
                "configure_model"
            )
        return content


def _gather_over_data(result: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Returns a metric's state on the data-parallel ranks, of any shapes; this rank's has its history.

    torchmetrics' own function calls a barrier and sizes that not every backend has.
    """
    axis = "dp" if group is None else group
    shapes = comm.gather_objects(tuple(result.shape), axis)
    flat = result.detach().flatten()
    longest = max(map(math.prod, shapes))
    rows = comm.all_gather(pad(flat, (0, longest - len(flat)))[None], axis)
    parts = [row[: math.prod(shape)].reshape(shape) for row, shape in zip(rows, shapes)]
    parts[comm.rank(axis)] = result
    return parts


@contextmanager
def _apart_from_data() -> Iterator[None]:
    """Gives a pipeline's step random numbers of its own: stages draw more or fewer, and are to read equal data."""
    seed = int(torch.empty((), dtype=torch.int64).random_())
    after = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(after)


def _visible(path: Any) -> Path:
    """Returns the path of a checkpoint's folder; Lightning's tuners begin names with a dot, as no tag does."""
    path = Path(path)
    return path.with_name(f"hidden{path.name}") if path.name.startswith(".") else path
