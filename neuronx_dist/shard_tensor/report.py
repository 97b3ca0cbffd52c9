"""Report of the communication of ShardTensors, by function: `with report() as r:`, then `print(r)`.

It is built on the records of `comm`, whose collectives are attributed by looking at the stack. So a function that runs
without a report pays nothing for it. The handlers tell what a record does not say: `gathered` by what was gathered
because a function has no handler, `predict` the bytes that a plan has, `note` what was chosen and why.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .. import comm
from ..call_site import call_site, frames
from ..comm import Call
from ..comm.recording import attach, detach
from ..mesh import Mesh
from ..program.fake_mode import QuietFakeMode

__all__ = [
    "Communicated",
    "Gathered",
    "Report",
    "Total",
    "current_function",
    "gathered",
    "name_node",
    "note",
    "predict",
    "report",
    "watched",
]

_FOLDER = str(Path(__file__).parent) + os.sep
_OP = "neuronx_dist.shard_tensor.op"  # in the metadata of an autograd node: the function that made it


class Communicated(NamedTuple):
    """One collective: the function that started it, its record, and the user's line."""

    op: str
    call: Call
    site: str


class Gathered(NamedTuple):
    """Gather of a function without a handler: the bytes on every rank, and the user's line."""

    op: str
    bytes: int
    site: str


@dataclass
class Total:
    """All collectives of a function.

    Attributes:
        collectives: how many of each verb.
        bytes: of all of them; each counts the larger of its input and result, as `comm.record` does.
        planned: those of exchanges among them, which have a plan.
        predicted: by the plans, before anything was sent.
        messages: those that this rank sends in exchanges and in all_to_all.
    """

    collectives: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    planned: int = 0
    predicted: int = 0
    messages: int = 0


class Report:
    """The communication of one rank while the report was open. `print` it, or read its lists.

    Attributes:
        calls: all collectives, in order.
        gathers: functions without a handler, each time that they gathered; whether or not there was a warning.
        notes: (function, text) of choices.
    """

    def __init__(self, rank: int | None) -> None:
        self.rank = rank
        self.calls: list[Communicated] = []
        self.gathers: list[Gathered] = []
        self.notes: list[tuple[str, str]] = []
        self._predicted: list[tuple[str, int]] = []

    def add(self, call: Call) -> None:
        """Adds a collective; called by `comm`, in the thread of the collective."""
        if ":" not in call.verb:
            self.calls.append(Communicated(current_function() or call.verb, call, call_site()))

    @property
    def collectives(self) -> int:
        """The number of collectives."""
        return len(self.calls)

    @property
    def bytes(self) -> int:
        """The bytes of all collectives."""
        return sum(entry.call.bytes for entry in self.calls)

    def get_comm_counts(self) -> dict[str, int]:
        """The number of collectives by verb, as torch's `CommDebugMode` counts its operators."""
        return dict(Counter(entry.call.verb for entry in self.calls))

    def get_total_counts(self) -> int:
        """The number of collectives, by the name that `CommDebugMode` has for it."""
        return self.collectives

    def by_op(self) -> dict[str, Total]:
        """The totals of each function, in the order in which they first communicated."""
        totals: dict[str, Total] = {}
        for entry in self.calls:
            total = totals.setdefault(entry.op, Total())
            total.collectives[entry.call.verb] = total.collectives.get(entry.call.verb, 0) + 1
            total.bytes += entry.call.bytes
            total.messages += entry.call.messages
            if entry.call.verb == "exchange":
                total.planned += entry.call.bytes
        for op, expected in self._predicted:
            totals.setdefault(op, Total()).predicted += expected
        return totals

    def __str__(self) -> str:
        noun = "collective" if self.collectives == 1 else "collectives"
        lines = [f"{self.collectives} {noun}, {self.bytes:,} bytes" + ("" if self.calls else ": nothing travels")]
        for op, total in self.by_op().items():
            verbs = ", ".join(f"{count} {verb}" for verb, count in total.collectives.items())
            plan = f" in {total.messages:,} messages" if total.messages else ""
            plan += f"; predicted {total.predicted:,} of {total.planned:,}" if total.predicted else ""
            lines.append(f"  {op:24} {verbs:32} {total.bytes:>14,} bytes{plan}")
        gathers = [f"{op} has no handler: gathers {count:,} bytes, at {site}" for op, count, site in self.gathers]
        for text, times in Counter([*gathers, *(f"{op}: {text}" for op, text in self.notes)]).items():
            lines.append(f"  {text}" + (f" ({times} times)" if times > 1 else ""))
        return "\n".join(lines)


_open: tuple[Report, ...] = ()  # replaced, never changed: other threads iterate over it


@contextmanager
def report(*, all_ranks: bool = False, mesh: Mesh | int | None = None, rank: int | None = None) -> Iterator[Report]:
    """Collects what this rank's ShardTensors communicate, backward included.

    Args:
        all_ranks: of every rank of this process (ranks as threads).
        mesh: plays one rank of a job of this size, which need not run: a number of ranks, or the job's mesh. Tensors
            made inside have shapes and no values, and take no memory.
        rank: the rank that is played; None: the middle one, which has neighbours on both sides.

    Raises:
        ValueError: `rank` without `mesh`, or not a rank of the mesh.

    Example:
        >>> with report() as r:
        ...     loss = model(x).mean()
        ...     loss.backward()
        >>> print(r)
        >>> with report(mesh=1024) as r:
        ...     domain = DeviceMesh("cpu", range(1024))
        ...     x = ShardTensor.from_local(torch.empty(1, 1, 8, 512, 512), domain, [Shard(2)])
        ...     distribute_module(UNet(), domain)(x).mean().backward()
    """
    global _open
    with ExitStack() as stack:
        if mesh is not None:
            job = Mesh(mesh) if isinstance(mesh, int) else mesh
            played = job.world_size // 2 if rank is None else rank
            if not 0 <= played < job.world_size:
                raise ValueError(f"report: rank {rank} is not one of the {job.world_size} ranks of the mesh")
            stack.enter_context(comm.as_rank(job, played))
            stack.enter_context(QuietFakeMode())
        elif rank is not None:
            raise ValueError(f"report: rank={rank} is played on a mesh: pass mesh=, the number of ranks or the mesh")
        result = Report(None if all_ranks or not comm.is_initialized() else comm.current().rank)
        attach(result)
        _open = (*_open, result)
        try:
            yield result
        finally:
            _open = tuple(other for other in _open if other is not result)
            detach(result)


def watched() -> bool:
    """Returns whether a report is open: facts for reports alone need not be computed otherwise."""
    return bool(_open)


def note(op: str, text: str) -> None:
    """Adds a handler's choice, and its reason, to open reports."""
    for entry in _of_this_rank():
        entry.notes.append((op, text))


def name_node() -> None:
    """Names the node of the autograd function whose forward is running, which sends nothing there, for open reports."""
    if _open:
        current_function()


def predict(num_bytes: int, op: str | None = None) -> None:
    """Adds a plan's bytes for this rank to open reports. `op`: None: the function that is being computed."""
    for entry in _of_this_rank():
        entry._predicted.append((op or current_function() or "exchange", num_bytes))


def gathered(op: str, num_bytes: int) -> None:
    """Adds the gather of a function without a handler to open reports."""
    for entry in _of_this_rank():
        entry.gathers.append(Gathered(op, num_bytes, call_site()))


def _of_this_rank() -> Iterator[Report]:
    if _open:
        rank = comm.current().rank if comm.is_initialized() else None
        yield from (report for report in _open if report.rank is None or report.rank == rank)


def current_function() -> str:
    """Returns the name of the function that this thread computes, of ShardTensors or of this package; "" for none.

    Of several, one inside the other, the outermost; in backward, the one whose forward made the node.
    """
    named = entered = ""
    node: Any = None
    for _, frame in frames():
        code = frame.f_code
        if code.co_name == "backward" and "ctx" in code.co_varnames and not named:
            context = frame.f_locals["ctx"]
            return f"{context.metadata.get(_OP) or _name_of_node(context)}, backward"
        if code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
            node = node or frame.f_locals["ctx"]
        if not code.co_filename.startswith(_FOLDER) or code.co_filename == __file__:
            continue
        if code.co_name == "__torch_function__":
            func = frame.f_locals["func"]
            named = getattr(func, "__name__", str(func))
        elif code.co_name == "op_hook":  # of a style
            entered = frame.f_locals["label"]
        elif not code.co_name.startswith("_"):
            entered = code.co_name
    result = named or entered
    if node is not None and result:
        node.metadata[_OP] = result
    return result


def _name_of_node(node: Any) -> str:
    """Name of an autograd node whose forward communicated nothing: `convert(I, R)`, or the name of its class."""
    row = getattr(node, "row", None)
    if row is None:
        return type(node).__name__.removesuffix("Backward").lstrip("_")
    verb, src, dst = row.key
    return f"{verb}({src}, {dst})"
