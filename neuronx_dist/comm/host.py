"""Transfers of tensors from the host and to the host, for any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .rank_selection import XLA, in_one_program

__all__ = ["as_inputs", "on_host", "upload"]


def upload(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Moves a CPU tensor to a device; on XLA it becomes an input of programs, whatever its value.

    `tensor.to(device)` makes a 0-dim tensor of 0 or 1 a constant of the program: a learning rate that warms up from 0
    would be compiled twice.
    """
    device = torch.device(device)
    if tensor.dim() or device.type != XLA or tensor.device.type != "cpu":
        return tensor.to(device)
    import torch_xla

    target = device if device.index is not None else torch_xla.device()
    moved: torch.Tensor = torch_xla._XLAC._xla_tensors_from_aten([tensor.detach()], [str(target)])[0]
    return moved


def on_host(tensors: Sequence[torch.Tensor], copy: bool = True) -> list[torch.Tensor]:
    """Returns the tensors on the CPU, detached; tensors on the CPU are not copied.

    XLA devices compute all of them in one program, and the host waits once. With `copy=False` it only waits.

    Moved one by one they would be as many programs, and could be wrong: torch_xla takes `a - (a + b)` and
    `b - (a + b)` for one
    program, whose inputs it then confuses (pytorch/xla#8353).
    """
    on_cpu = [tensor.detach() for tensor in tensors]
    lazy = [index for index, tensor in enumerate(on_cpu) if in_one_program(tensor)]
    if lazy:
        import torch_xla

        pending = [on_cpu[index] for index in lazy]
        torch_xla._XLAC._xla_sync_multi(pending, [], True, False)
        if copy:
            for index, tensor in zip(lazy, torch_xla._XLAC._xla_get_cpu_tensors(pending)):
                on_cpu[index] = tensor
    return [tensor.cpu() if copy else tensor for tensor in on_cpu]


def as_inputs(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Makes each tensor a separate input of the programs of XLA devices, as a step's results are to the next step.

    Scalars from the host are no such inputs: torch_xla shares one buffer among equal scalars, and puts 0 and 1 into the
    program. A resumed run would compile its step anew.
    """
    inputs = list(tensors)
    scalars = [index for index, tensor in enumerate(inputs) if in_one_program(tensor) and not tensor.dim()]
    for index, value in zip(scalars, on_host([inputs[index] for index in scalars])):
        inputs[index] = upload(value, inputs[index].device)
    on_host([inputs[index] for index in scalars], copy=False)
    return inputs
