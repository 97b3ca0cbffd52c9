"""Pages that the site makes: docstrings as Markdown, links, the sidebar. Sphinx is there after `make docs`."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.support import site_overflow
from tests.support.paths import DOCS

pytest.importorskip("sphinx", reason="make docs installs Sphinx")


@pytest.fixture(scope="module")
def site() -> Any:
    spec = importlib.util.spec_from_file_location("site_pages", DOCS / "site_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_docstring_becomes_markdown(site: Any) -> None:
    text = """Sums `x` over *ranks* of __all__ <axes>.

    >>> f(1)
    1

        a line of code

    Args:
        x, *rest: tensors
            of any shape.
    """
    assert site.markdown(text).split("\n") == [
        "Sums `x` over \\*ranks\\* of \\_\\_all\\_\\_ \\<axes>.",
        "",
        "```python",
        ">>> f(1)",
        "1",
        "```",
        "",
        "",
        "```",
        "a line of code",
        "```",
        "",
        "",
        "**Args**",
        "",
        "- `x, *rest`: tensors",
        "  of any shape.",
    ]


def test_links_that_leave_docs(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[Any] = []
    monkeypatch.setattr(site.log, "warning", lambda *args, **_: warnings.append(args))
    page = DOCS / "layout.md"
    text = (
        "[a](../examples/tour.py) [`b.py`](../examples/tour.py) [c](../README.md#x) [d](models.md)\n```\n[e](f)\n```\n"
    )
    expected = "a (`examples/tour.py`) `b.py` (`examples/tour.py`) [c](_generated/overview.md#x) [d](models.md)\n"
    expected += "```\n[e](f)\n```\n"
    assert site.with_links(text, DOCS, page, "") == expected
    at = "https://host/blob/main"
    assert f"[a]({at}/examples/tour.py)" in site.with_links(text, DOCS, page, at)
    assert not warnings
    site.with_links("[x](nowhere.md)", DOCS, page, "")
    assert "nowhere.md" in warnings[0]


def test_a_page_without_a_line_comes_last_in_how_to(site: Any) -> None:
    index = (DOCS / "index.md").read_text()
    entry = "Long context <long-context>\n"
    assert entry in site.sidebar(index, [])
    without = site.sidebar(index.replace("[Long context](long-context.md)", "Long context"), [])
    assert "\nlong-context\n```" in without.partition(":caption: How-to")[2].partition(":caption: ")[0]


@pytest.mark.slow
def test_a_public_name_without_a_docstring_is_named(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The build, which is a stage of CI, has all names, and refuses these."""
    monkeypatch.setattr(site, "PUBLIC", ["mesh"])
    monkeypatch.setattr(site, "WITH_PACKAGES", [])
    pages, missing = site.api_pages()
    assert (
        missing == [] and "{py:function} neuronx_dist.reduce_gradients(model: torch.nn.Module" in pages["neuronx_dist"]
    )
    monkeypatch.setattr(site, "_doc_of", lambda value: "")
    assert {"neuronx_dist.reduce_gradients", "neuronx_dist.mesh.part_of"} <= {*site.api_pages()[1]}


@pytest.mark.process
@pytest.mark.slow
def test_overflow_of_pages_and_pictures_is_noticed(tmp_path: Any) -> None:
    browser = site_overflow.browser()
    if browser is None:
        pytest.skip("no chromium here")
    scroller = "<div style='overflow: auto'><p style='width: 900px'>words</div><details><p>words</details>"
    pages = {
        "right.html": f"<p>words{scroller}",
        "wide.html": "<p style='width: 900px'>words",
        "box.html": "<div style='width: 200px'><b style='display: block; width: 210px'>words</b></div>",
        "word.html": f"<p style='width: 90px'>{'w' * 60}",
        "cut.html": "<p style='width: 90px; overflow: hidden; white-space: nowrap'>words, words and more words",
        "low.html": "<p style='height: 30px; overflow: hidden'>words<br>words<br>words",
        "off.html": "<p style='position: absolute; left: -50px'>words",
        "picture.html": "<svg width=50 height=50><text x=30 y=20>words</text></svg>",
        "right.svg": "<svg xmlns='http://www.w3.org/2000/svg' width='99' height='50'><text y='20'>words</text></svg>",
        "cut.svg": "<svg xmlns='http://www.w3.org/2000/svg' width='99' height='50'><text y='51'>words</text></svg>",
    }
    for name, text in pages.items():
        (tmp_path / name).write_text(text if name.endswith("svg") else f"<!doctype html>{text}")
    found = site_overflow.overflows(browser, [tmp_path])
    both = {line.split(": ")[0].partition("/")[2] for line in found}
    assert both == {name for name in pages if not name.startswith("right")}, found
    assert any('wide.html: <p> "words": 8 to 908, ' in line for line in found), found
