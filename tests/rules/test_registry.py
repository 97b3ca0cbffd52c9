"""Claims of every rule, in `registry.txt`: an edit of a table of rules is a line there, which its review reads.

`verify` (see verify_rule) says whether a claim is true; here none gets lost, and none comes unseen. NXD_UPDATE_RULES=1
writes the file anew, on torch 2.13. Functions that only another version of torch has are left out.
"""

from __future__ import annotations

import os
import textwrap
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import resolve_name

import neuronx_dist.program.experts  # noqa: F401  its functions have rules
from neuronx_dist.rules import RULES, Rule

FILE = Path(__file__).parent / "registry.txt"
DEFAULTS = Rule("", None)
# Names that only a newer torch has, and those of named tensors, which torch 2.9 has.
OTHERS = {"_has_grad_dtype_override", *"names align_as align_to has_names refine_names rename rename_".split()}
NAMESPACES = {"F": torch.nn.functional, "x": torch.Tensor, "torch": torch}


def claims(rule: Rule) -> str:
    """All that a rule says but its name and what it computes of a call."""
    words = []
    for field in Rule._fields:
        value = getattr(rule, field)
        if field not in ("name", "spec", "decompose") and value != getattr(DEFAULTS, field):
            words.append(f"{field}={'by call' if callable(value) else value}")
    return ", ".join(words) or "nothing"


def removed(function: Any) -> bool:
    """Whether torch has removed the function: its name remains, and raises an error, as `torch.cholesky` (2.15)."""
    return getattr(function, "__module__", None) == "torch._linalg_utils"


def is_here(name: str) -> bool:
    """Whether the installed torch has a function of the file; those that are named by their property alone it has."""
    namespace, *path = name.partition("=")[0].split(".")
    if path[0] == "__delete__" and namespace:
        return hasattr(torch.Tensor, namespace)
    if namespace not in NAMESPACES and not path[0].startswith("_foreach_"):
        return True
    place = NAMESPACES.get(namespace, torch)
    for word in path:
        place = getattr(place, word, None)
    return place is not None and not removed(place)


def named(function: Callable[..., Any], rule: Rule) -> str:
    owner = getattr(function, "__self__", None)
    owner = None if isinstance(owner, property) else owner  # which has a name since Python 3.13
    name = resolve_name(function) or f"{getattr(owner, '__name__', '')}.{getattr(function, '__name__', '')}"
    if name.startswith("torch.foreach."):
        return f"._foreach_{function.__name__}"  # claims the same as the older name
    name = name.replace(" ", "").replace("torch.nn.functional.", "F.").replace("torch.Tensor.", "x.")
    return name if name.rpartition(".")[2] == rule.name else f"{name}={rule.name}"


def registry() -> dict[str, set[str]]:
    by_claims = defaultdict(set)
    for function, rule in RULES.items():
        owner = getattr(function, "__self__", None)
        if str(getattr(owner, "__module__", None) or getattr(function, "__module__", None)).startswith("tests."):
            continue  # other tests of this process have registered it
        if rule.name in OTHERS or removed(function):
            continue
        by_claims[claims(rule)].add(named(function, rule))
    return dict(by_claims)


def written() -> dict[str, set[str]]:
    by_claims: dict[str, set[str]] = {}
    for block in FILE.read_text().split("\n\n"):
        head, _, names = block.partition("\n")
        by_claims[head] = set(names.split())
    return by_claims


def test_the_registry_is_what_was_reviewed():
    now = registry()
    if os.environ.get("NXD_UPDATE_RULES"):
        blocks = [
            head + "\n" + textwrap.fill(" ".join(sorted(names)), 118, initial_indent="  ", subsequent_indent="  ")
            for head, names in sorted(now.items())
        ]
        FILE.write_text("\n\n".join(blocks) + "\n")
    before = written()
    pairs = {(head, name) for head, names in now.items() for name in names}
    reviewed = {(head, name) for head, names in before.items() for name in names}
    assert sorted(pairs - reviewed) == []
    assert sorted((head, name) for head, name in reviewed - pairs if is_here(name)) == []
