"""`neuronx-dist convert`: weights from one format to another."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from ...command_line import command_parser, count
from ..errors import CheckpointError
from ..nxd.parameter_layout import FUSED
from .weights import FORMATS, convert

__all__ = ["arguments", "progress_bar", "run"]

_EXAMPLE = """\
examples:

  $ neuronx-dist convert runs/llama out --config models/llama          # the newest checkpoint, for transformers
  $ neuronx-dist convert models/llama runs/start                       # a folder of Hugging Face's, for load_checkpoint
  $ neuronx-dist convert models/llama nxd --to nxd --tp 8 --pp 4       # for NeuronX Distributed
  $ neuronx-dist convert nxd out --config models/llama                 # and what it wrote, back
  $ neuronx-dist convert model.gguf out                                # a GGUF file and its tokenizer, for transformers

  $ neuronx-dist convert runs/llama nxd --to nxd --tp 8 --dp 4 --optimizer --config models/llama --fused weight_q --xser
  $ neuronx-dist convert nxd runs/start --to ours --optimizer --config models/llama

A tensor is in memory at a time. Folders of save_checkpoint and NeuronX Distributed load into any layout as they are.
"""


def arguments() -> argparse.ArgumentParser:
    """The argument parser of `convert`."""
    parser = command_parser(
        "Converts weights: folders of Hugging Face's, of save_checkpoint and of NeuronX Distributed.", _EXAMPLE
    )
    add = parser.add_argument
    add("source", metavar="SRC", help="a folder of any of these formats, of one tag of it, or a weight file")
    add("target", metavar="DST", help="a folder that is new or empty")
    add("--to", choices=FORMATS, help="the format to write; default: ours of a folder of safetensors, else hf")
    add("--tag", help="the checkpoint to read (default: the newest), or to write (default: as read, or converted)")
    add("--tp", type=count, default=1, metavar="N", help="tensor-parallel ranks, of nxd (1)")
    add("--pp", type=count, default=1, metavar="N", help="pipeline stages, of nxd (1)")
    add("--dp", type=count, default=1, metavar="N", help="data-parallel ranks that divide ZeRO-1's state, of nxd (1)")
    add("--optimizer", action="store_true", help="the optimizer's state too, between ours and nxd")
    add("--groups", nargs="+", default=(), metavar="REGEX", help="of nxd: names in each parameter group but the first")
    add("--fused", choices=FUSED, help="of nxd: gate_up_proj, and qkv_proj with three weights or with one")
    add("--kv-size-multiplier", type=count, default=1, metavar="N", help="with --fused: repetitions of key/value heads")
    add("--hw-backend", choices=("trn1", "trn2"), default="trn1", help="with --fused: the order of the repetitions")
    add("--xser", action="store_true", help="of nxd: as use_xser writes")
    add("--config", metavar="FOLDER", help="with the model's config.json; default: SRC, if it has one")
    return parser


def run(args: argparse.Namespace) -> int:
    """Converts; returns 0, or 1 with a line that says what is wrong."""
    report = progress_bar(args.target)
    try:
        to = convert(
            args.source,
            args.target,
            to=args.to,
            tag=args.tag,
            tp=args.tp,
            pp=args.pp,
            dp=args.dp,
            optimizer=args.optimizer,
            groups=args.groups,
            fused=args.fused,
            kv_size_multiplier=args.kv_size_multiplier,
            hw_backend=args.hw_backend,
            xser=args.xser,
            config=args.config,
            progress=report,
        )
    except (CheckpointError, ValueError, OSError) as error:
        print(f"neuronx-dist convert: {error}", file=sys.stderr)
        return 1
    print(f"{args.target}: written as {to}")
    return 0


def progress_bar(target: str) -> Callable[[int, int], None]:
    """Returns a function that draws a progress bar on a terminal, and prints nothing elsewhere."""
    drawn = 0.0

    def report(done: int, total: int) -> None:
        nonlocal drawn
        if not sys.stderr.isatty() or (done < total and time.monotonic() - drawn < 0.1):
            return
        drawn = time.monotonic()
        filled = 30 * done // total
        bar = "#" * filled + "-" * (30 - filled)
        print(f"\r{target} [{bar}] {done}/{total} tensors", end="\n" if done == total else "", file=sys.stderr)

    return report
