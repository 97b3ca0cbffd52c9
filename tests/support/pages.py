"""Runs the Python of a page of docs/: its blocks in order, as one program, on the ranks that the page is for."""

from __future__ import annotations

import contextlib
import io
import linecache
import re
from collections.abc import Callable, Mapping
from typing import Any

from neuronx_dist import Mesh
from neuronx_dist.comm import threads
from tests.support.paths import DOCS

__all__ = ["blocks_of", "patched", "run_page"]

# Ranks are threads here, and have their mesh already.
_STARTS = re.compile(
    r"^(device = )?nxd\.(init_distributed|initialize_model_parallel|destroy_model_parallel)\(.*?\).*$", re.M
)
_BLOCK = re.compile(r"^```(python|diff)\n(.*?)^```", re.M | re.S)


def blocks_of(page: str) -> list[tuple[str, str]]:
    """Blocks of a page in order: ("python", code), or ("diff", changes of the first block)."""
    return _BLOCK.findall((DOCS / page).read_text())


def patched(code: str, diff: str) -> str:
    """`code` with the changes of a diff without line numbers: its lines are found in order, others stay."""
    result: list[str] = []
    rest = code.splitlines()
    for line in diff.splitlines():
        mark, text = line[:1], line[1:]
        if mark == "+":
            result.append(text)
            continue
        assert text in rest, f"the diff has a line that is not in the rest of the code: {text!r}"
        at = rest.index(text)
        result += rest[:at] + ([] if mark == "-" else [text])
        rest = rest[at + 1 :]
    return "\n".join([*result, *rest]) + "\n"


def run_page(
    page: str,
    names: Mapping[str, Any] | None = None,
    *,
    code: str | None = None,
    until: str | None = None,
    replace: Mapping[str, str] | None = None,
    printed: list[str] | None = None,
    before: Callable[[dict[str, Any]], None] | None = None,
    **mesh: int,
) -> list[dict[str, Any]]:
    """Runs a page's Python blocks, or `code`, on the ranks of a mesh; returns the names of each rank at the end.

    Args:
        names: what the page does not define.
        code: run this in place of the blocks.
        until: text of the last block that runs.
        replace: text that is another one in a test, such as a folder.
        printed: gets the output.
        before: called on each rank with the names, before the first block.
        mesh: sizes of axes, `tp=2, dp=2`.
    """
    blocks = [code] if code is not None else [text for kind, text in blocks_of(page) if kind == "python"]
    if until is not None:
        blocks = blocks[: 1 + next(i for i, block in enumerate(blocks) if until in block)]
    program = "\n".join(blocks)
    for old, new in (replace or {}).items():
        assert old in program, f"{page} does not have {old!r}"
        program = program.replace(old, new)
    program = _STARTS.sub(lambda found: "device = torch.device('cpu')" if found[1] else "", program)
    file = "train.py" if page == "start.md" else page.replace(".md", ".py")
    linecache.cache[file] = (len(program), None, program.splitlines(keepends=True), file)
    compiled = compile(program, file, "exec")

    def rank() -> dict[str, Any]:
        result = {"__name__": "page", **(names or {})}
        if before is not None:
            before(result)
        exec(compiled, result)
        return result

    out = io.StringIO()
    sizes = dict(mesh)
    dp = sizes.pop("dp", sizes.get("ep", 1))
    world = dp * sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)
    with contextlib.redirect_stdout(out):
        results = threads.run(Mesh(world, **sizes), rank)
    if printed is not None:
        printed.append(out.getvalue())
    return results
