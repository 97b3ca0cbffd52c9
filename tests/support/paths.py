"""Paths of the repository, its documents and its scripts, so that no test counts folders; names of modules' files."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

__all__ = ["DOCS", "EXAMPLES", "ROOT", "declared_in", "file_name"]

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"


def file_name(module: ModuleType) -> str:
    """`linear.py`, as messages and reports name it: by the module, which is imported from wherever it has moved."""
    assert module.__file__ is not None
    return Path(module.__file__).name


def declared_in(line: str) -> tuple[str, str]:
    """Returns the file name and the text of an assumption: of rows.py in `train.py:1 (in rows.py:2): text`."""
    found = re.fullmatch(r"(?:[^:]*:\d+ \(in (.*?):\d+\)|(.*?):\d+): (.*)", line)
    assert found is not None, line
    return Path(found[1] or found[2]).name, found[3]
