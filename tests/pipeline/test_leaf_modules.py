"""Modules that are recorded as one call and hold no parameters, such as rotary embeddings: which stages run them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist import comm, spmd
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline import TracingError
from neuronx_dist.pipeline.cut.placement import place_by_recording, place_by_registration
from neuronx_dist.pipeline.cut.splitting import split
from neuronx_dist.program.recorder import record
from tests.support.pipeline_models import HIDDEN, SEQ, Block, Model, batch, check_parity, cut, error, make, on_ranks

pytestmark = pytest.mark.slow  # together more than the fast tier has room for


class Rope(nn.Module):
    """A buffer and no parameter; what it gives depends on positions alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.linspace(0.1, 1.0, HIDDEN), persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[:, None] * self.inv_freq
        return angles.cos(), angles.sin()


class Counting(Rope):
    """Changes its buffer in place."""

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.inv_freq.mul_(1.1)
        return super().forward(positions)


class Replacing(Rope):
    """Puts another tensor in the place of its buffer."""

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.register_buffer("inv_freq", self.inv_freq * 1.1, persistent=False)
        return super().forward(positions)


class Noisy(Rope):
    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = super().forward(positions)
        return cos + torch.rand_like(cos), sin


class Reducing(Rope):
    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = super().forward(positions)
        return spmd.all_reduce(cos, "tp", src=spmd.P, dst=spmd.R), sin


class Learned(Rope):
    """Has a parameter, which is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)


class Rotated(Model):
    """Every layer uses what the leaf gives, which is registered last and called first."""

    def __init__(self, leaf: type[Rope] = Rope, calls: int = 1) -> None:
        super().__init__()
        self.rope = leaf()
        self.calls = calls

    def body(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(SEQ, dtype=x.dtype)
        for index, layer in enumerate(self.layers):
            if index < self.calls:
                cos, sin = self.rope(positions + index)
            x = layer(x * cos + sin)
        return x


def calls_of_the_leaf(model: nn.Module, tp: int = 1) -> list[int]:
    """Number of calls on each of four stages."""
    with comm.as_rank(Mesh(tp, tp=tp), 0):
        plans = split(record(model, batch(), [Block, Rope]), ["layers.0", "layers.1", "layers.2"])
    return [sum(node.target == "rope" for node in plan.nodes) for plan in plans]


@pytest.mark.parametrize(
    "pp,names",
    [
        pytest.param(4, [Rope], id="class"),
        pytest.param(2, ["Rope"], id="name"),
        pytest.param(2, "Rope", id="one name"),
        pytest.param(2, [Rope], id="class, 2 stages", marks=pytest.mark.full),
        pytest.param(4, ["Rope"], id="name, 4 stages", marks=pytest.mark.full),
        pytest.param(4, "Rope", id="one name, 4 stages", marks=pytest.mark.full),
    ],
)
def test_a_leaf_without_parameters_runs_on_every_stage_that_needs_it(pp: int, names: Any) -> None:
    model = make(Rotated)
    check_parity(Mesh(pp, pp=pp), model, batch(), 2, leaf_module_cls=names)
    check_parity(Mesh(pp, pp=pp), make(Rotated, calls=3), batch(), 2, leaf_module_cls=names)
    assert calls_of_the_leaf(model) == [1, 1, 1, 1]
    assert calls_of_the_leaf(make(Rotated, calls=3)) == [1, 1, 1, 1]


def test_its_buffer_is_on_every_stage_and_stays_there() -> None:
    def use(pipeline: Any) -> Any:
        pipeline.run_train(**batch())
        names = [name for name, _ in pipeline.local_named_buffers()]
        assert "rope" in dict(pipeline.local_named_modules())
        return names, pipeline.rope.inv_freq.is_meta

    for found in on_ranks(Mesh(2, pp=2), make(Rotated), use, leaf_module_cls=[Rope], output_loss_value_spec=True):
        assert found == (["rope.inv_freq"], False)


class ChangedOutside(Rotated):
    """The model changes the buffer of its leaf."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early = early

    def body(self, x: torch.Tensor) -> torch.Tensor:
        if self.early:
            self.rope.inv_freq.mul_(1.1)
        x = super().body(x)
        if not self.early:
            self.rope.inv_freq.mul_(1.1)
        return x


def test_a_buffer_that_is_changed_outside_of_its_leaf() -> None:
    model = make(ChangedOutside, early=True)
    assert calls_of_the_leaf(model) == [1, 0, 0, 0]
    check_parity(Mesh(2, pp=2), model, batch(), 2, leaf_module_cls=[Rope])
    with pytest.raises(TracingError, match=r"a buffer of rope is modified on pipeline stage 1 and used on .* \[0, 1\]"):
        check_parity(Mesh(2, pp=2), make(ChangedOutside, early=False), batch(), 2, leaf_module_cls=[Rope])


def test_it_is_of_no_stage_however_layers_are_placed() -> None:
    model, cuts = make(Rotated, leaf=Counting), ["layers.1"]
    with comm.as_rank(Mesh(1), 0):
        plans = split(record(model, batch(), [Block, Rope]), cuts)
    for placement in (
        place_by_registration(model, cuts, [Block, Rope]), place_by_recording(model, plans, cuts, [Block, Rope])
    ):  # fmt: skip
        assert placement.stages("rope") is placement.stages("rope.inv_freq") is None
        assert placement.stages("layers.1") == {0} and placement.stages("layers.2") == {1}


@pytest.mark.parametrize("leaf", [Counting, Replacing, Noisy, Learned])
def test_a_leaf_with_an_effect_runs_where_it_is_called(leaf: type[Rope]) -> None:
    assert calls_of_the_leaf(make(Rotated, leaf=leaf)) == [1, 0, 0, 0]


def test_a_leaf_that_communicates_runs_where_it_is_called() -> None:
    model = make(Rotated, leaf=Reducing)
    assert calls_of_the_leaf(model, tp=2) == [1, 0, 0, 0]
    assert calls_of_the_leaf(model) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "pp,leaf",
    [
        (4, Counting),
        (2, Replacing),
        pytest.param(2, Counting, marks=pytest.mark.full),
        pytest.param(4, Replacing, marks=pytest.mark.full),
    ],
)
def test_a_buffer_that_changes_is_that_of_one_process_in_every_step(pp: int, leaf: type[Rope]) -> None:
    model, alone = make(Rotated, leaf=leaf), make(Rotated, leaf=leaf)

    def use(pipeline: Any) -> Any:
        optimizer = torch.optim.SGD(pipeline.local_parameters(), lr=0.1)
        losses = []
        for seed in range(3):
            losses.append(pipeline.run_train(**batch(seed=seed)))
            optimizer.step()
            optimizer.zero_grad()
        return losses, {name: p.detach() for name, p in pipeline.local_named_parameters()}

    options = {"num_microbatches": 2, "output_loss_value_spec": True, "leaf_module_cls": [leaf]}
    results = on_ranks(Mesh(pp, pp=pp), model, use, **options)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        loss = torch.stack([alone(**piece) for piece in cut(batch(seed=step), 2)]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert error(results[-1][0][step], loss.detach()) < 1e-10
    weights = dict(alone.named_parameters())
    for _, local in results:
        assert all(error(value, weights[name].detach()) < 1e-10 for name, value in local.items())


@pytest.mark.parametrize("leaf", [Counting, Replacing])
def test_a_buffer_that_changes_on_two_stages_is_refused(leaf: type[Rope]) -> None:
    with pytest.raises(TracingError, match=r"a buffer of rope is modified on pipeline stage 1 and used on .* \[0, 1\]"):
        check_parity(Mesh(2, pp=2), make(Rotated, leaf=leaf, calls=3), batch(), 2, leaf_module_cls=[leaf])


def llama(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    from tests.support.llama import tiny_llama

    config = tiny_llama(vocab_size=48, num_hidden_layers=4, **options)
    return make(lambda: transformers.LlamaForCausalLM(config))


@pytest.mark.parametrize("pp,names", [(2, "LlamaRotaryEmbedding"), (2, None), (4, None)])
def test_the_rotary_embedding_of_llama_as_in_the_guide(pp: int, names: str | None) -> None:
    model = llama()
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    ids = torch.randint(0, 48, (4, 8), generator=torch.Generator().manual_seed(0))
    check_parity(
        Mesh(pp, pp=pp), model, {"input_ids": ids, "labels": ids}, 2, {"loss": True, "logits": False},
        transformer_layer_cls=LlamaDecoderLayer, leaf_module_cls=[names or LlamaRotaryEmbedding],
    )  # fmt: skip


def test_a_rotary_embedding_that_branches_on_positions() -> None:
    """A leaf is refused; looked into, the embedding has frequencies of longer sequences than it was built for."""
    model = llama(max_position_embeddings=6, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    ids = torch.randint(0, 48, (2, 8), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": ids}
    options = {"transformer_layer_cls": LlamaDecoderLayer, "spec": {"loss": True, "logits": False}}
    before = copy.deepcopy(model.model.rotary_emb.inv_freq)
    check_parity(Mesh(2, pp=2), model, inputs, 2, **options)
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    with pytest.raises(TracingError, match=r"layer model.rotary_emb needs the values .* leaf_module_cls .* leave"):
        check_parity(Mesh(2, pp=2), model, inputs, 2, leaf_module_cls=[LlamaRotaryEmbedding], **options)
