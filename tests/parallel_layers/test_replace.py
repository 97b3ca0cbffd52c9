"""`apply(model, plans)`: layers replaced by data, equal to the same model in one process; what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist import comm, spmd
from neuronx_dist.gradients.reduce import reduce_gradients
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers.loss_functions import parallel_cross_entropy
from neuronx_dist.parallel_layers.replace import LayerPlan, apply
from neuronx_dist.weights.shard_spec import gather_full

VOCAB, HIDDEN, INNER = 16, 8, 12


class Gated(nn.Module):
    """ids `[batch, seq]` -> logits `[batch, seq, VOCAB]`; the head shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.gate, self.up = nn.Linear(HIDDEN, INNER), nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(x + self.down(F.silu(self.gate(x)) * self.up(x)))


def plans(inner: int | None = None, fused: bool = True) -> list[LayerPlan]:
    return [
        LayerPlan("embed", "embedding"),
        LayerPlan("gate", "column", inner, ("up",) if fused else ()),
        LayerPlan("up", "column", inner),
        LayerPlan("down", "row", inner),
        LayerPlan("head", "column"),
    ]


def whole_model() -> Gated:
    return copy.deepcopy(WHOLE)


torch.manual_seed(0)
WHOLE = Gated().double()

IDS = torch.randint(VOCAB, (2, 5), generator=torch.Generator().manual_seed(1))
LABELS = IDS.roll(-1, 1)


@pytest.mark.parametrize(("tp", "inner"), [(1, None), (2, None), (4, None), (8, 16)])
@pytest.mark.parametrize("fused", [False, True])
def test_equal_to_one_process_after_three_steps(tp, inner, fused):
    reference = whole_model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(reference(IDS).flatten(0, 1), LABELS.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    expected = dict(reference.named_parameters())

    def rank_main():
        model = apply(whole_model(), plans(inner, fused))
        assert model.head.weight is model.embed.weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(3):
            optimizer.zero_grad()
            with comm.record() as calls:
                loss = parallel_cross_entropy(model(IDS), LABELS).mean()
                loss.backward()
            reduce_gradients(model)
            torch.testing.assert_close(loss.detach(), losses[step], rtol=1e-12, atol=0)
            optimizer.step()
        for name, param in model.named_parameters():
            whole = gather_full(param, spmd.spec_of(param))
            torch.testing.assert_close(whole, expected[name].detach(), rtol=1e-11, atol=1e-13)
        return sum(call.verb == "all_reduce" for call in calls)

    counts = comm.threads.run(Mesh(tp, tp=tp), rank_main)
    # embedding, down, two of the loss; backward: the head's input, and gate and up together or apart
    assert set(counts) == {0 if tp == 1 else 6 if fused else 7}


def test_meta_layers_stay_on_meta_and_flags_are_kept():
    def rank_main():
        with torch.device("meta"):
            model = Gated()
        model.gate.weight.requires_grad_(False)
        model.eval()
        apply(model, plans())
        assert all(param.is_meta for param in model.parameters())
        assert not model.gate.weight.requires_grad and model.up.weight.requires_grad and not model.gate.training
        assert model.gate.weight.shape == (INNER // 2, HIDDEN)

    comm.threads.run(Mesh(2, tp=2), rank_main)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (LayerPlan("gate", "columns"), "gate has the style 'columns': use one of column, row, embedding"),
        (LayerPlan("gat", "column"), "gat is not a module of this Gated"),
        (LayerPlan("gate", "embedding"), "gate is a Linear, but the style 'embedding' replaces torch.nn.Embedding"),
        (LayerPlan("gate", "column", 8), "gate has out_features 12, which is more than its padded size 8"),
        (LayerPlan("gate", "column", 13), "gate has out_features 13, which is not divisible by tp=2"),
        (LayerPlan("gate", "column", None, ("down",)), "gate is fused with down: all must be planned as columns"),
        (LayerPlan("up", "column"), "up is planned twice"),
    ],
)
def test_plans_that_do_not_fit_are_refused_and_the_model_is_left_as_it_was(wrong, message):
    def rank_main():
        model = whole_model()
        before = {name: type(module) for name, module in model.named_modules()}
        with pytest.raises(ValueError, match="cannot replace the layers of this Gated") as caught:
            apply(model, [LayerPlan("up", "column"), wrong])
        assert message in str(caught.value)
        assert {name: type(module) for name, module in model.named_modules()} == before

    comm.threads.run(Mesh(2, tp=2), rank_main)


@pytest.mark.parametrize(
    "register",
    ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"],
)
def test_hooks_of_a_replaced_layer_are_those_of_the_layer_in_its_place(register):
    def rank_main():
        model = whole_model()
        called = []
        handle = getattr(model.gate, f"register_{register}")(lambda *args: called.append(args[0]))
        apply(model, plans())
        model(IDS).sum().backward()
        assert called == [model.gate] and type(model.gate) is not nn.Linear
        handle.remove()
        model(IDS).sum().backward()
        assert len(called) == 1

    comm.threads.run(Mesh(2, tp=2), rank_main)


def test_a_copied_plan_is_equal():
    assert copy.deepcopy(plans()) == plans()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([LayerPlan("gate", "column", None, ("up",)), LayerPlan("up", "column", None, ("head",)),
          LayerPlan("head", "column")], "up is fused with head, but not all of them declare the same fusion"),
        ([LayerPlan("gate", "column", options={"gather": True})], "cannot replace gate with the options"),
        ([LayerPlan("gate", "column", None, ("head",)), LayerPlan("head", "column")], "fuse_columns needs"),
    ],
)  # fmt: skip
def test_what_is_found_out_while_building_leaves_the_model_as_it_was_too(wrong, message):
    def rank_main():
        model = whole_model()
        before = {name: type(module) for name, module in model.named_modules()}
        with pytest.raises(ValueError) as caught:
            apply(model, [LayerPlan("down", "row"), *wrong])
        assert message in str(caught.value)
        assert {name: type(module) for name, module in model.named_modules()} == before

    comm.threads.run(Mesh(2, tp=2), rank_main)


def test_a_module_with_two_names_is_planned_once():
    def rank_main():
        model = whole_model()
        model.again = model.up
        with pytest.raises(ValueError, match="again and up are the same module: plan it once"):
            apply(model, [LayerPlan("up", "column"), LayerPlan("again", "column")])

    comm.threads.run(Mesh(2, tp=2), rank_main)


def test_every_plan_that_does_not_fit_is_listed():
    """Whatever is wrong with one of them, the next is looked at too."""

    def rank_main():
        model = whole_model()
        model.norm = nn.LayerNorm(HIDDEN)
        wrong = [
            LayerPlan("gate", "columns"),
            LayerPlan("nowhere", "column"),
            LayerPlan("norm", "row"),
            LayerPlan("up", "column", 8),
            LayerPlan("down", "row", 13),
            LayerPlan("embed", "embedding", 15),
        ]
        with pytest.raises(ValueError) as caught:
            apply(model, wrong)
        begin = "cannot replace the layers of this Gated: "
        assert str(caught.value).removeprefix(begin).split("; ") == [
            "gate has the style 'columns': use one of column, row, embedding, embedding_columns, "
            "transposed_column, transposed_row, partial_gradient",
            "nowhere is not a module of this Gated",
            "norm is a LayerNorm, but the style 'row' replaces torch.nn.Linear",
            "up has out_features 12, which is more than its padded size 8",
            "down has in_features 13, which is not divisible by tp=2",
            "embed has num_embeddings 16, which is more than its padded size 15",
        ]

    comm.threads.run(Mesh(2, tp=2), rank_main)
