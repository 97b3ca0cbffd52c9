"""The key of generated files: all their dependencies, part by part, so that a message can name a changed one."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ...planner.cluster import Cluster
from ...torch_internals.tensors import pytree
from ..annotations.register import registrations
from ..config import ComputeConfig
from ..example import Example
from .fingerprint import digest, module_entries, package_digest, value_entries

__all__ = ["Key", "key_of"]


@dataclass(frozen=True)
class Key:
    """The dependencies of generated files, part by part: `{what: text}`.

    Attributes:
        program: the dependencies of a recording: the module and its arguments.
        choice: policy, config and all other dependencies.
    """

    program: dict[str, str]
    choice: dict[str, str]

    @property
    def digest(self) -> str:
        return digest(json.dumps(asdict(self), sort_keys=True))

    def differences(self, other: Key) -> list[str]:
        """Lists the parts that differ, as `(what): (there) -> (here)`."""
        lines = []
        for old, new in ((self.program, other.program), (self.choice, other.choice)):
            for what in {**old, **new}:
                if old.get(what) != new.get(what):
                    lines.append(f"{what}: {_shown(old.get(what), new.get(what))}")
        return lines


def key_of(example: Example, policy: Any, config: ComputeConfig, **others: Any) -> Key:
    """Returns the key of the files that are generated for a module.

    Args:
        example: the module, and arguments of which the shapes and dtypes of tensors count.
        policy: a name, a function, a plan, or a plan's file, whose content counts.
        others: further dependencies of the choice.
    """
    program = {"class": type(example.module).__qualname__, **module_entries(example.module)}
    for name, value in example.arguments.items():
        leaves, structure = pytree.tree_flatten(value)
        texts = [
            f"{leaf.dtype} {tuple(leaf.shape)} requires_grad={leaf.requires_grad}"
            if isinstance(leaf, torch.Tensor)
            else next(iter(value_entries("", leaf).values()))
            for leaf in leaves
        ]
        program[f"argument {name}"] = f"{structure} {texts}"
    for name, registered in registrations().items():  # all of them: code of installed packages may call any
        program |= value_entries(f"registered {name}", registered)
    program["torch"] = torch.__version__
    choice = {
        "this package": package_digest(),
        "python": sys.version.split()[0],
        **value_entries("policy", _read(policy)),
    }
    options = {name: _figures(value) for name, value in config.pas_config.items()}
    if options.get("load_plan_path"):
        options["load_plan_path"] = _read(options["load_plan_path"])
    for name, value in {**vars(config), "pas_config": options, **others}.items():
        choice |= value_entries(name, value)
    return Key(program, choice)


def _read(value: Any) -> Any:
    """Returns a digest of a plan's file; any other value as it is."""
    is_file = isinstance(value, (str, PathLike)) and Path(value).is_file()
    return f"file {digest(Path(value).read_bytes())}" if is_file else value


def _figures(value: Any) -> Any:
    """Returns the numbers of a cluster, as text; any other value as it is."""
    return repr(value) if isinstance(value, Cluster) else value


def _shown(old: str | None, new: str | None) -> str:
    if old is None or new is None:
        return "new" if old is None else "gone"
    if len(old) + len(new) <= 120:
        return f"{old} -> {new}"
    start = next((index for index, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
    begin = max(0, start - 20)
    return f"...{old[begin : start + 40]}... -> ...{new[begin : start + 40]}..."
