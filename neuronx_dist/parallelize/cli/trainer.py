"""`Trainer`: trains, validates, saves and resumes a parallel model, as a configuration says.

    Trainer(["-f", "config.yaml", "--max_epochs", "4"]).run()      # or Trainer(train_args=TrainerArgs(...))

A step has `update_freq` microbatches on each unit; where an epoch ends within a step, dummy batches fill it.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ... import comm
from ...checkpoint.random_state import capture, restore
from ...parallel_layers.parallel_state import process_group
from ..train.parallel_module import ParallelModule
from . import checkpoints
from .arg_parser import load_type
from .component_args import AggregatedOutputs
from .mixed_module import MixedModule, fixed, parallel_model
from .train_hook import EVENTS, AggregatedTrainHook, TrainHook, hook_of
from .trainer_args import TrainerArgs

__all__ = ["TrainStatus", "Trainer"]

logger = logging.getLogger(__name__)
_STAGES = ("train", "val", "test")
_NO_BATCH = "the data set of training has no batch: it needs micro_batch_size rows for each unit"


@dataclass
class TrainStatus:
    """Progress of a run: the steps after which weights were updated, and the lowest loss of a checkpoint."""

    finished_train_steps: int = 0
    best_loss: float = float("inf")


class Trainer:
    """Trains a model by a configuration.

    Args:
        argv: `-f config.yaml --name value ...`; None: the arguments of the script.
        train_args: the configuration, or a dict of it, in place of `argv`.

    Attributes:
        model, optimizer, lr_scheduler, loggers, hook: the components, once `run` has begun.
        dataset, dataloader: by "train", "val" and "test".
        rank, world_size, sync_group: this rank, the ranks of the job, and the process group of the units.
        train_status, total_train_steps_per_epoch, max_train_steps: progress.
    """

    def __init__(self, argv: Sequence[Any] | None = None, *, train_args: TrainerArgs | dict[str, Any] | None = None):
        if None not in (argv, train_args):
            raise ValueError("Trainer takes argv or train_args, not both")
        if train_args is None:
            train_args = TrainerArgs.from_cli(sys.argv[1:] if argv is None else argv)
        self.train_args = train_args if isinstance(train_args, TrainerArgs) else TrainerArgs.from_dict(train_args)
        self.rank, self.local_rank, self.world_size = 0, int(os.environ.get("LOCAL_RANK", 0)), 1
        self.model: Any = None
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self.hook: Any = None
        self.sync_group: Any = None
        self.dummy_input: Any = None
        self.loggers: list[Any] = []
        self.dataset: dict[str, Any] = dict.fromkeys(_STAGES)
        self.dataloader: dict[str, Any] = dict.fromkeys(_STAGES)
        self.dataloader_resumed = False
        self.train_status = TrainStatus()
        self.total_train_steps_per_epoch = self.max_train_steps = 0
        self._epoch_began: dict[str, Any] | None = None  # random states of this rank
        self._random_states: dict[str, Any] | None = None  # those of a checkpoint, until training goes on
        self._steps: Any = None

    def run(self) -> None:
        """Trains, or, in run mode "compile", writes the files of `parallelize`."""
        try:
            self._setup()
            if not self.train_args.compile_mode:
                self._train()
        finally:
            for stage in _STAGES:
                _close(self.dataloader[stage])
                self.dataset[stage] = self.dataloader[stage] = None
            if self.hook is not None:
                self.hook.on_finalize(self)

    @classmethod
    def merge_checkpoint(cls, checkpoint_files: Sequence[Path | str], output_file: Path | str) -> None:
        """Merges the files of all ranks of a checkpoint into one file, which any layout resumes from."""
        torch.save(checkpoints.merged(checkpoint_files), output_file)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None, *, tag: str | None = None) -> None:
        """Passes figures to all loggers; None: of the last finished step."""
        for target in self.loggers:
            target.log_metrics(metrics, step or self.train_status.finished_train_steps, tag=tag)

    # --- setup

    def _setup(self) -> None:
        args = self.train_args
        if not comm.is_initialized() and not args.compile_mode:
            comm.launch.init_distributed()
        args.init_env(self)
        self.dummy_input = fixed(self._first_sample(), args.input_dtype, None)
        self.model = parallel_model(args, self.dummy_input, load_module=not args.compile_mode)
        if args.compile_mode:
            return
        self.model.to(comm.current().backend.device)
        self.dummy_input = self._on_device(self.dummy_input)
        self.rank, self.world_size = int(comm.current().rank), comm.current().mesh.world_size
        self.sync_group = process_group(comm.communicator("dp"))
        self._steps = self.model if isinstance(self.model, ParallelModule) else MixedModule(self.model)
        for stage in _STAGES:
            self.dataset[stage] = args.create_dataset(stage)
            if self.dataset[stage] is not None:
                self.dataloader[stage] = args.create_dataloader(stage, self.dataset[stage])
        if not hasattr(self.dataloader["train"], "__len__"):
            raise ValueError("the data loader of training has no __len__, so that an epoch has no number of steps")
        if not len(self.dataloader["train"]):
            raise ValueError(_NO_BATCH)
        self.total_train_steps_per_epoch = -(-len(self.dataloader["train"]) // args.update_freq)
        epochs = args.max_epochs and args.max_epochs * self.total_train_steps_per_epoch
        self.max_train_steps = min(filter(None, (epochs, args.max_train_steps)))
        self.optimizer = args.create_parallel_optimizer(self.model)
        self.lr_scheduler = args.create_lr_scheduler(self.optimizer)
        self.loggers = args.create_loggers()
        model: Any = self.model
        if issubclass(args.model_type, TrainHook) and isinstance(model, ParallelModule):  # of no subclass of it
            model = hook_of({event: partial(getattr(args.model_type, event), model) for event in EVENTS})
        optimizer = getattr(self.optimizer, "base_optimizer", self.optimizer)  # under ZeRO that of the shards
        components = [x for x in (model, optimizer, self.lr_scheduler) if isinstance(x, TrainHook)]
        self.hook = AggregatedTrainHook([*components, args.create_hook()])
        for target in self.loggers:
            target.setup(args.to_dict())
        self._resume()
        self.hook.after_setup(self)

    def _first_sample(self) -> Any:
        if self.train_args.dummy_sample_gen_fn:
            return load_type(self.train_args.dummy_sample_gen_fn)(self.train_args)
        no_workers = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
        given = self.train_args.dataloader.train_args
        loader = self.train_args.create_dataloader("train", **{k: v for k, v in no_workers.items() if k in given})
        sample = next(iter(loader), None)
        _close(loader)
        if sample is None:
            raise ValueError(_NO_BATCH)
        return sample

    def _on_device(self, sample: Any) -> Any:
        return fixed(sample, self.train_args.input_dtype, comm.current().backend.device)

    # --- training

    def _train(self) -> None:
        status, loader = self.train_status, self.dataloader["train"]
        if status.finished_train_steps >= self.max_train_steps:
            logger.info("training is done already: %d steps", status.finished_train_steps)
            return
        for_epoch: Any = loader if hasattr(loader, "set_epoch") else getattr(loader, "sampler", None)
        self.hook.on_train_start(self)
        while status.finished_train_steps < self.max_train_steps:
            epoch = status.finished_train_steps // self.total_train_steps_per_epoch
            if hasattr(for_epoch, "set_epoch"):
                for_epoch.set_epoch(epoch)
            self.hook.on_epoch_start(self, epoch)
            self._train_epoch(epoch)
            self.hook.on_epoch_end(self, epoch)
        for target in self.loggers:
            target.finalize()
        self.hook.on_train_end(self)

    def _train_epoch(self, epoch: int) -> None:
        args, status = self.train_args, self.train_status
        first = status.finished_train_steps % self.total_train_steps_per_epoch
        bar = _Progress(self, f"epoch {epoch}", first)
        for idx, batches in enumerate(self._batches("train", first), first):
            loss = self._train_one(epoch, idx, batches, bar)
            is_end = status.finished_train_steps == self.max_train_steps
            is_validated = self._is_due(args.val_every_n_train_steps, args.val_every_n_epochs)
            if is_validated:
                loss = self._validate(loss)
            if is_end or self._is_due(args.checkpoint.every_n_train_steps, args.checkpoint.every_n_epochs):
                self._save(loss if is_validated else self._validate(loss))
            if is_end:
                break
        _close(bar._bar)

    def _is_due(self, every_steps: int | None, every_epochs: int | None) -> bool:
        done = self.train_status.finished_train_steps
        epochs, steps = divmod(done, self.total_train_steps_per_epoch)
        ends_epoch = not steps and every_epochs and not epochs % every_epochs
        return bool(ends_epoch or (every_steps and not done % every_steps))

    def _batches(self, stage: str, skipped: int = 0) -> Iterator[list[Any]]:
        """Yields the microbatches of each step; those of the first `skipped` steps are drawn, and not yielded."""
        per_step, states = self.train_args.update_freq, None
        if stage == "train":
            states, self._random_states = self._random_states, None
            if states is not None:  # making an iterator draws numbers: of the order of the rows, of the workers' seeds
                restore(states["epoch"] if skipped else states["now"])
            self._epoch_began = capture()
        iterator = iter(self.dataloader[stage])
        for _ in range(0 if self.dataloader_resumed else skipped * per_step):
            next(iterator)
        if states is not None and skipped:
            restore(states["now"])
        while batches := [self._on_device(sample) for sample in islice(iterator, per_step)]:
            yield batches

    def _filled(self, batches: list[Any]) -> list[Any]:
        return batches + [self.dummy_input] * (self.train_args.update_freq - len(batches))

    def _aggregated(self, outputs: list[Any]) -> AggregatedOutputs:
        aggregate = self.train_args.resolved_aggregate_outputs_fn or AggregatedOutputs.aggregate
        result = aggregate(outputs, self.sync_group)
        if not isinstance(result, AggregatedOutputs):
            raise TypeError(f"aggregate_outputs_fn must return AggregatedOutputs, got {type(result).__name__}")
        return result

    def _train_one(self, epoch: int, idx: int, batches: list[Any], bar: _Progress) -> float:
        """Makes one step, and returns its loss."""
        args, hook, optimizer = self.train_args, self.hook, self.optimizer
        hook.on_step_start(self, epoch, idx)
        begin = time.perf_counter()
        samples = self._filled(batches)
        self.model.train()
        hook.before_zero_grad(self)
        optimizer.zero_grad()
        hook.after_zero_grad(self)
        hook.on_train_step_start(self, batches)
        outputs = self._steps.train_step(samples, [n >= len(batches) for n in range(len(samples))])[: len(batches)]
        hook.on_train_step_end(self, outputs)
        aggregated = self._aggregated(outputs)
        loss = _reduced(aggregated.loss_sum, args.optimizer.loss_reduction, aggregated)
        hook.after_aggregate_train_step_outputs(self, aggregated, loss)
        hook.before_sync_grad(self)
        optimizer.sync_shard_grad()
        hook.after_sync_grad(self)
        if args.optimizer.grad_reduction != "sum":
            optimizer.scale_grads(_reduced(1.0, args.optimizer.grad_reduction, aggregated))
        hook.before_gnorm_clip(self)
        gnorm = optimizer.clip_gnorm(args.optimizer.clip_gnorm or None)
        hook.after_gnorm_clip(self, gnorm)
        metrics = {"train_loss": loss, "loss": loss, "gnorm": float(gnorm), "lr": optimizer.param_groups[0]["lr"]}
        hook.before_optimizer_step(self)
        optimizer.step()
        hook.after_optimizer_step(self)
        ends_epoch = idx + 1 == self.total_train_steps_per_epoch
        if args.lr_scheduler and (args.lr_scheduler.interval == "step" or ends_epoch):
            self.lr_scheduler.step()  # before the checkpoint, which goes on with the next step's rate
        self.train_status.finished_train_steps += 1
        metrics["train_wall"] = time.perf_counter() - begin
        hook.before_log_train_metrics(self, metrics, aggregated)
        self.log_metrics(metrics, tag="train")
        bar.show(metrics)
        hook.on_step_end(self, epoch, idx, metrics, aggregated)
        return loss

    def _validate(self, train_loss: float) -> float:
        """Returns the mean loss over the batches of validation; without a data set, the loss of training."""
        if self.dataloader["val"] is None:
            return train_loss
        hook, limit = self.hook, self.train_args.max_val_steps
        hook.on_val_start(self)
        begin, total, count = time.perf_counter(), 0.0, 0
        states = capture()  # which training goes on with, so that it does not depend on when validation runs
        self.model.eval()
        for idx, batches in enumerate(self._batches("val")):
            if limit and idx >= limit:
                break
            with torch.inference_mode():
                hook.on_val_step_start(self, batches)
                outputs = self._steps.infer_step(self._filled(batches))[: len(batches)]
                hook.on_val_step_end(self, outputs)
            aggregated = self._aggregated(outputs)
            hook.after_aggregate_val_step_outputs(self, aggregated, _reduced(aggregated.loss_sum, "mean", aggregated))
            total, count = total + (aggregated.loss_sum or 0.0), count + (aggregated.num_batches or 0)
        if not count:
            raise ValueError("the data set of validation has no batch: leave out its arguments, or drop_last")
        restore(states)
        loss = total / count
        hook.on_val_end(self, loss)
        metrics = {"val_loss": loss, "val_wall": time.perf_counter() - begin}
        hook.before_log_val_metrics(self, metrics)
        self.log_metrics(metrics, tag="val")
        return loss

    # --- checkpoints

    def _save(self, loss: float) -> None:
        config, status = self.train_args.checkpoint, self.train_status
        if config.no_save:
            return
        is_best = loss <= status.best_loss
        status.best_loss = min(loss, status.best_loss)
        content = {
            **checkpoints.states_of(config, self.model, self.optimizer),
            "lr_scheduler": self.lr_scheduler and self.lr_scheduler.state_dict(),
            "train_status": asdict(status),
            "train_args": self.train_args.to_dict(),
            "rng_states": {"epoch": self._epoch_began, "now": capture()},
            "rank": self.rank,
        }
        if self._keeps_position:
            content["dataloader"] = self.dataloader["train"].state_dict()
        self.hook.on_save_checkpoint(self, content)
        epoch = (status.finished_train_steps - 1) // self.total_train_steps_per_epoch
        checkpoints.save(content, config, f"{epoch:04d}-{status.finished_train_steps:04d}", is_best)

    @property
    def _keeps_position(self) -> bool:
        loader = self.dataloader["train"]
        return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))

    def _resume(self) -> None:
        config = self.train_args.checkpoint
        path = config.get_resume_checkpoint()
        if path is None:
            return
        content = checkpoints.read(path, self.model, self.optimizer, config.resume_from.with_merged)
        if path.is_file() and config.resume_from.convert_fn:
            content = load_type(config.resume_from.convert_fn)(content)
        self.hook.on_load_checkpoint(self, content)
        checkpoints.load_states(content, self.model, self.optimizer)
        rates, position, states = map(content.get, ("lr_scheduler", "dataloader", "rng_states"))
        if isinstance(position, list):  # merged files list the values of all ranks
            position = position[0] if all(other == position[0] for other in position) else None
        if rates and not self.lr_scheduler:
            raise ValueError(f"{path} has the state of a learning rate scheduler, but lr_scheduler is not configured")
        if position is not None and not self._keeps_position:
            raise ValueError(f"{path} has the position of a data loader, but this data loader has no load_state_dict")
        if rates:
            self.lr_scheduler.load_state_dict(rates)
        if position is not None:
            self.dataloader["train"].load_state_dict(position)
            self.dataloader_resumed = True
        self.train_status = TrainStatus(**content.get("train_status") or {})
        self._random_states = states if isinstance(states, dict) else None
        self.hook.after_load_checkpoint(self, content)


class _Progress:
    """The progress of an epoch on rank 0: tqdm's bar if it is installed, else lines of the log."""

    def __init__(self, trainer: Trainer, name: str, first: int) -> None:
        args, self._name, self._total = trainer.train_args, name, trainer.total_train_steps_per_epoch
        self._count, self._bar = first, None
        self._every = args.log_progress_every_n_train_steps if trainer.rank == 0 else None
        if trainer.rank == 0 and args.enable_progress_bar:
            with suppress(RuntimeError):  # tqdm is not installed
                self._bar = load_type("tqdm.tqdm")(total=self._total, initial=first, desc=name)

    def show(self, metrics: dict[str, Any]) -> None:
        self._count += 1
        if self._bar is not None:
            self._bar.set_postfix(metrics)
            self._bar.update()
        elif self._every and self._count % self._every == 0:
            figures = ", ".join(f"{name}={value:.4g}" for name, value in metrics.items())
            logger.info("%s: %d/%d %s", self._name, self._count, self._total, figures)


def _close(loader: Any) -> None:
    if hasattr(loader, "close"):
        loader.close()


def _reduced(value: float | None, reduction: str, aggregated: AggregatedOutputs) -> float:
    """Returns a sum divided as the reduction says; RuntimeError: `aggregate_outputs_fn` has not set a part of it."""
    counts = {"sum": 1, "mean": aggregated.num_batches, "per-token-mean": aggregated.num_tokens}
    if value is None or not counts[reduction]:
        missing = "loss_sum" if value is None else "num_batches" if reduction == "mean" else "num_tokens"
        raise RuntimeError(f"aggregate_outputs_fn did not set {missing}, which the reduction {reduction!r} needs")
    return value / counts[reduction]  # type: ignore[operator]
