"""`spmd.verify` on ranks that hold what they should, and on ranks that do not; on threads and on processes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from neuronx_dist import Mesh, comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_dist.pipeline import NxDPPModel
from neuronx_dist.spmd import SpmdTypeError, verification, verify
from neuronx_dist.spmd.verification import Verified
from tests.support.pool import processes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = ColumnParallelLinear(8, 16, gather_output=False, bias=True)
        self.down = RowParallelLinear(16, 8, input_is_parallel=True, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def build(cls: type[nn.Module] = Model) -> nn.Module:
    torch.manual_seed(0)
    model = cls()
    torch.manual_seed(0)
    return model


def batch() -> dict[str, object]:
    """Every data-parallel rank its own."""
    generator = torch.Generator().manual_seed(comm.rank("dp"))
    return {"ids": torch.randint(0, 99, (2, 4), generator=generator), "mask": torch.ones(2, 4), "scale": 2.0}


def of_every_rank(mesh: Mesh, change: Callable[[nn.Module, dict], None] | None = None, **options):
    """Result or error of `verify` on each rank, and the warnings."""

    def program():
        model, inputs = build(), batch()
        with torch.no_grad():
            if change is not None:
                change(model, inputs)
        try:
            return str(verify(model, inputs, **options))
        except SpmdTypeError as error:
            return error

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return threads.run(mesh, program)


@pytest.mark.parametrize("mesh", [Mesh(1), Mesh(2, tp=2), Mesh(4, tp=2), Mesh(4, tp=2, cp=2), Mesh(4, tp=2, ep=2)])
def test_what_is_right_passes(mesh):
    for text in of_every_rank(mesh):
        assert isinstance(text, str), text
        assert text.startswith("verified: ") and "hint" not in text
        if mesh.tp > 1:  # 2 x (norm weight and bias; no bias of a sharded column), inputs
            assert "7 over tp" in text
        if mesh.dp > 1:
            assert "10 over dp" in text


def on_one(rank: int, change: Callable[[nn.Module, dict], None]):
    return lambda model, inputs: change(model, inputs) if comm.rank("world") == rank else None


@pytest.mark.parametrize("name, change, axis", [
    ("layers.1.norm.bias", lambda m, i: m.layers[1].norm.bias[5].add_(1e-7), "tp"),
    ("layers.0.norm.weight", lambda m, i: m.layers[0].norm.weight.copy_(m.layers[0].norm.weight * 2), "dp"),
    ("layers.0.up.weight", lambda m, i: m.layers[0].up.weight[:2].copy_(m.layers[0].up.weight[:2].flip(0)), "dp"),
    ("layers.1.down.weight", lambda m, i: setattr(m.layers[1].down, "weight", nn.Parameter(torch.ones(8, 8))), "dp"),
    ("input['ids']", lambda m, i: i["ids"][0].add_(1), "tp"),
    ("input['ids']", lambda m, i: i.update(ids=i["ids"].float()), "tp"),
    ("input['mask']", lambda m, i: i.update(mask=torch.ones(2, 5)), "tp"),
    ("input['scale']", lambda m, i: i.update(scale=3.0), "tp"),
    ("input['more']", lambda m, i: i.update(more=torch.ones(2)), "tp"),
])  # fmt: skip
def test_a_value_that_differs_is_named_on_every_rank(name, change, axis):
    errors = of_every_rank(Mesh(4, tp=2), on_one(2, change), axes=[axis])
    assert len({str(error) for error in errors}) == 1 and isinstance(errors[0], SpmdTypeError), errors
    other = 3 if axis == "tp" else 0
    assert f"equal over {axis}" in str(errors[0]) and errors[0].axis == axis and errors[0].repairs
    lines = [line for line in errors[0].where_from if line.startswith(f"{name} over {axis}: ")]
    assert len(lines) == 1 and f"ranks [{other}]: " in lines[0] and "ranks [2]: " in lines[0], errors[0]


def test_the_message_shows_what_the_ranks_hold():
    errors = of_every_rank(Mesh(4, tp=2), on_one(1, lambda m, i: m.layers[0].norm.weight[0].fill_(3)))
    one, three = "float32 [8] (1, 1, 1, ...; sum 8, largest 1)", "float32 [8] (3, 1, 1, ...; sum 10, largest 3)"
    assert errors[0].where_from == [
        f"layers.0.norm.weight over tp: ranks [0]: {one}; ranks [1]: {three}",
        f"layers.0.norm.weight over dp: ranks [1]: {three}; ranks [3]: {one}",
    ]
    many = of_every_rank(Mesh(2, tp=1), on_one(1, lambda m, i: [p.add_(1) for p in m.parameters()]))
    assert len(many[0].where_from) == 10


def test_a_loss_of_one_bit_or_an_exchange_of_rows_is_noticed():
    """Sums that count places and are exact: NaNs, signed zeros and low bits of every dtype included."""
    from neuronx_dist.spmd.verification import _digests

    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int64,
        torch.bool,
        torch.complex64,
    ):
        x = torch.randint(0, 7, (60, 100), generator=torch.Generator().manual_seed(1)).to(dtype)
        changed = [x.clone().contiguous() for _ in range(3)]
        changed[0][[3, 4]] = changed[0][[4, 3]]
        changed[1].view(-1).view(torch.uint8)[-1] ^= 1
        changed[2] = x.t().contiguous().view(60, 100)
        digests = _digests([x, x.t().contiguous().t(), *changed])
        assert digests[0] == digests[1] and len(set(digests)) == 4, dtype
    big = torch.zeros((1 << 20) + 3, dtype=torch.bool)
    one, other = big.clone(), big.clone()
    one[-1] = other[0] = True
    assert len(set(_digests([big, one, other]))) == 3
    assert [d.constant for d in _digests([big, one, torch.ones(0), torch.ones(())])] == [True, False, True, True]


# --- what is only worth a word


def same_shard(model: nn.Module, inputs: dict) -> None:
    model.layers[0].up.weight.copy_(torch.arange(64.0).view(8, 8))
    model.layers[0].up.bias.zero_()  # alike and constant: as it should be


def test_one_shard_on_all_ranks_is_a_hint():
    for text in of_every_rank(Mesh(4, tp=2), same_shard):
        hints = [line for line in text.splitlines() if line.startswith("hint")]
        assert len(hints) == 2, text  # one for each tp group
        assert hints[0].startswith(
            "hint: layers.0.up.weight is the same on ranks [0, 1] of tp: perhaps all ranks loaded"
        )


def test_a_loader_that_does_not_know_its_rank_is_a_hint():
    def same_batch(model, inputs):
        inputs["ids"] = torch.arange(8).view(2, 4)

    for text in of_every_rank(Mesh(2), same_batch):
        assert "the whole batch is the same on ranks [0, 1] of dp: perhaps the loader" in text
    for text in of_every_rank(Mesh(2), lambda m, i: i.update(positions=torch.arange(4))):
        assert "hint" not in text


def test_hints_are_warnings():
    def program():
        comm.barrier()
        x = torch.arange(4.0)
        verify(None, {"x": x})

    with pytest.warns(UserWarning, match="verify: the whole batch is the same on ranks"):
        threads.run(Mesh(2), program)


# --- pipelines


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def pipeline(how: str) -> object:
    module = build(Tied)
    model = NxDPPModel(
        module, transformer_layer_cls=Block, num_microbatches=2, auto_partition=True, output_loss_value_spec=True
    )
    x = torch.ones(4, 8)
    model.run_train(x=x)
    with torch.no_grad():
        if how in ("tied", "later") and comm.rank("pp") == 1:
            dict(model.local_named_parameters())["head.weight"].add_(1)
        if how == "later":
            model.tied_weights_synced = False  # loaded since, and no step run
        if how == "norm" and comm.rank("world") == 3:
            next(p for n, p in model.local_named_parameters() if n.endswith("norm.weight")).add_(1)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always", UserWarning)
        try:
            return str(verify(model, {"x": x}))
        except SpmdTypeError as error:
            return error.where_from


def test_pipelines_and_tied_weights():
    for text in threads.run(Mesh(2, pp=2), pipeline, "right"):
        assert "1 over pp" in text and "hint" not in text
    for lines in threads.run(Mesh(2, pp=2), pipeline, "tied"):
        (line,) = lines
        assert line.startswith("a tied weight over pp: ranks [0]: embed.weight float32 [8, 8] (")
        assert "; ranks [1]: head.weight float32 [8, 8] (" in line
    for text in threads.run(Mesh(2, pp=2), pipeline, "later"):
        assert "hint: a tied weight over pp: ranks [0]: embed" in text and "equal in its first step" in text
    for lines in threads.run(Mesh(4, pp=2, tp=2), pipeline, "norm"):
        (line,) = lines
        assert line.startswith("layers.1.norm.weight over tp: ranks [2]: ")


# --- other backends, other tensors


def on_processes(wrong: bool) -> object:
    model, inputs = build(), batch()
    if wrong and comm.rank("world") == 1:
        with torch.no_grad():
            model.layers[0].norm.weight[7] = 2
    try:
        return str(verify(model, inputs))
    except SpmdTypeError as error:
        return str(error)


def test_on_processes():
    right = processes(2).run(on_processes, False, mesh=dict(tp=2))
    assert all(text == "verified: 7 over tp" for text in right), right
    wrong = processes(2).run(on_processes, True, mesh=dict(tp=2))
    assert len(set(wrong)) == 1 and "layers.0.norm.weight over tp" in wrong[0]


def test_seeds_that_differ_over_tp_are_a_hint():
    texts = processes(2).run(seeded_by_rank, mesh=dict(tp=2))
    assert all("hint: the default random stream (cpu) over tp: ranks [0]: " in text for text in texts), texts


def seeded_by_rank() -> str:
    torch.manual_seed(comm.rank("tp"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return str(verify(nn.Linear(2, 2).to("meta")))


def test_without_values_and_without_a_group():
    with comm.as_rank(Mesh(4, tp=2), 1):
        with torch.device("meta"):
            model = Model()
        found = verify(copy.deepcopy(model), {"x": torch.ones(2), "none": None}, axes=["tp"])
        assert found.compared == {"tp": 1} and len(found.skipped) == 10
        assert "not compared: 10 without values (layers.0.norm.weight" in str(found)
        with pytest.raises(ValueError, match="'tq' is not one of the axes tp, dp, cp, edp, pp"):
            verify(model, axes=["tq"])


def test_experts_are_compared_over_edp_alone():
    def program(wrong: bool):
        module = nn.Linear(2, 2)
        with torch.no_grad():
            module.weight.fill_(comm.rank("ep"))  # other experts on other ep ranks
            module.weight[0, 0] += 5 * comm.rank("edp") * wrong
            module.bias.fill_(1)
        module.weight.expert_model_parallel = True
        try:
            return str(verify(module))
        except SpmdTypeError as error:
            return error.where_from

    for text in threads.run(Mesh(4, ep=2), program, False):
        assert text == "verified: 1 over dp, 1 over edp"
    for lines in threads.run(Mesh(4, ep=2), program, True):
        assert len(lines) == 2 and all(line.startswith("weight over edp: ") for line in lines)


def test_weights_that_differ_over_cp_alone_are_named():
    errors = of_every_rank(Mesh(2, cp=2), on_one(1, lambda m, i: m.layers[0].norm.weight[0].fill_(3)), axes=["cp"])
    for error in errors:
        assert isinstance(error, SpmdTypeError) and error.axis == "cp", error
        assert error.where_from[0].startswith("layers.0.norm.weight over cp: ranks [0]: ")


def test_elements_exchanged_between_two_chunks_are_noticed(monkeypatch):
    """An element counts by its place in the tensor, not in the chunk that it is read with."""
    from neuronx_dist.spmd import verification

    monkeypatch.setattr(verification, "_CHUNK", 4)
    x = torch.arange(8)
    exchanged = x.clone()
    exchanged[1], exchanged[5] = x[5], x[1]
    one, other = verification._digests([x, exchanged])
    assert one != other


# --- in words


WORDS = [
    (torch.ones(2, 2), "float32 [2, 2] (1, 1, 1, ...; sum 4, largest 1)"),
    (torch.tensor([-3, 2]), "int64 [2] (-3, 2; sum -1, largest 3)"),
    (
        torch.tensor([0.5, -0.25, 1e9], dtype=torch.bfloat16),
        "bfloat16 [3] (0.5, -0.25, 9.98244e+08; sum 998244352, largest 998244352)",
    ),
    (torch.tensor(True), "bool [] (True; sum 1, largest 1)"),
    (torch.ones(0, 3), "float32 [0, 3] ()"),
    (torch.tensor([1 + 2j, 0j, 0j, 0j]), "complex64 [4] ((1+2j), 0j, 0j, ...)"),
    ({"a": 1}, "{'a': 1}"),
]  # fmt: skip


@pytest.mark.parametrize("value, words", WORDS)
def test_a_value_in_words(value, words):
    assert verification._words(value) == words


def test_what_was_verified_in_words():
    assert str(Verified({})) == "verified: nothing to compare" == str(Verified({"tp": 0}))
    assert str(Verified({"tp": 2, "dp": 0, "cp": 3}, ["a", "b"], ["x"])) == (
        "verified: 2 over tp, 3 over cp; not compared: 1 without values (x...)\nhint: a\nhint: b"
    )
    assert str(Verified({"tp": 1}, [], [*"abcd"])).endswith("not compared: 4 without values (a, b, c...)")


@pytest.mark.parametrize("count", [1, 10, 11])
def test_values_that_differ_in_words(count):
    findings = [verification._Finding("tp" if n else "dp", f"value {n}", True) for n in range(count)]
    error = verification._error(findings)
    axes = "dp, tp" if count > 1 else "dp"
    assert error.what == f"verify: values that the layout declares equal over {axes} differ between ranks"
    shown = [f"value {n}" for n in range(min(count, 10))]
    assert error.where_from == shown + ["... and 1 more"] * (count > 10)
    assert error.repairs == [
        "load or initialise them equally on all ranks: one checkpoint, materialize(model, seed), equal seeds and "
        "batches",
        "if they should differ, declare how they are sharded: spmd.set_spec(module, name, ShardSpec(...))",
    ]
    assert (error.axis, error.rule) == ("dp", "unequal_values")


def test_what_has_values():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2)
    assert not any(map(verification._has_values, (fake, torch.ones(2, device="meta"), torch.eye(2).to_sparse())))
    assert all(map(verification._has_values, (torch.ones(0), 3, None, "x")))


def test_inputs_and_their_names():
    x = torch.ones(2, requires_grad=True)
    values = [*verification._inputs({"a": [x, None], "b": (3,)})]
    assert [(value.name, value.equal, value.usually_equal, value.usually_different) for value in values] == [
        ("input['a'][0]", {"tp"}, {"pp"}, set()), ("input['b'][0]", {"tp"}, {"pp"}, set()),
    ]  # fmt: skip
    assert not values[0].value.requires_grad and values[1].value == 3


def test_a_digest_tells_values_shapes_and_dtypes_apart():
    x = torch.arange(6)
    others = [x.view(2, 3), x.int(), x.float(), x + 1, x.flip(0), 3, "3", None, torch.tensor(3)]
    digests = verification._digests([x, x.clone(), *others])
    assert digests[0] == digests[1] and len(set(digests)) == 1 + len(others)
    assert digests[0].shape == (6,) and digests[0].dtype == "int64" and digests[-2].dtype == "None"
    bits = [torch.tensor([5]).to(dtype) for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)]
    assert [digest.sums[0] for digest in verification._digests(bits)] == [5] * 4
    assert verification._digests([torch.tensor([1.0, 2.0]).view(2)])[0].constant is False
