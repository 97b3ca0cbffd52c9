"""Training by Lightning on real processes, for all layouts in one job, and by a plain loop in one process."""

from __future__ import annotations

import logging
import warnings
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.weights.shard_spec import gather_full, spec_of
from tests.trainer.nxd_model import BATCH, ROWS, STEPS, LanguageModel, Options, config_of

ROWS_OF_DATA = torch.cat(BATCH)
EPOCHS = 2


def items() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row, "labels": row.roll(-1)} for row in ROWS_OF_DATA]


def scheduler_of(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 4)


def build(sequence_parallel: bool) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(sequence_parallel)


def hooks_of(folder: str) -> SimpleNamespace:
    """Options of `NeuronHooksCallback`, as a script's argument parser has them."""
    logged = dict.fromkeys((f"enable_tb_logging_master_rank_{kind}_norms" for kind in ("activation", "grad")), True)
    return SimpleNamespace(
        hooks=True,
        target_layers="blocks.1, blocks.3.up",
        hooks_interval=3,
        enable_activation_dumps=True,
        enable_grad_dumps=True,
        dump_only_norms=True,
        dump_only_master_rank=True,
        master_print_model_layers=False,
        hooks_dump_base_directory=f"{folder}/hooks",
        **logged,
    )


def fit(
    mesh: nxd.Mesh, options: Options, folder: str, accumulated: int = 1, manual_opt: bool = True, resumed: str = ""
) -> dict[str, Any]:
    """Trains on one rank of a job; returns losses, norms and whole weights of this rank, and what all ranks wrote.

    Args:
        accumulated: batches of a step.
        resumed: name of a checkpoint of an earlier call with this folder.
    """
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    from neuronx_dist import lightning

    class Recorder(Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.losses: list[float] = []
            self.norms: list[float] = []

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            self.losses.append(float(trainer.callback_metrics.get("loss", 0.0)))
            self.norms.append(float(trainer.optimizers[0].grad_norm or 0.0))

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    config = config_of(mesh, options)
    module = lightning.NeuronLTModule(
        config,
        torch.optim.AdamW,
        scheduler_of,
        model_args=(options.sequence_parallel,),
        opt_kwargs={"lr": 0.01},
        model_fn=build,
        grad_accum_steps=accumulated if manual_opt else 1,
        manual_opt=manual_opt,
    )
    recorder = Recorder()
    saving = ModelCheckpoint(
        dirpath=f"{folder}/checkpoints",
        monitor="global_step" if manual_opt else None,
        mode="max",
        save_top_k=-1,
        every_n_train_steps=STEPS,
    )
    callbacks = [recorder, lightning.NeuronTQDMProgressBar(refresh_rate=100), saving]
    if mesh.pp > 1:
        callbacks.append(lightning.NeuronHooksCallback(hooks_of(folder)))
    trainer = Trainer(
        strategy=lightning.NeuronXLAStrategy(config),
        plugins=[lightning.NeuronXLAPrecisionPlugin()],
        callbacks=callbacks,
        logger=lightning.NeuronTensorBoardLogger(save_dir=folder, version=resumed or None),
        log_every_n_steps=1,
        max_epochs=EPOCHS,
        enable_model_summary=False,
        accumulate_grad_batches=1 if manual_opt else accumulated,
        default_root_dir=folder,
    )
    rows = items()
    sampler: Any = DistributedSampler(rows, mesh.size("dp"), comm.rank("dp"), shuffle=False)  # Lightning's shuffles
    loader = DataLoader(rows, batch_size=ROWS // mesh.size("dp") // accumulated, sampler=sampler)
    trainer.fit(module, loader, ckpt_path=f"{folder}/checkpoints/{resumed}" if resumed else None)
    if not resumed:
        nxd.save_checkpoint(f"{folder}/any layout", "end", model=module.model, optimizer=trainer.optimizers[0])
    return {
        "losses": recorder.losses[accumulated - 1 :: accumulated],
        "norms": recorder.norms[accumulated - 1 :: accumulated],
        "weights": {name: gather_full(p.detach(), spec_of(p)) for name, p in module.named_parameters()},
        "files": sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()),
        "steps": trainer.global_step,
        "bar": callbacks[1].is_enabled,
        "log_dir": trainer.log_dir,
    }


@cache
def plainly() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Returns losses, norms and weights of a loop that uses torch alone; on a mesh of one rank."""
    model = build(False)
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if "norm" not in n and "bias" not in n], "weight_decay": 0.01},
        {"params": [p for n, p in named if "norm" in n or "bias" in n], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    scheduler = scheduler_of(optimizer)
    losses, norms = [], []
    for _ in range(EPOCHS):
        for ids in BATCH:
            loss, _ = model(ids, ids.roll(-1, 1))
            loss.backward()
            losses.append(loss.item())
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return losses, norms, {name: param.detach() for name, param in named}
