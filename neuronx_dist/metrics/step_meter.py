"""Time, tokens, model FLOPs and memory of each step.

    meter = StepMeter(flops=training_flops(model, seq_len))
    for batch in loader:
        loss = train_step(batch)
        row = {"loss": float(loss), **meter.step(global_tokens(batch["input_ids"]))}

A step's time is the one between two calls of `step`, on this rank's host: a loop that reads its loss in each step, as
above, waits for the device.
"""

from __future__ import annotations

import resource
import sys
import time

import torch
import torch.distributed as dist

from .. import accelerator, comm
from ..comm.context import AxisLike
from .flops import TrainingFlops, peak_flops

__all__ = ["StepMeter", "global_tokens", "peak_memory"]


def global_tokens(input_ids: torch.Tensor) -> int:
    """Returns the tokens of a global batch, from the part of a rank, `[rows/dp, seq/cp]`: after the split over cp.

    Each token counts once: tp and pp ranks compute parts of the same ones. Without a mesh all ranks have rows of their
    own, as under `DistributedDataParallel`.
    """
    return input_ids.numel() * _ranks(("dp", "cp"))


def _ranks(axis: AxisLike) -> int:
    if comm.is_initialized():
        return comm.size(axis)
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class StepMeter:
    """Measures steps.

    Args:
        flops: of a token (`training_flops`); None: no FLOPs are reported.
        peak: FLOPs per second of a device at most, or its name in `PEAKS`; None: of this machine's device, if known.
        devices: number of ranks; None: of the current mesh, else of torch.distributed.
        device: where this rank computes; None: this machine's accelerator, else the CPU.
        predicted_memory: bytes that a rank needs, by `planning.memory.estimate_memory(...).peak`: reported beside the
            measured ones.
    """

    def __init__(
        self,
        *,
        flops: TrainingFlops | None = None,
        peak: float | str | None = None,
        devices: int | None = None,
        device: torch.device | None = None,
        predicted_memory: int | None = None,
    ) -> None:
        self.flops, self.predicted_memory = flops, predicted_memory
        self.device = device or torch.device(accelerator.current_type() or "cpu")
        self.peak = peak if isinstance(peak, (int, float)) else peak_flops(peak)
        if isinstance(peak, str) and self.peak is None:
            raise ValueError(f"no peak is known of {peak!r}: pass the FLOPs per second, or a name of metrics.PEAKS")
        if self.peak is not None and not self.peak > 0:
            raise ValueError(f"peak={self.peak}: pass the FLOPs per second of a device, or None")
        self.devices = devices or _ranks("world")
        self.mark()

    def mark(self) -> None:
        """Leaves the time since the last step out: that of an evaluation, of a checkpoint."""
        self._mark = time.perf_counter()

    def step(self, tokens: int) -> dict[str, float]:
        """Returns the figures of the step that ends now, of so many tokens of the global batch (`global_tokens`)."""
        begin = self._mark
        self.mark()
        return self.figures(tokens, self._mark - begin)

    def figures(self, tokens: float, seconds: float) -> dict[str, float]:
        """Returns the figures of a step with so many tokens that takes so long.

        Returns:
            `seconds`; `tokens_per_s`, and `tokens_per_s_per_device`; with FLOPs `tflops_per_device` and, where the peak
            is known, `mfu`, a fraction; `peak_memory` of this rank so far in bytes, and `predicted_memory`.
        """
        speed = tokens / max(seconds, 1e-9)
        row = {"seconds": seconds, "tokens_per_s": speed, "tokens_per_s_per_device": speed / self.devices}
        if self.flops is not None:
            flops = self.flops.per_token * speed / self.devices
            row["tflops_per_device"] = flops / 1e12
            if self.peak is not None:
                row["mfu"] = flops / self.peak
        memory = peak_memory(self.device)
        if memory is not None:
            row["peak_memory"] = memory
        if self.predicted_memory is not None:
            row["predicted_memory"] = self.predicted_memory
        return row


def peak_memory(device: torch.device) -> int | None:
    """Returns the most bytes that tensors of this process had on a device; None: the device does not count them.

    On the CPU it is the resident memory of the process, with all that Python has imported.
    """
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    module = accelerator.module_of(device.type)
    if not hasattr(module, "max_memory_allocated"):
        return None
    return int(module.max_memory_allocated())
