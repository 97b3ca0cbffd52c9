"""The flags of train_llama.py."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from neuronx_dist.metrics import PEAKS, peak_flops
from neuronx_dist.pipeline.schedule.selection import NAMES as SCHEDULES
from neuronx_dist.planning.layout import Layout
from neuronx_dist.planning.recompute import parse_bytes

_OF_ONE_RUN = ("out", "resume", "config", "check", "verify", "profile")


def arguments(description: str | None, argv: list[str] | None = None) -> argparse.Namespace:
    """Parsed flags; without --out, a folder under runs/ that does not exist yet."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def flag(name: str, default: object = None, text: str = "", **options: object) -> None:
        if default is not None:
            options.update(type=type(default), default=default)
            text += f" ({default})"
        parser.add_argument(name, help=text, **options)  # type: ignore[arg-type]

    def switch(name: str, text: str) -> None:
        parser.add_argument(name, help=text, action="store_true")

    flag(
        "--model", None, "Hugging Face folder: its weights if it has any, else its config alone; default: a small Llama"
    )
    flag("--tp", 1, "tensor-parallel size")
    flag("--pp", 1, "pipeline-parallel size; data parallelism takes the rest of the processes")
    flag("--cp", 1, "context-parallel size: ranks among which each sequence is divided, in zig-zag order")
    flag("--ep", 1, "expert-parallel size, a part of the data-parallel one: each rank has whole experts")
    flag("--experts", 0, "experts of the default model, of which each token takes two; 0: a Llama without")
    flag("--schedule", None, "of the pipeline; default: 1F1B, with several chunks interleaved", choices=SCHEDULES)
    flag("--virtual-pipeline-size", 1, "pieces of the model (chunks) on each pipeline stage")
    switch("--sequence-parallel", "between tp blocks, split activations along the sequence")
    switch("--zero1", "split the optimizer's state over data-parallel ranks")
    switch("--overlap", "with --zero1: reduce gradients in backward, await updated weights in the next forward")
    switch("--pad-heads", "add zero heads where tp does not divide the heads")
    switch("--pad-vocab", "add zero rows where tp does not divide the vocabulary")
    switch("--fused-loss", "compute the loss from the last hidden states, without the logits of all tokens in memory")
    flag(
        "--recompute",
        "none",
        "activations that backward computes again: of full layers (a third more computation), of attention functions, "
        "of norms, or auto: the fastest of these that fit --memory",
        choices=["none", "full", "attention", "norms", "auto"],
    )
    flag("--memory", None, "of a rank, for --recompute auto: 24 GB or 24 GiB")
    switch("--offload", "with --recompute: inputs of recomputed parts lie in the host's memory until backward")
    flag("--microbatches", 4, "microbatches of a step, on each data-parallel rank")
    flag("--global-batch", 16, "sequences of a step, over all ranks")
    flag("--seq-len", 128, "tokens of a sequence")
    flag("--steps", 200, "optimizer steps")
    flag("--lr", 2e-3, "peak learning rate; along a cosine it decays to --min-lr")
    parser.add_argument("--min-lr", type=float, help="learning rate after the last step; default: a tenth of --lr")
    flag("--warmup", 20, "steps of linear warm-up")
    flag("--optimizer", "adamw", "muon: Muon for matrices, AdamW for the rest", choices=["adamw", "muon"])
    flag("--weight-decay", 0.1, "of matrices")
    flag("--grad-clip", 1.0, "clip the gradient norm at this; 0 does not clip")
    switch("--allow-nonfinite", "train on after a loss or a gradient norm that is NaN or infinite")
    flag("--dtype", "float32", "bfloat16: bf16 parameters with fp32 masters", choices=["float32", "bfloat16"])
    flag("--seed", 0, "of weights and batches")
    flag("--device", "auto", "auto: this machine's accelerator, or the cpu; or a device type, as in docs/devices.md")
    flag("--data", None, "text files or folders; default: Python's library sources", nargs="+", metavar="PATH")
    flag("--data-limit", 4.0, "MiB of text to read; 0 reads all")
    flag(
        "--out",
        None,
        "folder to write, which must not exist without --resume; default: the first free one of runs/llama, "
        "runs/llama-2, ...",
    )
    flag("--save-every", 0, "steps between checkpoints; 0: only when the run is interrupted")
    flag("--keep", 3, "checkpoints that are kept; 0 keeps all")
    switch("--async-save", "write checkpoints in the background")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="TAG",
        help="go on from a checkpoint of --out, in any layout: the newest, or a TAG such as step_100; auto: newest, "
        "or a new run where there is none, which is what a restart by --max-restarts does",
    )
    parser.add_argument(
        "--eval-every", type=int, help="steps between held-out losses; default: a fifth of all; 0: none"
    )
    flag("--log-every", 10, "steps between lines where there is no terminal")
    switch("--verify", "train several layouts, at most 20 steps, and print their losses beside those of one process")
    parser.add_argument(
        "--check",
        type=int,
        nargs="?",
        const=0,
        metavar="PROCESSES",
        help="check the program of all ranks in this process, and do nothing else; without torchrun for so many "
        "processes (tp x pp)",
    )
    switch("--tensorboard", "write the metrics to --out/tensorboard too, for TensorBoard")
    peak_help = "FLOPs per second of a device, or its name (H100, trn2), for the MFU; default: that of this machine's"
    parser.add_argument("--peak", type=_number_or_name, help=peak_help)
    flag("--profile", 0, "steps that torch.profiler records on every rank, from the third on: --out/profile.rank0.json")
    parser.add_argument(
        "--config", metavar="FILE", help="flags of an earlier run, by its run.json; those of the command line go first"
    )
    flag("--check-limit", 30.0, "seconds that the same check may take before every launch; then it is left")
    switch("--no-check", "do not check before the launch")
    args = parser.parse_args(argv)
    if args.config is not None:
        try:
            earlier = _words_of(args.config, args)
        except (OSError, ValueError) as error:
            parser.error(f"--config {args.config}: {error}")
        args = parser.parse_args([*earlier, *(sys.argv[1:] if argv is None else argv)])
    for name, value in _derived(vars(args)).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def _derived(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that follow from other flags."""
    return {"min_lr": flags["lr"] / 10, "eval_every": max(1, flags["steps"] // 5)}


def _number_or_name(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _words_of(path: str, known: argparse.Namespace) -> list[str]:
    """Words of a command line with the flags of a run.json, without those that name its folder or what else was done.

    Raises:
        ValueError: the file has no flags, or some that do not exist.
    """
    record = json.loads(Path(path).read_text())
    flags = record.get("flags") if isinstance(record, dict) else None
    if not isinstance(flags, dict):
        raise ValueError("no run.json: it has no object `flags`")
    unknown = [f"--{name.replace('_', '-')}" for name in flags if name not in vars(known)]
    if unknown:
        raise ValueError(f"this version has no {', '.join(unknown)}")
    of_others = _derived({**vars(known), **flags})  # they follow from the flags of the new run
    words: list[str] = []
    for name, value in flags.items():
        if value is None or value is False or name in _OF_ONE_RUN or value == of_others.get(name):
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words


def check_flags(args: argparse.Namespace) -> None:
    """Refuses flags that no layout knows of.

    Raises:
        ValueError: a number is too small, or a flag needs another one; the message names the flag.
    """
    least = {"steps": 1, "seq_len": 2, "warmup": 0, "grad_clip": 0, "log_every": 1, "data_limit": 0, "check_limit": 0}
    least |= {"save_every": 0, "keep": 0, "eval_every": 0, "min_lr": 0, "experts": 0, "profile": 0}
    for name, value in least.items():
        if getattr(args, name) < value:
            why = ": each token is predicted from those before it" if name == "seq_len" else ""
            raise ValueError(f"--{name.replace('_', '-')} must be at least {value}, not {getattr(args, name)}{why}")
    if isinstance(args.peak, str) and peak_flops(args.peak) is None:
        raise ValueError(f"--peak {args.peak} is neither a number nor one of {', '.join(PEAKS)}")
    if isinstance(args.peak, float) and not args.peak > 0:
        raise ValueError(f"--peak must be above 0, not {args.peak:g}")
    if args.profile and args.profile + 2 > args.steps:
        raise ValueError(f"--profile {args.profile} begins at step 3, and needs --steps {args.profile + 2} or more")
    if args.resume is not None and args.out is None:
        raise ValueError("--resume needs --out, the folder of the run that goes on")
    if args.overlap and not args.zero1:
        raise ValueError("--overlap needs --zero1, whose collectives it overlaps with backward and forward")
    if (args.recompute == "auto") != (args.memory is not None):
        raise ValueError("--recompute auto and --memory need each other, as in --recompute auto --memory '24 GB'")
    if args.memory is not None:
        parse_bytes(args.memory)
    if args.offload and args.recompute == "none":
        raise ValueError("--offload needs --recompute, whose inputs it moves to the host")
    if args.lr <= 0:
        raise ValueError(f"--lr must be above 0, not {args.lr:g}")
    if args.min_lr > args.lr:
        raise ValueError(f"--min-lr must be at most --lr, {args.lr:g}, not {args.min_lr:g}")


def record_of(args: argparse.Namespace, layout: Layout, launches: list[Any]) -> dict[str, Any]:
    """Record of a run for `run.json`: the command, its launch, all flags, the layout, versions."""
    packages = ("neuronx_dist", "torch", "transformers", "numpy")
    versions = {name: version(name) for name in packages if find_spec(name) is not None}
    return {
        "command": shlex.join(sys.argv),
        "launches": launches,
        "flags": vars(args),
        "layout": {**dataclasses.asdict(layout), "dp": layout.dp},
        "versions": {"python": platform.python_version(), **versions},
    }


def layout_of(args: argparse.Namespace, world_size: int) -> Layout:
    """The layout that these flags ask for on so many processes."""
    return Layout(
        world_size,
        tp=args.tp,
        pp=args.pp,
        cp=args.cp,
        ep=args.ep,
        sequence_parallel=args.sequence_parallel,
        zero1=args.zero1,
        pad_heads=args.pad_heads,
        pad_vocab=args.pad_vocab,
        num_microbatches=args.microbatches,
        global_batch=args.global_batch,
        seq_len=args.seq_len,
        dtype=args.dtype,
        schedule=args.schedule,
        virtual_pipeline_size=args.virtual_pipeline_size,
    )


def recomputation_of(args: argparse.Namespace) -> dict[str, Any] | None:
    """Arguments of `nxd.recompute`; None: nothing is recomputed."""
    if args.recompute == "none":
        return None
    parts = {"memory": args.memory} if args.recompute == "auto" else {"what": args.recompute}
    return {**parts, "offload": args.offload}
