"""Small files that claim to be large: refused by name, without the memory and the time that they ask for."""

from __future__ import annotations

import json
import pickle
import resource
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist.checkpoint.convert.weights import convert
from neuronx_dist.checkpoint.dcp.catalog import Catalog, Extent, SavedTensor, StoredChunk, pickled, unpickled
from neuronx_dist.checkpoint.errors import CheckpointCorrupted
from neuronx_dist.comm.backends import threads
from neuronx_dist.hf.sources import open_source
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline.timeline.recorded import recorded
from neuronx_dist.weights.torch_files import read_plain


@contextmanager
def little() -> Iterator[None]:
    """Limits further memory of the process to 256 MiB of addresses, and its time to 5 s of CPU."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    begin = time.process_time()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert time.process_time() - begin < 5


def refused(reader: Callable[[], Any], message: str, *errors: type[Exception]) -> None:
    with little(), pytest.raises(errors or (ValueError,), match=message) as raised:
        reader()
    text = str(raised.value)
    assert len(text) < 2000 and "MemoryError" not in text and "RecursionError" not in text


def test_an_index_of_the_memo_of_a_pickle() -> None:
    """9 bytes, of which the C unpickler makes a table of 8 GiB."""
    content = b"\x80\x02Nr\x00\x00\x00\x20."
    assert len(content) == 9
    refused(
        lambda: unpickled(content, "run/.metadata"),
        "run/.metadata is damaged, or not the metadata",
        CheckpointCorrupted,
    )


def nested(depth: int) -> Any:
    """A list whose text doubles with each of its levels."""
    value: Any = []
    for _ in range(depth):
        value = [value, value]
    return value


def changed(what: str, value: Any) -> bytes:
    """A catalog in which one value is another."""
    chunk = StoredChunk((0,), (2,), Extent("__0_0.distcp", 0, 8))
    root = pickle.loads(pickled(Catalog({"model.w": SavedTensor((2,), torch.float32, [chunk])})))
    (entry,), (info,) = root.state_dict_metadata.values(), root.storage_data.values()
    changes = {"dtype": (entry.properties, "dtype"), "file": (info, "relative_path"), "length": (info, "length")}
    setattr(*changes[what], value)
    return pickle.dumps(root)


@pytest.mark.parametrize("what", ["file", "key", "dtype", "length"])
def test_values_whose_text_is_long(what: str) -> None:
    """Each level of a nested list, or of a tuple that is hashed, doubles the work."""
    if what == "key":
        content = b"\x80\x02}" + b")" + b"q\x00h\x00\x86" * 60 + b"Ns."  # {((.., ..), (.., ..)): None}
    else:
        content = changed(what, nested(60))
    refused(lambda: unpickled(content, "run/.metadata"), "^run/.metadata: ", CheckpointCorrupted)


@pytest.mark.parametrize("length", [64, 4 * 10**15])
def test_a_catalog_of_more_elements_than_bytes(length: int, tmp_path: Path) -> None:
    """The state of an optimizer whose shape the catalog alone says: 1e15 elements in a file of 64 bytes."""
    chunk = StoredChunk((0,), (10**15,), Extent("__0_0.distcp", 0, length))
    tensor = SavedTensor((10**15,), torch.float32, [chunk])
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "__0_0.distcp").write_bytes(bytes(64))
    catalog = Catalog({"model.weight": tensor, "optimizer.state.weight.row": tensor}, checksums=False)
    (tmp_path / "a" / ".metadata").write_bytes(pickled(catalog))
    said = "has a piece .* of 4000000000000000 bytes in a place of 64"
    if length > 64:
        said = "__0_0.distcp is truncated: it has 64 bytes, and .metadata refers to 4000000000000000"

    def rank() -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adafactor(model.parameters())
        refused(lambda: nxd.load_checkpoint(tmp_path, "a", model, optimizer), said, CheckpointCorrupted)

    threads.run(Mesh(1), rank)


@pytest.mark.parametrize("axis", ["tp", "ep"])
def test_a_rank_of_300_million_in_the_name_of_a_file(axis: str, tmp_path: Path) -> None:
    names = {
        "tp": "dp_rank_00_tp_rank_300000000_pp_rank_00.pt",
        "ep": "dp_rank_00_ep_rank_300000000_tp_rank_00_pp_rank_00.pt",
    }
    folder = tmp_path / "a" / "model"
    folder.mkdir(parents=True)
    for name in (names[axis], "dp_rank_00_tp_rank_00_pp_rank_00.pt"):
        torch.save({"weight": torch.zeros(2, 2)}, folder / name)
    for file in ("checkpoint", "done"):
        (tmp_path / "a" / file).write_text("1")
    said = (
        "lacks 299999999 of 300000001 files of model" if axis == "tp" else "lacks the file of ep rank 1, of 300000001"
    )
    load = lambda: nxd.load_checkpoint(tmp_path, "a", nn.Linear(2, 2, bias=False))  # noqa: E731
    threads.run(Mesh(1), lambda: refused(load, said, CheckpointCorrupted))


@pytest.mark.parametrize("field", ["stages", "microbatch", "chunk", "stage"])
def test_a_trace_of_200_million(field: str, tmp_path: Path) -> None:
    args = {"step": 0, "stage": 0, "chunk": 0, "microbatch": 0, field: 200_000_000}
    step = {"ph": "X", "cat": "step", "pid": 0, "ts": 0, "dur": 1, "args": {"step": 0, "stages": 1, **args}}
    (tmp_path / "t.json").write_text(json.dumps([step, {**step, "cat": "forward"}]))
    refused(lambda: recorded([str(tmp_path / "t.json")]), r"t.json: event \d, .* from 0 to 1000000 \(MAX_SIZE\)")


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_local_experts"])
def test_a_config_of_a_million_layers(field: str, tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    config = {"model_type": "mixtral", "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, field: 10**6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(
        lambda: convert(tmp_path, tmp_path / "out"), rf"its config has {field}=1000000, more than 10000 \(MAX_MODULES\)"
    )
    assert not (tmp_path / "out").exists()


def test_a_tensor_of_8_gib_in_a_file_of_1600_bytes(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1).expand(1 << 31)}, tmp_path / "pytorch_model.bin")
    assert (tmp_path / "pytorch_model.bin").stat().st_size < 2000
    refused(
        lambda: open_source(tmp_path), r"pytorch_model.bin has a tensor .* more than 67108864 \(MAX_EXPANDED_BYTES\)"
    )
    torch.save({"weight": torch.arange(4).expand(3, 4)}, tmp_path / "pytorch_model.bin")
    assert torch.equal(open_source(tmp_path).read("weight"), torch.arange(4).expand(3, 4))


def test_a_file_that_is_compressed(tmp_path: Path) -> None:
    """1 GiB of zeros in 1 MB."""
    path = tmp_path / "file.pt"
    torch.save({"weight": torch.zeros(1 << 16)}, path)
    with zipfile.ZipFile(path) as stored, zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        for name in stored.namelist():
            bomb.writestr(name, stored.read(name))
    refused(lambda: read_plain(tmp_path / "bomb.pt"), "bomb.pt is a zip with a compressed entry")
