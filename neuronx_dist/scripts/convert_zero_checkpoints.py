"""`nxd_convert_zero_checkpoints`: converts the state of NeuronX Distributed's ZeRO-1 to another dp, or to whole states.

    input_dir/optim/dp_rank_03_tp_rank_01_pp_rank_00.pt     rows of every state, those of a dp rank
    output_dir/optim/full_tp_rank_01_pp_rank_00.pt          --convert_to_full: all rows

tp and pp stay as they are. `load_checkpoint` reads any dp by itself; this is for NeuronX Distributed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..checkpoint.convert.convert_command import progress_bar
from ..checkpoint.errors import CheckpointCorrupted, CheckpointError, CheckpointMismatch
from ..checkpoint.nxd.nxd_writing import DividedTensor, Part, row_parts, write_files
from ..checkpoint.nxd.rank_files import StoredTensor, fault_of_optimizer, stored_state
from ..checkpoint.storage import LocalStorage
from ..torch_internals.tensors import pytree

__all__ = ["convert_zero_checkpoints", "main"]

_SHARDS = re.compile(r"(dp_rank_(?P<dp>\d+)|full)_tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)\.pt")
_DIVIDED = ("base_state", "sharded_master_weights")


class _Rows(NamedTuple):
    """A state that is divided into rows over dp ranks."""

    keys: tuple[Any, ...]
    shape: tuple[int, ...]
    shards: list[Any]  # StoredTensors, but in damaged files

    def read(self) -> torch.Tensor:
        """All rows, without padding."""
        rows = torch.cat([shard.tensor() for shard in self.shards])
        return rows[: self.shape[0]] if self.shape else rows[:1]

    def first_fault(self) -> int | None:
        """Returns the dp rank whose part has another shape than it should have; None if all are right."""
        count, *rest = self.shape or (1,)
        shape = (-(-count // len(self.shards)), *rest)
        for dp, shard in enumerate(self.shards):
            if not isinstance(shard, StoredTensor) or shard.shape != shape:
                return dp
        return None


def convert_zero_checkpoints(
    input_dir: str,
    output_dir: str,
    dp_size: int | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Writes the optimizer's state for another number of dp ranks, with one tensor in memory at a time.

    Args:
        input_dir, output_dir: folders of a checkpoint, with a folder `optim`.
        dp_size: number of dp ranks to divide the states over; None: whole states.
        progress: called after each tensor with the number of written tensors and the total.

    Raises:
        CheckpointError: there is no such state, or the output folder is not empty.
        CheckpointCorrupted: a file is missing, cut off, or holds something that could run.
    """
    storage = LocalStorage(input_dir)
    by_rank: dict[tuple[int, int], dict[int, str]] = {}
    whole = False
    for name in storage.list("optim"):
        match = _SHARDS.fullmatch(name)
        if match is not None:
            whole = whole or match["dp"] is None
            by_rank.setdefault((int(match["tp"]), int(match["pp"])), {})[int(match["dp"] or 0)] = f"optim/{name}"
    if not by_rank:
        raise CheckpointError(f"{input_dir}/optim has no ZeRO-1 files: dp_rank_..._tp_rank_..._pp_rank_....pt")
    if whole and dp_size is None:
        raise CheckpointError(f"{input_dir}/optim has full states already")
    target = Path(output_dir)
    if (target / "optim").exists() and any((target / "optim").iterdir()):
        raise CheckpointError(f"{output_dir}/optim exists already, and is not empty: nothing was written")
    xser = any(name.endswith(".tensors") for name in storage.list("optim"))
    degree = 1 + max(max(paths) for paths in by_rank.values())
    apart: list[StoredTensor] = []
    tensors: list[DividedTensor] = []
    constants: dict[str, dict[Any, Any]] = {}
    for (tp, pp), paths in sorted(by_rank.items()):
        if len(paths) < degree:
            missing = next(rank for rank in range(degree) if rank not in paths)
            raise CheckpointCorrupted(
                f"{input_dir}/optim lacks dp rank {missing} of {degree}, beside {paths[min(paths)]}"
            )
        states = [stored_state(storage, paths[dp], apart) for dp in range(degree)]
        for dp, state in enumerate(states):
            fault = fault_of_optimizer(state)
            if fault:
                raise CheckpointCorrupted(f"{input_dir}/{paths[dp]}: {fault} is not what NeuronX Distributed writes")
        if "base_state" not in states[0] or "shape_info" not in states[0]:
            raise CheckpointMismatch(
                f"{input_dir}/{paths[0]} is not a ZeRO-1 state: it has no base_state and shape_info"
            )
        where = f"_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"
        files = (
            [f"optim/full{where}"] if dp_size is None else [f"optim/dp_rank_{dp:02d}{where}" for dp in range(dp_size)]
        )
        for file in files:
            constants[file] = _without_tensors(states[0])
            if any(isinstance(leaf, StoredTensor) for leaf in pytree.tree_leaves(constants[file])):
                raise CheckpointCorrupted(f"{input_dir}/{paths[0]} has tensors beside states and master weights")
        for rows in _rows(states):
            wrong = rows.first_fault()
            if wrong is not None:
                raise CheckpointCorrupted(
                    f"{input_dir}/{paths[wrong]}: {'.'.join(map(str, rows.keys))} is not a part of {rows.shape} like "
                    "that of other dp ranks"
                )
            tensors.append(DividedTensor(rows.shards[0].dtype, rows.read, row_parts(files, rows.keys, rows.shape)))
        tensors += [
            DividedTensor(value.dtype, value.tensor, [Part(file, keys, value.shape) for file in files])
            for keys, value in _common(states[0])
        ]
    for tensor in apart:
        tensor.tensor()  # opens its file, before anything is written
    write_files(tensors, constants, target, progress, xser=xser, marked=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 after printing what is wrong."""
    parser = argparse.ArgumentParser(prog="nxd_convert_zero_checkpoints", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--input_dir", required=True, help="folder of a checkpoint, with the folder optim")
    add("--output_dir", required=True, help="folder to write to")
    add("--num_workers", type=int, default=1, help="without effect")
    add("--dp_size", type=int, help="dp ranks that there are to be, with --convert_to_sharded")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--convert_to_full", action="store_true", help="whole states")
    action.add_argument("--convert_to_sharded", action="store_true", help="states for --dp_size ranks")
    args = parser.parse_args(argv)
    if args.convert_to_sharded and (args.dp_size is None or args.dp_size < 1):
        parser.error("--convert_to_sharded needs --dp_size, at least 1")
    try:
        degree = None if args.convert_to_full else args.dp_size
        convert_zero_checkpoints(args.input_dir, args.output_dir, degree, progress_bar(args.output_dir))
    except (CheckpointError, OSError) as error:
        print(f"nxd_convert_zero_checkpoints: {error}", file=sys.stderr)
        return 1
    print(f"{args.output_dir}/optim: written")
    return 0


def _rows(states: Sequence[Mapping[str, Any]]) -> Iterator[_Rows]:
    """The states that are divided into rows over dp ranks."""
    for number, shape in states[0]["shape_info"].items():
        full_shape = tuple(shape)
        for entry, value in states[0]["base_state"].get(number, {}).items():
            if _is_divided(entry, value):
                shards = [state.get("base_state", {}).get(number, {}).get(entry) for state in states]
                yield _Rows(("base_state", number, entry), full_shape, shards)
        if number in states[0].get("sharded_master_weights", {}):
            masters = [state.get("sharded_master_weights", {}).get(number) for state in states]
            yield _Rows(("sharded_master_weights", number), full_shape, masters)


def _common(state: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], StoredTensor]]:
    """Tensors that all dp ranks have, such as the number of a step."""
    for number, entries in state["base_state"].items():
        for entry, value in entries.items():
            if isinstance(value, StoredTensor) and not _is_divided(entry, value):
                yield ("base_state", number, entry), value


def _is_divided(entry: str, value: Any) -> bool:
    return isinstance(value, StoredTensor) and bool(value.shape) and entry != "step"


def _without_tensors(state: Mapping[str, Any]) -> dict[Any, Any]:
    """The content of a file without tensors, as a new dict."""
    result = {key: value for key, value in state.items() if key not in (*_DIVIDED, "rank_of_shards")}
    result["base_state"] = {
        number: {entry: value for entry, value in entries.items() if not isinstance(value, StoredTensor)}
        for number, entries in state["base_state"].items()
    }
    return result


if __name__ == "__main__":
    sys.exit(main())
