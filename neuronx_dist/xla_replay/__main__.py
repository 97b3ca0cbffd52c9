"""Checks the multi-device XLA programs of a function of a script, on this machine.

    python -m neuronx_dist.xla_replay my_model.py:train_step --world-size 8 --tp 4 --dump programs/

The function is called on every rank without arguments, or with what `--arguments my_model.py:inputs` gives for it
(`inputs(rank)` returns a tuple of tensors, which come on the XLA device, and other values). It builds what it needs on
that device, without init_distributed and initialize_model_parallel: the mesh is that of the options. It returns the
tensors that it computes: losses, outputs, gradients; what is not returned is not computed.

What it computes is one program, cut where it calls torch_xla.sync() and where pipeline stages exchange something.
Printed: the collectives of each program with the lines that ask for them, and the verdict. Exit status 1: ranks that
run a program together have different ones, or replica groups fit no axis of the mesh; 2: the function could not
be lowered.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..mesh import Mesh
from ..topology import LINEAR, TOPOLOGIES
from ..torch_internals.tensors import pytree
from . import ProgramsDiffer, ReplicaGroupsWrong, WorkerError, close
from .programs import Program, table
from .replaying import ran_together, replay, traces_of
from .traces import RankTrace


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m neuronx_dist.xla_replay", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("function", help="file.py:name, or package.module:name")
    parser.add_argument("--world-size", type=int, required=True, help="ranks of the job")
    for axis, what in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context"), ("ep", "expert")):
        parser.add_argument(f"--{axis}", type=int, default=1, help=f"{what}-parallel size (1)")
    parser.add_argument("--topology", choices=TOPOLOGIES, default=LINEAR, help="order of the ranks (linear)")
    parser.add_argument("--arguments", metavar="FUNCTION", help="file.py:name of a function of the rank")
    parser.add_argument("--dump", type=Path, metavar="FOLDER", help="write each rank's programs there, as rank-N-K.hlo")
    parser.add_argument("--execute", action="store_true", help="run it too, and print what rank 0 gets")
    args = parser.parse_args(argv)
    try:
        mesh = Mesh(args.world_size, tp=args.tp, pp=args.pp, cp=args.cp, ep=args.ep, topology=args.topology)
        function = _load(args.function)
        inputs = _load(args.arguments) if args.arguments else lambda rank: ()
        arguments = [tuple(inputs(rank)) for rank in range(mesh.world_size)]
        traces = traces_of(function, mesh, arguments)
    except Exception as error:  # of the script, too
        print(f"xla_replay: {type(error).__name__}: {error}", file=sys.stderr)
        if isinstance(error.__cause__, WorkerError):
            print(f"\n{error.__cause__}", file=sys.stderr)
        return 2
    if not any(trace.steps[0].launches for trace in traces):
        print("xla_replay: nothing was computed: return the tensors that count (losses, gradients)", file=sys.stderr)
        return 2
    if args.dump is not None:
        _dump(traces, args.dump)
    try:
        programs, runs = ran_together(traces, mesh)
    except (ProgramsDiffer, ReplicaGroupsWrong) as error:
        print(f"{mesh}: the programs of rank 0\n")
        for launch in traces[0].steps[0].launches:
            print(_described(launch.program), end="\n\n")
        print(f"WRONG: {error}")
        return 1
    print(f"{mesh}: {len(programs)} program{'s' * (len(programs) != 1)}, run {len(runs)} times in all\n")
    for number, program in enumerate(programs):
        ranks = sorted({run.ranks for run in runs if run.program == number})
        times = sum(run.program == number for run in runs)
        by = " and by ".join("-".join(map(str, together)) for together in ranks)
        print(f"program {number}, run {times} time{'s' * (times != 1)}, by ranks {by}: {_described(program)}\n")
    print("ok: ranks that run a program together have the same one, and its replica groups are those of the mesh")
    if args.execute:
        for path, leaf in pytree.tree_flatten_with_path(replay(function, mesh, arguments).outputs[0])[0]:
            shown = leaf if not isinstance(leaf, torch.Tensor) or leaf.numel() <= 16 else tuple(leaf.shape)
            print(f"rank 0 {pytree.keystr(path)}: {shown}")
    return 0


def _load(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.rpartition(":")
    if not module_name:
        raise ValueError(f"{name!r} names no function: write file.py:function or package.module:function")
    if module_name.endswith(".py"):
        path = Path(module_name).resolve()
        if not path.is_file():
            raise ValueError(f"there is no file {module_name}")
        sys.path.insert(0, str(path.parent))
        module_name = path.stem
    function: Callable[..., Any] = getattr(importlib.import_module(module_name), attribute)
    return function


def _described(program: Program) -> str:
    size = f"{len(program.collectives)} collectives, {len(program.lines)} lines of HLO"
    return f"{size}\n{table(program)}" if program.collectives else size


def _dump(traces: list[RankTrace], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for rank, trace in enumerate(traces):
        for number, launch in enumerate(trace.steps[0].launches):
            (folder / f"rank-{rank}-{number}.hlo").write_text(launch.program.text)
    print(f"the programs are in {folder}")


if __name__ == "__main__":
    status = main()
    close()
    sys.exit(status)
