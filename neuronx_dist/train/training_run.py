"""The run of one rank: refusals and the check before anything is allocated, then training, then the saved folder."""

from __future__ import annotations

import os
from argparse import Namespace
from contextlib import nullcontext
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from .. import comm, hf, metrics
from ..checkpoint.errors import CheckpointError, CheckpointMismatch
from ..comm.launch import init_distributed
from ..optimizer import MuonAdamW
from ..parallel_layers.parallel_state import destroy_model_parallel, initialize_model_parallel
from ..planning.layout import Layout, format_bytes
from ..planning.memory import estimate_memory
from . import rank_exit
from .causal_lm import build, check, load_config
from .flags import layout_of, recomputation_of, record_of
from .layout_comparison import compare_layouts
from .loop import leave_together, train, train_step
from .progress import Progress
from .run_checkpoints import RunCheckpoints
from .run_folder import choose_folder, make_folder
from .text_stream import TextStream

__all__ = ["run_rank"]


def run_rank(args: Namespace) -> int:
    """Trains as this rank of the launcher's job, or alone; with --check and --verify it compares instead.

    Returns:
        The exit code, for ends that are the same on all ranks; others leave by `rank_exit`.
    """
    rank = rank_exit.launcher_rank()
    try:  # refuse what cannot work before anything is allocated
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if args.check is not None and world == 1:
            world = args.check or args.tp * args.pp * args.cp
        config, tokenizer = load_config(args)
        layout = layout_of(args, world)
        layout.check(config, data=args.data or ())
        if args.check is not None:
            report = check(args, config, layout, train_step)
            if rank == 0:
                report.show(details=True)
            return 0 if report.ok else 1
        sizes = dict(seq_len=args.seq_len, global_batch=args.global_batch, seed=args.seed)
        limit = round(args.data_limit * 2**20) or None
        text = TextStream(args.data, max_bytes=limit, tokenizer=tokenizer, **sizes)
        rank_exit.say(text.summary)
        if text.vocab_size > config.vocab_size:
            raise ValueError(f"the text has tokens up to {text.vocab_size}, the model knows {config.vocab_size}")
        device = init_distributed(args.device)  # before any backward: torch counts devices at the first
        recomputation = recomputation_of(args)
        memory = None
        if rank == 0:
            optimizer_class = MuonAdamW if args.optimizer == "muon" else torch.optim.AdamW
            options = dict(recomputation=recomputation, fused_loss=args.fused_loss, optimizer_class=optimizer_class)
            memory = estimate_memory(layout, config, **options)
    except ValueError as error:
        rank_exit.leave(str(error), rank_exit.WRONG_USE)
    if args.verify:
        rank_exit.on_interrupt(lambda: "while layouts were compared; nothing was written")
        return compare_layouts(args, config, text, device)
    initialize_model_parallel(args.tp, args.pp, context_parallel_size=args.cp, expert_model_parallel_size=args.ep)
    try:
        _run_in_folder(args, config, layout, text, tokenizer, device, memory)
    except comm.RemoteRankError as error:
        rank_exit.leave_without(error.rank, str(error))
    comm.barrier()
    destroy_model_parallel()
    return 0


def _run_in_folder(
    args: Namespace, config: Any, layout: Layout, text: TextStream, tokenizer: Any, device: torch.device, memory: Any
) -> None:
    """The run, of this rank, in the folder that is its own."""
    rank = rank_exit.launcher_rank()
    try:
        launches = choose_folder(args, layout)
    except ValueError as error:
        leave_together(str(error), rank_exit.WRONG_USE)
    if layout.world_size > 1 and not args.no_check:
        refusal = comm.broadcast_object(_check_before_launch(args, config, layout) if rank == 0 else None)
        if refusal:
            leave_together(refusal, rank_exit.WRONG_USE)
    picture = layout.picture(config)
    rank_exit.say(f"{picture}\n\n{memory or ''}\n\nbuilding the model; the first step records it ...")
    checkpoints = RunCheckpoints(args, config, text.checksum, rank_exit.say)
    state = build(args, config, device, rank_exit.say)
    try:
        make_folder(args)
        done = checkpoints.resume(state)
    except ValueError as error:
        leave_together(str(error), rank_exit.WRONG_USE)
    except CheckpointError as error:  # of the newest checkpoint another attempt may read what this one could not
        named = args.resume not in (None, "", "auto")
        leave_together(str(error), rank_exit.WRONG_USE if named or isinstance(error, CheckpointMismatch) else 1)
    if rank == 0 and done == 0 and args.prompt is not None and args.model is not None and hf.has_weights(args.model):
        print(f"\nbefore training the model goes on:\n{text.continuation(args.model, args.prompt)}\n", flush=True)
    title = f"tp {layout.tp} × pp {layout.pp} × dp {layout.dp}" + f" × cp {layout.cp}" * (layout.cp > 1)
    meter = _make_meter(args, config, device, memory)
    shown = dict(out=args.out, log_every=args.log_every, active=rank == 0, title=title, done=done, meter=meter)
    shown |= dict(record=record_of(args, layout, launches), writers=_writers_of(args, layout.world_size, done))
    profile: Any = nullcontext()
    if args.profile:
        trace = Path(args.out) / f"profile.rank{rank}.json"
        profile = metrics.profile_steps(trace, args.profile, pipeline=state.model)
    with Progress(args.steps, args.global_batch * args.seq_len, **shown) as progress, profile as profiler:
        checkpoints.say = progress.say
        rank_exit.end_after_step(lambda: f"{progress.interrupted()}, not saved; earlier checkpoints stay", progress.say)
        train(args, state, text, device, progress, checkpoints, profiler)
    checkpoints.finish()
    folder = Path(args.out) / "model"
    try:
        hf.save_pretrained(state.model, folder, tokenizer=tokenizer)
    except OSError as error:
        leave_together(f"{error}; {checkpoints.left()}")
    comm.barrier()
    done_text = f"after the last step; the weights are in {folder}: --model {folder} trains them further"
    rank_exit.on_interrupt(lambda: done_text)
    rank_exit.say(f"mean loss of the last {min(20, args.steps)} steps {progress.mean_loss(20):.4f}")
    _say_memory(device, memory)
    rank_exit.say(f"metrics.jsonl, loss.png, run.json and model/ are in {args.out}")
    if not isfinite(progress.mean_loss(1)):
        rank_exit.say("the last loss is not finite: the model writes no text")
    elif rank == 0:
        print(f"\nafter {args.steps} steps the model goes on:\n{text.continuation(folder, args.prompt)}")


def _check_before_launch(args: Namespace, config: Any, layout: Layout) -> str | None:
    """Returns the error if the ranks' programs do not fit together: the job ends with it."""
    limit = f"{args.check_limit:g} s"
    rank_exit.say(f"checking the program of {layout.world_size} ranks, {limit} at most (--no-check) ...")
    report = check(args, config, layout, train_step, args.check_limit)
    if any(problem.kind != "program" for problem in report.problems):
        return f"{report}\n(--no-check starts it all the same)"
    if report.problems:  # it could not be played
        print(f"warning: not checked, going on all the same: {report}\n", flush=True)
    elif not report.finished:
        print(f"warning: not checked to the end in {limit} (--check-limit), going on\n", flush=True)
    else:
        report.show(hint="--check")
    return None


def _make_meter(args: Namespace, config: Any, device: torch.device, memory: Any) -> metrics.StepMeter:
    """The meter of this rank; rank 0 says by which numbers it counts FLOPs."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        flops = metrics.training_flops(AutoModelForCausalLM.from_config(config), args.seq_len)
    predicted = None if memory is None else memory.stages[comm.rank("pp")].peak
    meter = metrics.StepMeter(flops=flops, peak=args.peak, device=device, predicted_memory=predicted)
    peak = "not known (--peak)" if meter.peak is None else f"{meter.peak / 1e12:g} TFLOPs per second"
    rank_exit.say(f"{flops}; peak of a device {peak}")
    return meter


def _writers_of(args: Namespace, world_size: int, done: int) -> list[Any]:
    """Writers of this rank, beside those of `Progress`: lines of other ranks than 0, TensorBoard of rank 0.

    Rank 0 removes steps that are made again from files of ranks that the run had in a larger layout.
    """
    out = Path(args.out)
    if rank := rank_exit.launcher_rank():
        return [metrics.JsonLines(out / f"metrics.rank{rank}.jsonl", after=done)]
    for file in out.glob("metrics.rank*.jsonl"):
        if int(file.stem.removeprefix("metrics.rank")) >= world_size:
            metrics.JsonLines(file, after=done).close()
    return [metrics.TensorBoard(out / "tensorboard", after=done)] if args.tensorboard else []


def _say_memory(device: torch.device, memory: Any) -> None:
    """Says the measured peak memory of a rank beside the predicted one; all ranks call it."""
    peaks = [peak for peak in comm.gather_objects(metrics.peak_memory(device)) if peak is not None]
    if peaks and memory is not None:
        of_process = " (of the process, with its imports)" if device.type == "cpu" else ""
        measured = f"{format_bytes(max(peaks))} measured{of_process}"
        rank_exit.say(f"peak memory of a rank: {measured}, {format_bytes(memory.peak)} predicted for tensors")
