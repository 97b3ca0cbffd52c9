"""A scene as a PNG, by matplotlib, which is optional: `pip install matplotlib`."""

from __future__ import annotations

from pathlib import Path

from .scene import LIGHT, Label, Rectangle, Scene

__all__ = ["save_png"]

_SCALE = 2  # pixels for each unit of the scene: sharp on fine screens


def save_png(scene: Scene, path: str | Path) -> None:
    """Writes a PNG with twice the scene's width and height, in its light theme.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: no global state and no screen
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyBboxPatch
        from PIL import Image  # comes with matplotlib
    except ImportError as error:
        raise RuntimeError(
            "a PNG needs matplotlib, which is not installed: pip install matplotlib, or write .html or .svg, which "
            "need nothing"
        ) from error

    point = 72 / 100  # matplotlib measures text and lines in points; a unit of the scene is a hundredth of an inch
    with rc_context({"hatch.linewidth": 0.8, "font.family": ["DejaVu Sans"]}):
        size = scene.width / 100, scene.height / 100
        figure = Figure(figsize=size, dpi=100 * _SCALE, facecolor=LIGHT["page"])
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, scene.width), ylim=(scene.height, 0))
        axes.set_axis_off()
        for shape in scene.shapes:
            if isinstance(shape, Rectangle):
                box = FancyBboxPatch(
                    (shape.x, shape.y),
                    shape.width,
                    shape.height,
                    boxstyle="round,pad=0,rounding_size=" + f"{min(2.0, shape.width / 3):g}",
                    facecolor=_colour(shape.fill),
                    edgecolor=LIGHT["hatch"] if shape.fill == "idle" else "none",
                    hatch="////" if shape.fill == "idle" else None,
                    linewidth=0,
                )
                axes.add_patch(box)
            elif isinstance(shape, Label):
                axes.text(
                    shape.x,
                    shape.y,
                    shape.text,
                    size=shape.size * point,
                    color=_colour(shape.fill),
                    ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
                    va="baseline",
                    weight="bold" if shape.bold else "normal",
                )
            else:
                xs, ys = zip(*shape.points)
                if shape.base is not None:
                    axes.fill_between(xs, ys, shape.base, color=LIGHT[shape.fill], linewidth=0)
                axes.plot(xs, ys, color=LIGHT[shape.line], linewidth=1.2 * point, solid_capstyle="butt")
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    # The picture has few colours: a palette makes the file a third as large.
    image = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba(), "raw", "RGBA", 0, 1)
    image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def _colour(fill: str) -> str:
    return fill if fill.startswith("#") else LIGHT[fill]
