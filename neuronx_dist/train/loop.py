"""A training step, and the loop around it: evaluation, checkpoints, signals, and values that are not finite."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any, NoReturn

import torch

from .. import comm
from ..attention.batch import get_batch_on_this_context_parallel_rank
from ..comm.launch import end_step
from ..gradients.reduce import global_num_items
from ..parallel_layers.parallel_state import destroy_model_parallel
from . import rank_exit
from .causal_lm import TrainingState
from .progress import Progress
from .run_checkpoints import RunCheckpoints
from .text_stream import TextStream

__all__ = ["largest_on_any_rank", "leave_together", "train", "train_step"]


def train_step(model: Any, optimizer: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """One optimizer step on this rank's rows: what is trained with, and what is checked."""
    loss: torch.Tensor = model.run_train(**_with_num_items(model, batch))
    optimizer.step()
    optimizer.zero_grad()
    end_step()
    return loss


def _with_num_items(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's part of the sequences, and what their summed loss is divided by."""
    part = get_batch_on_this_context_parallel_rank(batch, balance="zigzag")  # over cp > 1 labels are shifted
    return {**part, "num_items_in_batch": global_num_items(part["labels"], model.num_microbatches)}


def train(
    args: Namespace,
    state: TrainingState,
    text: TextStream,
    device: torch.device,
    progress: Progress,
    checkpoints: RunCheckpoints | None = None,
    profiler: Any = None,
) -> None:
    """The training loop, of this rank, from the step where `progress` is."""
    model, optimizer, schedule = state
    stages: list[int] = []  # with gradients that are not finite, in the last step
    optimizer.register_step_post_hook(lambda *_: stages.extend(_stages_not_finite(optimizer)))

    def rows(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        dp, rank = comm.size("dp"), comm.rank("dp")
        return {name: value.chunk(dp)[rank].to(device) for name, value in batch.items()}

    for step in range(progress.done + 1, args.steps + 1):
        lr = optimizer.param_groups[0]["lr"]
        loss, norm = float(train_step(model, optimizer, rows(text.batch(step)))), float(optimizer.grad_norm)
        schedule.step()
        if profiler is not None:
            profiler.step()
        progress.step(step, loss=loss, grad_norm=norm, lr=lr)
        if not (args.allow_nonfinite or (math.isfinite(loss) and math.isfinite(norm))):
            progress.interrupted()
            where = f" (gradients that are not finite: pipeline stage {', '.join(map(str, stages))})" if stages else ""
            saved = f"; {checkpoints.left()}" if checkpoints else ""
            leave_together(
                f"step {step} of {args.steps}: the loss is {loss}, the gradient norm {norm}{where}; this step is not "
                f"made{saved}. Try a lower --lr, a longer --warmup or another --seed; --allow-nonfinite trains on"
            )
        if args.eval_every and step % args.eval_every == 0:
            held_out = (_with_num_items(model, rows(text.held_out_batch(i))) for i in range(4))
            progress.held_out(sum(float(model.run_eval(**batch)) for batch in held_out) / 4)
        if checkpoints is not None:
            progress.flush()
            if signal := largest_on_any_rank(rank_exit.asked_to_end(), device):
                _end_after_step(signal, step, args, state, progress, checkpoints)
            checkpoints.after_step(step, state)
            progress.mark()


def _stages_not_finite(optimizer: Any) -> list[int]:
    """Pipeline stages that have a gradient which is not finite; all ranks call this after a step."""
    if math.isfinite(optimizer.grad_norm):
        return []
    grads = [shard.master.grad for shard in optimizer.shards if shard.master.grad is not None]
    is_finite = all(bool(grad.isfinite().all()) for grad in grads)
    return sorted({stage for stage, finite in comm.gather_objects((int(comm.rank("pp")), is_finite)) if not finite})


def largest_on_any_rank(number: int, device: torch.device) -> int:
    """Returns the largest of the ranks' numbers, on all ranks."""
    return int(comm.all_reduce(torch.tensor(number, device=device), "world", op="max"))


def _end_after_step(
    signal: int, step: int, args: Namespace, state: TrainingState, progress: Progress, checkpoints: RunCheckpoints
) -> NoReturn:
    """Ends all ranks after this step, with a checkpoint: a signal has asked any of them to end."""
    error = checkpoints.save(step, state, finish=True)
    done = progress.interrupted()
    comm.barrier()  # the first rank that ends ends the others
    destroy_model_parallel()
    saved = f", not saved: {error}" if error else f" and saved; go on with --resume --out {args.out}"
    rank_exit.leave_interrupted(signal, done + saved)


def leave_together(message: str, code: int = 1) -> NoReturn:
    """Ends all ranks, each of which calls this."""
    comm.barrier()  # the first rank that ends ends the others
    destroy_model_parallel()
    rank_exit.leave(message, code, together=True)
