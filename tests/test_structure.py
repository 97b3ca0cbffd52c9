"""The package is a tower: rooms on floors, and an import never points up, at any depth, late imports included.

`docs/architecture.md` names the floors. A new room gets a line in `TOWER`; nothing else here should need a change.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from tests.support.paths import ROOT
from tests.support.sources import nodes_of, tree_of

PACKAGE = ROOT / "neuronx_dist"

# From the ground up. Rooms on one line do not import one another. A room is a file, or a folder but for the parts of it
# that have a line of their own.
TOWER = [
    ["axis_sizes", "call_site", "command_line", "folder_names", "lazy_names", "model_shape", "nearest"]
    + ["shared_context", "topology", "torch_internals"],
    ["accelerator", "mesh", "rules", "unknown_keywords"],
    ["comm"],
    ["comm/backends"],
    ["comm/scopes", "comm/launch"],
    ["comm/doctor"],
    ["weights"],
    ["spmd"],
    ["attention", "data", "metrics", "program", "sharded_functions"],
    ["gradients"],
    ["parallel_layers"],
    ["modules"],
    ["shard_tensor"],
    ["distributed"],
    ["hf", "optimizer", "pipeline/schedule"],
    ["pipeline/timeline"],
    ["pipeline/cut"],
    ["pipeline/run"],
    ["pipeline"],
    ["checkpoint"],
    ["scripts", "trainer"],
    ["lightning"],
    ["checking/types"],
    ["checking/types/messages"],
    ["checking/types/handlers"],
    ["checking/types/judging", "checking/types/memo", "checking/types/raw_collectives"],
    ["checking/types/surroundings"],
    ["checking/types/mode"],
    ["checking/report"],
    ["checking/programs"],
    ["checking", "compat", "planning", "xla_replay"],
    ["planner"],
    ["hf/trainer"],
    ["train"],
    ["parallelize/composites", "parallelize/config", "parallelize/example"],
    ["parallelize/choose"],
    ["parallelize/annotations", "parallelize/policy", "parallelize/train"],
    ["parallelize/emit", "parallelize/generated"],
    ["parallelize/prove"],
    ["parallelize"],
    ["parallelize/cli"],
    ["compat/nnscaler"],
    ["__main__"],
]
FLOOR = {room: floor for floor, rooms in enumerate(TOWER) for room in rooms}

# The only names by which a room reaches a higher one, and only when a user asks for them.
DOORS_UP = {
    "spmd": {"SpmdTypeMode", "check", "checker", "typecheck"},
}
# Imported inside functions: the package works without them.
OPTIONAL = {
    "PIL",
    "gguf",
    "jax",
    "jinja2",
    "jaxlib",
    "matplotlib",
    "ml_dtypes",
    "numpy",
    "safetensors",
    "torch_xla",
    "transformers",
}


class Import(NamedTuple):
    """A file imports `module` (dotted, of this package), or `name` of it, at a line."""

    path: Path
    line: int
    module: str
    name: str | None

    def __repr__(self) -> str:
        return f"{self.path.relative_to(PACKAGE.parent)}:{self.line} imports {self.module} {self.name or ''}".rstrip()


@cache
def files(package: Path = PACKAGE) -> dict[str, Path]:
    """Dotted module name -> file."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path, package: Path = PACKAGE) -> Iterator[Import]:
    """Everything that a file imports of this package, at any depth, `TYPE_CHECKING` included."""
    known = files(package)
    inside = path.relative_to(package.parent).parts[:-1]
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (Import(path, node.lineno, alias.name, None) for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*inside[: len(inside) - node.level + 1], *filter(None, [node.module])])
            base = base if node.level else node.module or ""
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                if whole in known:
                    yield Import(path, node.lineno, whole, None)
                elif base in known:
                    yield Import(path, node.lineno, base, alias.name)


def room_of(path: Path) -> str:
    """The room of a file: the longest entry of the tower that it lies in. A folder's face belongs to its top floor."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts[-1] == "__init__":
        folder = "/".join(parts[:-1])
        inside = [room for room in FLOOR if room == folder or room.startswith(folder + "/")]
        if inside:
            return max(inside, key=FLOOR.__getitem__)
    for length in range(len(parts), 0, -1):
        room = "/".join(parts[:length])
        if room in FLOOR:
            return room
    raise AssertionError(f"{path.relative_to(PACKAGE)} has no floor: give its room a line in TOWER")


def circles(package: Path = PACKAGE) -> list[list[str]]:
    """The groups of files that import one another in a loop."""
    known = files(package)
    names = {path: name for name, path in known.items()}
    graph = {name: {i.module for i in imports_of(path, package)} - {name} for name, path in known.items()}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:  # Tarjan
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            members = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(members) > 1:
                found.append(sorted(members))

    for name in names.values():
        if name not in index:
            visit(name)
    return found


def test_no_files_import_one_another_in_a_circle():
    assert circles() == []


def test_imports_point_down():
    up = []
    for name, path in files().items():
        if name == PACKAGE.name:
            continue  # the package's own face names what users import
        here = room_of(path)
        for found in imports_of(path):
            target = files()[found.module]
            if target == PACKAGE / "__init__.py":
                up.append(f"{found!r}, the face of the whole package")
            elif (room := room_of(target)) != here and FLOOR[room] >= FLOOR[here]:
                up.append(f"{found!r}: {here} is on floor {FLOOR[here]}, {room} on floor {FLOOR[room]}")
    assert up == []


def test_every_room_of_the_tower_exists():
    missing = [room for room in FLOOR if not (PACKAGE / room).is_dir() and not (PACKAGE / f"{room}.py").is_file()]
    assert missing == []


def test_lazy_names_are_the_only_doors_up():
    """A table given to `lazy_names` names higher rooms only as `DOORS_UP` says; no other code imports by name."""
    doors: dict[str, set[str]] = defaultdict(set)
    by_name = []
    for name, path in files().items():
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
                by_name.append(name)
        if path.name != "__init__.py" or name == PACKAGE.name:
            continue
        here = room_of(path)
        tables = [node for node in nodes_of(path) if isinstance(node, ast.Dict)]
        for table in tables:
            for key, value in zip(table.keys, table.values):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                    target = files().get(f"{PACKAGE.name}.{value.value.partition(':')[0]}")
                    if target is not None and FLOOR[room_of(target)] > FLOOR[here]:
                        doors[here].add(key.value)
    assert dict(doors) == DOORS_UP
    assert sorted(set(by_name)) == [
        "neuronx_dist.__main__",
        "neuronx_dist.command_line",  # the user's own module
        "neuronx_dist.compat",  # what the user asks for
        "neuronx_dist.compat.neuronx_distributed",
        "neuronx_dist.compat.nxd_names",  # modules in the place of NxD's
        "neuronx_dist.compat.stand_ins",  # modules in the place of torch_xla's
        "neuronx_dist.lazy_names",
        "neuronx_dist.metrics.writers",  # tensorboard, or tensorboardX
        "neuronx_dist.parallelize.cli.arg_parser",  # names in the user's configuration
        "neuronx_dist.shard_tensor.physicsnemo",  # PhysicsNeMo, where it is installed
        "neuronx_dist.xla_replay.__main__",  # the user's own module
    ]


def test_functions_import_only_optional_packages():
    late = []
    for path in files().values():
        for function in nodes_of(path):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                for node in ast.walk(function):
                    names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                    names += [node.module or "."] if isinstance(node, ast.ImportFrom) and not node.level else []
                    names += ["."] if isinstance(node, ast.ImportFrom) and node.level else []
                    if any(name.split(".")[0] not in OPTIONAL for name in names):
                        late.append(f"{path.relative_to(PACKAGE.parent)}:{node.lineno} imports {', '.join(names)}")
    assert late == []


def top_room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _private(name: str) -> bool:
    """Returns whether a name is private and ours: torch's modules and tensors, and named tuples, have some, too."""
    if not name.startswith("_") or name.startswith("__") or name == "_":
        return False
    return not any(hasattr(other, name) for other in (nn.Module(), torch.Tensor, Import))


def test_no_room_reaches_for_anothers_private_members():
    """A `_name` is used in the room that defines it. (Of `x._name` it counts where any class or module defines it.)"""
    defined: dict[str, set[str]] = defaultdict(set)
    for path in set(files().values()) - {PACKAGE / "__init__.py"}:
        for node in nodes_of(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                defined[node.name].add(room_of(path))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    defined[node.attr].add(room_of(path))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined[node.id].add(room_of(path))
    reached = []
    for path in set(files().values()) - {PACKAGE / "__init__.py"}:
        here = room_of(path)
        if here == "torch_internals":
            continue  # its private names are torch's
        for node in nodes_of(path):
            name = node.attr if isinstance(node, ast.Attribute) else ""
            if not _private(name) or ast.unparse(node.value) in ("self", "cls", "super()"):
                continue
            if defined[name] and here not in defined[name]:
                reached.append(f"{path.relative_to(PACKAGE.parent)}:{node.lineno} uses {ast.unparse(node)}")
        for found in imports_of(path):
            if found.name and _private(found.name) and room_of(files()[found.module]) != here:
                reached.append(repr(found))
    assert reached == []


def _docstrings(tree: ast.Module) -> set[int]:
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, holders) and node.body and isinstance(node.body[0], ast.Expr)
    }


def test_no_file_knows_another_by_its_path():
    """Only documentation names files: what a string of code names breaks unseen when a file moves."""
    wrong = []
    for path in files().values():
        tree = tree_of(path)
        documentation = _docstrings(tree)
        for node in nodes_of(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
                for name in re.findall(r"\w+/[\w/]*\.py\b", node.value):
                    if any(known.as_posix().endswith("/" + name) for known in files().values()):
                        wrong.append(f"{path.relative_to(PACKAGE.parent)}:{node.lineno}: {name}")
    assert wrong == []


def test_importing_the_package_loads_no_checker_and_less_than_8050_lines():
    code = (
        "import sys, neuronx_dist; print(*[m.__file__ for n, m in sys.modules.items() if n.startswith('neuronx_dist')])"
    )
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(
        command, cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120, check=True
    ).stdout.split()
    rooms = {top_room(Path(file)) for file in loaded}
    assert rooms.isdisjoint(
        {"checking", "checkpoint", "planning", "pipeline", "optimizer", "hf", "train", "xla_replay"}
    )
    assert sum(len(Path(file).read_text().splitlines()) for file in loaded) < 8050


def test_the_files_that_the_documentation_names_are_there():
    """`comm/base.py`, `hf/{plan,swap}.py`, and after a semicolon or comma `pad.py`, which is in the same folder."""
    folders = ROOT.glob("[!.]*/")  # environments have a hundred thousand files
    known = {path.relative_to(ROOT).as_posix() for folder in folders for path in folder.rglob("*.py")}
    missing = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        if page.name == "CHANGELOG.md":  # it names what was
            continue
        for quoted in re.findall(r"`([\w/{},]+\.py)`", page.read_text()):
            braces = re.search(r"\{([^}]*)\}", quoted)
            for choice in braces[1].split(",") if braces else [""]:
                name = quoted.replace(braces[0], choice) if braces else quoted
                if not any(path == name or path.endswith(f"/{name}") for path in known):
                    missing.append(f"{page.name}: {name}")
    assert missing == []


def unlisted(room: Path) -> list[str]:
    """Names of the files of a folder that its `__init__` docstring does not mention (a folder: `name/`)."""
    page = ast.get_docstring(tree_of(room / "__init__.py")) or ""
    files = {path.name for path in room.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in room.glob("*/__init__.py")}
    return sorted(name for name in files | folders if not re.search(rf"(?<!\w){re.escape(name)}", page))


def stale(room: Path) -> list[str]:
    """Names of files on a room's page that are neither in the room nor, with a folder before them, elsewhere."""
    page = ast.get_docstring(tree_of(room / "__init__.py")) or ""
    listed = set(re.findall(r"(?<![\w/.])(\w+\.py)\b", page))
    return sorted(name for name in listed if not (room / name).is_file())


def test_the_page_of_each_room_lists_its_files():
    """Each room's `__init__`, which `docs/architecture.md` links, names all files of the room and no other."""
    missing = {}
    for face in sorted(PACKAGE.rglob("*/__init__.py")):
        if names := unlisted(face.parent) + stale(face.parent):
            missing[face.parent.relative_to(PACKAGE).as_posix()] = names
    assert missing == {}


# --- the tests above turn red ---


def write(folder: Path, **sources: str) -> Path:
    package = folder / "package"
    for name, source in {"__init__": "", **sources}.items():
        path = package / f"{name.replace('__in__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return package


def test_a_circle_by_a_late_import_is_seen(tmp_path):
    package = write(tmp_path, a="def f():\n    from . import b\n", b="from .a import f\n")
    assert circles(package) == [["package.a", "package.b"]]


def test_a_circle_under_type_checking_is_seen(tmp_path):
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import B\n"
    package = write(tmp_path, a=guarded, b="from . import a\n", c="from . import a, b\n")
    assert circles(package) == [["package.a", "package.b"]]


def test_a_file_that_its_room_does_not_list_is_seen(tmp_path):
    package = write(tmp_path, a="", b="")
    (package / "__init__.py").write_text('"""A room.\n\na.py   the first; c.py: gone; other/d.py\n"""\n')
    assert unlisted(package) == ["b.py"]
    assert stale(package) == ["c.py"]
