"""Writes the pictures of the site, docs/images/*.svg: `make pictures`. A test compares them.

mesh.svg     eight ranks as a grid, with one group of each axis
message.svg  the report on the step of docs/start.md that forgets a line
timeline.svg 1F1B and ZB-V, simulated
memory.svg   the predicted memory of a rank in five layouts of a Llama
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any
from xml.sax.saxutils import escape

from neuronx_dist import Layout, Mesh
from neuronx_dist.pipeline.schedule import Costs, OneFOneB, ZeroBubbleV
from neuronx_dist.pipeline.timeline.chart import simulated
from neuronx_dist.pipeline.timeline.scene import draw
from neuronx_dist.pipeline.timeline.svg import svg
from neuronx_dist.planning.memory import estimate_memory
from tests.support.pages import run_page
from tests.support.paths import DOCS

COLOURS = ("#4269d0", "#efb118", "#3ca951", "#ff725c", "#a463f2")
KINDS = ("parameters", "gradients", "optimizer", "activations", "logits")
LAYOUTS: tuple[dict[str, Any], ...] = (
    dict(),
    dict(zero1=True),
    dict(tp=2, sequence_parallel=True, zero1=True),
    dict(tp=2, pp=2, sequence_parallel=True, zero1=True),
    dict(tp=4, pp=2, sequence_parallel=True),
)


def _svg(width: int, height: int, title: str, body: Sequence[str], background: str = "#ffffff") -> str:
    style = "text { font: 13px sans-serif; fill: #1b1b1f } "
    style += ".code { font: 12.5px monospace; white-space: pre; fill: #e6e6e6 }"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
    rect = f'<rect width="{width}" height="{height}" rx="8" fill="{background}"/>'
    return "\n".join([head, f"<title>{escape(title)}</title><style>{style}</style>", rect, *body, "</svg>", ""])


def _text(x: float, y: float, words: str, *, anchor: str = "start", css: str = "", fill: str = "") -> str:
    marks = (f' class="{css}"' if css else "") + (f' style="fill: {fill}"' if fill else "")
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{marks}>{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> str:
    size = f'width="{width:g}" height="{height:g}"'
    return f'<rect x="{x:g}" y="{y:g}" {size} rx="5" fill="{fill}" stroke="{stroke}" stroke-width="2"/>'


def mesh() -> str:
    """Stages as rows, replicas as boxes, the ranks of a tp group within a box."""
    ranks, body = Mesh(8, tp=2, pp=2), []
    for rank in range(8):
        at = ranks.coordinates(rank)
        left, top = 100 + 250 * at["dp"], 50 + 105 * at["pp"]
        if at["tp"] == 0:
            body.append(_box(left, top, 225, 80, "none", COLOURS[0]))
            body.append(_text(left + 112, top - 6, f"dp {at['dp']}" if at["pp"] == 0 else "", anchor="middle"))
        if at["tp"] == at["dp"] == 0:
            body.append(_text(16, top + 45, f"pp {at['pp']}"))
        body.append(_box(left + 10 + 105 * at["tp"], top + 10, 100, 60, "#e8edfb"))
        body.append(_text(left + 60 + 105 * at["tp"], top + 36, f"rank {rank}", anchor="middle"))
        body.append(_text(left + 60 + 105 * at["tp"], top + 56, f"tp {at['tp']}", anchor="middle"))
    rows = ("tp, half of each matrix: ", "dp, other rows, equal weights: ", "pp, the other layers: ")
    for line, (words, axis) in enumerate(zip(rows, ("tp", "dp", "pp"))):
        groups = ", ".join(f"{{{', '.join(map(str, group))}}}" for group in ranks.groups(axis))
        body.append(_text(100, 262 + 20 * line, f"groups of {words}{groups}"))
    return _svg(600, 320, "eight ranks as a grid of pp 2, dp 2 and tp 2", body)


def message() -> str:
    """The report as a terminal shows it, 96 columns wide."""
    reports: list[str] = []
    run_page("start.md", until="report = spmd.check", printed=reports)
    text = re.sub(r"\S*?(train\.py:\d+)", r"\1", reports[-1])
    lines = ["$ python train.py"]
    for line in text[text.index("1 problem") :].strip().splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines += textwrap.wrap(line, 96, subsequent_indent=indent, break_long_words=False) or [""]
    colour: Callable[[str], str] = lambda line: "#ffb86c" if re.search(r"repair:|or:", line) else ""  # noqa: E731
    body = [_text(16, 28 + 19 * i, line, css="code", fill=colour(line)) for i, line in enumerate(lines)]
    return _svg(760, 30 + 19 * len(lines), "a report of spmd.check", body, "#16181d")


def memory() -> str:
    """A bar for each layout: the bytes of the fullest rank in forward and backward, by kind."""
    from transformers import LlamaConfig

    sizes = dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32)
    config = LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False)
    body, y = [], 70
    for kind, colour, x in zip(KINDS, COLOURS, (210, 310, 400, 490, 590)):
        body += [_box(x, 22, 12, 12, colour), _text(x + 17, 33, kind)]
    for options in LAYOUTS:
        dp = 8 // (options.get("tp", 1) * options.get("pp", 1))
        batch = dict(num_microbatches=32 // dp, global_batch=32, seq_len=2048, dtype="bfloat16")
        stages = estimate_memory(Layout(8, **options, **batch), config, fused_loss=True).stages
        stage = max(stages, key=lambda stage: stage.compute.peak)
        words = [f"{name} {options[name]}" for name in ("tp", "pp") if name in options] + [f"dp {dp}"]
        words += ["ZeRO-1"] if options.get("zero1") else []
        body.append(_text(200, y + 17, ", ".join(words), anchor="end"))
        x = 210.0
        for kind, colour in zip(KINDS, COLOURS):
            width = round(stage.compute.most.get(kind, 0) / 2**30 * 15, 1)
            body.append(_box(x, y, width, 24, colour))
            x += width
        body.append(_text(x + 8, y + 17, f"{stage.compute.peak / 2**30:.1f} GiB"))
        y += 36
    body.append(
        _text(
            16,
            y + 14,
            "A Llama of 1.5 billion parameters in bfloat16 on 8 ranks, one sequence of 2048 tokens a microbatch;",
        )
    )
    body.append(_text(16, y + 33, "with tp sequence parallelism, masters and AdamW's moments in fp32 (optimizer)."))
    return _svg(760, y + 50, "predicted memory of a rank", body)


def timeline() -> str:
    """1F1B and ZB-V on four stages, as `neuronx-dist timeline` draws them."""
    schedules = {"1f1b": OneFOneB(4, 8), "zb_v": ZeroBubbleV(4, 8)}
    return svg(draw([simulated(name, schedule, Costs()) for name, schedule in schedules.items()]))


PICTURES: dict[str, Callable[[], str]] = {"mesh": mesh, "message": message, "timeline": timeline, "memory": memory}

if __name__ == "__main__":
    for name, picture in PICTURES.items():
        (DOCS / "images" / f"{name}.svg").write_text(picture())
