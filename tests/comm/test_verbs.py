"""Every verb on every backend against a closed form: rank-valued tensors, any dim, dtype, layout, out=, async."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch.overrides import TorchFunctionMode

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.comm.backends.shapes import ShapesBackend, ShapesCommunicator
from neuronx_dist.comm.base import DONE, Communicator, Works
from neuronx_dist.mesh import Mesh
from tests.support.pool import processes

SIZE = -1  # stands for the number of ranks
SHAPES = {
    torch.float32: [(SIZE,), (2, 6, SIZE), (1, SIZE, 2), ()],
    torch.bfloat16: [(3, SIZE)],
    torch.float16: [(SIZE, 1)],
    torch.int64: [(SIZE, 2)],
    torch.float64: [(SIZE,)],
    torch.int32: [(SIZE,)],
}
CASES = sum(len(shapes) for shapes in SHAPES.values())


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, so that sums are exact in every dtype."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 5 + 8 * rank).reshape(shape).to(dtype)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values in memory that is not contiguous."""
    wide = x.new_zeros((*x.shape, 3))
    wide[..., 1] = x
    return wide[..., 1]


def layouts(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.clone(), strided(x)] + ([x.t().clone(memory_format=torch.contiguous_format).t()] if x.dim() == 2 else [])


def equal(found: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert found.dtype == expected.dtype, (what, found.dtype, expected.dtype)
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    assert torch.equal(found, expected), (what, found, expected)


def in_all_forms(
    verb: Callable[..., object], x: torch.Tensor, expected: torch.Tensor, what: object, /, **options: object
) -> None:
    """Plain, with out= (contiguous and not), with out=x where shapes allow, asynchronous; else `x` never changes."""
    outs = itertools.cycle(layouts(torch.full_like(expected, 99)))
    for given in layouts(x):
        before = given.clone()
        found = verb(given, **options)
        equal(found, expected, (what, "plain", given.stride()))
        assert found is not given and (found.numel() == 0 or found.data_ptr() != given.data_ptr()), what
        out = next(outs).fill_(99)
        assert verb(given, out=out, **options) is out
        equal(out, expected, (what, "out", given.stride(), out.stride()))
        handle = verb(given, async_op=True, **options)
        result = handle.wait()
        equal(result, expected, (what, "async"))
        assert handle.wait() is result, (what, "a second wait gives the same tensor")
        out = next(outs).fill_(99)
        assert verb(given, out=out, async_op=True, **options).wait() is out
        equal(out, expected, (what, "async out"))
        equal(given, before, (what, "the input is left alone"))
        if given.shape == expected.shape:
            assert verb(given, out=given, **options) is given
            equal(given, expected, (what, "out is x", given.stride()))


def on_every_rank(verb: str, size: int) -> int:
    """What each rank runs: returns how many cases it checked."""
    rank, done = comm.rank("world"), 0
    others = range(size)
    for dtype in SHAPES:
        for shape in SHAPES[dtype]:
            shape = tuple(size if length == SIZE else length for length in shape)
            dims = [*range(len(shape)), *range(-len(shape), 0)]
            even = [dim for dim in dims if shape[dim] % size == 0]
            all_values = [value(r, shape, dtype) for r in others]
            mine, total = all_values[rank], sum(all_values)
            total = total.to(dtype)
            what = (verb, dtype, shape)
            if verb == "all_reduce":
                in_all_forms(comm.all_reduce, mine, total, what, axis="world")
                in_all_forms(comm.all_reduce, mine, all_values[-1], (*what, "max"), axis="world", op="max")
                in_all_forms(comm.all_reduce, mine, all_values[0], (*what, "min"), axis="world", op="min")
            elif verb == "all_gather":
                for dim in dims:
                    in_all_forms(comm.all_gather, mine, torch.cat(all_values, dim), (*what, dim), axis="world", dim=dim)
            elif verb == "reduce_scatter":
                for dim in even:
                    for op, whole in (("sum", total), ("max", all_values[-1]), ("min", all_values[0])):
                        piece = whole.chunk(size, dim)[rank].contiguous()
                        in_all_forms(comm.reduce_scatter, mine, piece, (*what, dim, op), axis="world", dim=dim, op=op)
            elif verb == "all_to_all":
                for split, concat in itertools.product(even, dims):
                    expected = torch.cat([v.chunk(size, split)[rank] for v in all_values], concat)
                    options = dict(split_dim=split, concat_dim=concat)
                    in_all_forms(comm.all_to_all, mine, expected, (*what, options), axis="world", **options)
            elif verb == "permute":
                ring = [(src, (src + 1) % size) for src in others]
                for pairs in (ring, [(size - 1, 0)], [(1, 1)], []):
                    sources = [src for src, dst in pairs if dst == rank]
                    expected = all_values[sources[0]] if sources else torch.zeros_like(mine)
                    in_all_forms(comm.permute, mine, expected, (*what, pairs), axis="world", pairs=pairs)
            elif verb == "broadcast":
                for src in others:
                    in_all_forms(comm.broadcast, mine, all_values[src], (*what, src), axis="world", src=src)
            elif verb == "send":
                for given in layouts(mine):
                    # a ring, receives posted first; then in order, tags apart
                    out = torch.full_like(mine, 99)
                    receiving = comm.recv(out, "world", src=(rank - 1) % size, async_op=True)
                    assert comm.send(given, "world", dst=(rank + 1) % size) is given
                    assert receiving.wait() is out and receiving.wait() is out
                    equal(out, all_values[(rank - 1) % size], (*what, "ring"))
                    if rank == 0:
                        works = [comm.send(given + i, "world", dst=1, tag=i, async_op=True) for i in range(2)]
                        [work.wait() for work in works]
                    elif rank == 1:
                        for tag in range(2):
                            equal(comm.recv(out, "world", src=0, tag=tag), all_values[0] + tag, (*what, "tag", tag))
            done += 1
    comm.barrier()
    return done


VERBS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast", "send"]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("size", [2, 3])
def test_values_on_threads(verb, size):
    assert threads.run(Mesh(size, tp=size), on_every_rank, verb, size) == [CASES] * size


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("size", [2, 4])
def test_values_on_processes(verb, size):
    assert processes(size).run(on_every_rank, verb, size, mesh=dict(tp=size)) == [CASES] * size


def empty_tensors(size: int) -> None:
    for shape in [(0,), (0, 3), (size, 0)]:
        x = torch.empty(shape)
        assert comm.all_reduce(x, "world").shape == shape
        for dim in range(len(shape)):
            gathered = list(shape)
            gathered[dim] *= size
            assert list(comm.all_gather(x, "world", dim=dim).shape) == gathered
            assert list(comm.all_gather(x, "world", dim=dim, out=torch.empty(gathered)).shape) == gathered
            piece = list(shape)
            piece[dim] //= size
            if shape[dim] % size == 0:
                assert list(comm.reduce_scatter(x, "world", dim=dim).shape) == piece
                assert comm.all_to_all(x, "world", split_dim=dim, concat_dim=dim).shape == shape
        assert comm.broadcast(x, "world").shape == shape
        assert comm.permute(x, "world", [(0, 1)]).shape == shape


def test_empty_tensors():
    threads.run(Mesh(2, tp=2), empty_tensors, 2)
    processes(2).run(empty_tensors, 2)
    processes(4).run(empty_tensors, 4)


def reduce_dtypes(size: int) -> None:
    """256 + 1 is 256 in bf16; in fp32 it is not. The result has the input's dtype, or that of `out`."""
    rank = comm.rank("world")
    x = torch.full((size, 2), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    exact = 256.0 + (size - 1)
    rounded = torch.tensor(exact).bfloat16()
    for given in (x, x.t().contiguous().t()):
        wide = torch.empty(size, 2)
        found = comm.all_reduce(given, "world", reduce_dtype=torch.float32)
        assert found.dtype == torch.bfloat16 and (found == rounded).all()
        assert (comm.all_reduce(given, "world", reduce_dtype=torch.float32, out=wide) == exact).all()
        assert (comm.all_reduce(given, "world", reduce_dtype=torch.float32, async_op=True).wait() == rounded).all()
        piece = comm.reduce_scatter(given, "world", reduce_dtype=torch.float32)
        assert piece.dtype == torch.bfloat16 and piece.shape == (1, 2) and (piece == rounded).all()
        wide = torch.empty(1, 2)
        assert (comm.reduce_scatter(given, "world", reduce_dtype=torch.float32, out=wide) == exact).all()
    # a narrower reduce_dtype does not narrow
    fine = torch.full((size,), 1 + 2.0**-20, dtype=torch.float64)
    assert (comm.all_reduce(fine, "world", reduce_dtype=torch.float32) == size * (1 + 2.0**-20)).all()
    with comm.record() as calls:
        comm.all_reduce(x, "world", reduce_dtype=torch.float32)
        comm.all_reduce(x, "world", op="max", reduce_dtype=torch.float32)
        comm.all_reduce(fine, "world", reduce_dtype=torch.float32)
    assert [call.dtype for call in calls] == [torch.float32, torch.bfloat16, torch.float64]


def test_reduce_dtype_is_promoted():
    threads.run(Mesh(2), reduce_dtypes, 2)
    processes(2).run(reduce_dtypes, 2)


def merged_axes() -> dict[object, float]:
    x = torch.tensor([2.0 ** comm.rank("world")], dtype=torch.float64)
    axes = ["tp", "pp", "dp", ("dp", "cp"), ("pp", "tp"), ("tp", "pp"), "world", ("edp", "ep"), ()]
    gathered = comm.all_gather(x, ("tp", "pp")).log2().long().tolist()
    assert gathered == list(comm.communicator(("tp", "pp")).ranks)
    return {axis: comm.all_reduce(x, axis).item() for axis in axes}


@pytest.mark.parametrize("mesh", [Mesh(4, tp=2, pp=2), Mesh(4, tp=2, cp=2), Mesh(4, tp=4), Mesh(4, pp=2, ep=2)])
def test_merged_axes(mesh):
    expected = [
        {
            axis: float(sum(2**other for other in mesh.group_of(axis, rank)))
            for axis in ["tp", "pp", "dp", ("dp", "cp"), ("pp", "tp"), ("tp", "pp"), "world", ("edp", "ep"), ()]
        }
        for rank in range(4)
    ]
    assert threads.run(mesh, merged_axes) == expected
    sizes = dict(tp=mesh.tp, pp=mesh.pp, cp=mesh.cp, ep=mesh.ep)
    assert processes(4).run(merged_axes, mesh=sizes) == expected


def axes_of_one_rank() -> None:
    x = torch.arange(4.0)
    with comm.record(waits=True) as calls:
        assert comm.all_reduce(x, "pp") is x
        assert comm.all_reduce(x, "pp", async_op=True).wait() is x
        assert comm.all_gather(x, "pp") is x
        assert comm.reduce_scatter(x, "pp") is x
        assert comm.all_to_all(x, "pp") is x
        assert comm.broadcast(x, "pp") is x
        assert comm.permute(x, "pp", [(0, 0)]) is x
        assert torch.equal(comm.permute(x, "pp", []), torch.zeros(4))
        out = torch.empty(4)
        assert comm.all_reduce(x, "pp", out=out) is out and torch.equal(out, x)
        assert comm.gather_objects("here", "pp") == ["here"]
        assert comm.broadcast_object("here", "pp") == "here"
        comm.barrier("pp")
    assert not calls


def test_an_axis_of_one_rank_costs_nothing():
    threads.run(Mesh(2), axes_of_one_rank)
    processes(2).run(axes_of_one_rank)
    with comm.as_rank(Mesh(1), 0):
        axes_of_one_rank()


def objects(size: int) -> None:
    rank = comm.rank("world")
    assert comm.gather_objects({"rank": rank, 1: "x" * rank}) == [{"rank": r, 1: "x" * r} for r in range(size)]
    for src in range(size):
        assert comm.broadcast_object(("from", rank), src=src) == ("from", src)


def test_objects():
    threads.run(Mesh(3), objects, 3)
    processes(2).run(objects, 2)


def explicit_groups() -> list[object]:
    found: list[object] = []
    rank = comm.rank("world")
    for lists in ([[0, 3], [1, 2]], [[3, 0]], [[1]], [[0, 3]]):
        group = comm.new_group(lists, "mine")
        assert (group is None) == all(rank not in ranks for ranks in lists)
        if group is None:
            found.append(None)
            continue
        assert group.axis == "mine" and group.ranks[group.rank] == rank == group.global_rank
        assert comm.communicator(group) is group and comm.size(group) == group.size and comm.rank(group) == group.rank
        found.append(comm.all_gather(torch.tensor([rank]), group).tolist())
    for lists in ([[0, 0]], [[0, 4]], [[0, 1], [1, 2]]):
        with pytest.raises(ValueError, match="disjoint lists of ranks below 4"):
            comm.new_group(lists)
    comm.barrier()
    return found


def test_new_group():
    expected = [
        [[0, 3], [3, 0], None, [0, 3]],
        [[1, 2], None, [1], None],
        [[1, 2], None, None, None],
        [[0, 3], [3, 0], None, [0, 3]],
    ]
    assert threads.run(Mesh(4, tp=2, pp=2), explicit_groups) == expected
    assert processes(4).run(explicit_groups, mesh=dict(tp=2, pp=2)) == expected


def a_users_process_group() -> None:
    import torch.distributed as dist

    rank = comm.rank("world")
    group = dist.new_group([1, 0])
    assert torch.equal(comm.all_reduce(torch.tensor([rank + 1.0]), group), torch.tensor([3.0]))
    order = list(comm.communicator(group).ranks)
    assert comm.all_gather(torch.tensor([rank]), group).tolist() == order
    assert comm.size(group) == 2 and comm.rank(group) == order.index(rank)
    with pytest.raises(TypeError, match="mesh axis name.*7"):
        comm.all_reduce(torch.ones(1), 7)
    dist.destroy_process_group(group)


def test_a_process_group_is_an_axis():
    processes(2).run(a_users_process_group)


def several_in_flight() -> None:
    """Collectives made of messages do not meet each other, whatever the order of the waits."""
    rank, size = comm.rank("world"), comm.size("world")
    xs = [torch.full((i + 1,), float(10 * i + rank)) for i in range(5)]
    gathers = [comm.all_gather(x, "world", async_op=True) for x in xs]
    sums = [comm.all_reduce(x, "world", async_op=True) for x in xs]
    scatters = [comm.reduce_scatter(x.repeat(size), "world", async_op=True) for x in xs]
    for i in reversed(range(5)):
        assert torch.equal(gathers[i].wait(), torch.cat([torch.full((i + 1,), float(10 * i + r)) for r in range(size)]))
        total = float(sum(10 * i + r for r in range(size)))
        assert torch.equal(sums[i].wait(), torch.full((i + 1,), total))
        assert torch.equal(scatters[i].wait(), torch.full((i + 1,), total))


def test_several_collectives_in_flight():
    threads.run(Mesh(3), several_in_flight)
    processes(2).run(several_in_flight)
    processes(4).run(several_in_flight)


def inputs_with_gradients() -> None:
    """Verbs are not differentiable: nothing they return or fill is part of a graph."""
    x = torch.ones(2, requires_grad=True)
    y = x * 1
    for given in (x, y):
        out = torch.zeros(2)
        gathered = torch.zeros(4)
        for result in (
            comm.all_reduce(given, "world"),
            comm.all_reduce(given, "world", out=out),
            comm.broadcast(given, "world", out=out),
            comm.all_gather(given, "world", out=gathered),
            comm.reduce_scatter(given, "world"),
            comm.all_to_all(given, "world"),
        ):
            assert not result.requires_grad and result.grad_fn is None
    comm.all_reduce(x, "world", out=x)  # a parameter, in place
    assert x.is_leaf and x.requires_grad and x.tolist() == [2.0, 2.0]


def test_inputs_that_require_gradients():
    threads.run(Mesh(2), inputs_with_gradients)
    processes(2).run(inputs_with_gradients)


@pytest.mark.parametrize("tag", [-1, 1 << 20, (1 << 20) + 1])
def test_a_tag_that_is_not_a_users_is_refused(tag: int) -> None:
    """Those above are of collectives that are made of messages."""
    x = torch.ones(2)
    with comm.as_rank(Mesh(2, tp=2), 0):
        with pytest.raises(ValueError, match=rf"send over tp: tag={tag} is out of range \(0..1048575\)"):
            comm.send(x, "tp", dst=1, tag=tag)
        with pytest.raises(ValueError, match=rf"recv over tp: tag={tag} is out of range \(0..1048575\)"):
            comm.recv(x, "tp", src=1, tag=tag)
        comm.send(x, "tp", dst=1, tag=(1 << 20) - 1)
        comm.recv(x, "tp", src=1, tag=(1 << 20) - 1)


@pytest.mark.parametrize(
    "call, parts",
    [
        (lambda: comm.reduce_scatter(torch.ones(3), "tp"), ["reduce_scatter over tp", "2 partitions", "(3,)"]),
        (lambda: comm.all_to_all(torch.ones(2, 3), "tp", split_dim=-1), ["all_to_all", "dim 1", "(2, 3)", "3 is not"]),
        (lambda: comm.all_gather(torch.ones(2), "tp", dim=1), ["all_gather", "dim 1", "(2,)"]),
        (lambda: comm.all_gather(torch.ones(()), "tp"), ["dim 0", "()"]),
        (lambda: comm.reduce_scatter(torch.ones(2, 2), "tp", dim=-3), ["dim -3"]),
        (lambda: comm.all_reduce(torch.ones(2), "tp", op="avg"), ["sum, max, min", "avg"]),
        (lambda: comm.broadcast(torch.ones(2), "tp", src=2), ["broadcast over tp", "src=2", "0..1"]),
        (lambda: comm.broadcast_object(1, "tp", src=-1), ["src=-1"]),
        (lambda: comm.send(torch.ones(2), "tp", dst=0), ["send", "dst=0", "itself"]),
        (lambda: comm.recv(torch.ones(2), "tp", src=5), ["recv", "src=5"]),
        (lambda: comm.recv(torch.ones(2, 3).t(), "tp", src=1), ["contiguous", "(3, 2)"]),
        (lambda: comm.permute(torch.ones(2), "tp", [(0, 1), (1, 1)]), ["permute", "at most once"]),
        (lambda: comm.permute(torch.ones(2), "tp", [(0, 2)]), ["0..1"]),
        (lambda: comm.all_reduce(torch.ones(2), "tq"), ["tq", "tp"]),
        (lambda: comm.all_reduce(torch.ones(2), "tp", out=torch.ones(2, 2)), ["out has shape (2, 2)", "(2,)"]),
        (lambda: comm.all_gather(torch.ones(2), "tp", out=torch.ones(2)), ["(2,)", "(4,)"]),
        (lambda: comm.reduce_scatter(torch.ones(4), "tp", out=torch.ones(4)), ["(4,)", "(2,)"]),
        (lambda: comm.all_to_all(torch.ones(4), "tp", out=torch.ones(1)), ["(1,)", "(4,)"]),
        (lambda: comm.broadcast(torch.ones(1), "tp", out=torch.ones(4)), ["(4,)", "(1,)"]),
    ],
)
def test_wrong_arguments_are_refused(call, parts):
    with comm.as_rank(Mesh(2, tp=2), 0), pytest.raises(ValueError) as error:
        call()
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_shapes_backend_gives_the_shapes_of_the_real_ones():
    """Fake, meta and real tensors, no group: what `as_rank` returns has shape and dtype of what processes return."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def everything(device):
        x = torch.ones(4, 6, device=device)
        return [
            comm.all_reduce(x, "tp"),
            comm.all_reduce(x.bfloat16(), "tp", reduce_dtype=torch.float32),
            comm.all_gather(x, "tp", dim=-1),
            comm.all_gather(x, "tp", out=torch.ones(8, 6, device=device)),
            comm.reduce_scatter(x, "tp", dim=1),
            comm.all_to_all(x, "tp", split_dim=1, concat_dim=0),
            comm.permute(x, "tp", [(0, 1)]),
            comm.broadcast(x, "tp", src=1),
            comm.send(x, "tp", dst=1) if comm.rank("tp") == 0 else comm.recv(x, "tp", src=0),
            comm.all_reduce(x, "tp", async_op=True).wait(),
        ]

    expected = [[(t.shape, t.dtype) for t in found] for found in threads.run(Mesh(2, tp=2), everything, "cpu")]
    for rank in range(2):
        with comm.as_rank(Mesh(2, tp=2), rank):
            for device in ("cpu", "meta"):
                found = everything(device)
                assert [(t.shape, t.dtype) for t in found] == expected[rank]
                assert all(t.device.type == device for t in found)
            with FakeTensorMode():
                assert [(t.shape, t.dtype) for t in everything("cpu")] == expected[rank]
            # values are those of ranks that all hold what this one holds
            x = torch.arange(4.0)
            assert torch.equal(comm.all_reduce(x, "tp"), 2 * x)
            assert torch.equal(comm.all_gather(x, "tp"), x.repeat(2))
            assert torch.equal(comm.reduce_scatter(x, "tp"), 2 * x[2 * rank : 2 * rank + 2])
            assert torch.equal(comm.permute(x, "tp", [(0, 1)]), x if rank else torch.zeros(4))
            assert torch.equal(comm.recv(torch.ones(4), "tp", src=1 - rank), torch.zeros(4))


class Contiguous(ShapesCommunicator):
    """Takes nothing but contiguous buffers, as real backends do."""

    def __getattribute__(self, name):
        attribute = super().__getattribute__(name)
        if not name.startswith("start_") or name == "start_coalesced":
            return attribute

        def start(*args):
            assert all(x.is_contiguous() for x in args if isinstance(x, torch.Tensor)), name
            assert not any(x.requires_grad for x in args if isinstance(x, torch.Tensor)), name
            seen.add(name)
            return attribute(*args)

        return start


class ContiguousBackend(ShapesBackend):
    def communicator(self, label, groups, global_rank, own=False):
        return Contiguous(label, next(group for group in groups if global_rank in group), global_rank)


seen: set[str] = set()


@pytest.mark.parametrize("rank", range(2))
def test_buffers_of_backends_are_contiguous(rank):
    seen.clear()
    with comm.as_rank(Mesh(2, tp=2), rank, ContiguousBackend()):
        param = torch.ones(4, 6, requires_grad=True)  # verbs take its values, and write them in place
        for verb in (comm.all_reduce, comm.broadcast):
            assert verb(param, "tp", out=param) is param and param.is_leaf
        comm.recv(param, "tp", src=1 - rank)
        for x in layouts(torch.arange(24.0).view(4, 6)) + [param]:
            for dim in (0, 1):
                comm.all_gather(x, "tp", dim=dim)
                comm.all_gather(x, "tp", dim=dim, out=strided(torch.cat([x, x], dim).detach()))
                comm.reduce_scatter(x, "tp", dim=dim)
                comm.reduce_scatter(x, "tp", dim=dim, out=strided(x.detach().chunk(2, dim)[0]))
                comm.all_to_all(x, "tp", split_dim=dim, concat_dim=1 - dim)
                comm.all_to_all(x, "tp", split_dim=dim, concat_dim=dim, out=strided(x.detach()))
            for out in (None, strided(x.detach())):
                comm.all_reduce(x, "tp", out=out)
                comm.permute(x, "tp", [(0, 1), (1, 0)], out=out)
                comm.broadcast(x, "tp", src=0, out=out)
            comm.send(x, "tp", dst=1 - rank)
            comm.recv(x.detach().contiguous(), "tp", src=1 - rank)
    verbs = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast", "send", "recv")
    assert {f"start_{verb}" for verb in verbs} <= seen


ON_ONE_RANK = {
    "all_reduce": dict(op="max", reduce_dtype=torch.float64),
    "all_gather": dict(dim=1),
    "reduce_scatter": dict(dim=1),
    "all_to_all": dict(split_dim=1),
    "permute": dict(pairs=[(0, 0)]),
    "broadcast": dict(src=0),
}


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("verb", ON_ONE_RANK)
def test_on_an_axis_of_one_rank_every_form_gives_the_input(verb, as_list):
    x, out = torch.arange(6.0).view(2, 3), torch.zeros(2, 3)
    if as_list and verb not in ("all_reduce", "all_gather", "reduce_scatter"):
        return
    with comm.as_rank(Mesh(2, tp=2), 0), comm.record() as calls:
        for asynchronous in (False, True):

            def call(asynchronous=asynchronous, **options):
                if as_list:
                    options = {key: [value] if key == "out" else value for key, value in options.items()}
                given = [x] if as_list else x
                result = getattr(comm, verb)(given, "pp", **ON_ONE_RANK[verb], async_op=asynchronous, **options)
                assert isinstance(result, comm.Handle) == asynchronous
                result = result.wait() if asynchronous else result
                return result[0] if as_list else result

            assert call() is x is call(out=x)
            assert call(out=out.zero_()) is out and torch.equal(out, x)
            leaf = torch.zeros(2, 3, requires_grad=True)
            assert call(out=leaf) is leaf and torch.equal(leaf, x) and leaf.is_leaf
    assert not calls


def test_sizes_and_ranks_of_axes_make_no_group():
    class Without(ShapesBackend):
        def communicator(self, label, groups, global_rank, own=False):
            raise AssertionError(label)

    mesh = Mesh(16, tp=2, pp=2, cp=2)
    with comm.as_rank(mesh, 13, Without()):
        for axis in ("tp", "world", ("dp", "cp"), ()):
            assert (comm.size(axis), comm.rank(axis)) == (mesh.size(axis), mesh.coordinate(axis, 13))


def test_works_are_awaited_in_order_and_then_finished_once():
    events = []

    class Work:
        def __init__(self, name):
            self.name = name

        def wait(self):
            events.append(self.name)

    Works([Work("a"), Work("b")], lambda: events.append("end")).wait()
    Works([Work("c")]).wait()
    assert events == ["a", "b", "end", "c"] and DONE.wait() is None


def test_a_handle_that_a_mode_has_seen_is_finished_outside_of_it():
    with comm.as_rank(Mesh(2, tp=2), 0):
        handle = comm.all_gather(torch.ones(2, 2), "tp", dim=1, async_op=True)
        with Functions() as mode:
            result = handle.wait()
    assert mode.names == [] and result.shape == (2, 4)


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("verb, shapes", [
    ("all_reduce", [(2, 3), ()]), ("all_gather", [(2, 2, 3), (2,)]), ("reduce_scatter", [(3,)]),
])  # fmt: skip
def test_tensors_that_travel_together_are_views_of_one_buffer(verb, shapes):
    """[2, 3] and [] (not scattered), of which a copy travels: what is given is left alone."""
    xs = [torch.arange(6.0).view(2, 3), torch.tensor(9.0)][: len(shapes)]
    started = []

    class One(Communicator):
        def start_all_reduce(self, buffer, op):
            started.append((buffer.clone(), op))
            return DONE

        def start_all_gather(self, gathered, x):
            started.append((x.clone(), None))
            gathered.copy_(x.expand_as(gathered))
            return DONE

        def start_reduce_scatter(self, out, scattered, op):
            started.append((scattered.clone(), op))
            out.copy_(scattered[1])
            return DONE

    work, results = One("tp", (4, 5), 5).start_coalesced(verb, xs, "max", [None] * len(xs))
    ((sent, op),) = started
    assert work is DONE and op == (None if verb == "all_gather" else "max")
    assert [tuple(result.shape) for result in results] == shapes
    assert torch.equal(sent.reshape(-1), torch.cat([x.reshape(-1) for x in xs]))
    assert len({result.untyped_storage()._cdata for result in results}) == 1
    own = [torch.stack([x, x]) if verb == "all_gather" else x[1] if verb == "reduce_scatter" else x for x in xs]
    assert all(torch.equal(result, x) for result, x in zip(results, own))
    results[0].zero_()
    assert xs[0].sum() == 15
