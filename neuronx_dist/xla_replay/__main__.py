"""Checks the multi-device XLA program of a function of a script, on this machine.

    python -m neuronx_dist.xla_replay my_model.py:train_step --world-size 8 --tp 4 --dump programs/

The function is called on every rank without arguments, or with what `--arguments my_model.py:inputs` gives for it
(`inputs(rank)` returns a tuple of tensors and other values). It builds what it needs and returns the tensors that it
computes: losses, outputs, gradients. Printed: the collectives of the program, and the verdict. Exit status 1: the
ranks' programs differ, or replica groups fit no axis of the mesh.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..mesh import Mesh
from . import ProgramsDiffer, ReplicaGroupsWrong, WorkerError, close
from .programs import Program, check_groups, check_one_program, table
from .replaying import programs_of, replay


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m neuronx_dist.xla_replay", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("function", help="file.py:name, or package.module:name")
    parser.add_argument("--world-size", type=int, required=True, help="ranks of the job")
    for axis, what in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context"), ("ep", "expert")):
        parser.add_argument(f"--{axis}", type=int, default=1, help=f"{what}-parallel size (1)")
    parser.add_argument("--arguments", metavar="FUNCTION", help="file.py:name of a function of the rank")
    parser.add_argument("--dump", type=Path, metavar="FOLDER", help="write each rank's HLO as rank-N.hlo there")
    parser.add_argument("--execute", action="store_true", help="run it too, and print what rank 0 gets")
    args = parser.parse_args(argv)
    try:
        mesh = Mesh(args.world_size, tp=args.tp, pp=args.pp, cp=args.cp, ep=args.ep)
        function = _load(args.function)
        inputs = _load(args.arguments) if args.arguments else lambda rank: ()
        arguments = [tuple(inputs(rank)) for rank in range(mesh.world_size)]
        programs = programs_of(function, mesh, arguments)
    except (ValueError, ImportError, AttributeError, OSError, WorkerError) as error:
        print(f"xla_replay: {error}", file=sys.stderr)
        return 2
    if args.dump is not None:
        _dump(programs, args.dump)
    print(f"{mesh}: {len(programs[0].collectives)} collectives, {len(programs[0].lines)} lines of HLO\n")
    print(table(programs[0]))
    try:
        check_one_program(programs)
        check_groups(programs[0], mesh)
    except (ProgramsDiffer, ReplicaGroupsWrong) as error:
        print(f"\nWRONG: {error}")
        return 1
    print(f"\nok: {mesh.world_size} ranks have one program, and its replica groups are those of the mesh")
    if args.execute:
        for path, leaf in pytree.tree_flatten_with_path(replay(function, mesh, arguments).outputs[0])[0]:
            shown = leaf if not isinstance(leaf, torch.Tensor) or leaf.numel() <= 16 else tuple(leaf.shape)
            print(f"rank 0 {pytree.keystr(path)}: {shown}")
    return 0


def _load(name: str) -> Callable[..., Any]:
    place, _, attribute = name.rpartition(":")
    if not place:
        raise ValueError(f"{name!r} does not say which function: write file.py:function or package.module:function")
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise ValueError(f"there is no file {place}")
        sys.path.insert(0, str(path.parent))
        place = path.stem
    function: Callable[..., Any] = getattr(importlib.import_module(place), attribute)
    return function


def _dump(programs: list[Program], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for rank, program in enumerate(programs):
        (folder / f"rank-{rank}.hlo").write_text(program.text)
    print(f"the programs are in {folder}")


if __name__ == "__main__":
    status = main()
    close()
    sys.exit(status)
