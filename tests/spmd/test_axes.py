"""Axes as types name them: the atoms of every axis, their order, and which ranks lie along them."""

from __future__ import annotations

from itertools import product

import pytest

from neuronx_dist import Mesh, comm
from neuronx_dist.comm import context
from neuronx_dist.spmd import axes
from neuronx_dist.spmd.axes import PartOfAxisError, atoms_of, mesh_atoms, mesh_of, order_of

DENSE = {"pp": ("pp",), "cp": ("cp",), "tp": ("tp",), "ep": ()}
TABLES = {
    Mesh(16, tp=2, pp=2, cp=2): {**DENSE, "dp": ("dp",), "edp": ("dp", "cp")},
    Mesh(8, tp=2): {**DENSE, "pp": (), "cp": (), "dp": ("dp",), "edp": ("dp",)},
    Mesh(1): {"pp": (), "cp": (), "tp": (), "ep": (), "dp": (), "edp": ()},
    Mesh(16, tp=2, ep=4): {**DENSE, "pp": (), "cp": (), "dp": ("edp", "ep"), "ep": ("ep",), "edp": ("edp",)},
    Mesh(8, ep=8): {**DENSE, "pp": (), "cp": (), "tp": (), "dp": ("ep",), "ep": ("ep",), "edp": ()},
    Mesh(32, cp=4, ep=2): {
        **DENSE, "pp": (), "tp": (), "dp": ("dp",), "cp": ("cp/ep", "ep"), "ep": ("ep",), "edp": ("dp", "cp/ep")
    },
    Mesh(32, tp=2, cp=2, ep=2): {**DENSE, "pp": (), "dp": ("dp",), "cp": ("ep",), "ep": ("ep",), "edp": ("dp",)},
    Mesh(32, tp=2, cp=2, ep=4): {
        **DENSE, "pp": (), "dp": ("edp", "ep/cp"), "cp": ("cp",), "ep": ("ep/cp", "cp"), "edp": ("edp",)
    },
    Mesh(16, tp=8, tp_replicas=4): {
        **DENSE, "pp": (), "cp": (), "dp": ("dp",), "edp": ("dp",), "tp": ("tp/4", "tp%4"), "tp/4": ("tp/4",),
        "tp%4": ("tp%4",),
    },
    Mesh(4, tp=4, tp_replicas=4): {
        **DENSE, "pp": (), "cp": (), "dp": (), "edp": (), "tp": ("tp%4",), "tp/4": (), "tp%4": ("tp%4",)
    },
}  # fmt: skip
ORDER = ("pp", "dp", "edp", "cp/ep", "ep/cp", "ep", "cp", "tp/2", "tp%2", "a group", "b group")


@pytest.mark.parametrize("mesh", TABLES, ids=str)
def test_every_axis_is_a_product_of_atoms(mesh: Mesh) -> None:
    assert mesh_atoms(mesh) == TABLES[mesh]
    assert atoms_of("world", mesh) == tuple(
        dict.fromkeys(a for axis in ("pp", "dp", "cp", "tp") for a in TABLES[mesh][axis])
    )
    assert atoms_of(("tp", "dp", "tp"), mesh) == TABLES[mesh]["tp"] + TABLES[mesh]["dp"]


def test_without_common_pieces_there_are_no_types() -> None:
    with pytest.raises(ValueError, match="^cannot check types with cp=3 and ep=2: one must divide the other$"):
        mesh_atoms(Mesh(12, cp=3, ep=2))


def test_atoms_are_ordered_as_a_mesh_has_them() -> None:
    assert sorted([*ORDER[3:], *ORDER[:3]], key=order_of) == [*ORDER]
    assert order_of("tp/2") < order_of("tp%2") < order_of("a") and order_of("tp")[0] == order_of("tp%2")[0]
    assert {"dp", "edp", "cp", "cp/ep", "ep/cp"} == axes.DATA_ATOMS
    assert {"dp", "edp", "ep", "ep/cp"} == axes.SAMPLE_ATOMS


MESHES = [
    (dict(tp=2), Mesh(2, tp=2)),
    (dict(pp=2, dp=3, cp=2, tp=5), Mesh(60, pp=2, cp=2, tp=5)),
    (dict(dp=4, ep=2), Mesh(4, ep=2)),
    (dict(edp=2, ep=4, cp=2), Mesh(8, cp=2, ep=4)),  # dp 4
    (dict(edp=2, dp=4, ep=2), Mesh(4, ep=2)),
    (Mesh(6, tp=3), Mesh(6, tp=3)),
]


@pytest.mark.parametrize("sizes, mesh", MESHES)
def test_a_mesh_of_sizes(sizes, mesh) -> None:
    assert mesh_of(sizes) == mesh


NO_MESHES = {
    "mesh: 4 has no sizes by axis: write {'dp': 2, 'tp': 4}, or give a Mesh": 4,
    "mesh: unknown axes sp, x; axes are tp (tensor), dp (data), pp, cp, ep, edp": dict(x=1, tp=2, sp=2),
    "mesh: tp must be a positive integer, got 0": dict(tp=0),
    "mesh: dp must be a positive integer, got 2.0": dict(dp=2.0, tp=0),
    "mesh: edp 4 does not fit dp 4 x cp 1 = edp x ep 2": dict(dp=4, ep=2, edp=4),
}


@pytest.mark.parametrize("message", NO_MESHES)
def test_what_is_no_mesh(message) -> None:
    with pytest.raises(ValueError) as error:
        mesh_of(NO_MESHES[message])
    assert str(error.value) == message


def test_a_part_of_an_axis_that_types_do_not_have() -> None:
    with pytest.raises(PartOfAxisError) as error:
        atoms_of("tp%2", Mesh(8, tp=8, tp_replicas=4))
    assert error.value.replicas == 2
    assert str(error.value) == (
        "types are checked on all of tp, or on parts of 4, not on the part 'tp%2': pass Mesh(..., "
        "tp_replicas=2), which must be the same for all layers"
    )
    with pytest.raises(ValueError, match="'xp'"):
        atoms_of("xp", Mesh(8, tp=8))
    assert atoms_of("xp", None) == ("xp",)


def test_groups_are_the_axes_that_their_ranks_lie_along() -> None:
    """Each group along each axis; and lists of ranks along none, which are atoms of their own."""
    mesh = Mesh(16, tp=2, pp=2, cp=2)
    for rank, axis in product((0, 13), ("tp", "pp", "dp", "cp", ("dp", "cp"), "world")):
        with comm.as_rank(mesh, rank):
            group = comm.communicator(axis)
            assert atoms_of(group, mesh) == atoms_of(axis, mesh)
            assert atoms_of(group, None) == (group.axis if "," not in group.axis else f"{group.axis}{[*group.ranks]}",)
    with comm.as_rank(mesh, 0):
        assert atoms_of(comm.new_group([[0, 3]], "odd"), mesh) == ("odd[0, 3]",)
        assert atoms_of(comm.new_group([[0, 3]], "odd"), None) == ("odd",)
        alone = comm.new_group([[0]], "alone")
        assert atoms_of(alone, mesh) == () == atoms_of(alone, None)
    with comm.as_rank(Mesh(8, tp=2, pp=4), 2):
        assert atoms_of(comm.new_group([[2, 6]], "tied"), context.current().mesh) == ("pp",)
        assert atoms_of(comm.new_group([[2, 7]], "crossed"), context.current().mesh) == ("crossed[2, 7]",)
