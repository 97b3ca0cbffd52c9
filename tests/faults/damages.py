"""Damages of files at random, each from a seed: of bytes, and of the content of JSON, of headers and of pickles."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
import random
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import torch

from neuronx_dist.checkpoint.nxd.nxd_writing import _WITH_REFERENCES

WRONG: list[Any] = [5, -1, 0, 2**40, 1e30, float("nan"), True, None, "x", "", [], {}, [[]], {"a": {"b": 1}}, ["../x"]]


def damage(folder: Path, rng: random.Random) -> tuple[str, Path]:
    """Damages a file of a folder; returns what was done to it, in words, and the file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    file = rng.choice(files)
    kinds: list[tuple[str, Callable[[Path, random.Random], str]]] = [(kind.__name__, kind) for kind in _OF_BYTES]
    structure = _structure_of(file)
    if structure is not None:  # half of the damages of a file that has content to damage
        kinds += [("content", structure)] * len(kinds)
    name, kind = rng.choice(kinds)
    return f"{name}: {kind(file, rng)}", file


# --- bytes


def flipped(file: Path, rng: random.Random) -> str:
    content = bytearray(file.read_bytes())
    positions = [rng.randrange(8 * len(content)) for _ in range(rng.choice([1, 1, 8]) if content else 0)]
    for position in positions:
        content[position // 8] ^= 1 << position % 8
    file.write_bytes(content)
    return f"bits {positions}"


def truncated(file: Path, rng: random.Random) -> str:
    content = file.read_bytes()
    length = rng.choice([0, rng.randrange(len(content) or 1), max(0, len(content) - 1)])
    file.write_bytes(content[:length])
    return f"{length} of {len(content)} bytes"


def zeroed(file: Path, rng: random.Random) -> str:
    """A block that a disk has lost."""
    content = bytearray(file.read_bytes())
    start = rng.randrange(len(content) or 1)
    content[start : start + 512] = bytes(len(content[start : start + 512]))
    file.write_bytes(content)
    return f"512 bytes from {start}"


def removed(file: Path, rng: random.Random) -> str:
    file.unlink()
    return ""


def longer(file: Path, rng: random.Random) -> str:
    with file.open("ab") as stream:
        stream.write(rng.randbytes(100))
    return "100 bytes more"


def replaced(file: Path, rng: random.Random) -> str:
    content = rng.choice([b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", rng.randbytes(300)])
    file.write_bytes(content)
    return repr(content[:20])


def swapped(file: Path, rng: random.Random) -> str:
    others = sorted(path for path in file.parent.iterdir() if path.is_file() and path.suffix == file.suffix)
    other = rng.choice(others)
    here, there = file.read_bytes(), other.read_bytes()
    file.write_bytes(there)
    other.write_bytes(here)
    return f"with {other.name}"


_OF_BYTES = [flipped, truncated, zeroed, removed, longer, replaced, swapped]


# --- content


def _structure_of(file: Path) -> Callable[[Path, random.Random], str] | None:
    """Returns the function that damages the content of a file, if its format has any."""
    if file.suffix == ".json":
        return _of_json
    if file.suffix == ".safetensors":
        return _of_safetensors
    if file.name == ".metadata":
        return _of_pickle
    return _of_torch if file.suffix in (".pt", ".bin") else None


def _of_json(file: Path, rng: random.Random) -> str:
    value = json.loads(file.read_text())
    value, said = change(value, rng)
    file.write_text(json.dumps(value))
    return said


def _of_safetensors(file: Path, rng: random.Random) -> str:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, said = change(json.loads(content[8 : 8 + length]), rng)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    return said


def _of_pickle(file: Path, rng: random.Random) -> str:
    content = file.read_bytes()
    value, said = change(pickle.loads(content), rng)
    try:
        file.write_bytes(pickle.dumps(value))
    except (AttributeError, RuntimeError):  # an object that its class does not pickle
        return _of_pickle(file, rng)
    return said


def _of_torch(file: Path, rng: random.Random) -> str:
    value, said = change(torch.load(io.BytesIO(file.read_bytes()), weights_only=True), rng)
    torch.save(value, file, pickle_module=_WITH_REFERENCES)
    return said


def change(value: Any, rng: random.Random) -> tuple[Any, str]:
    """Deletes, replaces or swaps something in nested containers, or the value itself."""
    places = [(None, None), *_places(value)]
    holder, key = rng.choice(places)
    how = rng.choice(["delete", "replace", "replace", "swap"])
    if holder is None:
        return rng.choice(WRONG), "all of it"
    try:
        if how == "delete":
            del holder[key]
        elif how == "replace":
            holder[key] = rng.choice([*WRONG, torch.zeros(2)] if not _is_of_json(value) else WRONG)
        else:
            other, other_key = rng.choice(places[1:])
            holder[key], other[other_key] = other[other_key], holder[key]
    except (TypeError, AttributeError):  # keys that cannot be hashed, an attribute of the class
        return change(value, rng)
    return value, f"{how} of {str(key)[:60]}"


class _Fields:
    """The attributes of an object, as items."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __getitem__(self, name: str) -> Any:
        return getattr(self.of, name)

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self.of, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self.of, name)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields `(container, key)` of all that is nested in a value and can be changed."""
    holder: Any = value
    if isinstance(value, MutableMapping):
        keys: list[Any] = list(value)
        children = [*value.values(), *(key for key in keys if dataclasses.is_dataclass(key))]
    elif isinstance(value, list):
        keys, children = list(range(len(value))), value
    elif dataclasses.is_dataclass(value):
        holder = _Fields(value)
        keys = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        children = [getattr(value, key) for key in keys]
    else:
        return
    yield from ((holder, key) for key in keys)
    for child in children:
        yield from _places(child)


def _is_of_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
