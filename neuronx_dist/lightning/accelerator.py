"""Lightning's view of the devices: those of the ranks on this host, one for each process."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator

from ..comm.backends import local_device

__all__ = ["NeuronXLAAccelerator"]


class NeuronXLAAccelerator(Accelerator):
    """The device that `init_distributed` selects: an accelerator of this machine, or the CPU.

    `Trainer(devices=)` may be left out under torchrun; in a script that runs by itself it is the number of processes,
    which Lightning starts.
    """

    def setup_device(self, device: torch.device) -> None:
        """Does nothing: joining the job has selected the device."""

    def teardown(self) -> None:
        """Does nothing."""

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """Returns the number of processes on this host.

        Raises:
            ValueError: torchrun started another number of them; or it is no number.
        """
        count = NeuronXLAAccelerator.auto_device_count()
        if "LOCAL_WORLD_SIZE" not in os.environ and str(devices).isdecimal() and int(devices) > 0:
            return int(devices)
        if devices not in ("auto", -1, "-1", count, str(count)):
            raise ValueError(
                f"Trainer(devices={devices!r}): {count} processes run on this host, one for each device; start others "
                "by torchrun --nproc-per-node, or leave devices out"
            )
        return count

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        device_type = local_device.device_type("auto")
        return [torch.device(device_type)] * NeuronXLAAccelerator.parse_devices(devices)

    @staticmethod
    def auto_device_count() -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "neuron"

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}
