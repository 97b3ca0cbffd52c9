"""The figures: of the buggy programs so many are refused, of the right ones so many accepted."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from tests.checking.user_programs.support import (
    PROGRAMS,
    assumed_at_the_bug,
    execute,
    load,
    refused_as_its_original,
    verdict,
)


def figures(names: Sequence[str]) -> str:
    """Counts the programs that the checker judges rightly, and lists the others, a line each."""
    chosen = [PROGRAMS[name] for name in names]
    buggy, right = [p for p in chosen if p.bug], [p for p in chosen if p.right]
    refused = [p for p in buggy if verdict(p.name).outcome == "refused"]
    accepted = [p for p in right if verdict(p.name).outcome == "accepted"]
    same = [p for p in refused if refused_as_its_original(p)]
    assumed = [p for p in buggy if verdict(p.name).outcome == "accepted" and assumed_at_the_bug(p)]
    crashed = [p for p in chosen if verdict(p.name).outcome == "crashed"]
    lines = [
        f"buggy: refused {len(refused)} of {len(buggy)}, {len(same)} of them in the words in which the original is",
        f"    accepted with an assumption on the line of the bug: {len(assumed)}",
        f"right: accepted {len(accepted)} of {len(right)}",
        f"crashed: {len(crashed)}; {sum(verdict(p.name).seconds for p in chosen):.1f} s",
        "",
    ]
    for p in chosen:
        found = verdict(p.name)
        if found.outcome != ("accepted" if p.right else "refused"):
            lines.append(f"{found.outcome} {p.name}: {found.line or p.bug}")
            lines += [f"    assumed {text}" for text in (assumed_at_the_bug(p) if p.bug else ())]
        elif p in same:
            lines.append(f"refused as its original {p.name}: {found.line}")
        if not execute(p.name).confirms(p):
            lines.append(f"NOT CONFIRMED {p.name}: {execute(p.name)}")
    return "\n".join(lines)


def show(name: str) -> str:
    found = verdict(name)
    return f"{name}: {PROGRAMS[name].bug or 'right'}\n{execute(name)}\n{found.outcome}: {found.report or found.message}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    load()
    wanted = sys.argv[1:]
    chosen = [name for name in PROGRAMS if not wanted or any(name.startswith(start) for start in wanted)]
    print("\n\n".join(map(show, chosen)) if wanted else figures(chosen))
