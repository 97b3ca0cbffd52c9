"""What every rule claims, in `registry.txt`: an edit of a table of rules is a line there, which its review reads.

`verify` (see verify_rule) says whether a claim is true; here none gets lost, and none comes unseen. NXD_UPDATE_RULES=1
writes the file anew. Functions that only another version of torch has are left out.
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

from neuronx_dist.rules import RULES, Rule

FILE = Path(__file__).parent / "registry.txt"
DEFAULTS = Rule("", None)


def claims(rule: Rule) -> str:
    """All that a rule says but its name and what it computes of a call."""
    words = []
    for field in Rule._fields:
        value = getattr(rule, field)
        if field not in ("name", "spec", "decompose") and value != getattr(DEFAULTS, field):
            words.append(f"{field}={'by call' if callable(value) else value}")
    return ", ".join(words) or "nothing"


def named(function: Callable[..., Any], rule: Rule) -> str:
    owner = getattr(function, "__self__", None)
    name = resolve_name(function) or f"{getattr(owner, '__name__', '')}.{getattr(function, '__name__', '')}"
    name = name.replace(" ", "").replace("torch.nn.functional.", "F.").replace("torch.Tensor.", "x.")
    return name if name.rpartition(".")[2] == rule.name else f"{name}={rule.name}"


def registry() -> dict[str, set[str]]:
    by_claims = defaultdict(set)
    for function, rule in RULES.items():
        owner = getattr(function, "__self__", None)
        if str(getattr(owner, "__module__", None) or getattr(function, "__module__", None)).startswith("tests."):
            continue  # other tests of this process have registered it
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
    if torch.__version__.startswith("2.13."):  # other versions have fewer functions
        assert sorted(reviewed - pairs) == []
