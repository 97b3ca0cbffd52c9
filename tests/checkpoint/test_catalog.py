"""`.metadata`: what is written is read; what torch.distributed.checkpoint writes too; and nothing of it runs."""

import dataclasses
import math
import os
import pickle
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata

from neuronx_dist.checkpoint.dcp.catalog import Catalog, Extent, SavedTensor, StoredChunk, pickled, unpickled
from neuronx_dist.checkpoint.errors import CheckpointCorrupted


def catalog() -> Catalog:
    chunks = [
        StoredChunk((0, 0), (2, 3), Extent("__0_0.distcp", 64, 900)),
        StoredChunk((2, 0), (2, 3), Extent("__1_0.distcp", 0, 12)),
    ]
    return Catalog(
        {"model.w": SavedTensor((4, 3), torch.bfloat16, chunks)},
        {"optimizer.param_groups": Extent("__0_0.distcp", 0, 64)},
        {"model.w": ("model", "w"), "optimizer.param_groups": ("optimizer", "param_groups")},
    )


def test_what_is_written_is_read():
    assert unpickled(pickled(catalog()), "name") == catalog()


def test_what_torch_writes_is_read(tmp_path):
    state = {"model": {"w": torch.arange(6.0).view(2, 3)}, "step": 3, "t": torch.ones((), dtype=torch.float64)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    read = unpickled((tmp_path / ".metadata").read_bytes(), "name")
    assert not read.checksums and read.objects.keys() == {"step"}
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in read.tensors.items()} == {
        "model.w": ((2, 3), torch.float32),
        "t": ((), torch.float64),
    }
    assert read.paths["model.w"] == ("model", "w")


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


class Patch:
    """Would change a class of torch.distributed.checkpoint, by the state that BUILD sets."""

    def __reduce__(self):
        return (_CLASS, (), (None, {"__doc__": "changed"}))


_CLASS = metadata.StorageMeta


@pytest.mark.parametrize("where", ["planner_data", "storage_data", "storage_meta", "version"])
def test_a_malicious_pickle_does_not_run(where, tmp_path):
    target = tmp_path / "it_ran"
    good = pickle.loads(pickled(catalog()))
    bad = pickle.dumps(dataclasses.replace(good, **{where: Evil(target)}))
    with pytest.raises(CheckpointCorrupted, match=r"name: it refers to posix.system, .* Nothing was executed"):
        unpickled(bad, "name")
    assert not target.exists()
    pickle.loads(bad)
    assert target.exists()  # it would have


def test_a_pickle_changes_no_class():
    attack = (
        b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n"  # the class itself, on which BUILD is called
        b"(N}X\x07\x00\x00\x00version" + b"X\x04\x00\x00\x00evilstb."
    )
    with pytest.raises(CheckpointCorrupted):
        unpickled(attack, "name")
    pickle.loads(attack)
    assert metadata.Metadata.version == "evil"  # it would have
    metadata.Metadata.version = None
    with pytest.raises(CheckpointCorrupted):
        unpickled(attack, "name")
    assert metadata.Metadata.version is None


@pytest.mark.parametrize(
    "name", ["builtins.eval", "torch.load", "torch.ops", "torch.nn.Module", "collections.OrderedDict"]
)
def test_other_names_are_refused(name):
    module, _, attribute = name.rpartition(".")
    with pytest.raises(CheckpointCorrupted, match=f"it refers to {name}"):
        unpickled(b"c%b\n%b\n." % (module.encode(), attribute.encode()), "name")


@pytest.mark.parametrize("file", ["../other", "/etc/passwd", "a/b", "..", "", ".", "a\\b", "a\nb", 7])
def test_files_elsewhere_are_refused(file):
    wrong = catalog()
    wrong.objects["optimizer.param_groups"] = Extent(file, 0, 1)
    with pytest.raises(CheckpointCorrupted, match="which is outside of this folder"):
        unpickled(pickled(wrong), "name")


def changed(**fields):
    chunk = catalog().tensors["model.w"].chunks[0]._replace(**fields)
    wrong = catalog()
    wrong.tensors["model.w"].chunks[0] = chunk
    return pickled(wrong)


def test_pieces_that_do_not_fit_are_refused():
    with pytest.raises(CheckpointCorrupted, match=r"model.w, of shape \(4, 3\), has a piece \(2, 3\) at \(3, 0\)"):
        unpickled(changed(offset=(3, 0)), "name")
    with pytest.raises(CheckpointCorrupted, match="the pieces of model.w do not add up to its 12 elements"):
        unpickled(changed(shape=(1, 3)), "name")
    with pytest.raises(CheckpointCorrupted, match="are not valid sizes"):
        unpickled(changed(extent=Extent("f", -1, 8)), "name")


@pytest.mark.parametrize(
    "rectangles, whole",
    [
        ([((0, 0), (2, 3)), ((1, 0), (2, 3))], (4, 3)),  # row 3 is in no piece
        ([((0, 0), (4, 1)), ((0, 1), (4, 1)), ((0, 0), (4, 1))], (4, 3)),
        ([((0, 0), (2, 2)), ((0, 1), (2, 2)), ((2, 0), (2, 2))], (4, 3)),
        ([((0, 0, 0), (1, 2, 2)), ((0, 1, 1), (2, 1, 1)), ((1, 0, 0), (1, 1, 2))], (2, 2, 2)),
    ],
)
def test_pieces_that_overlap_are_refused(rectangles, whole):
    """Elements that are in no piece kept the old weights, where those of overlapping pieces add up to the whole."""
    chunks = [StoredChunk(*at, Extent("a", 8 * index, 9999)) for index, at in enumerate(rectangles)]
    with pytest.raises(CheckpointCorrupted, match=r"two pieces of w overlap, \(.*\) at \(.*\), and others are missing"):
        unpickled(pickled(Catalog({"w": SavedTensor(whole, torch.float32, chunks)}, {}, {})), "name")


@pytest.mark.parametrize("seed", range(3))
def test_pieces_that_cover_a_tensor_exactly_are_taken(seed):
    """A tensor cut at random, along any dims, in any order."""
    rng = random.Random(seed)

    def cuts(offset, shape, depth):
        dim = rng.randrange(3)
        if depth == 0:
            return [(offset, shape)]
        at = rng.randint(0, shape[dim])
        first = (*shape[:dim], at, *shape[dim + 1 :])
        second = (*shape[:dim], shape[dim] - at, *shape[dim + 1 :])
        moved = (*offset[:dim], offset[dim] + at, *offset[dim + 1 :])
        return cuts(offset, first, depth - 1) + cuts(moved, second, depth - 1)

    rectangles = [at for at in cuts((0, 0, 0), (7, 8, 9), 5) if math.prod(at[1])]
    rng.shuffle(rectangles)
    chunks = [StoredChunk(*at, Extent("a", 8 * index, 9999)) for index, at in enumerate(rectangles)]
    catalog = Catalog({"w": SavedTensor((7, 8, 9), torch.float32, chunks)}, {}, {})
    assert unpickled(pickled(catalog), "name") == catalog


def test_compressed_items_are_refused():
    root = pickle.loads(pickled(catalog()))
    root.storage_data = {
        index: filesystem._StorageInfo(info.relative_path, 0, 1, ["zstd"]) for index, info in root.storage_data.items()
    }
    with pytest.raises(CheckpointCorrupted, match="zstd.*not supported"):
        unpickled(pickle.dumps(root), "name")


def test_damaged_pickles_are_refused():
    content = pickled(catalog())
    for wrong in (content[: len(content) // 2], b"", b"nothing", content[5:], pickle.dumps({"a": 1})):
        with pytest.raises(CheckpointCorrupted, match="name"):
            unpickled(wrong, "name")
