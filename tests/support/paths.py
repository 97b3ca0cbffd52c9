"""Where the repository, its documents and its scripts are, so that no test counts folders; names of modules' files."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

__all__ = ["DOCS", "EXAMPLES", "ROOT", "file_name"]

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"


def file_name(module: ModuleType) -> str:
    """`linear.py`, as messages and reports name it: by the module, which is imported from wherever it has moved."""
    assert module.__file__ is not None
    return Path(module.__file__).name
