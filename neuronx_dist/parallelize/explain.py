"""`explain`: what the plan of a parallel module costs, as a table to read and as a dict."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .train.parallel_module import ParallelModule

__all__ = ["Explanation", "explain"]

_ROWS = 20
_ALTERNATIVES = 2


class Explanation(dict[str, Any]):
    """Costs of a plan, by the model of costs that chose it; `str()` is the table. All times are seconds.

    `seconds` are those of forward and backward of a microbatch, of which `compute_seconds` and `collective_seconds`;
    `stage_seconds` are those of each pipeline stage, `step_seconds` those of a step. `parameter_bytes` (with gradients
    and optimizer state) and `saved_bytes` (for backward) are those of a rank. `gap` is the fraction of `seconds` above
    a lower bound, `gap_of`, before equal collectives are joined: that saves `joined_seconds`, and `joined_collectives`
    calls, which `seconds` and `collectives` count. `collectives` has the sums of each operator, `calls` a row for each
    call: its strategy, its share of all that, and its other strategies with the seconds that the best plan with them
    takes longer, at most these if `alternatives_exact` is False: then the search is approximate.
    """

    def __str__(self) -> str:
        return self.table()

    def table(self, rows: int | None = _ROWS) -> str:
        """Returns the costs as text; `rows`: number of calls, those of most seconds first; None: all, in order."""
        costs, calls = self["costs"], self["calls"]
        next_best = "next best" if self.get("alternatives_exact", True) else "next best (approximate)"
        gap = "not known" if self["gap"] is None else f"{self['gap']:.2%}"
        stages = ", ".join(map(_time, self["stage_seconds"]))
        lines = [
            f"{self['name']}, {self['layout']}: {_time(self['seconds'])} forward and backward "
            f"({_time(self['compute_seconds'])} computing, {_time(self['collective_seconds'])} collectives)",
            *(
                [f"pipeline stages: {stages}; a step {_time(self['step_seconds'])}"]
                if len(self["stage_seconds"]) > 1
                else []
            ),
            f"memory of a rank: {_size(self['parameter_bytes'])} of parameters, gradients and optimizer state, "
            f"{_size(self['saved_bytes'])} saved for backward",
            f"gap: {gap} ({self['gap_of']})",
            f"costs: {costs['flops'] / 1e12:g} TFLOP/s, {costs['bandwidth'] / 1e9:g} GB/s, link "
            f"{costs['link_bandwidth'] / 1e9:g} GB/s and {costs['link_latency'] * 1e6:g} us, launch "
            f"{costs['launch'] * 1e6:g} us; sums over units and the optimizer are not counted",
            *(_job_lines(self["job"]) if "job" in self else []),
        ]
        sums = [
            (
                entry["operator"],
                entry["axis"],
                entry["times"],
                _size(entry["forward_bytes"]),
                _size(entry["backward_bytes"]),
                _time(entry["seconds"]),
            )
            for entry in self["collectives"]
        ]
        if sums:
            lines += ["", *_aligned(("collective", "axis", "times", "sent forward", "backward", "in all"), sums)]
        if self.get("joined_collectives"):
            saved = f"{self['joined_collectives']} collectives and {_time(self['joined_seconds'])} less"
            lines.append(f"equal collectives of a layer are joined: {saved} than the choice counted")
        ordered = calls if rows is None else sorted(calls, key=lambda row: -row["seconds"] * row["times"])[:rows]
        lines += ["", *_aligned((*_HEAD, next_best), [_row(row) for row in ordered])]
        if len(ordered) < len(calls):
            rest = sum(row["seconds"] * row["times"] for row in calls) - sum(r["seconds"] * r["times"] for r in ordered)
            lines.append(f"and {len(calls) - len(ordered)} more kinds of calls: {_time(rest)}; table(None) lists all")
        return "\n".join(lines)


def explain(parallel: ParallelModule | type[ParallelModule]) -> Explanation:
    """Returns what the plan of a parallel module costs: `print(explain(parallel))` shows it.

    The figures are predictions of the model of costs that chose the plan (`pas_config["costs"]`), of the program in
    training. They are in `plan.json` beside the generated files, too, under "costs".

    Raises:
        TypeError: `parallel` is no parallel module, and no class of one.
        ValueError: its files have no costs.
    """
    module_class = parallel if isinstance(parallel, type) else type(parallel)
    if not issubclass(module_class, ParallelModule):
        raise TypeError(f"explain takes a module or class that parallelize returned, got {module_class.__name__}")
    plan: Mapping[str, Any] = json.loads(module_class.PLAN or "{}")
    if not plan.get("costs"):
        raise ValueError(
            f"the files of {module_class.__name__} have no costs: generate them by parallelize(..., reuse='override')"
        )
    axes = {"pp": plan["pp"], "tp": plan["tp"]}
    parts = f" (as {' x '.join(map(str, plan['axes']))})" if plan.get("axes") else ""
    layout = " x ".join(f"{name}={size}" for name, size in axes.items() if size > 1) + parts or "one rank"
    return Explanation(name=module_class.__name__, layout=layout, **plan["costs"])


def _job_lines(job: Mapping[str, Any]) -> list[str]:
    """Returns the comparison of whole jobs: the chosen one first, then by seconds, or by their lower bound."""
    memory = "any memory" if job["memory"] is None else f"{_size(job['memory'])} of a rank"
    lines = [
        "",
        f"whole job, for {memory}: {job['chosen']}, {_time(job['seconds'])} a step of {job['samples']} samples "
        f"({_time(job['waiting_seconds'])} waiting, {_time(job['recomputing_seconds'])} recomputing, "
        f"{_time(job['update_seconds'])} reduction and optimizer), {_size(job['peak_bytes'])} of a rank; gap "
        f"{job['gap']:.2%} to a lower bound of all jobs",
    ]

    def row(entry: Mapping[str, Any]) -> tuple[Any, ...]:
        seconds, size = entry["seconds_per_sample"], entry["bytes"]
        shown = f"at least {_time(entry['at_least'])}" if seconds is None else _time(seconds)
        return entry["job"], shown, "" if size is None else _size(size), entry["recomputed"] or "", entry["why"]

    compared = sorted(job["compared"], key=lambda entry: entry["seconds_per_sample"] or entry["at_least"])
    return [*lines, *_aligned(("job", "a sample", "a rank", "recomputed", ""), [row(entry) for entry in compared])]


_HEAD = ("times", "call", "strategy", "all", "collectives", "saved each")


def _row(row: Mapping[str, Any]) -> tuple[Any, ...]:
    sent = sum(entry["seconds"] for entry in row["collectives"])
    others = [f"{name} {_time(more, '+')}" for name, more in list(row["alternatives"].items())[:_ALTERNATIVES]]
    call = " ".join(filter(None, [row["module"], row["function"]]))
    return (
        row["times"],
        call,
        row["strategy"],
        _time(row["seconds"] * row["times"]),
        _time(sent * row["times"]) if sent else "",
        _size(row["saved_bytes"]) if row["saved_bytes"] else "",
        "; ".join(others),
    )


def _aligned(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    table = [head, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]


def _time(seconds: float, sign: str = "") -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:{sign}.4g} {unit}"
    return f"{seconds * 1e6:{sign}.3g} us"


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:g} B"
