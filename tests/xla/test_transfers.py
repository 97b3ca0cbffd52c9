"""Transfers between ranks in both of their forms, and where collectives between stages cut the program."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.comm.backends import xla
from neuronx_dist.comm.backends.xla_transfer import how_to_transfer, rows_of
from neuronx_dist.mesh import Mesh
from neuronx_dist.xla_replay import replay
from tests.xla.programs import transfers as programs

TP4, TP3, TP2 = Mesh(4, tp=4), Mesh(3, tp=3), Mesh(4, tp=2)
CHAIN, BACK = [(0, 1), (1, 2), (2, 3)], [(1, 0), (2, 1), (3, 2)]
PAIRS = [
    (TP4, CHAIN),
    (TP4, BACK),
    (TP4, [(1, 2)]),
    (TP4, [(3, 0), (0, 3)]),
    (TP4, [(0, 1), (1, 0), (2, 3)]),
    (TP4, [(0, 2), (1, 1)]),
    (TP4, []),
    (TP3, [(0, 1), (1, 2)]),
    (TP3, [(2, 0)]),
    (TP2, [(0, 1)]),
    (TP2, [(1, 0), (0, 1)]),
]


@pytest.mark.parametrize("mode", ["permute", "all_gather"])
@pytest.mark.parametrize("mesh,pairs", PAIRS, ids=str)
def test_a_rank_gets_what_its_source_has(mesh: Mesh, pairs: Any, mode: str) -> None:
    """Also scalars, integers, booleans and half precision; a rank that is no destination gets zeros."""

    def held(rank: int) -> list[torch.Tensor]:
        x = torch.arange(6.0).view(2, 3) + 10 * (rank + 1)
        sources = [src for src, _ in pairs]
        if mesh.coordinate("tp", rank) not in sources:
            x = torch.full_like(x, torch.nan)  # what a rank holds that sends nothing
        return [x, torch.tensor(rank + 1), x > 12, x.bfloat16(), torch.tensor(rank + 0.5)]

    ranks = range(mesh.world_size)
    found = replay(programs.transferred, mesh, [(mode, pairs, *held(rank)) for rank in ranks])
    for rank in ranks:
        (group,) = [group for group in mesh.groups("tp") if rank in group]
        source = next((group[src] for src, dst in pairs if group[dst] == rank), None)
        for actual, like, sent in zip(found.outputs[rank], held(rank), held(source if source is not None else 0)):
            expected = torch.zeros_like(like) if source is None else sent
            assert actual.dtype == expected.dtype and torch.equal(actual, expected), (rank, actual, expected)
    kinds = {collective.kind for collective in found.program.collectives}
    assert kinds == ({"collective-permute"} if mode == "permute" else {"all-gather"})


def test_neighbours_exchange_in_groups_of_two() -> None:
    x = torch.ones(3)
    found = replay(programs.transferred, TP4, [("all_gather", CHAIN, x)] * 4)
    assert [collective.groups for collective in found.program.collectives] == [((0, 1), (2, 3)), ((1, 2), (3, 0))]
    assert {collective.axis for collective in found.program.collectives} == {"tp"}
    assert rows_of([(0, 1), (2, 3)], 4) == [[[0, 1], [2, 3]]]
    assert rows_of([(5, 0)], 6) == [[[1, 2], [3, 4], [5, 0]]]
    assert rows_of([(0, 2)], 4) == [[[0, 1, 2, 3]]] and rows_of([(0, 1)], 3) == [[[0, 1, 2]]]


def test_how_is_said_by_the_environment_or_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_xla.runtime as xr

    for device, expected in (("CPU", "permute"), ("TPU", "permute"), ("NEURON", "all_gather")):
        monkeypatch.setattr(xr, "device_type", lambda device=device: device)
        assert how_to_transfer() == expected
    monkeypatch.setenv("NEURONX_DIST_XLA_TRANSFER", "permute")
    assert how_to_transfer() == "permute"
    monkeypatch.setenv("NEURONX_DIST_XLA_TRANSFER", "p2p")
    with pytest.raises(ValueError, match="NEURONX_DIST_XLA_TRANSFER='p2p': use permute or all_gather"):
        how_to_transfer()


# --- programs of their own --------------------------------------------------------------------------------------------

MESH = Mesh(8, pp=2, tp=2)


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Returns the calls on the device and the places of cuts, as `torch_xla.sync` gets them; nothing is executed."""
    import torch_xla

    calls: list[str] = []
    monkeypatch.setattr(torch_xla, "sync", lambda: calls.append("cut"))
    with comm.as_rank(MESH, 5, xla.XlaBackend(MESH)):
        yield calls


def on_device(*shape: int) -> torch.Tensor:
    return torch.ones(shape).to("xla:0")


def test_which_axes_cross_stages(cuts: list[str]) -> None:
    crossing = {axis: comm.communicator(axis).crosses_stages for axis in ("tp", "dp", "pp", "world", ("pp", "tp"))}
    assert crossing == {"tp": False, "dp": False, "pp": True, "world": True, ("pp", "tp"): True}
    assert comm.new_group([[1, 5], [0, 4]], "tied").crosses_stages
    assert not comm.new_group([[4, 5, 6, 7], [0, 1, 2, 3]], "stage").crosses_stages
    one_stage = xla.XlaBackend(Mesh(4, tp=2)).communicator("world", [[0, 1, 2, 3]], 0)
    assert isinstance(one_stage, xla.XlaCommunicator) and not one_stage.crosses_stages


@pytest.mark.parametrize(
    "verb,options",
    [
        ("all_reduce", {}),
        ("all_gather", {}),
        ("reduce_scatter", {}),
        ("all_to_all", {}),
        ("broadcast", {}),
        ("permute", {"pairs": [(0, 1)]}),
    ],
)
def test_between_stages_every_verb_is_cut_off_before_and_after(
    cuts: list[str], verb: str, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = xla.XlaCommunicator._note
    monkeypatch.setattr(xla.XlaCommunicator, "_note", lambda *given: (cuts.append(given[1]), note(*given)))
    for mode in ("permute", "all_gather"):
        monkeypatch.setenv("NEURONX_DIST_XLA_TRANSFER", mode)
        getattr(comm, verb)(on_device(4, 2), "pp", **options)
        assert cuts == ["cut", verb, "cut"]
        cuts.clear()
        getattr(comm, verb)(on_device(4, 2), "tp", **options)
        assert cuts == [verb]
        cuts.clear()


def test_several_tensors_at_once_are_cut_off_too(cuts: list[str]) -> None:
    for verb in (comm.all_reduce, comm.all_gather, comm.reduce_scatter):
        verb([on_device(2), on_device(4, 2)], "pp")
        assert cuts == ["cut", "cut"]
        cuts.clear()
        verb([on_device(2), on_device(4, 2)], "tp")
        assert cuts == []


def test_inside_a_program_of_its_own_nothing_is_cut(cuts: list[str]) -> None:
    backend = comm.current().backend
    assert not backend.has_messages
    with backend.own_program():
        assert cuts == ["cut"]
        with backend.own_program():
            comm.permute(on_device(2), "pp", [(0, 1)])
            comm.all_reduce(on_device(2), "pp")
        assert cuts == ["cut"]
    assert cuts == ["cut", "cut"]
    with pytest.raises(KeyError), backend.own_program():
        raise KeyError
    cuts.clear()
    comm.all_reduce(on_device(2), "pp")
    assert cuts == ["cut", "cut"]  # an error inside left nothing behind


def test_each_thread_has_programs_of_its_own(cuts: list[str]) -> None:
    import threading

    def another() -> None:
        with xla.own_program():
            pass

    with xla.own_program():
        thread = threading.Thread(target=another)
        thread.start()
        thread.join()
        assert cuts == ["cut"] * 3
    assert cuts == ["cut"] * 4


# --- what such a program is -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["permute", "all_gather"])
def test_what_is_sent_is_data_whatever_it_was_made_of(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Stages send what they computed, a dummy, a constant: once they have been cut off, it is one program."""
    monkeypatch.setenv("NEURONX_DIST_XLA_TRANSFER", mode)
    import torch_xla

    device = torch.device("xla:0")
    texts = set()
    for rank in (0, 4):
        for x in (
            (torch.arange(3.0).to(device) * 2).exp(),
            torch.zeros(3, device=device),
            torch.ones((), device=device).expand(3),
            xla.upload(torch.zeros(3), device),
            torch.arange(6.0).to(device)[3:],
        ):
            with comm.as_rank(MESH, rank, xla.XlaBackend(MESH)):
                programs_to_run = [torch_xla.sync]  # what comes before; the transfer one rank alone cannot run
                with monkeypatch.context() as patch:
                    patch.setattr(torch_xla, "sync", lambda left=programs_to_run: left.pop()() if left else None)
                    result = comm.permute(x, "pp", [(0, 1)])
                text = torch_xla._XLAC._get_xla_tensors_hlo([result]).partition("ENTRY")[2]
                texts.add(re.sub(r"IrToHlo\.\d+", "", text))
                del result  # nothing waits for it, and it is not run
    assert len(texts) == 1, texts
    assert text.count("f32[3]{0} parameter(") == 1
