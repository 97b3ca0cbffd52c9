"""The report of plans, one HTML file: the ranks, a simulated step, memory, terms, and what would change the choice."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from ..pipeline.schedule import Costs, simulate
from ..pipeline.schedule.selection import training_schedule
from ..pipeline.timeline.chart import Chart
from ..pipeline.timeline.scene import draw
from ..pipeline.timeline.svg import svg
from ..planning.layout import format_bytes, format_count
from .cluster import Cluster
from .layout_plan import TERMS, LayoutPlan
from .plans import Plans, plan
from .predictor import Predictor
from .stage_memory import StageBytes

__all__ = ["report", "save_report"]

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
_WIDTH = 1200  # pixels of a PNG

_COLOURS = (
    "#4269d0",
    "#97bbf5",
    "#6cc5b0",
    "#efb118",
    "#ff725c",
    "#a463f2",
    "#9c6b4e",
    "#9498a0",
    "#3ca951",
    "#ff8ab7",
)
_HEADER = ["", "layout", "s/step", "tokens/s/device", "MFU", "waiting", "peak", "left"]
_MOST_STAGES = 16
_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; white-space: nowrap; }
td, th { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line); }
td:nth-child(2), th:nth-child(2), td.text, th.text { text-align: left; }
td:nth-child(2), td.text { white-space: normal; min-width: 13rem; }
pre { overflow-x: auto; padding: .8rem; background: var(--soft); border-radius: .3rem; line-height: 1.25; }
.command { white-space: pre-wrap; overflow-wrap: anywhere; }
.bar { display: flex; height: 1.1rem; background: var(--soft); }
.row { display: grid; grid-template-columns: 4.2rem minmax(4rem, 1fr) 5.2rem; gap: .6rem;
  align-items: center; margin: .25rem 0; }
.row span:last-child { text-align: right; } .limit { border-right: 2px solid #d33; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1rem; margin: .6rem 0; font-size: .85rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .3rem; vertical-align: -.05rem; }
.timeline { min-width: 60rem; width: 100%; height: auto; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p>{{ summary }}</p>
<p>To train in its layout:</p>
<pre class="command">{{ command }}</pre>
<h2>The fastest plans</h2>
<div class="scroll"><table>
<tr>{% for cell in header %}<th{{ text if loop.last else '' }}>{{ cell }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td{{ text if loop.last else '' }}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
<h2>Where the time goes</h2>
{{ legend(term_names) }}
{{ bars(term_bars) }}
<h2>Memory by stage of plan 1</h2>
{{ legend(memory_names) }}
{{ bars(memory_bars) }}
<p>Bars are as long as the memory of a device, {{ memory }}; plans leave 5 % of it.</p>
<h2>The ranks of plan 1</h2>
<pre>{{ picture }}</pre>
{% if timeline %}<h2>A step of plan 1, simulated</h2>
<p>{{ timeline_words }}</p>
<div class="scroll">{{ timeline | safe }}</div>
{% endif %}
<h2>What would change it</h2>
<div class="scroll"><table>
<tr><th></th><th>change</th><th{{ text }}>best plan</th><th>tokens/s/device</th></tr>
{% for what, layout, speed in sensitivity %}<tr><td></td><td>{{ what }}</td><td{{ text }}>{{ layout }}</td>
<td>{{ speed }}</td></tr>
{% endfor %}</table></div>
<p>Formulas, their sources, and what is not modelled: docs/planner.md.</p>
</body>
</html>
"""
_MACROS = """\
{% set text = ' class=text' %}
{% macro bars(rows) %}{% for label, parts, total in rows %}<div class="row"><span>{{ label }}</span><div class="bar">
{% for name, colour, share in parts %}
<div title="{{ name }}" style="width:{{ '%.3f' | format(100 * share) }}%;background:{{ colour }}"></div>
{% endfor %}</div><span>{{ total }}</span></div>{% endfor %}{% endmacro %}
{% macro legend(names) %}<div class="legend">{% for name, colour in names %}
<span><i style="background:{{ colour }}"></i>{{ name }}</span>{% endfor %}</div>{% endmacro %}
"""


def report(plans: Plans) -> str:
    """Returns the report as an HTML page.

    Raises:
        ModuleNotFoundError: jinja2 is not installed; torch requires it.
    """
    import jinja2

    best, workload, cluster, job = plans[0], plans.workload, plans.cluster, plans.job
    title = f"{workload.name} on {cluster.devices} x {cluster.name}"
    summary = (
        f"{format_count(workload.num_parameters)} parameters, {job.global_batch} x {job.seq_len} tokens a step. Best: "
        f"{best.words()}: {best.seconds.total:.4g} s, MFU {best.mfu:.1%}, {best.margin:.0%} of the memory left."
    )
    timeline, words = _timeline(best)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_MACROS + _PAGE).render(
        title=title,
        summary=summary,
        command=best.train_command(),
        header=[*_HEADER, "beyond products, most time takes"],
        rows=[_row(number, one) for number, one in enumerate(plans, 1)],
        term_names=list(zip(TERMS.values(), _COLOURS)),
        term_bars=[_term_bar(number, one, max(x.seconds.total for x in plans)) for number, one in enumerate(plans, 1)],
        memory_names=list(zip(_memory_names(), _COLOURS)),
        memory_bars=_memory_bars(best),
        memory=format_bytes(cluster.memory),
        picture=best.layout.picture(workload.shape, width=100),
        timeline=timeline,
        timeline_words=words,
        sensitivity=_sensitivity(plans),
    )


def save_report(plans: Plans, path: str | PathLike[str]) -> None:
    """Writes the report as an HTML page, or, by the name of the file, as PNG.

    Raises:
        ValueError: a PNG needs a browser, Chromium or one of its kind, which is not installed.
    """
    path = Path(path)
    page = report(plans)
    if path.suffix.lower() == ".png":
        _draw_png(page, path)
    else:
        path.write_text(page)


def _draw_png(page: str, path: Path) -> None:
    """Draws a page with a browser without a window, which is opened twice: for the height, and for the picture."""
    browser = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise ValueError(f"{path}: a PNG is drawn by one of {', '.join(_BROWSERS)}: install one, or write .html")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(2, "No such file or directory", str(path))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        measure = "<script>document.title = document.documentElement.scrollHeight</script></body>"
        file.write_text(page.replace("</body>", measure))
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
        ]
        command = [browser, *flags, f"--window-size={_WIDTH},1000"]
        options: dict[str, Any] = dict(capture_output=True, text=True, timeout=120, check=True)
        dom = subprocess.run([*command, "--dump-dom", file.as_uri()], **options).stdout
        height = dom.partition("<title>")[2].partition("</title>")[0]
        command[-1] = f"--window-size={_WIDTH},{height}"
        subprocess.run([*command, f"--screenshot={path.absolute()}", file.as_uri()], **options)


def _row(number: int, one: LayoutPlan) -> list[str]:
    terms = {name: getattr(one.seconds, name) for name in TERMS if name != "products"}
    most = max(terms, key=terms.__getitem__)
    limit = f"{TERMS[most]} ({terms[most] / one.seconds.total:.0%})"
    seconds = one.seconds
    waiting = f"{seconds.bubble:.3g} s ({seconds.bubble / seconds.total:.1%})"
    figures = [f"{seconds.total:.4g}", f"{one.tokens_per_second:,.0f}", f"{one.mfu:.1%}", waiting]
    return [str(number), one.words(), *figures, format_bytes(one.peak), f"{one.margin:.0%}", limit]


def _term_bar(number: int, one: LayoutPlan, longest: float) -> tuple[str, list[tuple[str, str, float]], str]:
    parts = []
    for (name, words), colour in zip(TERMS.items(), _COLOURS):
        seconds = getattr(one.seconds, name)
        parts.append((f"{words}: {seconds:.4g} s", colour, max(0.0, seconds) / longest))
    return f"plan {number}", parts, f"{one.seconds.total:.4g} s"


def _memory_names() -> list[str]:
    return [name for name in StageBytes._fields if name not in ("step", "first_gradients")]


def _memory_bars(best: LayoutPlan) -> list[tuple[str, list[tuple[str, str, float]], str]]:
    bars = []
    for stage, memory in enumerate(best.stages[:_MOST_STAGES]):
        parts = []
        for name, colour in zip(_memory_names(), _COLOURS):
            nbytes = getattr(memory, name)
            if name in ("loss", "temporary") and nbytes < max(memory.loss, memory.temporary):
                nbytes = 0.0  # the larger one of the two counts
            parts.append((f"{name}: {format_bytes(nbytes)}", colour, nbytes / best.cluster.memory))
        bars.append((f"stage {stage}", parts, format_bytes(memory.peak)))
    return bars


def _timeline(best: LayoutPlan) -> tuple[str, str]:
    """Returns the picture of a step, and what it shows; "" without a pipeline."""
    layout = best.layout
    if layout.pp == 1 or layout.pp > _MOST_STAGES:
        return "", ""
    predictor = Predictor(best.workload, best.cluster)
    tasks = predictor.tasks(best.candidate)

    def milliseconds(part: int) -> Any:
        return lambda stage, chunk: 1e3 * tasks[stage][chunk][part]

    shown = min(layout.num_microbatches, 2 * layout.pp + 2)
    name = layout.schedule if isinstance(layout.schedule, str) else None
    schedule = training_schedule(layout.pp, shown, schedule=name, num_chunks=layout.virtual_pipeline_size)
    message = 1e3 * predictor.message_seconds(best.candidate)
    costs = Costs(milliseconds(0), milliseconds(1), milliseconds(2), message)
    chart = Chart(str(layout.schedule), simulate(schedule, costs).timeline, "ms")
    words = f"{shown} of {layout.num_microbatches} microbatches, by the seconds of each stage."
    return svg(draw([chart], 1200)), words


def _sensitivity(plans: Plans) -> list[list[str]]:
    """Returns the best of the plans on other clusters, and the best plan of other batches."""
    cluster, job = plans.cluster, plans.job
    rows = [["as planned", plans[0].words(), f"{plans[0].tokens_per_second:,.0f}"]]
    dtype = plans[0].layout.dtype
    changed: list[tuple[str, Cluster]] = []
    for factor, words in ((0.5, "half of"), (2.0, "twice")):
        for index, link in enumerate(cluster.links):
            links = list(cluster.links)
            links[index] = replace(link, bandwidth=min(cluster.bandwidth, link.bandwidth * factor))
            where = f"the bandwidth of the link of {link.span} devices"
            changed.append((f"{words} {where}", replace(cluster, links=tuple(links))))
    slower = {**cluster.flops, dtype: cluster.flops[dtype] / 2}
    changed.append(("half of the speed of products", replace(cluster, flops=slower)))
    for words, other in changed:
        rows.append([words, *_fastest([_on(one, other) for one in plans])])
    for words, batch in (("half of the batch", job.global_batch // 2), ("twice the batch", 2 * job.global_batch)):
        if batch:
            try:
                found = plan(
                    plans.workload,
                    global_batch=batch,
                    seq_len=job.seq_len,
                    cluster=cluster,
                    constraints=job.fixed,
                    top_k=1,
                    check=False,
                )
            except ValueError:
                rows.append([words, "no plan fits", ""])
            else:
                rows.append([words, *_fastest(found)])
    return rows


def _on(one: LayoutPlan, cluster: Cluster) -> LayoutPlan:
    return replace(one, cluster=cluster, seconds=Predictor(one.workload, cluster).seconds(one.candidate))


def _fastest(plans: Sequence[LayoutPlan]) -> list[str]:
    best = min(plans, key=lambda one: one.seconds.total)
    return [best.words(), f"{best.tokens_per_second:,.0f}"]
