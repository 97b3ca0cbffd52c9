"""The flags of `neuronx-dist train`, in groups: defaults, refusals, sizes of the model, `run.json` as flags again."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from math import lcm
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..metrics import PEAKS, peak_flops
from ..model_shape import ModelShape
from ..pipeline.schedule.selection import NAMES as SCHEDULES
from ..planning.layout import Layout, parse_bytes

__all__ = [
    "check_flags",
    "config_file",
    "default_sizes",
    "layout_of",
    "model_shape",
    "parser",
    "processes_of",
    "recomputation_of",
    "record_of",
]

_OF_ONE_RUN = ("out", "resume", "config", "check", "verify", "profile", "nproc", "auto")


class _Parser(argparse.ArgumentParser):
    """A parser that puts the flags of --config before those of the command line, and derives defaults from both.

    The words of the command line are the attribute `words` of the result.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words: Sequence[str] = sys.argv[1:] if args is None else list(args)
        flags, rest = super().parse_known_args(words, namespace)
        if flags.config is not None:
            try:
                earlier = _words_of(flags.config, flags)
            except FileNotFoundError:
                self.error(f"--config {flags.config}: no such file; give the run.json of an earlier run's folder")
            except (OSError, ValueError) as error:
                self.error(f"--config {flags.config}: {error}")
            flags, rest = super().parse_known_args([*earlier, *words])
        for name, value in _derived(vars(flags)).items():
            if getattr(flags, name) is None:
                setattr(flags, name, value)
        flags.words = words
        return flags, rest


def parser(description: str, examples: str) -> argparse.ArgumentParser:
    """Returns the parser of all flags; without --out a run writes to a folder under runs/ that does not exist yet."""
    top = _Parser(
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [flags]",
    )
    group: Any = top

    def flag(name: str, default: object = None, text: str = "", **options: object) -> None:
        if default is not None:
            options.update(type=type(default), default=default)
            text += f" ({default})"
        if "choices" not in options:
            options.setdefault("metavar", "X" if options.get("type") is float else "N")
        group.add_argument(name, help=text, **options)

    def switch(name: str, text: str) -> None:
        group.add_argument(name, help=text, action="store_true")

    group = top.add_argument_group("ranks and layout")
    flag(
        "--nproc",
        None,
        "ranks to start on this host: a number, or auto: one for each accelerator; default: as many as the degrees "
        "below take. Ranks of torchrun, srun, mpirun or neuronx-dist run start no others",
        type=_number_or_auto,
    )
    switch("--auto", "the layout that `neuronx-dist plan` predicts to be the fastest; flags that are given stay")
    flag("--tp", 1, "tensor-parallel size")
    flag("--pp", 1, "pipeline-parallel size; data parallelism takes the rest of the ranks")
    flag("--cp", 1, "context-parallel size: ranks among which each sequence is divided, in zig-zag order")
    flag("--ep", 1, "expert-parallel size, a part of the data-parallel one: each rank has whole experts")
    switch("--sequence-parallel", "between tp blocks, split activations along the sequence")
    switch("--zero1", "split the optimizer's state over data-parallel ranks")
    switch("--overlap", "with --zero1: reduce gradients in backward, await updated weights in the next forward")
    flag("--microbatches", 4, "microbatches of a step, on each data-parallel rank")
    flag("--schedule", None, "of the pipeline; default: 1F1B, with several chunks interleaved", choices=SCHEDULES)
    flag("--virtual-pipeline-size", 1, "pieces of the model (chunks) on each pipeline stage")
    switch("--pad-heads", "add zero heads where tp does not divide the heads")
    switch("--pad-vocab", "add zero rows where tp does not divide the vocabulary")
    flag(
        "--device",
        "auto",
        "auto: this machine's accelerator, or the cpu; or a type, as in docs/devices.md",
        metavar="TYPE",
    )

    group = top.add_argument_group("model and text")
    folder = "Hugging Face folder: its weights if it has any, else its config alone; default: a small Llama"
    flag("--model", None, folder, metavar="FOLDER")
    flag("--experts", 0, "experts of the default model, of which each token takes two; 0: a Llama without")
    flag("--dtype", "float32", "bfloat16: bf16 parameters with fp32 masters", choices=["float32", "bfloat16"])
    flag("--data", None, "text files or folders; default: Python's library sources", nargs="+", metavar="PATH")
    flag("--data-limit", 4.0, "MiB of text to read; 0 reads all")
    flag("--seq-len", 128, "tokens of a sequence")
    flag("--seed", 0, "of weights and batches")

    group = top.add_argument_group("optimization")
    flag("--steps", 200, "optimizer steps")
    flag("--global-batch", 16, "sequences of a step, over all ranks")
    flag("--optimizer", "adamw", "muon: Muon for matrices, AdamW for the rest", choices=["adamw", "muon"])
    flag("--lr", 2e-3, "peak learning rate; along a cosine it decays to --min-lr")
    flag("--min-lr", None, "learning rate after the last step; default: a tenth of --lr", type=float)
    flag("--warmup", 20, "steps of linear warm-up")
    flag("--weight-decay", 0.1, "of matrices")
    flag("--grad-clip", 1.0, "clip the gradient norm at this; 0 does not clip")
    switch("--allow-nonfinite", "train on after a loss or a gradient norm that is NaN or infinite")

    group = top.add_argument_group("memory")
    switch("--fused-loss", "compute the loss from the last hidden states, without the logits of all tokens in memory")
    flag(
        "--recompute",
        "none",
        "activations that backward computes again: of full layers (a third more computation), of attention functions, "
        "of norms, or auto: the fastest of these that fit --memory",
        choices=["none", "full", "attention", "norms", "auto"],
    )
    flag("--memory", None, "of a rank, for --recompute auto: 24 GB or 24 GiB", metavar="BYTES")
    switch("--offload", "with --recompute: inputs of recomputed parts lie in the host's memory until backward")

    group = top.add_argument_group("folder and checkpoints")
    flag(
        "--out",
        None,
        "folder to write, which must not exist without --resume; default: the first free one of runs/llama, "
        "runs/llama-2, ...",
        metavar="FOLDER",
    )
    flag("--save-every", 0, "steps between checkpoints; 0: only when the run is interrupted")
    flag("--keep", 3, "checkpoints that are kept; 0 keeps all")
    switch("--async-save", "write checkpoints in the background")
    flag(
        "--resume",
        None,
        "go on from a checkpoint of --out, in any layout: the newest, or a TAG such as step_100; auto: newest, "
        "or a new run where there is none, which is what a restart by --max-restarts does",
        nargs="?",
        const="",
        metavar="TAG",
    )
    flag(
        "--config", None, "flags of an earlier run, by its run.json; those of the command line go first", metavar="FILE"
    )

    group = top.add_argument_group("figures")
    flag("--log-every", 10, "steps between lines where there is no terminal")
    flag("--eval-every", None, "steps between held-out losses; default: a fifth of all; 0: none", type=int)
    switch("--tensorboard", "write the metrics to --out/tensorboard too, for TensorBoard")
    flag(
        "--peak",
        None,
        "FLOPs per second of a device, or its name (H100, trn2), for the MFU; default: that of this machine's",
        type=_number_or_name,
        metavar="FLOPS",
    )
    flag("--profile", 0, "steps that torch.profiler records on every rank, from the third on: --out/profile.rank0.json")

    flag(
        "--prompt",
        None,
        "text that the model goes on with by its likeliest tokens, after the training and, if it begins with weights, "
        "before; default: a random text after the training",
        metavar="TEXT",
    )

    group = top.add_argument_group("instead of training, and before it")
    flag(
        "--check",
        None,
        "check the program of all ranks in this process, and do nothing else: of PROCESSES ranks, or of tp x pp x cp",
        type=int,
        nargs="?",
        const=0,
        metavar="PROCESSES",
    )
    switch("--verify", "train several layouts, at most 20 steps, and print their losses beside those of one process")
    flag("--check-limit", 30.0, "seconds that the same check may take before every launch; then it is left")
    switch("--no-check", "do not check before the launch")
    return top


def processes_of(args: argparse.Namespace, accelerators: int) -> int:
    """Returns the number of ranks to start on a host with so many accelerators, where no launcher has started any.

    Raises:
        ValueError: --nproc auto without an accelerator.
    """
    if args.nproc == "auto" and not accelerators:
        raise ValueError("--nproc auto counts accelerators, and torch sees none on this host: give a number")
    if args.auto and args.nproc is None and not accelerators:
        raise ValueError("--auto chooses a layout for a number of ranks, and torch sees no accelerator: give --nproc")
    if args.auto and args.nproc is None:
        return accelerators
    least = lcm(args.tp * args.pp * args.cp, args.tp * args.pp * args.ep)
    return int({"auto": accelerators, None: least}.get(args.nproc, args.nproc))


def _number_or_auto(text: str) -> int | str:
    if text != "auto" and not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, or auto, got {text}")
    return text if text == "auto" else int(text)


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
    try:
        record = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"no run.json: it is not JSON ({error})") from None
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
    least |= dict.fromkeys(("tp", "pp", "cp", "ep", "microbatches", "virtual_pipeline_size", "global_batch"), 1)
    for name, value in least.items():
        if getattr(args, name) < value:
            why = ": each token is predicted from those before it" if name == "seq_len" else ""
            raise ValueError(f"--{name.replace('_', '-')} must be at least {value}, not {getattr(args, name)}{why}")
    if args.schedule is not None and args.pp == 1 and not (args.auto or args.verify):
        raise ValueError(
            f"--schedule {args.schedule} is of a pipeline, and --pp is 1: give --pp 2 or more, or leave it out"
        )
    if args.sequence_parallel and args.tp == 1 and not (args.auto or args.verify):
        raise ValueError("--sequence-parallel shards along tp, and --tp is 1: give --tp 2 or more, or leave it out")
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


def default_sizes(args: argparse.Namespace) -> dict[str, Any]:
    """Sizes of the model without --model: a byte-level Llama, or Mixtral with --experts."""
    sizes = dict(hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8)
    if args.experts:
        sizes |= dict(intermediate_size=256, num_local_experts=args.experts, num_experts_per_tok=2)
    return {**sizes, "num_key_value_heads": 4, "max_position_embeddings": 1024, "vocab_size": 256}


def model_shape(args: argparse.Namespace) -> ModelShape:
    """Sizes of the model, read without transformers, whose import takes seconds.

    Raises:
        ValueError: the folder of --model has no config.json.
    """
    if args.model is None:
        return ModelShape.of(SimpleNamespace(**default_sizes(args)))
    config = json.loads(config_file(args).read_text())
    return ModelShape.of(SimpleNamespace(**config.get("text_config", config)))


def config_file(args: argparse.Namespace) -> Path:
    """Returns the config.json in the folder of --model.

    Raises:
        ValueError: there is none.
    """
    file = Path(args.model) / "config.json"
    if not file.is_file():
        gguf = ", which `neuronx-dist convert` writes from a GGUF file" if args.model.endswith(".gguf") else ""
        raise ValueError(f"--model {args.model} has no config.json: give the folder of a Hugging Face model{gguf}")
    return file


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
