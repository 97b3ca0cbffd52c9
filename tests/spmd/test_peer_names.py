"""Public names of the published package spmd_types: equal here, or in the table of docs/type-system.md."""

from __future__ import annotations

import inspect
import re
import types
from typing import Any

import pytest

peer = pytest.importorskip("spmd_types")

from spmd_types import checker as peer_checker  # noqa: E402
from spmd_types import rules as peer_rules  # noqa: E402

from neuronx_dist import spmd  # noqa: E402
from neuronx_dist.checking import checker  # noqa: E402
from neuronx_dist.spmd import type_rules  # noqa: E402
from neuronx_dist.spmd.operator_options import Options  # noqa: E402
from tests.support.paths import ROOT  # noqa: E402

MODULES = {"": (peer, spmd), "checker.": (peer_checker, checker), "rules.": (peer_rules, type_rules)}
DIFFERS, MISSING = "differs", "missing"


def public_names(module: types.ModuleType) -> list[str]:
    """Names that the module defines or offers: of `rules` those of its own functions and classes."""
    own_only = module is peer_rules
    found = []
    for name, value in vars(module).items():
        if name[0] == "_" or name == "annotations" or (inspect.ismodule(value) and name != "rules"):
            continue
        if own_only and getattr(value, "__module__", "") != module.__name__:
            continue
        found.append(name)
    return sorted(found)


def parameters(function: Any) -> tuple[int, set[str]]:
    """Returns the number of positional parameters, and the names of those passed by keyword."""
    positional, keywords = 0, set()
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional = 99
        elif parameter.kind is parameter.VAR_KEYWORD:
            keywords |= set(Options.__annotations__) if "Options" in str(parameter.annotation) else {"*"}
        elif parameter.kind is parameter.KEYWORD_ONLY:
            keywords.add(parameter.name)
        else:
            positional += 1
            keywords.add(parameter.name)
    return positional, keywords


def difference(theirs: Any, ours: Any) -> str:
    """Returns in which way the parameters differ; "" where each call of theirs is a call of ours."""
    if not inspect.isfunction(theirs):
        return ""
    try:
        (their_count, _), (our_count, our_names) = parameters(theirs), parameters(ours)
    except (TypeError, ValueError):
        return ""
    only_by_name = {
        p.name for p in inspect.signature(theirs).parameters.values() if p.kind is p.KEYWORD_ONLY
    } - our_names
    if "*" in our_names:
        only_by_name = set()
    if only_by_name:
        return f"no {', '.join(sorted(only_by_name))}"
    return f"{their_count} positional parameters, here {our_count}" if their_count > our_count else ""


def found_differences() -> dict[str, str]:
    """Name -> "missing", or how it differs."""
    found = {}
    for prefix, (theirs, ours) in MODULES.items():
        for name in public_names(theirs):
            if not hasattr(ours, name):
                found[prefix + name] = MISSING
            elif words := difference(getattr(theirs, name), getattr(ours, name)):
                found[prefix + name] = words
    return found


def table() -> dict[str, str]:
    """Name -> "missing" or "differs", from the documentation; every row has a reason."""
    section = (ROOT / "docs" / "type-system.md").read_text().split("## The language of spmd_types")[1].split("\n## ")[0]
    rows = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[1] in (DIFFERS, MISSING):
            assert len(cells[2]) > 20, f"no reason: {line}"
            rows.update((name, cells[1]) for name in re.findall(r"`([^`]+)`", cells[0]))
    return rows


def test_the_table_lists_all_differences():
    found, rows = found_differences(), table()
    assert {n for n, w in found.items() if w == MISSING} == {n for n, w in rows.items() if w == MISSING}
    unlisted = {name: words for name, words in found.items() if words != MISSING and name not in rows}
    assert unlisted == {}
    public = {prefix + name for prefix, (theirs, _) in MODULES.items() for name in public_names(theirs)}
    assert set(rows) <= public, "rows of names that the published package does not have"


def test_most_of_the_language_is_here():
    names = sum(len(public_names(theirs)) for theirs, _ in MODULES.values())
    assert names > 80 and len(found_differences()) < names / 4


if __name__ == "__main__":
    for name, words in found_differences().items():
        print(name, "|", words)
