"""Rows of a global batch for each data-parallel rank, with a position that any data-parallel size loads.

The k-th global batch has the same rows at any dp size, in the same order: rank r of dp gets the r-th of dp contiguous
parts, and all tp, pp and cp ranks of a replica get the same part. So losses are those of one process, and a position in
samples of the global order is a position at any dp size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from .. import comm
from ..comm.context import AxisLike

__all__ = ["DataParallelBatchSampler", "DataParallelStream"]

_LAST = ("drop", "repeat")


class DataParallelBatchSampler(Sampler[list[int]]):
    """Indices of this rank's rows of each global batch: `DataLoader(data, batch_sampler=...)`.

    The order of an epoch is drawn from `seed + epoch`, as `DistributedSampler` does. An iteration that ends moves on to
    the next epoch; `set_epoch` chooses one.

    Args:
        data: a data set with a length, or the length.
        global_batch_size: rows of one batch of the loader, over all data-parallel ranks.
        shuffle: False: the order of the data set, in each epoch.
        last: treatment of the rows after the last full batch of an epoch: "drop", or "repeat", which fills the batch
            with the first rows of the epoch's order. None: the batch size has to divide the length.
        axis: ranks along it get different rows.

    Raises:
        ValueError: dp does not divide the batch, no full batch is in the data, or rows are left and `last` is None.
    """

    def __init__(
        self,
        data: Sized | int,
        global_batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        last: str | None = None,
        axis: AxisLike = "dp",
    ) -> None:
        self.length = data if isinstance(data, int) else len(data)
        self.global_batch_size, self.seed, self.shuffle, self.last = global_batch_size, seed, shuffle, last
        self.epoch = 0
        self._position = self._start = 0  # samples of the global order: those before the next batch; of a loaded state
        self._part = _part_of(global_batch_size, axis)
        left = self.length % global_batch_size
        if last not in (None, *_LAST):
            raise ValueError(f'last={last!r} is none of "drop", "repeat" and None')
        if self.length < global_batch_size and last != "repeat":
            raise ValueError(
                f"{self.length} rows are less than one global batch of {global_batch_size}: take a smaller batch, or "
                'last="repeat", which repeats rows'
            )
        if left and last is None:
            raise ValueError(
                f"global batches of {global_batch_size} leave {left} of {self.length} rows in each epoch: say "
                'last="drop" to leave them out, or last="repeat" to fill the last batch with '
                f"{global_batch_size - left} rows that the epoch has had"
            )

    def __len__(self) -> int:
        """Batches of an epoch."""
        whole, left = divmod(self.length, self.global_batch_size)
        return whole + (left > 0 and self.last == "repeat")

    def __iter__(self) -> Iterator[list[int]]:
        self._position, self._start = self._start, 0
        order = self._order()
        while self._position < self.length:
            batch = order[self._position : self._position + self.global_batch_size].tolist()
            missing = self.global_batch_size - len(batch)
            if missing and self.last != "repeat":
                break
            while len(batch) < self.global_batch_size:
                batch += order[: self.global_batch_size - len(batch)].tolist()
            self._position += self.global_batch_size - missing
            yield batch[self._part]
        self.epoch += 1
        self._position = 0

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of an epoch, from its first row unless a position in this epoch was loaded."""
        if epoch != self.epoch:
            self.epoch, self._position, self._start = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the position as plain data: equal on all ranks, after as many batches."""
        state = {"epoch": self.epoch, "samples": self._position}
        return {**state, "length": self.length, "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue at a position, which any dp size and batch size may have saved.

        Raises:
            ValueError: the position is one in another order of rows.
        """
        mine = self.state_dict()
        for name in ("length", "seed", "shuffle"):
            if state[name] != mine[name]:
                raise ValueError(
                    f"the saved position is that of {name}={state[name]}, and this sampler has {name}={mine[name]}: "
                    "rows would be lost or doubled; pass the value of the saved run, or start a new epoch of the data"
                )
        self.epoch = state["epoch"]
        self._position = self._start = state["samples"]

    def _order(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.length)
        return torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + self.epoch))


class DataParallelStream(IterableDataset[Any]):
    """Rows of an iterable data set, of which each data-parallel rank yields those of its part of a global batch.

    Every rank reads the stream and passes over the rows of others, so that batches have the same rows, and the position
    is the same, at any dp size. For streams whose reading takes longer than a step divides by dp, divide the files
    (`datasets.distributed.split_dataset_by_node`); such a position is one of this dp size only.

    Example:
        >>> stream = DataParallelStream(load_dataset("json", data_files=files, streaming=True)["train"], 64)
        >>> loader = StatefulDataLoader(stream, batch_size=64 // comm.size("dp"))

    Args:
        data: any iterable that can be iterated anew. If it has `state_dict` and `load_state_dict`, as iterable data
            sets of `datasets` have, its state is a part of the position; else rows are read again up to the position.
        global_batch_size: rows of one batch of the loader, over all data-parallel ranks.
        last: treatment of the rows after the last full batch: "drop", or "repeat", which fills the batch with its first
            rows again.
        skip: True: to read rows again also where the data set has a state, which does not contain the rows in the
            buffer of `shuffle`.

    Raises:
        ValueError: dp does not divide the batch; in iteration: several workers, each of which would read other rows.
    """

    def __init__(
        self,
        data: Iterable[Any],
        global_batch_size: int,
        *,
        last: str = "drop",
        skip: bool = False,
        axis: AxisLike = "dp",
    ) -> None:
        if last not in _LAST:
            raise ValueError(f'last={last!r} is neither "drop" nor "repeat"')
        self.data, self.global_batch_size, self.last = data, global_batch_size, last
        self._epoch = torch.zeros((), dtype=torch.long).share_memory_()  # of a worker's copy, too
        self._has_state = hasattr(data, "state_dict") and not skip
        self._part = _part_of(global_batch_size, axis)
        self._start: dict[str, Any] | None = None  # a loaded state
        self._state: dict[str, Any] = {"epoch": 0, "samples": 0, "data": None}
        self._inside = False  # of a global batch

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration, or of the present one."""
        return int(self._epoch)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ValueError(
                f"a DataParallelStream in {worker.num_workers} workers of a loader would be read by each of them: use "
                "num_workers=1, or 0"
            )
        start, self._start = self._start, None
        samples = start["samples"] if start else 0
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(self.epoch)
        if self._has_state and start and start["data"] is not None:
            self.data.load_state_dict(start["data"])  # type: ignore[attr-defined]
            rows = iter(self.data)
        else:
            rows = islice(self.data, samples, None)
        while batch := list(islice(rows, self.global_batch_size)):
            samples += len(batch)
            if len(batch) < self.global_batch_size and self.last == "drop":
                break
            while len(batch) < self.global_batch_size:
                batch += batch[: self.global_batch_size - len(batch)]
            self._state = {
                "epoch": self.epoch,
                "samples": samples,
                "data": self.data.state_dict() if self._has_state else None,  # type: ignore[attr-defined]
            }
            *first, final = batch[self._part]
            self._inside = True
            yield from first
            self._inside = False
            yield final
        self.epoch += 1
        self._state = {"epoch": self.epoch, "samples": 0, "data": None}

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of an epoch, from its first row unless a position in this epoch was loaded."""
        if epoch != self.epoch:
            self.epoch, self._start, self._inside = epoch, None, False
            self._state = {"epoch": epoch, "samples": 0, "data": None}

    def state_dict(self) -> dict[str, Any]:
        """Returns the position as plain data: equal on all ranks, after as many batches.

        Raises:
            ValueError: this rank has yielded a part of its rows of a batch.
        """
        if self._inside:
            raise ValueError(
                f"the position is inside of a global batch of {self.global_batch_size} rows, where no other dp size "
                f"could continue: use a batch_size of {self._part.stop - self._part.start}, this rank's rows of it"
            )
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue at a position, which any dp size and batch size may have saved."""
        self._start, self._state, self._inside = dict(state), dict(state), False
        self.epoch = state["epoch"]


def _part_of(global_batch_size: int, axis: AxisLike) -> slice:
    """Returns the rows of this rank of a global batch."""
    ranks, rank = comm.size(axis), int(comm.rank(axis))
    if global_batch_size < 1 or global_batch_size % ranks:
        raise ValueError(
            f"a global batch of {global_batch_size} rows cannot be divided by {ranks} data-parallel ranks: take "
            f"{max(1, -(-global_batch_size // ranks)) * ranks}"
        )
    share = global_batch_size // ranks
    return slice(rank * share, (rank + 1) * share)
