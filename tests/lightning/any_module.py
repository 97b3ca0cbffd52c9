"""A user's `LightningModule` and script: on ranks with `NxDStrategy`, and by Lightning alone in one process."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler, WeightedRandomSampler, default_collate
from torchmetrics import SumMetric
from transformers import MixtralConfig, MixtralForCausalLM

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.lightning import NxDStrategy
from neuronx_dist.spmd import spec_of
from neuronx_dist.weights.shard_spec import gather_full
from tests.hf.models import SIZES, VOCAB, llama_config, reference_loss, reference_model

ROWS, SEQ, STEPS, ACCUMULATED, MICROBATCHES = 32, 8, 4, 2, 2


def rows(seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Rows with unequal numbers of labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (ROWS, SEQ), generator=generator)
    labels = ids.clone()
    for row in range(ROWS):
        labels[row, : row % 7] = -100
    return [{"input_ids": ids[row], "labels": labels[row]} for row in range(ROWS)]


def scheduler_of(optimizer: Any) -> Any:
    schedulers = torch.optim.lr_scheduler
    warmup, rest = schedulers.LinearLR(optimizer, 0.5, 1.0, 2), schedulers.ExponentialLR(optimizer, 0.9)
    return schedulers.SequentialLR(optimizer, [warmup, rest], [2])


class Llama(LightningModule):  # type: ignore[misc]
    """Fine-tunes a Llama, with tensor-parallel layers and in stages where there is a mesh."""

    def __init__(self, optimizer: Any = torch.optim.AdamW, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["optimizer"])
        self.optimizer_class = optimizer
        self.model: Any = None
        self.rows = SumMetric()

    def build(self) -> Any:
        return reference_model(llama_config())

    def configure_model(self) -> None:
        if self.model is not None:
            return
        self.model = self.build()
        if not comm.is_initialized():
            return
        nxd.hf.swap(self.model)
        if comm.size("pp") > 1:
            self.model = nxd.NxDPPModel(
                self.model,
                transformer_layer_cls=nxd.hf.transformer_layer_class(self.model),
                num_microbatches=MICROBATCHES,
                auto_partition=True,
                output_loss_value_spec={"loss": True},
            )

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        if not comm.is_initialized():
            return reference_loss(self.model(input_ids=batch["input_ids"]).logits, batch["labels"])
        batch = nxd.get_batch_on_this_context_parallel_rank(batch)
        if comm.size("pp") == 1:
            items = nxd.global_num_items(batch["labels"])
            return self.model(**batch, num_items_in_batch=items).loss
        batch["num_items_in_batch"] = nxd.global_num_items(batch["labels"], MICROBATCHES)
        return self.model.run_train(**batch) if self.training else self.model.run_eval(**batch)

    def training_step(self, batch: dict[str, Any], _: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Any], _: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)
        self.rows(len(batch["labels"]))
        self.log("val_rows", self.rows)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer_class(self.parameters(), lr=self.hparams["lr"])
        return [optimizer], [{"scheduler": scheduler_of(optimizer), "interval": "step"}]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Whole(Llama):
    """Has the Hugging Face model from the beginning, which `swap=True` makes parallel."""

    def __init__(self, optimizer: Any = torch.optim.AdamW, lr: float = 0.01) -> None:
        super().__init__(optimizer, lr)
        with default_dtype(torch.float64):  # as in `configure_model`
            self.model = reference_model(llama_config())

    def predict_step(self, batch: dict[str, Any], _: int) -> Any:
        return self.model(input_ids=batch["input_ids"]).logits.argmax(-1)


class Experts(Llama):
    """Has a Mixtral."""

    def build(self) -> Any:
        config = MixtralConfig(**SIZES, num_hidden_layers=1)
        config._experts_implementation = "eager"
        return reference_model(config, MixtralForCausalLM)


class Manual(Llama):
    """Steps by itself, and clips."""

    def __init__(self, optimizer: Any = torch.optim.SGD, lr: float = 0.5) -> None:
        super().__init__(optimizer, lr)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Any], _: int) -> None:
        optimizer, loss = self.optimizers(), self.loss(batch)
        if loss.requires_grad:  # that of a pipeline has done its backward
            self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        optimizer.step()
        optimizer.zero_grad()
        self.lr_schedulers().step()
        self.log("loss", loss, sync_dist=True)


class Watched(Llama):
    """Looks at averaged gradients, gathered values and copies, as callbacks do."""

    def __init__(self, optimizer: Any = torch.optim.SGD, lr: float = 0.5) -> None:
        super().__init__(optimizer, lr)
        self.seen: list[float] = []

    def on_before_optimizer_step(self, _: Any) -> None:
        self.seen.append(float(self.model.model.norm.weight.grad.norm()))

    def on_validation_epoch_end(self) -> None:
        copied = copy.deepcopy(self)  # as of callbacks that average weights
        ranks = comm.size("dp") if comm.is_initialized() else 1
        self.seen.append(float(copied.rows.compute()) * self.all_gather(torch.zeros(())).numel() / ranks)


class Random(Llama):
    """Draws rows, masks of labels, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def configure_model(self) -> None:
        self.model = nxd.hf.swap(reference_model(llama_config(layers=3, attention_dropout=0.5)))
        if comm.size("pp") > 1:
            layer = nxd.hf.transformer_layer_class(self.model)
            spec = {"loss": True}
            self.model = nxd.NxDPPModel(self.model, layer, 2, auto_partition=True, output_loss_value_spec=spec)

    def training_step(self, batch: dict[str, Any], _: int) -> Any:
        self.seen += [int(batch[name].sum()) for name in ("input_ids", "labels")]
        return self.loss(batch)


def masked(samples: list[Any]) -> dict[str, torch.Tensor]:
    batch: dict[str, torch.Tensor] = default_collate(samples)
    batch["labels"][torch.rand(batch["labels"].shape) < 0.3] = -100
    return batch


class Recorder(Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def fit(
    folder: str,
    options: dict[str, Any] | None = None,
    optimizer: Any = torch.optim.AdamW,
    *,
    resumed: str | None = None,
    clip: Any = 0.5,
    module_class: Any = None,
    **trainer_options: Any,
) -> dict[str, Any]:
    """Trains with the strategy of `options`, or without one; returns what was logged, and whole weights.

    Args:
        resumed: path of a checkpoint.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    recorder = Recorder()
    saving = ModelCheckpoint(dirpath=folder, monitor="val_loss", save_last=True, filename="{step}")
    parallel: dict[str, Any] = {"accelerator": "cpu"} if options is None else {"strategy": NxDStrategy(**options)}
    trainer = Trainer(
        **parallel,
        **{
            "precision": "64-true",
            "max_steps": STEPS,
            "gradient_clip_val": clip,
            "accumulate_grad_batches": ACCUMULATED,
            "val_check_interval": 4,
            "callbacks": [recorder, saving],
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": folder,
            **trainer_options,
        },
    )
    data, dp = rows(), comm.size("dp") if options is not None else 1
    sampler: Any = DistributedSampler(data, 1, 0) if options is None else None  # else Lightning makes it
    loader = DataLoader(data, batch_size=4 // dp, sampler=sampler)
    held_out = DataLoader(rows(1)[: ROWS // 4], batch_size=4 // dp)  # type: ignore[arg-type]
    module_class = module_class or (Whole if options and options.get("swap") else Llama)
    module = module_class(optimizer, 0.5 if optimizer is torch.optim.SGD else 0.01)
    trainer.fit(module, loader, held_out, ckpt_path=resumed)
    (tested,) = trainer.test(module, held_out, verbose=False)
    part = getattr(module.model, "local_named_parameters", module.model.named_parameters)()
    return {
        "losses": recorder.losses,
        "rates": recorder.rates,
        "validated": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "tested": tested,
        "weights": {name: gather_full(param.detach(), spec_of(param)).clone() for name, param in part},
        "best": Path(saving.best_model_path).name,
        "last": saving.last_model_path,
    }


def watched(folder: str, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the results of `fit` with gradients clipped by value, and what the hooks saw."""
    module = Watched()
    result = fit(
        folder,
        options,
        torch.optim.SGD,
        module_class=lambda *_: module,
        clip=0.01,
        gradient_clip_algorithm="value",
        num_sanity_val_steps=0,
    )
    hidden = Path(folder, ".lr_find.ckpt")  # a name of Lightning's tuners
    module.trainer.save_checkpoint(hidden)
    module.trainer.strategy.load_checkpoint(hidden)
    module.trainer.strategy.remove_checkpoint(hidden)
    return {**result, "seen": module.seen}


def random_data(folder: str, options: dict[str, Any]) -> list[int]:
    """Returns sums of the batches that this rank trained on."""
    seed_everything(0, verbose=False)
    sampler = WeightedRandomSampler(torch.arange(ROWS) + 1.0, 8)
    module = Random()
    trainer = Trainer(
        strategy=NxDStrategy(**options),
        precision="64-true",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    try:
        trainer.fit(module, DataLoader(rows(), batch_size=4, sampler=sampler, collate_fn=masked))
    finally:
        os.environ.pop("PL_GLOBAL_SEED", None)
        os.environ.pop("PL_SEED_WORKERS", None)
    return module.seen


def in_bf16(folder: str) -> tuple[list[float], list[Any], list[torch.Tensor]]:
    """Returns losses, dtypes of weights, masters and states, and predictions in float64, at tp 2 on swapped models."""
    module = Whole()
    result = fit(folder, {"tp": 2, "swap": True}, module_class=lambda *_: module, precision="bf16-true", max_steps=2)
    optimizer = module.trainer.optimizers[0]
    dtypes = [next(module.model.parameters()).dtype, optimizer.shards[0].master.dtype]
    dtypes += [optimizer.base_optimizer.state[optimizer.shards[0].master]["exp_avg"].dtype]
    trainer = Trainer(
        strategy=NxDStrategy(tp=2, swap=True), precision="64-true", logger=False, enable_progress_bar=False
    )
    return result["losses"], dtypes, trainer.predict(Whole(), DataLoader(rows(1), batch_size=8))
