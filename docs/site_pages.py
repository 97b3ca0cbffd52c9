"""Makes the pages of the site that are not Markdown files of docs/, and links that work there and on GitHub.

_generated/api/    a page for each room with public names (tests/support/public_names.py), from docstrings
_generated/*.md    copies of README.md, benchmarks/README.md, CONTRIBUTING.md and CHANGELOG.md
torch.inv          the inventory of torch's names, so that a build asks no server

The sidebar is `index.md`: a caption for each heading, an entry for each link below it; pages of docs/ that are on no
list come last in "How-to". A relative link that leaves docs/ is checked, and leads into `repository`, or is a path.
A public name without a docstring, and a link to a file that is not there, are errors of the build.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import types
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging
from sphinx.util.inspect import stringify_signature

from tests.support.public_names import PUBLIC, WITH_PACKAGES, public_names

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
GENERATED = DOCS / "_generated"
COPIES = {
    "overview": "README.md",
    "benchmarks": "benchmarks/README.md",
    "contributing": "CONTRIBUTING.md",
    "changelog": "CHANGELOG.md",
}
TORCH = """class torch.Tensor tensors.html#torch.Tensor|class torch.dtype tensor_attributes.html#torch.dtype
    class torch.device tensor_attributes.html#torch.device|class torch.optim.Optimizer optim.html#torch.optim.Optimizer
    class torch.nn.Module generated/torch.nn.Module.html#torch.nn.Module
    class torch.nn.Parameter generated/torch.nn.parameter.Parameter.html#torch.nn.parameter.Parameter
    class torch.optim.AdamW generated/torch.optim.AdamW.html#torch.optim.AdamW
    class torch.distributed.ProcessGroup distributed.html#torch.distributed.ProcessGroup
    class torch.Generator generated/torch.Generator.html#torch.Generator"""

log = logging.getLogger(__name__)


# --- docstrings as Markdown ---

_SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields|Example|Examples|Note|Notes|Warning|Shapes|Keys):$")


def _escaped(line: str) -> str:
    """Text outside of backticks without Markdown's and HTML's marks: `*args`, `<name>`."""
    pieces = re.split(r"(`+[^`]*`+)", line)
    marks = r"[<*\[\]]|(?<![^\W_])_|_(?![^\W_])"
    return "".join(x if x.startswith("`") else re.sub(marks, lambda mark: f"\\{mark[0]}", x) for x in pieces)


def markdown(doc: str) -> str:
    """A docstring as Markdown: its sections as lists, indented lines and `>>>` as code."""
    lines: list[str] = []
    section, until_blank = False, False
    code: int | None = None  # indentation of the block of code
    for line in [*inspect.cleandoc(doc).splitlines(), ""]:
        text, indent = line.strip(), len(line) - len(line.lstrip())
        if code is not None:
            ends = not text if until_blank else text and indent < code
            if not ends:
                lines.append(line[code:])
                continue
            while not lines[-1]:
                lines.pop()
            lines += ["```", ""]
            code = None
        if indent == 0 and _SECTION.match(text):
            section = True
            lines += ["", f"**{text[:-1]}**", ""]
            continue
        section = section and (indent > 0 or not text)
        doctest, columns = text.startswith(">>>"), bool(re.search(r"\S {2,}\S", text)) and not section
        until_blank = doctest or columns
        first = not lines or not lines[-1].strip()
        if doctest or (first and not section and (indent >= 4 or columns)):
            code = indent
            lines += ["```python" if doctest else "```", line[code:]]
        elif section and indent == 4 and re.match(r"[\w*, .\[\]`]+: ", text):
            names, rest = text.split(": ", 1)
            lines.append(f"- `{names.strip('`')}`: {_escaped(rest)}")
        elif section:
            lines.append(("  " if text else "") + _escaped(text))
        else:
            mark = text[:2] if text[:2] in ("* ", "- ") else ""
            lines.append(line[:indent] + mark + _escaped(text[len(mark) :]))
    return "\n".join(lines).strip() + ("\n```" if code is not None else "")


# --- pages of public names ---


def _signature(value: Any) -> str:
    try:
        shown = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [
        one
        if one.default is one.empty or isinstance(one.default, (int, float, str, tuple, type(None)))
        else one.replace(default=_Named(one.default))
        for one in shown.parameters.values()
    ]
    returns = inspect.Signature.empty if isinstance(value, type) else shown.return_annotation
    shown = shown.replace(parameters=parameters, return_annotation=returns)
    text = re.sub(r"\s+", " ", stringify_signature(shown))
    return re.sub(r"(?<![\w.])nn\.(Module|Parameter)", r"torch.nn.\1", text)


class _Named:
    """A default by its name: an object's address would change with every build."""

    def __init__(self, value: Any) -> None:
        self.name = str(value) if str(value).startswith("torch.") else getattr(value, "__name__", type(value).__name__)

    def __repr__(self) -> str:
        return self.name


def _directive(kind: str, name: str, signature: str, body: str, colons: int = 4) -> str:
    fence = "`" * (colons + 2)
    return f"{fence}{{py:{kind}}} {name}{signature}\n\n{body}\n{fence}\n"


def _methods(cls: type, done: set[int]) -> Iterator[str]:
    for name, value in vars(cls).items():
        function = (
            inspect.unwrap(getattr(value, "__func__", value)) if callable(getattr(value, "__func__", value)) else value
        )
        doc = getattr(function, "__doc__", None)
        if name[0] == "_" or not doc or id(function) in done:
            continue
        if isinstance(value, property):
            yield _directive("property", name, "", markdown(doc), 3)
        elif inspect.isfunction(function):
            done.add(id(function))
            signature = re.sub(r"^\((self|cls)(, )?", "(", _signature(function))
            yield _directive("method", name, signature, markdown(doc), 3)


def _doc_of(value: Any) -> str:
    """The docstring of its own: of a class not that of a base, of a dataclass not the generated signature."""
    doc = vars(value).get("__doc__") if isinstance(value, type) else getattr(value, "__doc__", None)
    generated = isinstance(value, type) and (doc or "").startswith(value.__name__ + "(")
    return "" if not doc or generated else doc


def _without_files(doc: str) -> str:
    """A room's docstring without the list of its files, which is for those who work on it."""
    return "\n\n".join(part for part in doc.split("\n\n") if not re.match(r"[\w/.]+(\.py|/)[ :]", part))


def _constant_doc(name: str, value: Any) -> str:
    """The comment `#:` above the assignment, in the module of this package that makes it."""
    for module in [*sys.modules.values()]:
        if module.__name__.startswith("neuronx_dist") and vars(module).get(name) is value:
            docs = ModuleAnalyzer.for_module(module.__name__).find_attr_docs()
            if ("", name) in docs:
                return " ".join(docs["", name]).strip()
    return "" if isinstance(value, type) or type(value).__module__ == "builtins" else _doc_of(type(value))


def api_pages() -> tuple[dict[str, str], list[str]]:
    """Returns the pages by name, and the public names that have no docstring."""
    pages: dict[str, list[str]] = {}
    homes: dict[int, str] = {}
    missing: list[str] = []
    done: set[int] = set()
    for module_name in ["", *PUBLIC, *WITH_PACKAGES]:
        full = f"neuronx_dist.{module_name}".rstrip(".")
        module = importlib.import_module(full)
        page = pages.setdefault(module_name.partition(".")[0] or "neuronx_dist", [])
        page += [f"#{'#' * bool(page)} `{full}`", markdown(_without_files(module.__doc__ or "")), ""]
        rows: list[str] = []
        for name in public_names(module):
            value, label = getattr(module, name), f"{full}.{name}"
            if isinstance(value, types.ModuleType):
                rows.append(f"- `{label}`: a module. {_escaped((value.__doc__ or '').strip().partition(chr(10))[0])}")
            elif not callable(value) or isinstance(value, (types.UnionType, types.GenericAlias)):
                doc = _constant_doc(name, value)
                if not doc:
                    missing.append(label)
                page.append(_directive("data", label, "", markdown(doc)))
            elif id(value) in homes:
                rows.append(f"- `{label}`: {{py:obj}}`{homes[id(value)]}`")
            else:
                homes[id(value)] = label
                outside = getattr(value, "__module__", "").partition(".")[0]
                doc = _doc_of(value) or _constant_doc(name, value)
                doc = doc or ("" if outside == "neuronx_dist" else f"The class of {outside}.")
                if not doc:
                    missing.append(label)
                body = markdown(doc)
                if isinstance(value, type):
                    body += "\n\n" + "\n".join(_methods(value, done))
                page.append(
                    _directive("class" if isinstance(value, type) else "function", label, _signature(value), body)
                )
        page += [*rows, ""]
    return {name: "\n".join(lines) for name, lines in pages.items()}, missing


# --- links and the sidebar ---

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s:]+)\)")
_FENCED = re.compile(r"(^ *```.*?^ *```[ ]*$)", re.M | re.S)


def page_of(path: Path) -> Path | None:
    """The Markdown file of the site's page with the content of `path`, if there is one."""
    pages = {ROOT / original: GENERATED / f"{copy}.md" for copy, original in COPIES.items()}
    path = pages.get(path, path)
    return path if path.is_relative_to(DOCS) and path.suffix == ".md" else None


def with_links(source: str, folder: Path, page: Path, repository: str) -> str:
    """The text of `page` with links that the site can follow; they are relative to `folder`."""

    def link(found: re.Match[str]) -> str:
        text, target, fragment = found[1], found[2], found[3] or ""
        path = (folder / target).resolve()
        if not path.exists():
            log.warning("%s links to %s, which is not there", page.relative_to(ROOT), target, type="link")
        to = page_of(path)
        if to is not None:
            return f"[{text}]({os.path.relpath(to, page.parent)}{fragment})"
        name = os.path.relpath(path, ROOT)
        if repository:
            return f"[{text}]({repository.rstrip('/')}/{name}{fragment})"
        return text if Path(name).name.removesuffix(".py") in text else f"{text} (`{name}`)"

    def image(found: re.Match[str]) -> str:
        return f"![{found[1]}]({os.path.relpath(folder / found[2], page.parent)})"

    parts = _FENCED.split(_IMAGE.sub(image, source))
    return "".join(part if _FENCED.fullmatch(part) else _LINK.sub(link, part) for part in parts)


def sidebar(index: str, api: list[str]) -> str:
    """Hidden toctrees: a caption for each `##` of the start page, and an entry for each link of a list below it."""
    sections: dict[str, dict[str, str]] = {}
    for part in re.split(r"^## ", index, flags=re.M)[1:]:
        lines = "\n".join(re.findall(r"^[*-] .*", part, re.M))
        links = re.findall(r"\[([^\]]+)\]\(([^)#\s]+\.md)\)", lines)
        pages = [(title, page_of((DOCS / target).resolve())) for title, target in links]
        entries = {_docname(page): title.replace("`", "") for title, page in pages if page is not None}
        if entries:
            sections[part.partition("\n")[0]] = entries
    sections["API"] |= {f"_generated/api/{name}": name for name in api}
    listed = {"index"}.union(*sections.values())
    unlisted = [_docname(page) for page in sorted(DOCS.rglob("*.md")) if GENERATED not in page.parents]
    sections["How-to"] |= {name: "" for name in unlisted if name not in listed}
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n"
        + "\n".join(f"{title} <{name}>" if title else name for name, title in entries.items())
        + "\n```\n"
        for caption, entries in sections.items()
    )


def _docname(page: Path) -> str:
    return page.relative_to(DOCS).with_suffix("").as_posix()


# --- Sphinx's events ---


def write_pages(app: Sphinx) -> None:
    pages, missing = api_pages()
    if missing:
        raise ExtensionError(f"{len(missing)} public names have no docstring: {', '.join(missing)}; write one each")
    texts = {GENERATED / "api" / f"{name}.md": text for name, text in pages.items()}
    for name, original in COPIES.items():
        page, file = GENERATED / f"{name}.md", ROOT / original
        texts[page] = with_links(file.read_text(), file.parent, page, app.config.repository)
    for path in GENERATED.rglob("*.md"):
        if path not in texts:
            path.unlink()
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:  # an unchanged page is not read again
            path.write_text(text)
    app.api_names = list(pages)


def write_inventory(app: Sphinx, config: Any) -> None:
    """The objects.inv of torch's names, before intersphinx reads it."""
    entries = [entry.split() for entry in TORCH.replace("\n", "|").split("|")]
    lines = "".join(f"{name} py:{kind} 1 {place} -\n" for kind, name, place in entries)
    head = "# Sphinx inventory version 2\n# Project: torch\n# Version: \n"
    head += "# The remainder of this file is compressed using zlib.\n"
    GENERATED.mkdir(exist_ok=True)
    (GENERATED / "torch.inv").write_bytes(head.encode() + zlib.compress(lines.encode()))


def read_page(app: Sphinx, docname: str, source: list[str]) -> None:
    if docname.startswith("_generated"):
        return
    page = DOCS / f"{docname}.md"
    text = with_links(source[0], page.parent, page, app.config.repository)
    source[0] = text + (sidebar(source[0], app.api_names) if docname == "index" else "")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("repository", "", "env")
    app.connect("config-inited", write_inventory, priority=1)
    app.connect("builder-inited", write_pages)
    app.connect("source-read", read_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
