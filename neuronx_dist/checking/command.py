"""`neuronx-dist check file.py:model_fn --mesh tp=4`: checks a parallel model from the command line."""

from __future__ import annotations

import argparse
import ast
from typing import Any

from ..command_line import command_parser, load_object
from ..spmd.axes import mesh_of
from .api import check

__all__ = ["arguments", "run"]

_EXAMPLE = """\
examples:

  # model.py
  import torch, torch.nn.functional as F, neuronx_dist as nxd

  def model_fn():
      return torch.nn.Sequential(nxd.ColumnParallelLinear(8, 32, gather_output=False),
                                 nxd.RowParallelLinear(32, 8, input_is_parallel=True))

  def example_inputs():
      return torch.zeros(4, 8)

  def step(model, optimizer, x):
      model(x).square().mean().backward()
      nxd.reduce_gradients(model)
      optimizer.step()

  $ neuronx-dist check model.py:model_fn --mesh dp=2,tp=4 --step step
  check ok: 8 ranks, level G: gradients and collectives agree; 1 trusted declaration (--details lists them)

  $ neuronx-dist check model.py:model_fn --mesh pp=2,tp=4 --option layers=8 --numeric
  $ neuronx-dist check model.py:model_fn --mesh dp=64,tp=8 --time-limit 60 --json      # for CI

The exit code is 0 if all is well, 1 if there is a problem, 2 if the command cannot be understood.
"""


def arguments() -> argparse.ArgumentParser:
    """Builds the parser of the arguments of `check`."""
    parser = command_parser(
        "Plays a training step of every rank that can differ, without processes, weights or values.", _EXAMPLE
    )
    add = parser.add_argument
    add("model", metavar="file.py:model_fn", help="a function that builds the model of a rank")
    add("--mesh", required=True, metavar="pp=2,dp=2,tp=4", help="sizes of the axes; others are 1")
    add(
        "--inputs",
        metavar="[file.py:]name",
        help="example inputs of one rank: a function or a value; default: example_inputs of the model's file",
    )
    add("--step", metavar="[file.py:]name", help="step(model, optimizer, inputs): a training step")
    add("--optimizer", metavar="[file.py:]name", help="optimizer(params); default: SGD")
    add("--option", action="append", default=[], metavar="name=value", help="an argument of model_fn; may be repeated")
    add("--level", choices=("G", "L", "none"), default="G", help="what to prove of the types (G)")
    add("--numeric", action="store_true", help="run it with values too; for toy sizes")
    add("--time-limit", type=float, metavar="SECONDS", help="stop after so long, without a verdict")
    add("--details", "--verbose", action="store_true", help="list what was assumed, trusted and left out, with lines")
    add("--json", action="store_true", help="print the report as JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    """Checks what `args` name; returns the exit code.

    Raises:
        argparse.ArgumentError: the command names something that is not there.
    """
    file = args.model.rpartition(":")[0]
    model_fn = load_object(args.model)
    inputs = load_object(args.inputs or "example_inputs", file, "" if args.inputs else "; add it, or give --inputs")
    try:
        mesh = _sizes(args.mesh)
        mesh_of(mesh)
    except ValueError as error:
        raise _usage_error(f"--mesh {args.mesh}: {error}") from None
    report = check(
        model_fn,
        inputs,
        mesh,
        options=dict(_option(text) for text in args.option),
        step=load_object(args.step, file) if args.step else None,
        optimizer=load_object(args.optimizer, file) if args.optimizer else None,
        level=None if args.level == "none" else args.level,
        numeric=args.numeric,
        time_limit=args.time_limit,
    )
    if args.json:
        print(report.to_json(indent=2))
    else:
        report.show(details=args.details, hint="--details", numeric="--numeric")
    return 0 if report.ok else 1


def _usage_error(text: str) -> argparse.ArgumentError:
    return argparse.ArgumentError(None, text)


def _sizes(text: str) -> dict[str, int]:
    """`pp=2,dp=2,tp=4` as a dict."""
    sizes = {}
    for part in text.split(","):
        axis, equals, size = part.partition("=")
        if not equals or not size.strip().isdigit():
            raise _usage_error(f"--mesh {text}: {part!r} is not axis=size, such as tp=4")
        sizes[axis.strip()] = int(size)
    return sizes


def _option(text: str) -> tuple[str, Any]:
    """`name=value`; a value that is no Python literal is a string."""
    name, equals, value = text.partition("=")
    if not equals:
        raise _usage_error(f"--option {text}: write name=value")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
