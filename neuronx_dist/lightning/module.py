"""Lightning's module: a model, its optimizer and its training step, by a configuration of NxD's trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from .. import comm
from ..gradients.accumulation import scale_gradients
from ..trainer import initialize_parallel_model, initialize_parallel_optimizer
from ..trainer.model import loss_of
from .logger import NeuronTensorBoardLogger

__all__ = ["NeuronLTModule"]

_WITHOUT_DECAY = ("bias", "norm")


class NeuronLTModule(LightningModule):
    """A model made by `initialize_parallel_model`, and its training under `Trainer`.

    Subclasses may replace each method; NxD's examples replace `setup`, `training_step` and `configure_optimizers`,
    and log in `on_train_batch_end`. The training step here passes a batch, a dict, to the model by name, and steps
    after every `grad_accum_steps` batches, and after the epoch's last batch, with the mean of their gradients.

    Args:
        nxd_config: of `neuronx_distributed_config`.
        opt_cls: a torch optimizer; it is called with `opt_args` and `opt_kwargs` behind the parameters.
        scheduler_cls: returns a scheduler: `scheduler_cls(optimizer, *scheduler_args, **scheduler_kwargs)`; None: none.
        model_fn: builds the model: `model_fn(*model_args, **model_kwargs)`.
        train_batch_size, logging_interval: as NxD has them, for subclasses.
        log_rank0: rank 0 reports, in place of the first rank of the last pipeline stage.
        manual_opt: False: Lightning computes gradients and steps by itself (`Trainer(accumulate_grad_batches=)`); not
            in a pipeline.

    Attributes:
        model: the `NxDModel`, once `setup` has run.
        loss, lr, global_norm: of the last step; the loss is the mean over the data, on every rank.
        should_print: whether the last batch ended a step.

    Raises:
        ValueError: `manual_opt=False` in a pipeline, whose `run_train` computes the gradients, or with
            `grad_accum_steps`; fewer than 1 `grad_accum_steps`.
        RuntimeError: a checkpoint is saved inside of an accumulation, whose gradients it would not have.
    """

    wrapped_attribute = "model"

    def __init__(
        self,
        nxd_config: Mapping[str, Any],
        opt_cls: Callable[..., torch.optim.Optimizer],
        scheduler_cls: Callable[..., Any] | None,
        model_args: tuple[Any, ...] = (),
        model_kwargs: Mapping[str, Any] = {},
        opt_args: tuple[Any, ...] = (),
        opt_kwargs: Mapping[str, Any] = {},
        scheduler_args: tuple[Any, ...] = (),
        scheduler_kwargs: Mapping[str, Any] = {},
        model_fn: Callable[..., nn.Module] | None = None,
        grad_accum_steps: int = 1,
        train_batch_size: int = 16,
        logging_interval: int = 1,
        log_rank0: bool = False,
        manual_opt: bool = True,
    ) -> None:
        super().__init__()
        if not manual_opt and nxd_config["pipeline_parallel_size"] > 1:
            raise ValueError(
                "manual_opt=False in a pipeline: its run_train computes the gradients; use manual_opt=True"
            )
        if grad_accum_steps < 1:
            raise ValueError(f"grad_accum_steps must be at least 1, got {grad_accum_steps}")
        if not manual_opt and grad_accum_steps > 1:
            raise ValueError(
                f"manual_opt=False with grad_accum_steps={grad_accum_steps}: Lightning accumulates then; use "
                f"Trainer(accumulate_grad_batches={grad_accum_steps})"
            )
        self.nxd_config = nxd_config
        self.opt_cls, self.opt_args, self.opt_kwargs = opt_cls, opt_args, opt_kwargs
        self.scheduler_cls, self.scheduler_args, self.scheduler_kwargs = scheduler_cls, scheduler_args, scheduler_kwargs
        self.model_fn, self.model_args, self.model_kwargs = model_fn, model_args, model_kwargs
        self.grad_accum_steps = grad_accum_steps
        self.train_batch_size = train_batch_size
        self.logging_interval = logging_interval
        self.log_rank0 = log_rank0
        self.automatic_optimization = not manual_opt
        self.model: Any = None
        self.loss: Any = None
        self.lr: Any = None
        self.input_ids: Any = None
        self.global_norm: Any = None
        self.should_print = False
        self._batches = 0  # since the last step

    def setup(self, stage: str | None = None, include_buffers: bool = False) -> None:
        """Builds the model, once; Lightning calls it before each of fit, validate, test and predict.

        Raises:
            ValueError: there is no `model_fn`.
        """
        if self.model is None:
            if self.model_fn is None:
                raise ValueError("NeuronLTModule needs model_fn, which returns a model with parallel layers")
            self.model = initialize_parallel_model(
                self.nxd_config, self.model_fn, include_buffers, *self.model_args, **self.model_kwargs
            )
        self.averaged_loss = torch.zeros(1, dtype=torch.double, device=comm.current().backend.device)
        self.print_pp_rank = 0 if self.log_rank0 else comm.size("pp") - 1

    @property
    def device(self) -> torch.device:
        """The device of this rank, where `initialize_parallel_model` puts the model."""
        return comm.current().backend.device if comm.is_initialized() else super().device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def configure_optimizers(self) -> Any:
        def build(groups: Any, **defaults: Any) -> torch.optim.Optimizer:
            return self.opt_cls(groups, *self.opt_args, **defaults)

        optimizer = initialize_parallel_optimizer(
            self.nxd_config,
            build if self.opt_args else self.opt_cls,
            self.get_param_groups_by_weight_decay(),
            **self.opt_kwargs,
        )
        if self.scheduler_cls is None:
            return [optimizer]
        scheduler = self.scheduler_cls(optimizer, *self.scheduler_args, **self.scheduler_kwargs)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def get_param_groups_by_weight_decay(self) -> list[dict[str, Any]]:
        """Returns two groups: with a weight decay of 0.01, and, for biases and norms, without."""
        groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay} for decay in (0.01, 0.0)]
        for name, param in self.model.named_parameters():
            groups[any(part in name for part in _WITHOUT_DECAY)]["params"].append(param)
        return groups

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Any:
        """Returns the loss of a batch, None on all stages of a pipeline but the one where the model ends."""
        self.should_print = False
        if self.automatic_optimization:
            loss = loss_of(self.model(**batch))
            self.log("loss", self._mean_over_data(loss), prog_bar=True)
            return loss
        if not self.model.pp_enabled:
            loss = loss_of(self.model(**batch))
            (loss / self.grad_accum_steps).backward()
            loss = loss.detach()
        else:
            loss = self.model.run_train(**batch)
        if loss is not None:
            self.averaged_loss += loss
        self._batches += 1
        if self._batches == self.grad_accum_steps or self.trainer.is_last_batch:
            self._step()
        self._report()
        return loss

    def _step(self) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        self.loss, self.should_print = self._mean_over_data(self.averaged_loss / self._batches), True
        divisor = 1 if self.model.pp_enabled else self.grad_accum_steps  # of the losses
        if divisor != self._batches:
            scale_gradients(self.model.module, divisor / self._batches)
        self.averaged_loss.zero_()
        self._batches = 0
        self.lr = optimizer.param_groups[0]["lr"]
        optimizer.step()
        self.global_norm = optimizer.grad_norm
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()

    def on_train_start(self) -> None:
        """Drops what an earlier `fit` has accumulated that was stopped inside of a step."""
        if self._batches:
            self._batches = 0
            for optimizer in self.trainer.optimizers:
                optimizer.zero_grad()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._batches:
            raise RuntimeError(
                f"NeuronLTModule: a checkpoint after batch {self._batches} of grad_accum_steps={self.grad_accum_steps} "
                "would lack their gradients: save at the end of a step or of an epoch, as "
                "ModelCheckpoint(every_n_train_steps=), or validate there (val_check_interval)"
            )

    def _mean_over_data(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the mean over the data of the losses where the model ends; zeros on other stages add nothing."""
        total = self.trainer.strategy.reduce(loss.detach().sum(), reduce_op="sum")
        return total / (comm.size("tp") * comm.size(("dp", "cp")))

    def _report(self) -> None:
        """Logs loss, learning rate, norm and step of a batch that ended a step, where callbacks see them."""
        for logger in self.trainer.loggers:
            if isinstance(logger, NeuronTensorBoardLogger):
                logger.print_step = self.global_step if self.should_print else -1
        if self.should_print:
            values = {"loss": self.loss, "lr": self.lr, "global_norm": self.global_norm}
            for name, value in values.items():
                if value is not None:
                    self.log(name, value, prog_bar=True)
            self.log("global_step", float(self.global_step), prog_bar=True)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the model's parameters; in a pipeline, of this stage."""
        if self.model is None:
            return super().named_parameters(*args, **kwargs)
        return self.model.named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        return self.model.load_state_dict(state_dict, strict=strict, assign=assign)
