"""ShardTensors from whole tensors, from one rank's, from local ones, and from sizes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from neuronx_dist import comm, distributed
from neuronx_dist.comm import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor import (
    DeviceMesh,
    Replicate,
    Shard,
    ShardTensor,
    distribute_tensor,
    fallback,
    scatter_tensor,
)
from tests.shard_tensor.support.cases import on_ranks, verbs


def whole(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


@pytest.mark.parametrize("src", [0, 2])
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("along", [None, (1, 12, 0, 3)])
def test_the_values_of_the_source_count(src, shape, along):
    def distribute(mesh):
        x = whole(16, 6) * (mesh.get_rank() + 1)
        x.requires_grad_()
        placements = [Shard(0)] if mesh.ndim == 1 else [Shard(1), Shard(0)]
        sizes = [along] if mesh.ndim == 1 else [(1, 5), None]
        y = distribute_tensor(x, mesh, placements, sizes=sizes, src=src)
        assert y.is_leaf and y.requires_grad and y.to_local().is_leaf
        assert torch.equal(y.full_tensor().detach(), whole(16, 6) * (src + 1))

    on_ranks(4, distribute, shape)


def scattered(mesh):
    x = whole(7, 3) if mesh.get_rank() == 1 else None
    with comm.record() as calls:
        y = scatter_tensor(x, 1, mesh, [Shard(0)], requires_grad=True, sizes=[(2, 5, 0)])
    assert y.is_leaf and y.requires_grad
    assert torch.equal(y.full_tensor().detach(), whole(7, 3))
    return [(call.verb, call.bytes) for call in calls if call.verb != "gather_objects"]


def test_scatter_sends_every_rank_its_slice_only():
    """The peer sends the whole tensor to every rank. An empty shard is not sent at all."""
    sent = on_ranks(3, scattered)
    assert sent == [[("exchange", 48)], [("exchange", 48)], [("exchange", 0)]]


def test_scatter_without_a_tensor_is_refused_on_all_ranks():
    def scatter(mesh):
        with pytest.raises(ValueError, match="tensor is None on rank 0, which is global_src"):
            scatter_tensor(None, 0, mesh, [Shard(0)])
        with pytest.raises(ValueError, match="global_src=5 is not one of the ranks"):
            scatter_tensor(None, 5, mesh, [Shard(0)])

    on_ranks(2, scatter)


def test_a_meta_tensor_stays_one():
    def distribute(mesh):
        with comm.record() as calls:
            x = distribute_tensor(torch.empty(7, 3, device="meta"), mesh, [Shard(0)])
        assert x.to_local().is_meta and x.is_meta and x.to_local().shape == ((4, 3) if mesh.get_rank() == 0 else (3, 3))
        assert calls == []

    on_ranks(2, distribute)


def test_a_tensor_with_a_graph_is_refused():
    def distribute(mesh):
        with pytest.raises(RuntimeError, match="from_local"):
            distribute_tensor(torch.ones(4, requires_grad=True) * 2, mesh, [Shard(0)])

    on_ranks(2, distribute)


# --- from local tensors


def inferred(mesh):
    rows = (11, 5)[mesh.get_rank()]
    local = torch.full((rows, 2), float(mesh.get_rank()), dtype=torch.float64, requires_grad=True)
    with comm.record() as calls:
        x = ShardTensor.from_local(local, mesh, [Shard(0)])
        (x * 2).sum().backward()
    assert x.shape == (16, 2) and x._spec.sizes == ((11, 5),)
    assert x.offsets == ((0, 0), (11, 0))[mesh.get_rank()]
    assert x._spec.sharding_shapes() == {0: (torch.Size((11, 2)), torch.Size((5, 2)))}
    assert x._spec.sharding_shapes(0) == (torch.Size((11, 2)), torch.Size((5, 2)))
    assert torch.equal(local.grad, torch.full_like(local, 2.0))
    return verbs(calls)


def test_from_local_infers_shapes_once():
    assert on_ranks(2, inferred) == [["all_reduce"]] * 2


def test_the_mean_of_a_split_of_3_and_5_is_that_of_8_elements():
    """torch's DTensor gives 1.5 in place of 1.625, silently."""

    def mean(mesh):
        local = torch.full(((3, 5)[mesh.get_rank()],), float(mesh.get_rank() + 1))
        return ShardTensor.from_local(local, mesh, [Shard(0)]).mean().item()

    assert on_ranks(2, mean) == [1.625, 1.625]


def test_from_local_on_a_grid():
    def infer(mesh):
        a, b = mesh.get_coordinate()
        local = torch.ones((1, 3)[a], (2, 5)[b])
        x = ShardTensor.from_local(local, mesh, [Shard(0), Shard(1)])
        assert x.shape == (4, 7) and x._spec.sizes == ((1, 3), (2, 5))

    on_ranks(4, infer, (2, 2))


def test_from_local_by_chunks_and_by_what_is_told():
    def make(mesh):
        with comm.record() as calls:
            local = torch.ones((4, 3)[mesh.get_rank()], 2)
            assert ShardTensor.from_local(
                local, mesh, [Shard(0)], sharding_shapes="chunk", global_shape=(7, 2)
            ).shape == (7, 2)
            assert ShardTensor.from_local(torch.ones(4, 2), mesh, [Shard(0)], sharding_shapes="chunk").shape == (8, 2)
            told = {0: [(4, 2), (3, 2)]}
            assert ShardTensor.from_local(local, mesh, [Shard(0)], sharding_shapes=told).shape == (7, 2)
            assert ShardTensor.from_local(torch.ones(4), mesh).placements == (Replicate(),)
            with pytest.raises(ValueError, match="but its layout requires"):
                ShardTensor.from_local(torch.ones(6, 2), mesh, [Shard(0)], sharding_shapes=told)
            with pytest.raises(ValueError, match="no entry for mesh dim 0"):
                ShardTensor.from_local(local, mesh, [Shard(0)], sharding_shapes={})
            with pytest.raises(ValueError, match='is not "infer"'):
                ShardTensor.from_local(local, mesh, [Shard(0)], sharding_shapes="guess")
        return verbs(calls)

    assert on_ranks(2, make) in ([[], []], [["gather_objects"]] * 2)


def test_only_infer_compares_between_ranks():
    """Different layouts elsewhere are noticed by the next exchange of parts, not by a sum: docs/shard-tensor.md."""

    def make(mesh):
        rank = mesh.get_local_rank()
        split = [(5, 3), (3, 5)][rank]
        with comm.record() as calls:
            x = distribute_tensor(whole(8), mesh, [Shard(0)], sizes=[split], src=None)
            told = ShardTensor.from_local(torch.ones(split[rank]), mesh, [Shard(0)], sharding_shapes={0: [*zip(split)]})
            chunk = ShardTensor.from_local(torch.ones(4, 2 + rank), mesh, [Shard(0)], sharding_shapes="chunk")
        assert calls == [] and told.shape == (8,) and chunk.shape == (8, 2 + rank)
        for y in (x, told):
            with pytest.raises(comm.CommError, match="sends 5 elements to rank 1, which expects 3"):
                y.full_tensor()
        assert x.sum().item() == 35.0 and whole(8).sum() == 28.0

    on_ranks(2, make)


def test_shapes_that_do_not_fit_are_refused_on_all_ranks():
    def infer(mesh):
        with pytest.raises(ValueError, match=r"must be equal but for dim 0, but the ranks have \[\(2, 3\), \(2, 4\)\]"):
            ShardTensor.from_local(torch.ones(2, 3 + mesh.get_rank()), mesh, [Shard(0)])
        with pytest.raises(ValueError, match=r"along mesh dim 0 \(Replicate\(\)\) must be equal"):
            ShardTensor.from_local(torch.ones(2 + mesh.get_rank()), mesh, [Replicate()])

    on_ranks(2, infer)


# --- factories


@pytest.mark.parametrize("placements", [[Replicate()], [Shard(0)], [Shard(1)]], ids=str)
def test_factories_give_the_values_of_one_process(placements):
    factories = {
        "rand": lambda f, **at: f.rand(5, 7, **at),
        "randn": lambda f, **at: f.randn((5, 7), dtype=torch.float64, **at),
        "randint": lambda f, **at: f.randint(2, 9, size=(5, 7), **at),
        "ones": lambda f, **at: f.ones(5, 7, **at),
        "zeros": lambda f, **at: f.zeros((5, 7), **at),
        "full": lambda f, **at: f.full((5, 7), 3.5, **at),
    }
    generators = [torch.Generator() for _ in range(3)]
    del generators

    def make(mesh):
        made = {}
        for name, factory in factories.items():
            if name in ("rand", "randn", "randint"):
                continue
            made[name] = factory(distributed, device_mesh=mesh, placements=placements).full_tensor()
        assert distributed.empty(5, 7, device_mesh=mesh, placements=placements).shape == (5, 7)
        return made

    for made in on_ranks(3, make):
        for name, x in made.items():
            assert torch.equal(x, factories[name](torch)), name
    for name in ("rand", "randn", "randint"):  # the threads' generator is one: one rank after the other
        torch.manual_seed(4)
        expected = factories[name](torch)
        pieces = {}

        def draw(mesh, name=name, pieces=pieces):
            for index in range(mesh.size()):
                if index == mesh.get_local_rank():
                    torch.manual_seed(4)
                    pieces[index] = factories[name](distributed, device_mesh=mesh, placements=placements)
                comm.barrier(mesh.communicator())
            return pieces[mesh.get_local_rank()].full_tensor()

        assert all(torch.equal(x, expected) for x in on_ranks(3, draw)), name


def _one_after_the_other(function):
    """`function(mesh)` on 2 ranks, whose generator is one: each draws from the seed."""

    def on_rank(mesh):
        for index in range(mesh.size()):
            if index == mesh.get_local_rank():
                torch.manual_seed(4)
                x = function(mesh)
            comm.barrier(mesh.communicator())
        return x._spec, x.dtype, x.requires_grad, x.full_tensor().detach()

    return on_ranks(2, on_rank)


LIKES = {
    "rand_like": (),
    "randn_like": (),
    "randint_like": (2, 9),
    "zeros_like": (),
    "ones_like": (),
    "full_like": (3.5,),
}


@pytest.mark.parametrize("name", LIKES)
@pytest.mark.parametrize("sizes", [None, (1, 6)], ids=str)
def test_like_another_tensor(name, sizes):
    arguments = LIKES[name]
    torch.manual_seed(4)
    expected = getattr(torch, name)(whole(3, 7), *arguments)

    def operand(mesh):
        return distribute_tensor(whole(3, 7), mesh, [Shard(1)], sizes=[sizes], src=None)

    makers = {
        "torch": lambda mesh: getattr(torch, name)(operand(mesh), *arguments),
        "ours": lambda mesh: getattr(distributed, name)(operand(mesh), *arguments),
        "of a plain tensor": lambda mesh: getattr(distributed, name)(
            whole(3, 7), *arguments, device_mesh=mesh, placements=[Shard(1)], sizes=[sizes]
        ),
        "to another layout": lambda mesh: getattr(distributed, name)(
            operand(mesh), *arguments, placements=[Shard(0)], requires_grad=True
        ),
    }
    with fallback("error"):
        for words, make in makers.items():
            for spec, dtype, grad, values in _one_after_the_other(make):
                assert torch.equal(values, expected), words
                assert dtype == torch.float64 and grad == (words == "to another layout")
                assert spec.placements == ((Shard(0),) if grad else (Shard(1),)), words
                assert grad or spec.sizes == (sizes or (4, 3),), words


def test_new_tensors():
    def make(mesh):
        x = distribute_tensor(whole(3, 7).requires_grad_(), mesh, [Shard(1)], sizes=[(1, 6)], src=None)
        with comm.record() as calls, fallback("error"):
            like = {
                "zeros": x.new_zeros(3, 7),
                "ones": x.new_ones((3, 7), dtype=torch.int64),
                "full": x.new_full((3, 7), 3.5),
                "full by name": x.new_full(size=x.shape, fill_value=3.5),
                "empty": x.new_empty(x.shape),
            }
            other = [x.new_zeros(2, 4), x.new_full((2, 4), 0.0), x.new_tensor([[0.0] * 4] * 2, requires_grad=True)]
            copy = x.new_tensor(x, dtype=torch.float32)
        assert calls == []
        assert all(y._spec is x._spec and not y.requires_grad for y in like.values())
        assert all(y.placements == (Replicate(),) and y.tolist() == [[0.0] * 4] * 2 for y in other)
        assert all(y.dtype == torch.float64 for y in other) and other[-1].requires_grad
        assert copy._spec is x._spec and torch.equal(copy.full_tensor(), whole(3, 7).float())
        return [(name, y.dtype, y.full_tensor()) for name, y in like.items() if name != "empty"]

    expected = [
        torch.zeros(3, 7, dtype=torch.float64),
        torch.ones(3, 7, dtype=torch.int64),
        *[torch.full((3, 7), 3.5, dtype=torch.float64)] * 2,
    ]
    for made in on_ranks(2, make):
        for (name, dtype, values), plain in zip(made, expected, strict=True):
            assert dtype == plain.dtype and torch.equal(values, plain), name


def test_a_new_strided_tensor_is_a_leaf():
    def run(mesh):
        x = distribute_tensor(whole(3, 7), mesh, [Shard(1)], sizes=[(1, 6)], src=None)
        with comm.record() as calls, fallback("error"):
            y = x.new_empty_strided((3, 7), (7, 1), requires_grad=True)
        assert calls == [] and y.is_leaf and y._spec is x._spec
        with torch.no_grad():
            y.fill_(2.0)
        y.square().sum().backward()
        assert torch.equal(y.grad.full_tensor(), torch.full((3, 7), 4.0, dtype=torch.float64))

    on_ranks(2, run)


def test_values_in_order():
    def make(mesh):
        options = {"device_mesh": mesh, "placements": [Shard(0)], "sizes": [(1, 3)]}
        tensors = [
            distributed.arange(1, 8, 2, **options),
            distributed.linspace(0, 6, steps=4, dtype=torch.float64, requires_grad=True, **options),
            distributed.logspace(0, 3, 4, base=2, **options),
        ]
        assert [x.to_local().shape for x in tensors] == [(3,) if mesh.get_rank() else (1,)] * 3
        assert tensors[1].requires_grad and tensors[1].dtype is torch.float64
        return [x.full_tensor().tolist() for x in tensors]

    assert on_ranks(2, make) == [[[1, 3, 5, 7], [0, 2, 4, 6], [1, 2, 4, 8]]] * 2


# --- meshes


def test_meshes():
    def make():
        mesh = distributed.init_device_mesh("cpu", (2, -1), mesh_dim_names=("dp", "domain"))
        assert mesh is DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "domain"))
        assert (mesh.shape, mesh.ndim, mesh.size(), mesh.size(1)) == ((2, 2), 2, 4, 2)
        rank = mesh.get_rank()
        assert mesh.get_coordinate() == [rank // 2, rank % 2] and mesh.get_local_rank("dp") == rank // 2
        part = mesh["domain"]
        assert part.mesh.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert part.communicator() is mesh.communicator("domain")
        turned = mesh["domain", "dp"]
        assert turned.shape == (2, 2) and turned.mesh.tolist() == [[0, 2], [1, 3]]
        with mesh:
            assert distribute_tensor(torch.ones(2)).device_mesh is mesh
        assert distribute_tensor(torch.ones(2)).device_mesh is DeviceMesh.from_axes(("dp", "tp"))  # that of the job
        with pytest.raises(RuntimeError, match="has no process group on the backend threads"):
            mesh.get_group("dp")
        for bad, words in [
            (lambda: DeviceMesh("cpu", [0, 0]), "must be distinct and below the world size 4"),
            (lambda: DeviceMesh("cpu", [0, 9]), "must be distinct and below the world size 4"),
            (lambda: DeviceMesh("cpu", [0, 1], mesh_dim_names=("a", "b")), "1 distinct names"),
            (lambda: distributed.init_device_mesh("cpu", (3, -1)), "does not fit 4 ranks"),
            (lambda: mesh["tp"], "has no dim 'tp'"),
            (lambda: mesh.communicator(), "pass mesh_dim, an index or a name"),
        ]:
            with pytest.raises(ValueError, match=words):
                bad()
        axes = DeviceMesh.from_axes(("dp", "tp"))
        assert axes.mesh_dim_names == ("dp", "tp") and axes.communicator("tp") is comm.communicator("tp")
        part = DeviceMesh("cpu", [1, 2])
        assert (part.get_coordinate() is None) == (rank not in (1, 2))

    threads.run(Mesh(4, tp=2), make)


def test_a_source_that_is_no_rank_of_the_mesh_is_refused():
    def refused(mesh):
        with pytest.raises(ValueError, match="src=7 is not one of the 2 ranks"):
            distribute_tensor(torch.ones(4), mesh, [Shard(0)], src=7)

    on_ranks(2, refused)


def test_offsets_of_each_mesh_dim():
    """`x.offsets` is for each tensor dim; called, as PhysicsNeMo does, it is for each mesh dim."""

    def run(mesh):
        x = distribute_tensor(torch.zeros(7, 3, 16), mesh, [Shard(2), Shard(0)], sizes=[(11, 5), (2, 5)])
        row, column = mesh.get_coordinate()
        along = ((0, 11)[row], (0, 2)[column])
        assert x.offsets == (along[1], 0, along[0]) and x.offsets() == along
        assert [x.offsets(mesh_dim=m) for m in (0, 1)] == list(along)
        y = distribute_tensor(torch.zeros(7), mesh, [Replicate(), Shard(0)], sizes=[None, (2, 5)])
        assert y.offsets() == (0, along[1]) and y.offsets(0) == 0

    on_ranks(4, run, (2, 2))


def test_from_local_takes_shapes_by_position():
    def run(mesh):
        x = torch.ones(3 - mesh.get_rank())
        for arguments in (("infer",), ({0: [(3,), (2,)]},), ("chunk", (5,))):
            assert ShardTensor.from_local(x, mesh, [Shard(0)], *arguments)._spec.sizes == ((3, 2),)

    on_ranks(2, run)


def test_offsets_where_two_mesh_dims_shard_one_dim():
    def rank(mesh):
        x = distribute_tensor(torch.ones(8), mesh, [Shard(0), Shard(0)], src=None)
        assert copy.deepcopy(x.offsets) == pickle.loads(pickle.dumps(x.offsets)) == tuple(x.offsets)
        return tuple(x.offsets), x.offsets()

    assert on_ranks(4, rank, (2, 2)) == [((0,), (0, 0)), ((2,), (0, 2)), ((4,), (4, 4)), ((6,), (4, 6))]
