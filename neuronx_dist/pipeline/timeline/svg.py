"""A scene as SVG, and as an HTML page, which loads nothing from anywhere; both follow the reader's theme."""

from __future__ import annotations

from html import escape

from .scene import DARK, LIGHT, Area, Label, Rectangle, Scene

__all__ = ["html", "svg"]

_FONT = "font-family: system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
# Attributes have the colours of the light theme, for viewers without CSS; themed shapes have a class.
_DARK = " ".join(f".{name} {{ fill: {value} }} .stroke-{name} {{ stroke: {value} }}" for name, value in DARK.items())
_STYLE = f"""\
.timeline {{ {_FONT}; font-variant-numeric: tabular-nums }}
@media (prefers-color-scheme: dark) {{ {_DARK} }}
"""
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>%(title)s</title>
<style>
body { margin: 0; background: %(light_page)s } main { overflow-x: auto }
@media (prefers-color-scheme: dark) { body { background: %(dark_page)s } }
svg { display: block; margin: 12px auto; min-width: %(width)dpx; max-width: %(max_width)dpx; height: auto }
#tip { position: fixed; display: none; padding: 6px 10px; border-radius: 6px; background: #1d2733; color: #fff;
  font: 13px system-ui, sans-serif; box-shadow: 0 2px 10px #0006; pointer-events: none; white-space: pre }
[data-m] { transition: opacity .08s }
%(style)s</style>
</head>
<body>
<main>%(svg)s</main>
<div id="tip"></div>
<script>
const svg = document.querySelector("svg"), tip = document.getElementById("tip");
const bars = [...svg.querySelectorAll("[data-m]")];
svg.addEventListener("pointermove", event => {
  const bar = event.target.closest("[data-m]");
  tip.style.display = bar ? "block" : "none";
  for (const other of bars)  // the way of a microbatch through the pipeline
    other.style.opacity = bar && (other.dataset.m !== bar.dataset.m || other.dataset.c !== bar.dataset.c) ? .25 : 1;
  if (!bar) return;
  tip.textContent = bar.dataset.tip.replaceAll(" · ", "\\n");
  const { clientX: x, clientY: y } = event, { offsetWidth: width, offsetHeight: height } = tip;
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - width - 8)) + "px";
  tip.style.top = (y + 18 + height > innerHeight ? y - height - 10 : y + 18) + "px";
});
svg.addEventListener("pointerleave", () => {
  tip.style.display = "none";
  for (const bar of bars) bar.style.opacity = 1;
});
</script>
</body>
</html>
"""


def svg(scene: Scene) -> str:
    """Returns the scene as an SVG file. A bar has a title, which a browser shows under the pointer."""
    size = f' xmlns="http://www.w3.org/2000/svg" width="{scene.width:g}" height="{scene.height:g}"'
    return _svg(scene, size, titles=True, style=f"<style>\n{_STYLE}</style>\n")


def html(scene: Scene) -> str:
    """Returns an HTML page: the pointer shows the description of a task, and highlights its microbatch."""
    return _PAGE % {
        "title": escape(scene.title),
        "style": _STYLE,
        "svg": _svg(scene, "", titles=False, style=""),
        "width": scene.width,
        "max_width": 1.5 * scene.width,
        "light_page": LIGHT["page"],
        "dark_page": DARK["page"],
    }


def _svg(scene: Scene, attributes: str, *, titles: bool, style: str) -> str:
    parts = [
        f'<svg{attributes} class="timeline" viewBox="0 0 {scene.width:g} {scene.height:g}" role="img" '
        f'aria-label="{escape(scene.title)}">\n{style}'
        '<defs><pattern id="hatched" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="6" height="6" {_fill("idle")}/>'
        f'<rect width="1.2" height="6" {_fill("hatch")}/></pattern></defs>\n'
        f'<rect width="100%" height="100%" {_fill("page")}/>'
    ]
    for shape in scene.shapes:
        if isinstance(shape, Rectangle):
            parts.append(_rectangle(scene, shape, titles))
        elif isinstance(shape, Label):
            weight = ' font-weight="600"' if shape.bold else ""
            parts.append(
                f'<text x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size:g}" text-anchor="{shape.anchor}"'
                f'{weight} {_fill(shape.fill)} pointer-events="none">{escape(shape.text)}</text>'
            )
        else:
            parts.append(_area(shape))
    return "\n".join([*parts, "</svg>"])


def _rectangle(scene: Scene, shape: Rectangle, titles: bool) -> str:
    where = f'x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" height="{shape.height:.2f}" rx="2"'
    fill = 'fill="url(#hatched)"' if shape.fill == "idle" else _fill(shape.fill)
    if shape.bar is None:
        return f"<rect {where} {fill}/>"
    text = escape(scene.describe(shape.stage, shape.bar))
    data = f'data-c="{shape.chart}" data-m="{shape.bar.task.microbatch}"'
    if titles:
        return f"<rect {data} {where} {fill}><title>{text}</title></rect>"
    return f'<rect {data} data-tip="{text}" {where} {fill}/>'


def _area(shape: Area) -> str:
    line = " ".join(f"{x:.2f},{y:.2f}" for x, y in shape.points)
    stroke = (
        f'<polyline points="{line}" fill="none" class="stroke-{shape.line}" stroke="{LIGHT[shape.line]}" '
        'stroke-width="1.2"/>'
    )
    if shape.base is None:
        return stroke
    closed = f"{line} {shape.points[-1][0]:.2f},{shape.base:.2f} {shape.points[0][0]:.2f},{shape.base:.2f}"
    return f'<polygon points="{closed}" {_fill(shape.fill)}/>{stroke}'


def _fill(fill: str) -> str:
    return f'fill="{fill}"' if fill.startswith("#") else f'class="{fill}" fill="{LIGHT[fill]}"'
