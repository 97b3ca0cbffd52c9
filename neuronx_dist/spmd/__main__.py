"""Checks a parallel model from the command line: `python -m neuronx_dist.spmd check file.py:model_fn --mesh tp=4`."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

_EXAMPLE = """\
example:

  # model.py
  import torch, torch.nn.functional as F, neuronx_dist as nxd

  def model_fn():
      return torch.nn.Sequential(nxd.ColumnParallelLinear(8, 32, gather_output=False),
                                 nxd.RowParallelLinear(32, 8, input_is_parallel=True))

  def example_inputs():
      return torch.zeros(4, 8)

  def step(model, optimizer, x):
      model(x).square().sum().backward()
      nxd.reduce_gradients(model)
      optimizer.step()

  $ python -m neuronx_dist.spmd check model.py:model_fn --mesh dp=2,tp=4 --step step
  ok: 27 operators, 2 collectives, 8 ranks with one program; ...

The exit code is 0 if all is well, 1 if there is a problem, 2 if the command cannot be understood.
"""


class _Usage(Exception):
    """The command names something that is not there."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m neuronx_dist.spmd", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser(
        "check",
        help="play a training step of every rank in this process, and compare them",
        description="Plays a training step of every rank that can differ, without processes, weights or values.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("model", metavar="file.py:model_fn", help="a function that builds the model of a rank")
    check.add_argument("--mesh", required=True, metavar="pp=2,dp=2,tp=4", help="sizes of the axes; others are 1")
    check.add_argument(
        "--inputs",
        metavar="[file.py:]name",
        help="example inputs of one rank: a function or a value; default: example_inputs of the model's file",
    )
    check.add_argument("--step", metavar="[file.py:]name", help="step(model, optimizer, inputs): a whole training step")
    check.add_argument("--optimizer", metavar="[file.py:]name", help="optimizer(params); default: SGD")
    check.add_argument(
        "--option", action="append", default=[], metavar="name=value", help="an argument of model_fn; may be repeated"
    )
    check.add_argument("--level", choices=("G", "L", "none"), default="G", help="what to prove of the types (G)")
    check.add_argument("--numeric", action="store_true", help="run it with values too; for toy sizes")
    check.add_argument("--time-limit", type=float, metavar="SECONDS", help="stop after so long, without a verdict")
    check.add_argument("--json", action="store_true", help="print the report as JSON")
    try:
        args = parser.parse_args(argv)
    except SystemExit as ended:  # help is 0, a mistake 2
        return int(ended.code or 0)
    try:
        return _check(args)
    except _Usage as error:
        print(f"{parser.prog} check: {error}", file=sys.stderr)
        return 2


def _check(args: argparse.Namespace) -> int:
    from ..checking import check
    from .axes import mesh_of

    file = args.model.rpartition(":")[0]
    model_fn = _load(args.model, "")
    inputs = _load(args.inputs or "example_inputs", file)
    try:
        mesh = _sizes(args.mesh)
        mesh_of(mesh)
    except ValueError as error:
        raise _Usage(f"--mesh {args.mesh}: {error}") from None
    report = check(
        model_fn,
        inputs,
        mesh,
        options=dict(_option(text) for text in args.option),
        step=_load(args.step, file) if args.step else None,
        optimizer=_load(args.optimizer, file) if args.optimizer else None,
        level=None if args.level == "none" else args.level,
        numeric=args.numeric,
        time_limit=args.time_limit,
    )
    print(report.to_json(indent=2) if args.json else report)
    return 0 if report.ok else 1


def _load(name: str, file: str) -> Any:
    """What `file.py:name` or `package.module:name` is; a bare `name` is looked up in `file`."""
    place, _, attribute = name.rpartition(":")
    place = place or file
    if not place:
        raise _Usage(f"{name!r} names no file: write file.py:function")
    module = _module(place)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise _Usage(f"{place} has no {attribute!r}; it has {_listed(module)}")
        found = getattr(found, part)
    return found


_modules: dict[str, Any] = {}


def _module(place: str) -> Any:
    if place in _modules:
        return _modules[place]
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise _Usage(f"there is no file {place} (seen from {Path.cwd()})")
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))  # as Python does for a script: it may import its neighbours
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise _Usage(f"cannot import {place}: {error}") from None
    _modules[place] = module
    return module


def _listed(module: Any) -> str:
    own = [n for n, x in vars(module).items() if callable(x) and getattr(x, "__module__", "") == module.__name__]
    return ", ".join(own) or "no functions"


def _sizes(text: str) -> dict[str, int]:
    """`pp=2,dp=2,tp=4` as a dict."""
    sizes = {}
    for part in text.split(","):
        axis, equals, size = part.partition("=")
        if not equals or not size.strip().isdigit():
            raise _Usage(f"--mesh {text}: {part!r} is not axis=size, such as tp=4")
        sizes[axis.strip()] = int(size)
    return sizes


def _option(text: str) -> tuple[str, Any]:
    """`name=value`; a value that is no Python literal is a string."""
    name, equals, value = text.partition("=")
    if not equals:
        raise _Usage(f"--option {text}: write name=value")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


if __name__ == "__main__":
    sys.exit(main())
