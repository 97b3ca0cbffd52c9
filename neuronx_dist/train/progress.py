"""Output of a run: one line of a terminal or plain lines, metrics.jsonl and other writers, and a loss curve."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from ..metrics import JsonLines, StepMeter

__all__ = ["Progress", "centred_means", "loss_curve"]


class Progress:
    """Progress of a run of `steps` steps. A context manager for every rank; only an `active` one shows or writes.

    Into the folder `out` (made if missing; None: nothing is written) go `metrics.jsonl`, one object a step with step,
    loss, grad_norm, lr, what `meter` measures and, where there was an evaluation, held_out_loss; at the end,
    `loss.png`; and before the first step `run.json`, which is `record`. A run that goes on after step `done` keeps the
    objects up to that step, and its record is added to those under `resumed`.
    On a terminal one line shows the last step, elsewhere there is a line every `log_every` steps.
    `writers` get `(step, values)` of each step, on every rank.
    """

    def __init__(
        self,
        steps: int,
        tokens_per_step: int,
        *,
        out: str | Path | None = None,
        record: dict[str, Any] | None = None,
        log_every: int = 10,
        active: bool = True,
        title: str = "",
        terminal: bool | None = None,
        done: int = 0,
        meter: StepMeter | None = None,
        writers: Sequence[Any] = (),
    ) -> None:
        self.steps, self.tokens_per_step, self.log_every = steps, tokens_per_step, max(1, log_every)
        self.title, self.active = title, active
        self.rows: list[dict[str, Any]] = []
        self.done = self._first = done
        self.out = Path(out) if out is not None and active else None
        self._meter = meter or StepMeter(devices=1)
        self._writers = [*writers]
        if self.out:
            self.out.mkdir(parents=True, exist_ok=True)
            if record is not None:
                _write_record(self.out / "run.json", record, done)
            lines = JsonLines(self.out / "metrics.jsonl", after=done, warn=self.say)
            self.rows = lines.rows
            self._writers.append(lines)
        self._written = len(self.rows)
        self._terminal = active and (sys.stdout.isatty() if terminal is None else terminal)
        self._shown = ""  # the line of the last step, on a terminal
        self._start = time.perf_counter()

    def __enter__(self) -> Progress:
        self._start = time.perf_counter()
        self.mark()
        return self

    def step(self, step: int, *, loss: float, grad_norm: float, lr: float) -> None:
        """After a step, counted from 1. The time since the last call of `step` or `held_out` is the step's."""
        row = {"step": step, "loss": loss, "grad_norm": grad_norm, "lr": lr, **self._meter.step(self.tokens_per_step)}
        self.rows.append(row)
        self.done = step
        self._write(upto=len(self.rows) - 1)  # this step's object waits: an evaluation may follow
        is_logged = step % self.log_every == 0 or step in (self._first + 1, self.steps)
        if self._terminal or (self.active and is_logged):
            left = (time.perf_counter() - self._start) / (step - self._first) * (self.steps - step)
            count = f"{step:>{len(str(self.steps))}}/{self.steps}"
            line = f"step {count}  {self._text(row)}  {_clock(left)} left"
            if self._terminal:
                self._shown = line[: shutil.get_terminal_size().columns - 1]  # a line that wraps cannot be replaced
                print(f"\r{self._shown}\x1b[K", end="", flush=True)
            else:
                print(line, flush=True)

    def held_out(self, loss: float) -> None:
        """The held-out loss after the last step; the time that the evaluation took counts for no step."""
        if self.rows:
            self.rows[-1]["held_out_loss"] = loss
        self.say(f"held-out loss {loss:.4f} after step {self.done}")
        self.mark()

    def say(self, text: str) -> None:
        """A line of its own, on a terminal above the line of the last step."""
        if self._terminal:
            print(f"\r{text}\x1b[K\n{self._shown}", end="", flush=True)
        elif self.active:
            print(text, flush=True)

    def interrupted(self) -> str:
        """Ends the output where it is; returns how far the run is, for whoever stopped it."""
        self.__exit__(None, None, None)
        return f"after step {self.done} of {self.steps}"

    def flush(self) -> None:
        """Writes the last step, too: nothing that belongs to it will follow."""
        self._write(upto=len(self.rows))

    def mark(self) -> None:
        """The time since the last step counts for none."""
        self._meter.mark()

    def mean_loss(self, last: int = 20) -> float:
        """Mean loss of the last steps."""
        losses = [row["loss"] for row in self.rows[-last:]]
        return sum(losses) / len(losses) if losses else float("nan")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal and self._shown:
            print(flush=True)  # the line of the last step stays
            self._terminal = False
        self.flush()
        for writer in self._writers:
            if hasattr(writer, "close"):
                writer.close()
        if self.out and self.rows:
            try:
                loss_curve(self.rows, self.out / "loss.png", self.title)
            except (ImportError, OSError) as error:
                if find_spec("matplotlib") is None:
                    self.say("no loss curve: matplotlib is not installed (pip install matplotlib)")
                    return
                self.say(f"warning: no loss curve: {error}")

    def _text(self, row: dict[str, Any]) -> str:
        recent = [r["tokens_per_s"] for r in self.rows[-10:]]
        speed = len(recent) / sum(1 / max(s, 1e-9) for s in recent)
        text = f"loss {row['loss']:.4f}  grad norm {row['grad_norm']:.3f}  {speed:,.0f} tokens/s"
        return text + (f"  MFU {row['mfu'] * speed / row['tokens_per_s']:.1%}" if "mfu" in row else "")

    def _write(self, upto: int) -> None:
        for row in self.rows[self._written : upto]:
            for writer in self._writers:
                writer(row["step"], row)
        self._written = max(upto, self._written)


def loss_curve(rows: Sequence[dict[str, Any]], path: Path, title: str = "") -> None:
    """Training loss of each step, its mean over 21 steps around it, and held-out losses, as PNG. Needs matplotlib.

    Near the ends the mean is over fewer steps, as many before as after.
    """
    from matplotlib.figure import Figure  # no pyplot: no global state and no screen

    steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
    means = centred_means(losses)
    held_out = [(row["step"], row["held_out_loss"]) for row in rows if "held_out_loss" in row]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="training")
    axes.plot(steps, means, color="tab:blue", linewidth=2, label="training, mean of 21 steps around")
    if held_out:
        axes.plot(*zip(*held_out), "o-", color="tab:orange", label="held out")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def centred_means(values: Sequence[float], reach: int = 10) -> list[float]:
    """Returns the mean of each value and of up to `reach` values on both sides, equally many: it does not lag."""
    last = len(values) - 1
    windows = [(i, min(reach, i, last - i)) for i in range(len(values))]
    return [sum(values[i - near : i + near + 1]) / (2 * near + 1) for i, near in windows]


def _write_record(path: Path, record: dict[str, Any], done: int) -> None:
    """Writes `record` of a new run, or adds it to that of the run that goes on."""
    if done and path.exists():
        first = json.loads(path.read_text())
        record = {**first, "resumed": [*first.get("resumed", []), {"after_step": done, **record}]}
    _replace(path, json.dumps(record, indent=2) + "\n")


def _replace(path: Path, text: str) -> None:
    """Writes a file that holds the old text or the new one, whenever the process is killed."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
