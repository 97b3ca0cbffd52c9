"""PhysicsNeMo's import names, in interpreters of their own where they must not stay, and the tree of its groups."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from neuronx_dist import shard_tensor as st
from neuronx_dist.comm import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor import DistributedManager, Replicate, Shard, ShardTensor
from neuronx_dist.shard_tensor.physicsnemo import NAMES, patches
from neuronx_dist.shard_tensor.physicsnemo.group_tree import ProcessGroupConfig, ProcessGroupNode
from tests.shard_tensor.support.cases import on_ranks
from tests.support.paths import ROOT

IMPORTS = """
import importlib, warnings
warnings.simplefilter("error")
import neuronx_dist.shard_tensor.physicsnemo as names
import physicsnemo
from physicsnemo.distributed import DistributedManager, ProcessGroupConfig, all_gather_v, fused_all_reduce, reduce_loss
from physicsnemo.distributed import autograd, fft, manager, mappings, utils
from physicsnemo.distributed.fused_all_reduce import fused_all_reduce as again
from physicsnemo.domain_parallel import ShardTensor, scatter_tensor, sync_module_over_mesh, register_custom_ops
from physicsnemo.domain_parallel import shard_tensor as module
from physicsnemo.domain_parallel.shard_utils import halo, ring
from physicsnemo.domain_parallel.shard_utils.ring import *
import physicsnemo.domain_parallel.shard_utils.patch_core as core
import neuronx_dist.shard_tensor as st

assert ShardTensor is module.ShardTensor is st.ShardTensor and DistributedManager is st.DistributedManager
assert again is fused_all_reduce and autograd.all_gather_v is all_gather_v
assert ring.RingPassingConfig is RingPassingConfig
assert issubclass(core.MissingShardPatch, NotImplementedError) and halo.HaloConfig(0, 0, 1).sizes is None
assert physicsnemo.domain_parallel.shard_utils.ring is ring
for name, objects in names.NAMES.items():
    module = importlib.import_module(name)
    assert all(getattr(module, key) is value for key, value in objects.items() if key not in ("fused_all_reduce",))
    assert importlib.util.find_spec(name).name == name
names.install()  # again: nothing changes
assert physicsnemo.domain_parallel.ShardTensor is ShardTensor
for missing, words in (
    ("import physicsnemo.models", "No module named 'physicsnemo.models'"),
    ("import physicsnemo.domain_parallel.shard_utils.conv_patches", "No module named 'physicsnemo.domain_parallel"),
    ("from physicsnemo.domain_parallel.shard_utils.ring import get_comm_stream", "needs no stream of the caller"),
    ("from physicsnemo.distributed.utils import distributed_transpose", "call spmd.all_to_all"),
    ("from physicsnemo.distributed import nothing", "cannot import name 'nothing'"),
):
    try:
        exec(missing)
    except ImportError as error:
        assert words in str(error), error
    else:
        raise AssertionError(missing)
assert not hasattr(physicsnemo, "__version__")
print("done")
"""

# A package of the name is there, as PhysicsNeMo would be.
INSTALLED = """
import sys, warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import neuronx_dist.shard_tensor.physicsnemo as names
assert ["physicsnemo is installed, and keeps its import names" in str(w.message) for w in seen].count(True) == 1
assert "physicsnemo" not in sys.modules
{before}
try:
    names.install(replace=True)
except RuntimeError as error:
    print(error)
    sys.exit()
from physicsnemo.domain_parallel import ShardTensor
import neuronx_dist.shard_tensor as st
from physicsnemo.models import anything
assert ShardTensor is st.ShardTensor is anything and sys.modules["physicsnemo"].__version__ == "0"
import physicsnemo
assert physicsnemo.domain_parallel.ShardTensor is ShardTensor
print("replaced")
"""


def interpreted(program: str, *folders: Path) -> str:
    path = ":".join(map(str, (*folders, ROOT)))
    run = [sys.executable, "-c", program]
    result = subprocess.run(run, env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.process
@pytest.mark.slow
def test_the_import_names():
    assert interpreted(IMPORTS) == "done"


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    "before, printed",
    [
        ("", "replaced"),
        pytest.param(
            "import physicsnemo.domain_parallel",
            "physicsnemo.domain_parallel: imported already; import neuronx_dist.shard_tensor.physicsnemo, and call "
            "install(replace=True), before anything that imports physicsnemo",
            marks=pytest.mark.full,
        ),
    ],
)
def test_where_physicsnemo_is_installed(tmp_path, before, printed):
    package = tmp_path / "physicsnemo"
    (package / "domain_parallel").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0'\n")
    (package / "domain_parallel" / "__init__.py").write_text("ShardTensor = None\n")
    (package / "models.py").write_text("from physicsnemo.domain_parallel import ShardTensor as anything\n")
    assert interpreted(INSTALLED.format(before=before), tmp_path) == printed


def test_every_name_of_the_table_is_this_package_s():
    for objects in NAMES.values():
        for name, value in objects.items():
            assert name in ("METHODS", "ST_AVAILABLE") or value.__module__.startswith("neuronx_dist.shard_tensor"), name
    assert NAMES["physicsnemo.domain_parallel"]["sync_module_over_mesh"] is st.sync_module_over_mesh


def config() -> ProcessGroupConfig:
    tree = ProcessGroupConfig(ProcessGroupNode("world"))
    tree.add_node(ProcessGroupNode("model"), parent=tree.root)
    tree.add_node(ProcessGroupNode("data"), parent="world")
    tree.add_node(ProcessGroupNode("spatial"), parent="model")
    tree.add_node(ProcessGroupNode("channel"), parent="model")
    return tree


def test_a_tree_of_groups(capsys):
    tree = config()
    assert tree.leaf_groups() == ["spatial", "channel", "data"] and tree.root_id == "world"
    tree.set_leaf_group_sizes({"channel": 3, "spatial": 2, "data": 4}, update_parent_sizes=False)
    assert tree.get_node("model").size is None
    assert tree.update_parent_sizes(verbose=True) == 24
    assert (tree.get_node("model").size, tree.get_node("world").size) == (6, 24)
    assert capsys.readouterr().out == "group 'model': size None becomes 6\ngroup 'world': size None becomes 24\n"
    with pytest.raises(ValueError, match="'model' is none of the leaf groups"):
        tree.set_leaf_group_sizes({"model": 2})
    with pytest.raises(ValueError, match="'time' is none of the leaf groups"):
        tree.set_leaf_group_sizes({"time": 2})
    for name, parent in (("data", "world"), ("time", "space")):
        with pytest.raises(ValueError, match=f"add_node '{name}' below '{parent}': the groups are"):
            tree.add_node(ProcessGroupNode(name), parent=parent)
    with pytest.raises(ValueError, match="leaf group 'spatial' has no size"):
        config().update_parent_sizes()


def test_the_groups_of_a_tree(capsys):
    """Every child divides the ranks that the children before it leave together."""

    def run():
        DistributedManager.initialize()
        tree = config()
        with pytest.raises(ValueError, match="ProcessGroupNode.* has no size: call config.set_leaf_group_sizes first"):
            DistributedManager.create_groups_from_config(tree)
        tree.set_leaf_group_sizes({"channel": 2, "spatial": 2, "data": 2})
        DistributedManager.create_groups_from_config(tree, verbose=True)
        manager = DistributedManager()
        return {name: list(manager._communicator(name).ranks) for name in ("model", "data", "spatial", "channel")}

    results = threads.run(Mesh(8), run)
    assert results[0] == {"model": [0, 1, 2, 3], "data": [0, 4], "spatial": [0, 1], "channel": [0, 2]}
    assert results[7] == {"model": [4, 5, 6, 7], "data": [3, 7], "spatial": [6, 7], "channel": [5, 7]}
    assert "group 'spatial': ranks [[0, 1], [2, 3], [4, 5], [6, 7]]" in capsys.readouterr().out


def test_shapes_of_shards_and_arguments_of_handlers():
    def run(mesh):
        placements = [Replicate(), Shard(1)]
        shapes = patches.compute_sharding_shapes_from_chunking_global_shape(mesh, placements, (2, 5))
        assert shapes == {1: [(2, 1), (2, 1), (2, 1), (2, 2)]}
        x = ShardTensor.from_local(torch.ones(shapes[1][mesh.get_local_rank(1)]), mesh, placements, shapes)
        assert x.shape == (2, 5)
        with pytest.raises(ValueError, match="1 entries for a mesh of 2 dims"):
            patches.compute_sharding_shapes_from_chunking_global_shape(mesh, placements[:1], (2, 5))

    on_ranks(4, run, (1, 4))
    assert patches.promote_to_iterable(3, (1, 2)) == (3, 3) and patches.promote_to_iterable("same", (1, 2)) == "same"
    assert patches.promote_to_iterable([1, 2], (3, 4)) == [1, 2]
    with pytest.raises(ValueError, match=r"promote_to_iterable: \[1\] must have 2 entries"):
        patches.promote_to_iterable([1], (1, 2))
    patches.register_custom_ops()
