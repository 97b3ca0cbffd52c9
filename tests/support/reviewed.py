"""Texts that were reviewed, as files beside the tests, which a review reads. NXD_UPDATE_TEXTS=1 writes them anew."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Mapping
from pathlib import Path

__all__ = ["assert_reviewed", "with_code_for_lines"]

_LINE = re.compile(r"(?P<path>[\w./-]+\.py):(?P<line>\d+)")


def assert_reviewed(path: Path, texts: Mapping[str, str]) -> None:
    """The texts, each below its name, are those of the file."""
    now = "\n".join(f"=== {name}\n{text.rstrip()}\n" for name, text in texts.items())
    if os.environ.get("NXD_UPDATE_TEXTS"):
        path.write_text(now)
    assert now == path.read_text()


def with_code_for_lines(text: str, *files: str) -> str:
    """`file:line` of these files as the code that stands there; of other files without folder and line."""

    def code(match: re.Match[str]) -> str:
        for file in files:
            if Path(match["path"]).name == Path(file).name:
                return f"<{linecache.getline(file, int(match['line'])).strip()}>"
        return f"<{Path(match['path']).name}>"

    return _LINE.sub(code, text)
