"""Layouts of a job: degrees and batch, the check whether they fit a model, and a picture of the ranks; pure Python.

layout = Layout(world_size=8, tp=2, pp=2, num_microbatches=4, global_batch=32, seq_len=128)
layout.check(config)            # LayoutError with every problem and its repair, or nothing
print(layout.picture(config))   # ranks as pp (down) x dp (boxes) x tp (within a box)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, prod
from os import PathLike
from pathlib import Path
from typing import Any

from ..mesh import Mesh
from ..model_shape import ModelShape, padded_heads, stage_layers
from ..pipeline.schedule import Schedule, prove, training_schedule
from .nearest_layout import nearest_layout, words_of_changes

__all__ = ["Layout", "LayoutError", "format_bytes", "format_count", "parse_bytes"]

AnyPath = str | PathLike[str]
DTYPES = ("float32", "bfloat16", "float16", "float64")


class LayoutError(ValueError):
    """Error: a layout cannot work.

    Attributes:
        problems: a sentence per reason, with the numbers and what would work.
        nearest: the flags of the nearest layout that works, "--tp 2 --microbatches 8"; "": degrees are not the reason.
    """

    def __init__(self, problems: list[str], nearest: str = "") -> None:
        self.problems, self.nearest = problems, nearest
        head = "this layout cannot work" + (f", for {len(problems)} reasons" if len(problems) > 1 else "")
        last = [f"the nearest layout that works: {nearest}"] if nearest else []
        super().__init__("\n  ".join(["\n  - ".join([head + ":", *problems]), *last]))


@dataclass(frozen=True)
class Layout:
    """Layout of a training job over its ranks. The data-parallel degree is the rest that the other degrees leave.

    `global_batch` is in sequences, `seq_len` in tokens. Each data-parallel replica cuts its share of the batch into
    `num_microbatches`. `schedule` and `virtual_pipeline_size` are those of `NxDPPModel`.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    zero1: bool = False
    pad_heads: bool = False
    pad_vocab: bool = False
    num_microbatches: int = 1
    global_batch: int = 1
    seq_len: int = 1
    dtype: str = "float32"
    schedule: str | Schedule | Callable[[int, int], Schedule] | None = None
    virtual_pipeline_size: int = 1

    @property
    def model_parallel(self) -> int:
        """Ranks that hold one replica of the model."""
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        return self.world_size // self.model_parallel

    @property
    def micro_batch(self) -> int:
        """Sequences of one microbatch on one rank."""
        return self.global_batch // (self.dp * self.num_microbatches)

    @property
    def training_schedule(self) -> Schedule:
        """The pipeline schedule that `schedule` names.

        Raises:
            ValueError: no schedule has the name, or it does not work for these sizes; `problems` reports that too.
            TypeError: `schedule` is no schedule.
        """
        return training_schedule(
            self.pp, self.num_microbatches, schedule=self.schedule, num_chunks=self.virtual_pipeline_size
        )

    @property
    def bubble(self) -> float:
        """Fraction of a step in which a stage waits, if all stages take equally long."""
        return self.training_schedule.bubble

    def mesh(self) -> Mesh:
        return Mesh(self.world_size, tp=self.tp, pp=self.pp, cp=self.cp, ep=self.ep)

    def check(self, config: Any = None, *, data: Iterable[AnyPath] = (), out: AnyPath | None = None) -> None:
        """Refuses a layout that cannot work, before anything is allocated.

        Args:
            config: the model's Hugging Face config or `ModelShape`. Without it only ranks and batch are checked.
            data: files or folders that must exist.
            out: a folder that must be empty, or not exist yet.

        Raises:
            LayoutError: lists every problem, with the nearest values that would work.
        """
        problems = self.problems(config)
        nearest = self.nearest(config) if problems else ""
        for path in data:
            if not Path(path).exists():
                problems.append(f"data: no file or folder {path} (seen from {Path.cwd()}); give paths that exist")
        if out is not None and Path(out).exists() and not (Path(out).is_dir() and not any(Path(out).iterdir())):
            free = _free_name(Path(out))
            problems.append(f"out: {out} exists, and a run does not write over another; use {free}, or move it away")
        if problems:
            raise LayoutError(problems, nearest)

    def nearest(self, config: Any = None) -> str:
        """Returns the flags by which the nearest layout that fits a model of this config differs; "": there is none."""
        model = ModelShape() if config is None else ModelShape.of(config)
        known = self if self.dtype in DTYPES else replace(self, dtype=DTYPES[0])
        found = nearest_layout(known, model, lambda layout: not layout.problems(model))
        return "" if found is None else words_of_changes(self, found)

    def problems(self, config: Any = None) -> list[str]:
        """Returns the problems of this layout for a model of this config; empty if it fits.

        It knows sizes only: docs/models.md lists the models that `hf.swap` refuses at cp > 1 for their attention.
        """
        sizes = ["world_size", "tp", "pp", "cp", "ep", "virtual_pipeline_size"]
        sizes += ["num_microbatches", "global_batch", "seq_len"]
        problems = [
            f"{name} must be a positive integer, not {getattr(self, name)!r}"
            for name in sizes
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1
        ]
        if self.dtype not in DTYPES:
            problems.append(f"dtype {self.dtype!r} is not known; use one of {', '.join(DTYPES)}")
        if problems:
            return problems  # the checks below divide by these numbers
        model = ModelShape() if config is None else ModelShape.of(config)
        return [
            *self._rank_problems(model),
            *self._schedule_problems(model),
            *self._model_problems(model),
            *self._batch_problems(model),
        ]

    def _rank_problems(self, model: ModelShape) -> list[str]:
        problems = []
        for names in [["tp", "pp", "cp"], ["tp", "pp", "ep"]]:
            sizes = {name: getattr(self, name) for name in names if name in ("tp", "pp") or getattr(self, name) > 1}
            degree = prod(sizes.values())
            if self.world_size % degree == 0 or (names[-1] == "ep" and self.ep == 1):
                continue
            named = " × ".join(f"{name} {size}" for name, size in sizes.items())
            problems.append(
                f"{self.world_size} processes are not divisible by {named} = {degree}: "
                + _either(
                    ("start {} processes", _multiples_near(self.world_size, degree)),
                    ("use tp {}", _near(self.tp, lambda tp: self._ranks_fit(tp, self.pp) and self._tp_fits(model, tp))),
                    ("use pp {}", _near(self.pp, lambda pp: self._pp_fits(model, pp))),
                )
            )
        return problems

    def _schedule_problems(self, model: ModelShape) -> list[str]:
        try:
            schedule = self.training_schedule
            if not (self.schedule is None or isinstance(self.schedule, str)):  # named schedules are proven by tests
                prove(schedule)
        except (ValueError, TypeError) as error:
            return [f"schedule: {error}"]
        except RuntimeError as error:
            return [f"schedule: {schedule} cannot run: {error}"]
        if model.layers is None or schedule.num_virtual_stages <= model.layers:
            return []
        chunks = schedule.num_chunks
        of_chunks = f" with {chunks} chunks each ({schedule})" if chunks > 1 else ""
        advice = _either(
            ("use pp {}", _near(self.pp, lambda pp: self._pp_fits(model, pp))),
            (
                "use virtual_pipeline_size {}",
                _near(chunks, lambda size: replace(self, virtual_pipeline_size=size)._pp_fits(model, self.pp)),
            ),
        )
        return [f"{self.pp} pipeline stages{of_chunks} for {model.layers} layers: {advice}"]

    def _model_problems(self, model: ModelShape) -> list[str]:
        problems = []
        experts = model.experts or 0
        if self.ep > 1 and model.layers is not None and not experts:
            problems.append(f"ep {self.ep}: this model has no experts; use ep 1")
        elif experts % self.ep:
            ranks = self.world_size // (self.tp * self.pp)
            fitting = _near(self.ep, lambda ep: experts % ep == 0 and ranks % ep == 0)
            problems.append(f"{experts} experts are not divisible by ep {self.ep}: " + _either(("use ep {}", fitting)))
        use_tp = ("use tp {}", _near(self.tp, lambda tp: self._tp_fits(model, tp)))
        if model.heads and model.kv_heads:
            problems += self._head_problems(model.heads, model.kv_heads, use_tp)
        if model.intermediate is not None and model.intermediate % self.tp:
            values = ("make it {}", _multiples_near(model.intermediate, self.tp))
            which = f"intermediate_size {model.intermediate} is not divisible by tp {self.tp}: "
            problems.append(which + _either(use_tp, values))
        if model.vocab is not None and model.vocab % self.tp and not self.pad_vocab:
            which = f"vocab_size {model.vocab} is not divisible by tp {self.tp}: "
            padding = f"which adds {-model.vocab % self.tp} zero rows"
            problems.append(f"{which}{_either(use_tp)}, or pad_vocab (--pad-vocab), {padding}")
        return problems

    def _head_problems(self, heads: int, kv_heads: int, use_tp: tuple[str, list[int]]) -> list[str]:
        if heads % kv_heads:
            return [f"{heads} query heads cannot share {kv_heads} key/value heads evenly; correct the model's config"]
        needed = padded_heads(heads, kv_heads, self.tp)
        if self.pad_heads or not needed.pads(heads, kv_heads):
            return []
        if heads == kv_heads:
            what, after = f"{heads} attention heads", f"{needed.heads} heads"
        else:
            what = f"{kv_heads} key/value heads (shared by {heads} query heads)"
            after = f"{needed.heads} query and {needed.kv_heads} key/value heads"
        if needed.replicas > 1:
            after += f", each of the latter on {needed.replicas} ranks"
        split = f"{what} cannot be split over tp {self.tp}: "
        return [split + _either(use_tp) + f", or pad_heads (--pad-heads), which makes it {after}"]

    def _batch_problems(self, model: ModelShape) -> list[str]:
        problems = []
        share = self.dp * self.num_microbatches
        if self.world_size % self.model_parallel == 0 and self.global_batch % share:
            by = f"dp {self.dp} × {self.num_microbatches} microbatches = {share}"
            fewer = _near(self.num_microbatches, lambda m: self.global_batch % (self.dp * m) == 0)
            problems.append(
                f"a global batch of {self.global_batch} is not divisible by {by}: "
                + _either(
                    ("use a global batch of {}", _multiples_near(self.global_batch, share)),
                    ("use {} microbatches", fewer),
                )
            )
        divisor = 2 * self.cp if model.layers is not None and self.cp > 1 else 1
        if self.seq_len % divisor:
            problems.append(
                f"seq_len {self.seq_len} is not divisible by 2 × cp {self.cp} = {divisor}, the chunks of zig-zag "
                "order: " + _either(("use seq_len {}", _multiples_near(self.seq_len, divisor)))
            )
        if self.sequence_parallel and self.seq_len % (self.tp * self.cp):
            lengths = _multiples_near(self.seq_len, self.tp * self.cp)
            over = f"tp {self.tp}" + (f" × cp {self.cp}" if self.cp > 1 else "")
            problems.append(
                f"seq_len {self.seq_len} is not divisible by {over}, as sequence parallelism needs: "
                + _either(("use seq_len {}", lengths))
            )
        if model.max_positions is not None and self.seq_len > model.max_positions:
            most = model.max_positions
            problems.append(f"seq_len {self.seq_len} is longer than the model's {most} positions: use at most {most}")
        return problems

    def _ranks_fit(self, tp: int, pp: int) -> bool:
        return all(self.world_size % (tp * pp * other) == 0 for other in (self.cp, self.ep))

    def _tp_fits(self, model: ModelShape, tp: int) -> bool:
        """Returns whether `tp` divides the model's sizes and, unless pp, cp and ep do not, the number of ranks."""
        if self._ranks_fit(1, self.pp) and not self._ranks_fit(tp, self.pp):
            return False
        sizes = [
            model.intermediate,
            None if self.pad_vocab else model.vocab,
            self.seq_len if self.sequence_parallel else None,
        ]
        if not all(size is None or size % tp == 0 for size in sizes):
            return False
        if self.pad_heads or model.kv_heads is None:
            return True
        heads = model.heads or model.kv_heads
        return not padded_heads(heads, model.kv_heads, tp).pads(heads, model.kv_heads)

    def _pp_fits(self, model: ModelShape, pp: int) -> bool:
        if not self._ranks_fit(self.tp, pp):
            return False
        try:
            pieces = replace(self, pp=pp).training_schedule.num_virtual_stages
        except (ValueError, TypeError):
            return False
        return model.layers is None or pieces <= model.layers

    def picture(self, config: Any = None, *, width: int = 100) -> str:
        """Draws the ranks: a row for each pipeline stage, a box for each data-parallel rank, tp ranks joined by `═`.

        Boxes beyond `width` columns, and stages beyond 16, are left out in the middle.
        """
        mesh, layers = self.mesh(), None if config is None else ModelShape.of(config).layers
        axes = [axis for axis in ("pp", "dp", "cp", "tp") if axis != "cp" or self.cp > 1]
        title = f"{self.world_size} rank{'s' * (self.world_size > 1)} = "
        title += " × ".join(f"{axis} {mesh.size(axis)}" for axis in axes)

        stages, notes = [f"stage {stage}" for stage in range(self.pp)], self._stage_notes(layers)
        left, right = max(map(len, stages)), max(map(len, notes))
        box = max(len(self._cell(mesh, 0, 0)), len(f"dp {self.dp - 1}")) + 4
        replicas = _elide(range(self.dp), max(3, (width - left - right - 4) // (box + 1)))

        def row(head: str, boxes: Callable[[int], str], note: str = "") -> str:
            drawn = ["…" if replica is None else boxes(replica) for replica in replicas]
            return " ".join([head.ljust(left), *drawn, "", note]).rstrip()

        lines = [title, "", row("", lambda replica: "┌" + f" dp {replica} ".center(box - 2, "─") + "┐")]
        for stage in _elide(range(self.pp), 16):
            if stage is None:
                lines.append(row("  ⋮", lambda replica: "│" + "⋮".center(box - 2) + "│"))
            else:
                lines.append(row(stages[stage], partial(self._box, mesh, box - 2, stage), notes[stage]))
        lines.append(row("", lambda replica: "└" + "─" * (box - 2) + "┘"))
        return "\n".join([*lines, *self._legend()])

    def _box(self, mesh: Mesh, width: int, stage: int, replica: int) -> str:
        return f"│{self._cell(mesh, stage, replica).center(width)}│"

    def _cell(self, mesh: Mesh, stage: int, replica: int) -> str:
        """Draws the ranks of one stage of one replica: 4═5, or 4═5 ┊ 6═7 with context parallelism."""
        digits = len(str(self.world_size - 1))
        first = (stage * self.dp + replica) * self.cp  # tp groups are listed in rank order
        groups = [_elide(group, 9) for group in mesh.groups("tp")[first : first + self.cp]]
        return " ┊ ".join("═".join("…" if r is None else str(r).rjust(digits) for r in group) for group in groups)

    def _stage_notes(self, layers: int | None) -> list[str]:
        """Returns a note for each stage: the layers that it holds."""
        if layers is None:
            return [""] * self.pp
        holders = self.training_schedule.holders
        parts: list[list[str]] = [[] for _ in range(self.pp)]
        parts[holders[0]].append("embedding")
        for stage, layer_range in zip(holders, stage_layers(layers, len(holders))):
            parts[stage].append(
                f"layer {layer_range[0]}"
                if len(layer_range) == 1
                else f"layers {layer_range.start}–{layer_range.stop - 1}"
            )
        parts[holders[-1]].append("norm, head")
        return [", ".join(part) for part in parts]

    def _legend(self) -> list[str]:
        lines = []
        if self.tp > 1:
            sequence = ", and the sequence between layers" if self.sequence_parallel else ""
            lines.append(f"═  tp: each layer's weights are split{sequence}")
        if self.cp > 1:
            lines.append("┊  cp: each sequence is split")
        if self.dp > 1:
            state = ", each keeps its part of the optimizer state (ZeRO-1)" if self.zero1 else ""
            lines.append(f"□  dp: each box sees other sequences, gradients are averaged{state}")
        if self.pp > 1:
            holders = self.training_schedule.holders
            down = holders == [*range(self.pp)]
            line = _elide(holders, 16)
            way = "down" if down else "to stages " + " ".join("…" if stage is None else str(stage) for stage in line)
            schedule = self.schedule if isinstance(self.schedule, str) else self.training_schedule
            named = "" if self.schedule is None else f" ({schedule})"
            lines.append(
                f"↓  pp: microbatches go {way} and their gradients {'up' if down else 'back'}; "
                f"{self.bubble:.0%} of a step is waiting{named}"
            )
        pieces = [(self.dp, "replica"), (self.num_microbatches, "microbatch"), (self.micro_batch, "sequence")]
        plural = {"microbatch": "microbatches"}
        batch = " × ".join(f"{count} {name if count == 1 else plural.get(name, name + 's')}" for count, name in pieces)
        return [*lines, f"a step: {batch} of {self.seq_len} tokens = {self.global_batch * self.seq_len:,} tokens"]


def format_bytes(count: float, *, is_decimal: bool = False) -> str:
    """Formats bytes: 1536 -> '1.5 KiB', or with `is_decimal` '1.5 KB'."""
    base, infix = (1000, "") if is_decimal else (1024, "i")
    for unit in ("", "K", "M", "G"):
        if abs(count) < base:
            return f"{count:.1f} {unit}{infix}B" if unit else f"{count:.0f} B"
        count /= base
    return f"{count:.1f} T{infix}B"


def parse_bytes(text: str | float) -> int:
    """Bytes of "24 GB" (powers of 1000) or "24 GiB" (of 1024), or of a number.

    Raises:
        ValueError: it is no such number, or not more than 0.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        count = float(text)
    else:
        found = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?)(i?)B\s*", str(text), re.IGNORECASE)
        if not found or found[1].count(".") > 1 or found[1] == ".":
            raise ValueError(f'memory={text!r} is no number of bytes: write "24 GB" or "24 GiB"')
        count = float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " ")
    if not 0 < count < inf:
        raise ValueError(f"memory={text!r} must be more than 0, and finite")
    return int(count)


def format_count(count: float) -> str:
    """Formats a count: 134515008 -> '134.5 M'."""
    for unit in ("", " K", " M", " B"):
        if abs(count) < 1000:
            return f"{count:.0f}" if not unit else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f} T"


def _near(value: int, works: Callable[[int], bool]) -> list[int]:
    """Returns the nearest values below and above `value` that work, searching up to about 4 times `value`."""
    below = next((n for n in range(value - 1, 0, -1) if works(n)), None)
    above = next((n for n in range(value + 1, 4 * value + 65) if works(n)), None)
    return [n for n in (below, above) if n is not None]


def _multiples_near(value: int, step: int) -> list[int]:
    below = value // step * step
    return [n for n in (below, below + step) if n > 0]


def _either(*options: tuple[str, list[int]]) -> str:
    """Joins options: ('use tp {}', [1, 3]), ... -> 'use tp 1 or 3, or ...'; options without values are left out."""
    texts = [text.format(" or ".join(map(str, values))) for text, values in options if values]
    return ", or ".join(texts) if texts else "no value near it works"


def _elide(items: Sequence[int], most: int) -> list[int | None]:
    """Returns at most `most` items, with None in place of the middle ones."""
    return [*items] if len(items) <= most else [*items[: most - 2], None, items[-1]]


def _free_name(path: Path) -> Path:
    """Returns an unused name: run -> run-2, run-3, ..."""
    path, number = path if path.name else path / "run", 2
    while path.with_name(f"{path.name}-{number}").exists():
        number += 1
    return path.with_name(f"{path.name}-{number}")
