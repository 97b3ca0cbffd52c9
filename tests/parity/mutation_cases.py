"""Small cases, one of which covers each call site: what runs, on which ranks, beside what one process gives.

A case is a function that raises if anything is wrong. Threads are ranks, but for what torch.distributed does itself.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM

import neuronx_dist as nxd
from neuronx_dist import comm, hf, spmd
from neuronx_dist.gradients.guards import share_found_inf
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import grads, mappings, parallel_state
from neuronx_dist.shard_tensor.device_mesh import DeviceMesh
from neuronx_dist.shard_tensor.moves.exchange import exchange
from neuronx_dist.shard_tensor.ring import RingPassingConfig, perform_ring_iteration
from neuronx_dist.shard_tensor.windows.index_maps import Sliding, plan_windows
from neuronx_dist.train.loop import largest_on_any_rank
from neuronx_dist.weights.shard_spec import ShardSpec, gather_full
from tests.parallel_layers.test_mappings import TABLE as REGIONS
from tests.parallel_layers.test_mappings import check as check_region
from tests.spmd.test_collectives import every_redistribution
from tests.spmd.test_conformance import check_conformance
from tests.spmd.test_operator_options import check_gathered_pieces, check_routed, routed
from tests.support.llama_training import (
    Case,
    Report,
    batch,
    build,
    config,
    differences,
    distance,
    initial_state,
    inputs,
    make_optimizer,
    reference,
    step_of,
    train,
    without_float32_inside,
    worst_difference,
)

__all__ = [
    "compared_values",
    "conformance",
    "cross_entropy",
    "embedding",
    "exchange_of_a_plan",
    "expert_regions",
    "full_logits",
    "layer",
    "megatron_all_to_all",
    "norms",
    "number_of_labels",
    "one_step",
    "python_objects",
    "redistribution",
    "region",
    "steps_in_rounds",
    "steps_of_a_pipeline",
    "tensor_of_one_rank",
    "tied_copies",
    "turn_of_a_ring",
    "unequal_values",
    "values_of_every_verb",
    "verbs_on_threads",
    "written_folder",
]

TOLERANCE = 1e-10


def _close(actual: Any, expected: Any, what: str) -> None:
    value = distance(actual, expected)
    assert value < TOLERANCE, f"{what} is {value:.1e} away"


# --- one step of a Llama ----------------------------------------------------------------------------------------------


def one_step(case: Case) -> None:
    """Loss, norm, gradients and weights of one step of SGD, without a pipeline and so without recording."""
    options = case.options

    def rank_main() -> Report:
        module = build(case).original_module
        hf.load_pretrained(module, initial_state(options.heads, options.tied, options.layers, options.dtype))
        params = list(module.parameters())
        optimizer = make_optimizer(case, "sgd", params)
        loss = module(**inputs(case, 0)).loss
        loss.backward()
        grads.reduce_gradients(module, average_over_data=case.optimizer != "zero1")
        loss = comm.all_reduce(loss.detach(), "dp") / case.dp
        norm = step_of(case, optimizer, params)
        table = hf.full_state_dict(module, gradients=True)
        return Report([float(loss)], [float(norm)], {0: table}, hf.full_state_dict(module))

    for report in comm.threads.run(case.mesh, rank_main, timeout=20.0):
        for what, value in differences(report, reference(options, "sgd", 1)).items():
            assert value < TOLERANCE, f"{what} is {value:.1e} away"


def steps_of_a_pipeline(case: Case) -> None:
    """Two steps: the second sees what the first did to the weights."""
    worst, what = worst_difference(case, comm.threads.run(case.mesh, partial(train, case, ("sgd",), 2), timeout=20.0))
    assert worst < TOLERANCE, f"{what} is {worst:.1e} away"


def steps_in_rounds(case: Case) -> None:
    """The same where ranks have no messages: stages in lockstep."""
    with mock.patch.object(comm.threads.ThreadsBackend, "has_messages", False):
        steps_of_a_pipeline(case)


def full_logits() -> None:
    """Without labels the logits are whole on every rank, and their gradients go back to this rank's."""
    case = Case(tp=2)
    state = initial_state("gqa", False, 2, torch.float64)
    ids, _ = batch("even", 0)
    plain = LlamaForCausalLM(config(case.options)).double()
    plain.load_state_dict(state)
    expected = without_float32_inside(plain, torch.float64)(input_ids=ids).logits
    expected.square().sum().backward()

    def rank_main() -> None:
        module = build(case).original_module
        hf.load_pretrained(module, state)
        logits = module(input_ids=ids).logits
        _close(logits.detach(), expected.detach(), "logits")
        logits.square().sum().backward()
        rows = module.lm_head.weight
        _close(rows.grad, plain.lm_head.weight.grad.chunk(2)[comm.rank("tp")], "gradient of the head")

    comm.threads.run(case.mesh, rank_main, timeout=20.0)


def written_folder() -> None:
    """The index of a folder that two stages wrote names every tensor."""
    state = initial_state("gqa", False, 3, torch.float64)
    with tempfile.TemporaryDirectory() as folder:

        def rank_main() -> None:
            model = build(Case(pp=2))
            hf.load_pretrained(model, state)
            hf.save_pretrained(model, folder)

        comm.threads.run(Mesh(2, pp=2), rank_main, timeout=20.0)
        index = json.loads((Path(folder) / "model.safetensors.index.json").read_text())["weight_map"]
        assert index.keys() == state.keys(), sorted(state.keys() - index.keys())
        for name, file in index.items():
            assert torch.equal(load_file(str(Path(folder) / file))[name], state[name]), name


def tied_copies() -> None:
    """Copies that differ are made equal to the first stage's."""
    state = initial_state("gqa", True, 3, torch.float64)

    def rank_main() -> torch.Tensor:
        model = build(Case(pp=2, tied=True))
        hf.load_pretrained(model, state)
        (copy_of_stage, _), *_ = model.tied_groups()
        with torch.no_grad():
            copy_of_stage.add_(comm.rank("pp"))
        model.sync_tied_weights()
        return copy_of_stage.detach()

    for value in comm.threads.run(Mesh(2, pp=2), rank_main, timeout=20.0):
        _close(value, state["model.embed_tokens.weight"], "the tied weight")


# --- functions and layers alone ---------------------------------------------------------------------------------------


def norms() -> None:
    """Norms 2 and inf of a gradient that is sharded over tp, and of one that is not."""
    whole = [torch.arange(1.0, 9.0, dtype=torch.float64), torch.tensor([3.0, -9.5], dtype=torch.float64)]

    def rank_main() -> None:
        module = nn.ParameterDict({"sharded": torch.zeros(4).double(), "replicated": torch.zeros(2).double()})
        spmd.set_spec(module, "sharded", spmd.ShardSpec("tp", 0, 1, 2, (8,)))
        module["sharded"].grad = whole[0].chunk(2)[comm.rank("tp")].clone()
        module["replicated"].grad = whole[1].clone()
        for kind in (2, math.inf):
            expected = torch.linalg.vector_norm(torch.cat(whole), kind)
            _close(grads.get_grad_norm(module.parameters(), kind), expected, f"norm {kind}")

    comm.threads.run(Mesh(2, tp=2), rank_main, timeout=20.0)


def flags_of_a_scaler() -> None:
    """One rank has an infinite gradient."""

    def rank_main() -> None:
        found = torch.tensor(float(comm.rank("tp") == 1))
        share_found_inf(torch.optim.SGD([torch.zeros(1)]), found)
        _close(found, torch.tensor(1.0), "infinite gradient")

    comm.threads.run(Mesh(2, tp=2), rank_main, timeout=20.0)


def cross_entropy(transform: bool = False) -> None:
    """Logits beyond what exp can take, the largest of them on one rank: the maximum has to be the whole row's.

    `transform`: the gradient is asked of `torch.func`, not of `backward`.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 8, generator=generator, dtype=torch.float64) * 2000
    logits[3:] -= 5000.0
    logits[0, :4] += 3000.0
    labels = torch.tensor([0, 5, 2, 7, -100, 1])
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, labels, reduction="none")
    expected.sum().backward()

    def rank_main() -> None:
        mine = logits.chunk(2, -1)[comm.rank("tp")].clone().requires_grad_()
        if transform:
            vjp = torch.func.vjp(lambda x: nxd.parallel_cross_entropy(x, labels), mine.detach())
            losses, gradient = vjp[0], vjp[1](torch.ones_like(vjp[0]))[0]
        else:
            losses = nxd.parallel_cross_entropy(mine, labels)
            losses.sum().backward()
            gradient = mine.grad
        _close(losses.detach(), expected.detach(), "loss")
        _close(gradient, whole.grad.chunk(2, -1)[comm.rank("tp")], "gradient")

    comm.threads.run(Mesh(2, tp=2), rank_main, timeout=20.0)


def layer(
    make: Callable[[], nn.Module],
    split: Callable[[torch.Tensor], torch.Tensor],
    join: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """A linear layer of 8 to 8 features beside torch's: output, input gradient, and parameter gradients.

    `split` takes this rank's input of the whole one, `join` makes the whole output of this rank's.
    """
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    weight, bias, x, g = draw(8, 8), draw(8), draw(4, 2, 8), draw(4, 2, 8)
    plain = nn.Linear(8, 8, dtype=torch.float64)
    plain.load_state_dict({"weight": weight, "bias": bias})
    whole = x.clone().requires_grad_()
    expected = plain(whole)
    expected.backward(g)

    def rank_main() -> None:
        mine = hf.load_pretrained(make(), {"weight": weight, "bias": bias})
        given = x.clone().requires_grad_()
        out = join(mine(split(given)))
        _close(out.detach(), expected.detach(), "output")
        out.backward(g)
        _close(given.grad, whole.grad, "gradient of the input")
        grads.reduce_gradients(mine)
        found = hf.full_state_dict(mine, gradients=True)
        for name, param in plain.named_parameters():
            _close(found[name], param.grad, f"gradient of the {name}")

    comm.threads.run(Mesh(2, tp=2), rank_main, timeout=20.0)


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x


def _sum_of_partials(x: torch.Tensor) -> torch.Tensor:
    return spmd.all_reduce(x, "tp", src=spmd.P, dst=spmd.I)


def _joined_features(x: torch.Tensor) -> torch.Tensor:
    return spmd.all_gather(x, "tp", src=spmd.S(-1), dst=spmd.I)


def _joined_sequence(x: torch.Tensor) -> torch.Tensor:
    return spmd.all_gather(x, "tp", src=spmd.S(0), dst=spmd.I)


def _own_features(x: torch.Tensor) -> torch.Tensor:
    return spmd.convert(x, "tp", src=spmd.I, dst=spmd.S(-1))


def _own_sequence(x: torch.Tensor) -> torch.Tensor:
    return spmd.convert(x, "tp", src=spmd.I, dst=spmd.S(0))


def _column(**options: Any) -> nn.Module:
    with torch.device("meta"):
        return nxd.ColumnParallelLinear(8, 8, dtype=torch.float64, **options)


def _row(**options: Any) -> nn.Module:
    with torch.device("meta"):
        return nxd.RowParallelLinear(8, 8, dtype=torch.float64, **options)


def embedding(**options: Any) -> None:
    """An embedding beside torch's. Its output is `[batch, seq, hidden]`, or this rank's part of the sequence."""
    generator = torch.Generator().manual_seed(0)
    weight, g = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((8, 4), (3, 4, 4)))
    ids = torch.randint(0, 8, (3, 4), generator=generator)
    plain = nn.Embedding(8, 4, dtype=torch.float64)
    plain.load_state_dict({"weight": weight})
    expected = plain(ids)
    expected.backward(g)

    def rank_main() -> None:
        with torch.device("meta"):
            mine: nn.Module = nxd.ParallelEmbedding(8, 4, dtype=torch.float64, sequence_dimension=1, **options)
        hf.load_pretrained(mine, {"weight": weight})
        out = mine(ids)
        if options.get("sequence_parallel_enabled"):
            out = spmd.all_gather(out, "tp", src=spmd.S(1), dst=spmd.I)
        _close(out.detach(), expected.detach(), "output")
        out.backward(g)
        _close(hf.full_state_dict(mine, gradients=True)["weight"], plain.weight.grad, "gradient of the weight")

    comm.threads.run(Mesh(2, tp=2), rank_main, timeout=20.0)


def region(name: str) -> None:
    for row in REGIONS:
        if row[0] == name:
            comm.threads.run(Mesh(2, tp=2), check_region, *row, timeout=20.0)


def megatron_all_to_all() -> None:
    def rank_main() -> None:
        rank = comm.rank("tp")
        x = torch.tensor([1.0, 2.0]).mul(10**rank).requires_grad_()
        y = mappings.all_to_all("tp", x)
        assert y.tolist() == [[1.0, 10.0], [2.0, 20.0]][rank]
        y.backward(torch.tensor([3.0, 5.0]) * 7**rank)
        assert x.grad is not None and x.grad.tolist() == [[3.0, 21.0], [5.0, 35.0]][rank]

    comm.threads.run(Mesh(2, tp=2), rank_main, timeout=20.0)


def expert_regions(scatter_gather: bool) -> None:
    """Tokens of every ep rank come to the expert's rank, are multiplied there by its number, and come back."""

    def rank_main() -> None:
        ep = comm.rank("ep")
        tokens = (
            torch.arange(1.0, 49.0).view(4, 4, 3) * 100**ep
        )  # [experts, capacity, hidden]; the same on all tp ranks
        x = tokens.clone().requires_grad_()
        inside = mappings.enter_expert_parallel_region(x, scatter_gather)  # [experts/ep, ep, capacity, hidden]
        for source in range(2):
            here = torch.arange(1.0, 49.0).view(4, 4, 3)[2 * ep : 2 * ep + 2] * 100**source
            assert torch.equal(inside[:, source].detach(), here)
        numbers = torch.arange(1.0, 5.0).view(4, 1, 1)
        out = mappings.exit_expert_parallel_region(inside * numbers[2 * ep : 2 * ep + 2].unsqueeze(-1), scatter_gather)
        assert torch.equal(out.detach(), tokens * numbers)
        g = torch.arange(48.0).view(4, 4, 3)
        out.backward(g)
        assert x.grad is not None and torch.equal(x.grad, g * numbers)

    comm.threads.run(Mesh(4, tp=2, ep=2), rank_main, timeout=20.0)


def hybrid_step() -> None:
    """A step of ZeRO-1 over pairs: the mean is over all four ranks, and the norm is that of the mean."""

    def rank_main() -> None:
        param = nn.Parameter(torch.zeros(4))
        options = dict(lr=1.0, max_norm=math.inf, sharding_groups=[[0, 1], [2, 3]])
        optimizer = nxd.NeuronZero1Optimizer([param], torch.optim.SGD, **options)
        param.grad = torch.full((4,), 10.0 ** comm.rank("dp"))
        optimizer.step()
        _close(param.detach(), torch.full((4,), -1111 / 4), "parameter")
        _close(optimizer.grad_norm, torch.tensor(1111 / 2), "norm")

    comm.threads.run(Mesh(4), rank_main, timeout=20.0)


def tensor_of_one_rank() -> None:
    """A tensor whose positions one rank has, as an embedding table that is whole on it."""
    whole = torch.arange(12.0).view(4, 3) + 1
    layout = ShardSpec("tp", 0, 1, 2, (4, 3), holder=1)

    def rank_main() -> None:
        local = layout.local_slice(whole, comm.rank("tp"))
        assert local.shape == layout.local_shape
        torch.testing.assert_close(gather_full(local, layout), whole)

    comm.threads.run(Mesh(2, tp=2), rank_main, timeout=20.0)


def several_tensors() -> None:
    """Two tensors of unequal shapes in one sum, one gather and one scatter, against sums and joins of all ranks."""
    whole = [torch.arange(1.0, 9.0).view(2, 2, 2), torch.arange(1.0, 13.0).view(2, 2, 3) ** 2]

    def rank_main() -> None:
        xs = [x[int(comm.rank("tp"))] for x in whole]
        sums = spmd.together(spmd.all_reduce, xs, "tp", src=spmd.P, dst=spmd.R)
        joined = spmd.together(spmd.all_gather, xs, "tp", src=spmd.S(0), dst=spmd.R)
        rows = spmd.together(spmd.reduce_scatter, xs, "tp", src=spmd.P, dst=spmd.S(0))
        for x, total, join, row in zip(whole, sums, joined, rows, strict=True):
            torch.testing.assert_close(total, x[0] + x[1])
            torch.testing.assert_close(join, torch.cat([x[0], x[1]]))
            torch.testing.assert_close(row[0], (x[0] + x[1])[int(comm.rank("tp"))])

    comm.threads.run(Mesh(2, tp=2), rank_main, timeout=20.0)


def number_of_labels() -> None:
    def rank_main() -> None:
        labels = torch.tensor([[0, 1, 2, 3, 4]] if comm.rank("dp") == 0 else [[0, 1, -100, -100, -100]])
        assert float(grads.global_num_items(labels, 2)) == 5 / (2 * 2)

    comm.threads.run(Mesh(2), rank_main, timeout=20.0)


def signal_of_one_rank() -> None:
    def rank_main() -> None:
        assert largest_on_any_rank(15 * int(comm.rank("world") == 1), torch.device("cpu")) == 15

    comm.threads.run(Mesh(3), rank_main, timeout=20.0)


def python_objects() -> None:
    def rank_main() -> None:
        assert parallel_state.gather_python_object({"rank": comm.rank("dp")}, "dp") == [{"rank": 0}, {"rank": 1}]

    comm.threads.run(Mesh(2), rank_main, timeout=20.0)


def unequal_values() -> None:
    """`spmd.verify` finds what one rank holds otherwise than the other."""

    def rank_main() -> bool:
        try:
            spmd.verify(None, {"x": torch.full((2,), float(comm.rank("tp")))}, axes=["tp"])
        except spmd.SpmdTypeError:
            return True
        return False

    assert comm.threads.run(Mesh(2, tp=2), rank_main, timeout=20.0) == [True, True]


def compared_values() -> None:
    """`spmd.check` with values finds the loss of one process."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).square().mean()

    report = spmd.check(Model, torch.arange(8.0).view(2, 4), {"dp": 2}, numeric=True)
    assert report.ok, str(report)


def values_of_every_verb() -> list[str]:
    """Returns the errors on this rank of two. Runs to the end whatever goes wrong, so that the ranks stay together."""
    rank = comm.rank("world")
    wrong = []

    def check(what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        if not torch.equal(actual, expected):
            wrong.append(what)

    for count in (4, 1 << 18):  # gloo's all_gather goes two ways, by size
        xs = [torch.arange(float(count)) % 7 + 1 + 10 * r for r in range(2)]
        x, half = xs[rank], count // 2
        rows = slice(rank * half, rank * half + half)
        check("all_reduce", comm.all_reduce(x, "world"), xs[0] + xs[1])
        check("all_reduce max", comm.all_reduce(x, "world", op="max"), xs[1])
        check("all_gather", comm.all_gather(x, "world"), torch.cat(xs))
        check("reduce_scatter", comm.reduce_scatter(x, "world"), (xs[0] + xs[1])[rows])
        check("all_to_all", comm.all_to_all(x, "world"), torch.cat([y[rows] for y in xs]))
        check("permute", comm.permute(x, "world", [(0, 1), (1, 0)]), xs[1 - rank])
        check("broadcast", comm.broadcast(x, "world", src=1), xs[1])
        for what, found, total in (
            ("all_reduce of a list", comm.all_reduce([x, x[:2]], "world"), xs[0] + xs[1]),
            ("all_gather of a list", comm.all_gather([x, x[:2]], "world"), torch.stack(xs)),
            ("reduce_scatter of a list", comm.reduce_scatter([x, x[:2]], "world"), xs[0] + xs[1]),
        ):
            first, second = total, total[..., :2]
            if what.startswith("reduce_scatter"):
                first, second = first[rows], second[rank : rank + 1]
            check(what, torch.cat(found), torch.cat([first.reshape(-1), second.reshape(-1)]))
        receiving = comm.recv(torch.full_like(x, 99.0), "world", src=1 - rank, async_op=True)
        comm.send(x, "world", dst=1 - rank)
        check("send", receiving.wait(), xs[1 - rank])
        sends, recvs = [x[:0], x[: half + rank]], [x[:0], torch.zeros(count - half + 1 - rank)]
        if rank:
            sends, recvs = sends[::-1], recvs[::-1]
        check("exchange", comm.exchange(sends, recvs, "world")[1 - rank], xs[1 - rank][: half + 1 - rank])
    if comm.gather_objects(rank) != [0, 1]:
        wrong.append("gather_objects")
    return wrong


def verbs_on_threads() -> None:
    wrong = comm.threads.run(Mesh(2), values_of_every_verb, timeout=20.0)
    assert wrong == [[], []], wrong


def exchange_of_a_plan() -> None:
    """A halo, and its gradient."""
    plan = plan_windows(Sliding(5, 3, 1, 1, 1), (0, 2, 5)).plan

    def rank_main() -> None:
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0, 5.0]][comm.rank("tp")], requires_grad=True)
        window = exchange(x, plan, "tp", 0)
        _close(window.detach(), torch.tensor([[0.0, 1, 2, 3], [2.0, 3, 4, 5, 0]][comm.rank("tp")]), "the window")
        (grad,) = torch.autograd.grad((window * torch.arange(1.0, 1 + len(window))).sum(), x)
        _close(grad, torch.tensor([[2.0, 4], [6.0, 3, 4]][comm.rank("tp")]), "its gradient")

    comm.threads.run(Mesh(2, tp=2), rank_main, timeout=20.0)


def turn_of_a_ring() -> None:
    def rank_main() -> None:
        mesh = DeviceMesh("cpu", [0, 1])
        x = torch.full((2,), 1.0 + mesh.get_local_rank(), requires_grad=True)
        passed = perform_ring_iteration(x, mesh, RingPassingConfig())
        _close(passed.detach(), torch.full((2,), 2.0 - mesh.get_local_rank()), "what the other rank has passed on")
        (grad,) = torch.autograd.grad((passed * (3.0 + mesh.get_local_rank())).sum(), x)
        _close(grad, torch.full((2,), 4.0 - mesh.get_local_rank()), "its gradient")

    comm.threads.run(Mesh(2), rank_main, timeout=20.0)


def conformance() -> None:
    comm.threads.run(Mesh(2, tp=2), check_conformance, timeout=20.0)


def unequal_pieces() -> None:
    check_gathered_pieces(0, spmd.R)  # its backward is the scattered sum


def routed_rows() -> None:
    check_routed(comm.threads.run(Mesh(3, tp=3), routed, timeout=20.0))


def redistribution() -> None:
    comm.threads.run(Mesh(2, tp=2), every_redistribution, timeout=20.0)
