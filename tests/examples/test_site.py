"""Pages that the site makes: docstrings as Markdown, links, the sidebar. Sphinx is there after `make docs`."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.support import site_width
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
def test_a_wide_page_is_noticed(tmp_path: Any) -> None:
    browser = site_width.browser()
    if browser is None:
        pytest.skip("no chromium here")
    (tmp_path / "narrow.html").write_text("<p>words")
    (tmp_path / "wide.html").write_text("<div style='width: 900px'>words</div>")
    assert site_width.wide_pages(browser, tmp_path) == ["wide.html: 908 pixels in a window of 400"]
