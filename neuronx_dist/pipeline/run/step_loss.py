"""The loss of a step: which output it is, whether it is finite, and what `run_train` returns of it.

NxDPPModel(output_loss_value_spec=...)                                              find_loss
NxDPPModel(check_finite=True)                                                       refuse_infinite_loss
NxDPPModel(return_mb_loss, broadcast_and_average_loss, return_loss_on_cpu)          report_loss
run_train(...).backward()                                                           without_backward
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from ... import comm, spmd
from ...program.recording import Recording, TensorSpec, describe
from ...spmd.watching import active
from ...torch_internals.tensors import pytree
from ..schedule import Task

__all__ = ["find_loss", "refuse_infinite_loss", "report_loss", "without_backward"]


# --- which output is the loss


def find_loss(recording: Recording, spec: Any) -> fx.Node:
    """The node of the output that `spec` marks as the loss.

    Args:
        spec: True for a forward that returns the loss; a tuple as long as the returned tuple or list; a dict with keys
            of the returned dict (a key that is left out is not the loss); or these within one another.

    Raises:
        ValueError: the spec does not fit the outputs, or does not mark one scalar; the message shows both.
    """
    result = recording.result
    try:
        marked = list(_marked(result, spec, "the model's output"))
        if len(marked) != 1:
            raise ValueError(f"it marks {len(marked)} outputs as the loss: mark one with True")
        (loss,) = marked
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ValueError(
                f"it marks {describe(loss)} as the loss, which is no scalar tensor: are labels among the inputs?"
            )
    except ValueError as error:
        raise ValueError(
            f"output_loss_value_spec={spec!r} does not fit the model's output {describe(result)}: {error}"
        ) from None
    flat = pytree.tree_leaves(result)
    node = recording.outputs[next(index for index, leaf in enumerate(flat) if leaf is loss)]
    assert isinstance(node, fx.Node)
    return node


def _marked(output: Any, spec: Any, where: str) -> Iterator[Any]:
    if spec is True:
        yield output
    elif isinstance(spec, Mapping):
        if not isinstance(output, Mapping):
            raise ValueError(f"{where} is no dict; {_fitting(output)}")
        missing = [key for key in spec if key not in output]
        if missing:
            labels = " (are labels among the inputs?)" if any(spec[key] for key in missing) else ""
            raise ValueError(f"{where} has no {', '.join(map(repr, missing))}{labels}")
        for key, inner in spec.items():
            yield from _marked(output[key], inner, f"{where}[{key!r}]")
    elif isinstance(spec, (tuple, list)):
        if not isinstance(output, (tuple, list)):
            raise ValueError(f"{where} is no tuple; {_fitting(output)}")
        if len(output) != len(spec):
            raise ValueError(f"{where} has {len(output)} entries, the spec {len(spec)}")
        for index, inner in enumerate(spec):
            yield from _marked(output[index], inner, f"{where}[{index}]")
    elif spec not in (False, None):
        raise ValueError(f"a spec consists of True, False, tuples and dicts, not of {spec!r}")


def _fitting(output: Any) -> str:
    """Describes a spec that fits this output."""
    if isinstance(output, Mapping):
        return f"a spec for it is a dict, such as {{{next(iter(output), 'loss')!r}: True}}"
    if isinstance(output, (tuple, list)):
        return f"a spec for it is a tuple, such as {(True, *(False for _ in output[1:]))}"
    return "a spec for it is True"


# --- a loss that is not finite


def refuse_infinite_loss(task: Task, outputs: Sequence[Any], received: Sequence[torch.Tensor]) -> None:
    """Checks the loss of a microbatch; the host waits for its value.

    Args:
        outputs: of the model; the first is its loss.
        received: tensors that the stage received for this microbatch.

    Raises:
        FloatingPointError: the loss is not finite; the message says whether a received tensor was so already.
    """
    loss = float(outputs[0].detach())
    if loss - loss == 0:
        return
    begun = [
        index for index, x in enumerate(received) if x.is_floating_point() and not bool(x.detach().isfinite().all())
    ]
    if begun:
        shape = list(received[begun[0]].shape)
        origin = (
            f"this stage received a tensor of shape {shape} that was not finite already: look at the earlier stages"
        )
    elif received:
        origin = "all tensors that this stage received were finite, so the fault is on this stage"
    else:
        origin = "the fault is on this stage, which received nothing from others"
    raise FloatingPointError(f"the loss of microbatch {task.microbatch} is {loss} (check_finite=True); {origin}")


# --- what a step returns


def report_loss(
    losses: list[torch.Tensor],
    spec: TensorSpec,
    *,
    stage: int,
    last_stage: int,
    return_mb_loss: bool,
    broadcast_and_average_loss: bool,
    computed_on: torch.device,
    report_on: torch.device,
) -> torch.Tensor | list[torch.Tensor] | None:
    """Returns the mean loss by the options of `NxDPPModel`. All ranks call it.

    Args:
        losses: by microbatch, on `last_stage`, which holds the end of the model.
        spec: of one of them.
        computed_on, report_on: devices of the losses, and of the result.
    """
    is_last = stage == last_stage
    if not is_last and not broadcast_and_average_loss:
        return None
    if return_mb_loss:
        return [loss.to(report_on) for loss in losses]
    if is_last:
        mean = torch.stack(losses).mean()
    else:
        mean = torch.empty((), dtype=spec.dtype, device=computed_on)
    if broadcast_and_average_loss:
        if is_last:
            total = comm.all_reduce(mean, ("dp", "cp"))
            mean = total / comm.size(("dp", "cp"))
        mean = comm.broadcast(mean, "pp", src=last_stage)
        if active() is not None:
            spmd.assert_type(mean, dict.fromkeys(("pp", "dp", "cp"), spmd.R))
    return mean.to(report_on)


_Loss = TypeVar("_Loss", bound=torch.Tensor | list[torch.Tensor] | None)


def without_backward(loss: _Loss) -> _Loss:
    """Makes `backward()` of reported losses raise a RuntimeError that says who has done it; returns the losses.

    The attributes are of these tensors alone: their copies in files and results of calculations have none.
    """
    for reported in loss if isinstance(loss, list) else [loss]:
        if reported is not None:
            vars(reported).update(backward=_refuse_backward, __getstate__=lambda: None)
    return loss


def _refuse_backward(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "run_train has done forward and backward of all microbatches, and its loss is for reports: leave out "
        "loss.backward(), and call optimizer.step()"
    )
