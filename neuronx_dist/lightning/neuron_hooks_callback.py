"""Files with the inputs, outputs and gradients of layers during training, to compare runs.

BASE/LAYER/global_step_N/RANK_layer_input_raw.pt     and _layer_output_, _grad_input_, _grad_output_; _norm.pt
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from .. import comm
from ..nearest import nearest
from ..parallel_layers import parallel_state

__all__ = ["NeuronHooksCallback"]


class NeuronHooksCallback(Callback):
    """Writes what goes into and comes out of layers, and its gradients, in some steps of a run.

    In a step of several microbatches the last one's is reported. Training alone is recorded, not validation.

    Args:
        cfg: options as attributes, such as the namespace of an argparse parser: `hooks` (False: the callback does
            nothing), `target_layers` (names, separated by commas), `hooks_interval` (steps from one file to the next),
            `enable_activation_dumps`, `enable_grad_dumps`, `dump_only_norms`, `dump_only_master_rank` (one rank for
            each layer), `master_print_model_layers`, `hooks_dump_base_directory`, and
            `enable_tb_logging_master_rank_{activation,grad}_norms` (norms are logged too).

    Raises:
        ValueError: an interval below 1; at the start of training, a layer that the model does not have.
    """

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.cfg, self.hooks = cfg, bool(cfg.hooks)
        self.target_layers = (
            [name.strip() for name in cfg.target_layers.split(",") if name.strip()] if cfg.hooks else []
        )
        self.folder = getattr(cfg, "hooks_dump_base_directory", None) or (
            f"./hooks_outputs/{os.environ.get('SLURM_JOB_ID')}/hooks_dumps"
        )
        self._handles: list[Any] = []
        if self.target_layers and cfg.hooks_interval < 1:
            raise ValueError(f"NeuronHooksCallback: hooks_interval must be at least 1 step, got {cfg.hooks_interval}")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        layers = dict(pl_module.model.named_modules())
        if self.hooks and self.cfg.master_print_model_layers and trainer.is_global_zero:
            print("Layers of the model:", *layers, sep="\n")
        for target in self.target_layers:
            layer = layers.get(target)
            if layer is None and comm.size("pp") == 1:
                raise ValueError(
                    f"NeuronHooksCallback: there is no layer {target!r}; nearest: {nearest(target, layers)}"
                )
            if layer is not None and self.cfg.enable_activation_dumps:
                hook = self._hook(target, "layer", "activation", trainer, pl_module)
                self._handles.append(layer.register_forward_hook(hook))
            if layer is not None and self.cfg.enable_grad_dumps:
                hook = self._hook(target, "grad", "grad", trainer, pl_module)
                self._handles.append(layer.register_full_backward_hook(hook))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)

    def _hook(self, layer: str, file: str, metric: str, trainer: Any, pl_module: Any) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, outputs: Any) -> None:
            if not trainer.training:
                return
            step = pl_module.global_step
            if step % self.cfg.hooks_interval:
                return
            if self.cfg.dump_only_master_rank and (comm.rank("tp") or comm.rank(("dp", "cp"))):
                return
            folder = os.path.join(self.folder, layer, f"global_step_{step}")
            os.makedirs(folder, exist_ok=True)
            for side, value in (("input", _first(inputs)), ("output", _first(outputs))):
                if value is None:
                    continue
                value = value.detach().norm().item() if self.cfg.dump_only_norms else value.detach().cpu()
                form = "norm" if self.cfg.dump_only_norms else "raw"
                name = f"{parallel_state.get_rank_info_str()}_{file}_{side}_{form}.pt"
                torch.save(value, os.path.join(folder, name))
                if self.cfg.dump_only_norms and getattr(self.cfg, f"enable_tb_logging_master_rank_{metric}_norms"):
                    pl_module.log(f"{metric}_{side}_norm/{layer}", value, on_step=True, on_epoch=False)

        return hook


def _first(values: Any) -> torch.Tensor | None:
    """Returns the tensor, or the first one of a tuple."""
    if isinstance(values, (tuple, list)):
        return next((value for value in values if isinstance(value, torch.Tensor)), None)
    return values if isinstance(values, torch.Tensor) else None
