"""Every reader against files that are damaged at random: equal, refused, unclear, silent or hung.

    equal     the damage is in bytes that mean nothing, or that nothing reads
    refused   an error in one line, with the name of the file or of its checkpoint
    unclear   any other error
    silent    other values; only where the format has no checksums
    hung      not finished after 60 s

A sample is part of the tests; `NXD_FULL=1` damages 300 times for each reader. `-s` prints the table, and
`NXD_DAMAGE="NxD, xser:17"` one damage by its number, with the error.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from neuronx_dist.checkpoint.errors import CheckpointError
from neuronx_dist.parallelize.generated.generated_files import GeneratedFilesError
from neuronx_dist.torch_internals.tensors import pytree
from tests.faults.damages import damage
from tests.faults.readers import READERS, Reader

CLASSES = ("equal", "refused", "unclear", "silent", "hung")
CLEAR = (CheckpointError, GeneratedFilesError, ValueError, OSError)
# Words of Python's own messages, and of torch's advice to somebody else.
UNCLEAR = ("file an issue", "object has no attribute", "unhashable", "indices must be", "not supported between")
UNCLEAR += ("positional argument", "unexpected keyword", "is not iterable", "not subscriptable", "unpack", "KeyError: ")

counts: dict[str, Counter[str]] = {}


def outcome(reader: Reader, folder: Path, expected: Any, file: Path) -> tuple[str, str]:
    """Reads a damaged folder; returns the class, and the error or what differs."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(reader.read(folder))
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    if not result:
        return "hung", ""
    if isinstance(result[0], BaseException):
        error = result[0]
        text = f"{type(error).__name__}: {error}"
        return ("refused" if is_clear(error, folder, file) else "unclear"), text
    return ("equal" if same(result[0], expected) else "silent"), ""


def is_clear(error: BaseException, folder: Path, file: Path) -> bool:
    text = str(error)
    names = [file.name, str(folder)] + [path.name for path in folder.rglob("*") if path.suffix == file.suffix]
    is_documented = isinstance(error, (KeyError, RuntimeError)) and text.lstrip('"').startswith("checkpointing.load: ")
    return (
        (isinstance(error, CLEAR) and not isinstance(error, UnicodeError) or is_documented)
        and any(name in text for name in names)
        and not any(words in text for words in UNCLEAR)
        and len(text) < 2000
        and ("\n" not in text or "generated from -> now" in text)
    )


def same(one: Any, other: Any) -> bool:
    leaves, structure = pytree.tree_flatten(one)
    others, other_structure = pytree.tree_flatten(other)
    return str(structure) == str(other_structure) and all(map(_same_leaf, leaves, others))


def _same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("NxD")) for name in READERS]
)
@pytest.mark.slow
def test_damages_at_random(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reader = READERS[name]
    original = tmp_path / "original"
    original.mkdir()
    reader.write(original)
    expected = reader.read(original)
    assert same(reader.read(original), expected)
    only = os.environ.get("NXD_DAMAGE", "").rpartition(":")
    numbers = range(300 if os.environ.get("NXD_FULL") == "1" else 12)
    if only[0]:
        numbers = range(int(only[2]), int(only[2]) + 1) if only[0] == name else range(0)
    count, wrong = Counter[str](), []
    for number in numbers:
        folder = tmp_path / f"damaged {number}"
        shutil.copytree(original, folder)
        what, file = damage(folder, random.Random(f"{name}:{number}"))
        found, text = outcome(reader, folder, expected, file)
        count[found] += 1
        line = f"{name}:{number}: {file.relative_to(folder)}: {what}: {found}: {text}"
        if found in ("unclear", "hung") or (found == "silent" and reader.sums):
            wrong.append(line)
        if only[0]:
            with capsys.disabled():
                print(f"\n{line}")
        shutil.rmtree(folder)
    counts[name] = count
    assert not wrong, "\n".join(wrong)


RANK = "dp_rank_00_tp_rank_00_pp_rank_01.pt"


def edited(folder: Path, file: str, keys: tuple[Any, ...], value: Any) -> Path:
    """Replaces a value in the content of a file; `del`: removes it."""
    path = folder / file
    is_json = path.suffix == ".json"
    content = json.loads(path.read_text()) if is_json else torch.load(path, weights_only=True)
    if not keys:
        content = value
    else:
        holder = content
        for key in keys[:-1]:
            holder = holder[key]
        if value == "del":
            del holder[keys[-1]]
        else:
            holder[keys[-1]] = value
    if is_json:
        path.write_text(json.dumps(content))
    else:
        torch.save(content, path)
    return path


MANIFEST = "_parallel_modules/torch/nn/modules/linear/Linear/_/manifest.json"


@pytest.mark.parametrize(
    "name, file, keys, value",
    [
        ("NxD", f"a/optim/{RANK}", ("base_state", 0), 5),
        ("NxD", f"a/optim/{RANK}", ("base_state", 0, "step"), (1, 2)),
        ("NxD", f"a/optim/{RANK}", ("base_state", 0, "step"), "del"),
        ("NxD", f"a/optim/{RANK}", ("base_state", 0, "exp_avg"), "del"),
        ("NxD", f"a/optim/{RANK[:-4]}0.pt", ("param_groups", 0, "betas"), []),
        ("NxD", f"a/optim/{RANK}", ("shape_info", 0), 5),
        ("NxD", f"a/optim/{RANK}", (), 5),
        ("NxD", f"a/model/{RANK}", (), None),
        ("NxD", f"a/model/{RANK}", ("layers.1.down.weight",), True),
        ("NxD, xser", f"a/model/{RANK}.info.pt", (0,), 5),
        ("NxD, xser", f"a/model/{RANK}.tensors/tensor_0.pt", (), {"a": 1}),
        ("checkpointing.load", "tp_rank_00_pp_rank_00/checkpoint.pt", (), [1]),
        ("checkpointing.load", "tp_rank_00_pp_rank_00/checkpoint.pt", ("model",), 5),
        ("checkpointing.load", "tp_rank_00_pp_rank_00/checkpoint.pt", ("model", "up.bias"), {}),
        (".bin", "pytorch_model.bin.index.json", (), 5),
        (".bin", "pytorch_model.bin.index.json", ("weight_map", "lm_head.weight"), 5),
        (".bin", "pytorch_model.bin.index.json", ("weight_map",), "del"),
        ("safetensors", "generation_config.json", (), 5),
        ("convert with config.json", "config.json", ("hidden_size",), "8"),
        ("convert with config.json", "config.json", ("model_type",), 5),
        ("convert with config.json", "config.json", (), []),
        ("trace", "trace.json", (1, "dur"), "del"),
        ("trace", "trace.json", (1, "ts"), None),
        ("trace", "trace.json", (1, "args", "step"), "del"),
        ("trace", "trace.json", (1, "args", "stage"), "del"),
        ("trace", "trace.json", (1, "cat"), "forwart"),
        ("trace", "trace.json", (1, "args", "stage"), 7),
        ("plan", "plan.json", ("inputs",), 5),
        ("plan", "plan.json", ("pp",), "up"),
        ("plan", "plan.json", ("calls", 0, "strategy"), "del"),
        ("plan", "plan.json", ("parameters", "up.weight", "shape"), "x"),
        ("generated files", MANIFEST, ("choice", "policy"), 5),
        ("generated files", MANIFEST, ("files", "gencode0.py", "sha256"), "del"),
        ("generated files", MANIFEST, ("weights", "weight"), 5),
        ("generated files", MANIFEST, (), None),
    ],
)
def test_values_of_other_types(name: str, file: str, keys: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    """Errors of Python or torch, without the file's name, or a task of a trace that vanished, before."""
    reader = READERS[name]
    folder = tmp_path / "folder"
    folder.mkdir()
    reader.write(folder)
    found, text = outcome(reader, folder, None, edited(folder, file, keys, value))
    assert found == "refused", text


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the table of the damages before, with `-s`."""
    print(f"\n{'':30}" + "".join(f"{found:>9}" for found in CLASSES))
    for name, count in counts.items():
        print(f"{name:30}" + "".join(f"{count[found]:9}" for found in CLASSES))
    assert all(not count["unclear"] and not count["hung"] for count in counts.values())
