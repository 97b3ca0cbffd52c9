"""One pass of a schedule over a batch on this rank: an executor, with the transport of this backend."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...torch_internals.tensors import pytree
from ..schedule import Schedule, prove
from .executor import Executor
from .lockstep_transport import Lockstep
from .message_transport import Messages
from .microbatches import Batch
from .stage_program import StageProgram
from .step_loss import refuse_infinite_loss
from .trace import Trace
from .transport import Channels, Transport

__all__ = ["check_pieces", "check_runs", "run_batch"]


def run_batch(
    program: StageProgram,
    schedule: Schedule,
    batch: Batch,
    *,
    module: nn.Module,
    stage: int,
    channels: Channels,
    parameters: Iterable[nn.Parameter],
    device: torch.device,
    check_finite: bool = False,
    trace: Trace | None = None,
) -> tuple[list[Any], int]:
    """Runs a schedule.

    Args:
        program: of this stage, for a microbatch of this batch.
        module: the whole model, of which this rank holds `parameters`, on `device`.
        channels: to the other stages.
        check_finite: refuse a loss that is NaN or infinite.
        trace: receives the events of the pass; None: no trace.

    Returns:
        `(results, peak)`: by microbatch, on the stage that ends the model, the loss, the forward's result, or both as a
        pair, as the program has them, None elsewhere; and the most forwards whose activations were saved at one time.

    Raises:
        any error of a task, with the task and the stage before the message.
    """
    transport = _transport(program, schedule, stage, channels, parameters, device)
    if trace is not None:
        transport = trace.watch(transport, schedule, stage)
    executor = Executor(
        module=module,
        chunks=program.chunks,
        schedule=schedule,
        stage=stage,
        transport=transport,
        microbatches=batch.microbatches(program.input_leaves, device),
        pick_loss=None if program.structure is not None else (lambda outputs: outputs[0]),
        check_outputs=refuse_infinite_loss if check_finite and program.loss is not None else None,
    )
    results = executor.execute()
    if program.structure is not None and stage == schedule.holders[-1]:
        results = [_result(program, leaves) for leaves in results]
    return results, executor.peak_in_flight


def _result(program: StageProgram, leaves: list[Any]) -> Any:
    assert program.structure is not None
    if program.loss is None:
        return pytree.tree_unflatten(leaves, program.structure)
    return leaves[0], pytree.tree_unflatten(leaves[1:], program.structure)


def check_pieces(schedule: Schedule, cut_for: Schedule) -> None:
    """Checks that stages hold the same pieces of the model in a schedule and in the one for which the model is cut.

    Raises:
        ValueError: stages hold other pieces.
    """
    expected = _holders(cut_for)
    if _holders(schedule) != expected:
        raise ValueError(
            f"{schedule} does not fit this model, which has {cut_for.num_stages} stages with {cut_for.num_chunks} "
            f"pieces of the model each, in the order {expected} of (stage, chunk)"
        )


def _holders(schedule: Schedule) -> list[tuple[int, int]]:
    return [schedule.holder(virtual_stage) for virtual_stage in range(schedule.num_virtual_stages)]


def check_runs(schedule: Schedule) -> None:
    """Plays a schedule on the strictest transport, so that no schedule runs in which stages wait for ever.

    Raises:
        RuntimeError: a deadlock, messages that do not pair up, a backward that is missing or too early.
    """
    try:
        prove(schedule)
    except RuntimeError as error:
        raise RuntimeError(f"{schedule} cannot run: {error}") from None


def _transport(
    program: StageProgram,
    schedule: Schedule,
    stage: int,
    channels: Channels,
    parameters: Iterable[nn.Parameter],
    device: torch.device,
) -> Transport:
    if program.transfers is not None:
        return Lockstep(
            schedule=schedule,
            stage=stage,
            transfers=program.transfers,
            channels=channels,
            parameters=parameters,
            device=device,
        )
    return Messages(
        schedule=schedule,
        stage=stage,
        wires=program.wires,
        channels=channels,
        device=device,
    )
