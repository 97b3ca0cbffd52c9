"""A checkpoint of each of twelve layouts loads into each other: weights and the state of AdamW, bit for bit.

The first checkpoint is of one process that has trained. What torch.distributed.checkpoint reads of it is compared with
what it reads of the checkpoint of every layout; and what each rank of every layout holds after loading the first one
with what it holds after loading those of the others.
"""

import os

import pytest
import torch

from neuronx_dist import comm
from tests.checkpoint.llama_layouts import Layout, load_and_save, load_each, train_and_save, whole

LAYOUTS = [
    Layout(optimizer="plain"),
    Layout(dp=2, optimizer="plain"),
    Layout(dp=4),
    Layout(tp=2, dp=2),
    Layout(tp=4, optimizer="plain"),
    Layout(tp=4, sequence_parallel=True),
    Layout(pp=2, microbatches=2, optimizer="master"),
    Layout(pp=4, microbatches=4, optimizer="plain"),
    Layout(pp=2, dp=2, microbatches=4),
    Layout(pp=2, microbatches=2, schedule="interleaved", optimizer="plain"),
    Layout(pp=2, tp=2, microbatches=2, schedule="zb_v", sequence_parallel=True),
    Layout(pp=2, tp=2, dp=2, microbatches=2),
]
CORNERS = [LAYOUTS[index] for index in (3, 5, 8, 9)]
FULL = bool(os.environ.get("NXD_FULL"))
SAVED = LAYOUTS if FULL else [LAYOUTS[0], *CORNERS]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("matrix")
    first = root / "first"
    comm.threads.run(LAYOUTS[0].mesh, train_and_save, LAYOUTS[0], first)
    folders = {"first": first}
    for layout in SAVED:
        folders[str(layout)] = root / str(layout)
        comm.threads.run(layout.mesh, load_and_save, layout, first, folders[str(layout)])
    return folders


def test_there_are_twelve_layouts():
    assert len({str(layout) for layout in LAYOUTS}) == 12


@pytest.mark.slow
@pytest.mark.parametrize("layout", SAVED, ids=str)
def test_a_layout_saves_what_one_process_saves(layout, checkpoints):
    expected, actual = whole(checkpoints["first"]), whole(checkpoints[str(layout)])
    assert actual.keys() == expected.keys() and len(expected) > 100
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    assert all(value.abs().sum() > 0 for value in expected.values())


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS if FULL else CORNERS, ids=str)
def test_a_layout_loads_the_same_from_every_other(layout, checkpoints):
    for rank, loaded in enumerate(comm.threads.run(layout.mesh, load_each, layout, checkpoints)):
        first = loaded.pop("first")
        assert any("exp_avg_sq" in key for key in first)
        for name, tensors in loaded.items():
            assert tensors.keys() == first.keys()
            different = [key for key in first if not torch.equal(tensors[key], first[key])]
            assert different == [], f"rank {rank} after loading {name}"
