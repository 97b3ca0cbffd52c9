"""What the code of a repair is to import: an edit is whole, so that the file runs with it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from .provenance import Site
from .syntax import syntax_tree
from .trials import Edit, Repair

__all__ = ["importing"]

_STATEMENTS = {
    "comm": "from neuronx_dist import comm",
    "nxd": "import neuronx_dist as nxd",
    "spmd": "from neuronx_dist import spmd",
    "torch": "import torch",
}
_USED = re.compile(rf"(?<![\w.])({'|'.join(_STATEMENTS)})(?=[.(])")


def importing(repairs: Iterable[str], here: Site | None) -> list[str]:
    """The repairs, each with one edit more for what its edits name and the file at hand does not."""
    return [_importing(repair, here) if isinstance(repair, Repair) and repair.edits else repair for repair in repairs]


def _importing(repair: Repair, here: Site | None) -> Repair:
    if here is None:
        return repair
    known = here.frame.f_globals.keys() | here.frame.f_locals.keys()
    used = {name for edit in repair.edits if edit.file == here.file for name in _USED.findall(edit.text)}
    missing = sorted(used - known)
    tree = syntax_tree(here.source)
    if not missing or tree is None:
        return repair
    line = _first_line(tree)
    text = "".join(f"{_STATEMENTS[name]}\n" for name in missing)
    return Repair(repair, Edit(here.file, (line, 0), (line, 0), text), *repair.edits)


def _first_line(tree: ast.Module) -> int:
    """The line of the first statement behind the docstring and what is imported of the future."""
    for node in tree.body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not docstring and getattr(node, "module", "") != "__future__":
            return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
    return 1
