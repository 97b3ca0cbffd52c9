"""Repairs are at the user's own line, in words that mean something there: never in a layer's or a library's code."""

import ast
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import hf, spmd
from neuronx_dist.checking.types.messages import provenance
from neuronx_dist.spmd import I, S
from tests.checking.types.messages.test_messages import POSITIONS
from tests.support.llama import tiny_llama

HIDDEN, INNER, VOCAB = 8, 16, 32
IDS = torch.zeros(4, 8, dtype=torch.long)
SEQUENCE = dict(sequence_parallel_enabled=True, sequence_dimension=1)


class Model(nn.Module):
    """`case`: the method that is its forward, behind an embedding."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.embedding = nxd.ParallelEmbedding(VOCAB, HIDDEN)
        self.up = nxd.ColumnParallelLinear(HIDDEN, INNER, gather_output=False)
        self.down = nxd.RowParallelLinear(INNER, HIDDEN, input_is_parallel=True)
        self.sequence_up = nxd.ColumnParallelLinear(HIDDEN, INNER, gather_output=False, **SEQUENCE)
        self.norm = nxd.LayerNorm(HIDDEN)
        self.layers = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU())
        self.attention = nn.MultiheadAttention(HIDDEN, 2, batch_first=True)
        self.head = nxd.ColumnParallelLinear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.case)(self.embedding(ids), ids).pow(2).sum()

    def whole_input_of_a_row_layer(self, x, ids):
        return self.down(torch.cat([x, x], -1))

    def whole_input_of_a_sequence_parallel_layer(self, x, ids):
        return self.down(self.sequence_up(x))

    def features_into_a_sequence_parallel_layer(self, x, ids):
        return self.sequence_up(self.up(x)[..., :HIDDEN].contiguous())

    def blocks_into_a_sequence_parallel_layer(self, x, ids):
        h = spmd.convert(x, "tp", src=I, dst=S(2))
        return self.sequence_up(torch.cat([h, h], 2))

    def norm_of_a_shard(self, x, ids):
        return self.norm(self.up(x))

    def sequence_shard_into_layers(self, x, ids):
        return self.layers(spmd.convert(x, "tp", src=I, dst=S(1)))

    def sequence_shard_into_attention(self, x, ids):
        h = spmd.convert(x, "tp", src=I, dst=S(1))
        return self.attention(h, h, h, need_weights=False)[0]

    def whole_logits(self, x, ids):
        return nxd.parallel_cross_entropy(self.head(x), ids)

    def weight_used_by_itself(self, x, ids):
        return F.linear(x, self.layers[0].weight) + F.linear(self.up(x)[..., :HIDDEN], self.layers[0].weight)


TAKEN = ": that is what it takes"
FIRST = {
    "whole_input_of_a_row_layer": 'spmd.convert(torch.cat([x, x], -1), "tp", src=spmd.I, dst=spmd.S(2))',
    "whole_input_of_a_sequence_parallel_layer": f'spmd.convert(x, "tp", src=spmd.I, dst=spmd.S(1)){TAKEN}',
    "features_into_a_sequence_parallel_layer": (
        f'spmd.all_to_all(self.up(x)[..., :HIDDEN].contiguous(), "tp", src=spmd.S(2), dst=spmd.S(1)){TAKEN}'
    ),
    "blocks_into_a_sequence_parallel_layer": (
        'spmd.convert(torch.cat([spmd.all_gather(part, "tp", src=spmd.S(2), dst=spmd.I) for part in '
        f'torch.cat([h, h], 2).chunk(2, 2)], 2), "tp", src=spmd.I, dst=spmd.S(1)){TAKEN}'
    ),
    "norm_of_a_shard": 'spmd.all_gather(self.up(x), "tp", src=spmd.S(2), dst=spmd.I) before it, and its weight whole',
    "whole_logits": "gather_output=False on the layer that makes them, or no gather behind it",
}
CASES = [name for name in vars(Model) if not name.startswith("_") and name != "forward"]


def problem(model_fn, **options):
    report = spmd.check(model_fn, IDS, {"tp": 2}, options=options)
    assert not report.ok
    error = report.problems[0].error
    assert isinstance(error, spmd.SpmdTypeError), report
    return error


@POSITIONS
@pytest.mark.parametrize("case", CASES)
def test_repairs_are_at_the_users_line(case):
    error = problem(Model, case=case)
    method = next(node for node in ast.walk(ast.parse(open(__file__).read())) if getattr(node, "name", "") == case)
    for edit in (edit for repair in error.repairs for edit in getattr(repair, "edits", ())):
        assert edit.file == __file__ and method.lineno <= edit.start[0] <= method.end_lineno, edit
        ast.parse(edit.text, mode="eval")
    for repair in error.repairs:
        assert "layers.0" not in repair.replace("<layers.0", ""), repair  # a path is no expression
    assert f"{__file__}:" in str(error)
    assert error.repairs and error.repairs[0] == FIRST.get(case, error.repairs[0])


@POSITIONS
def test_what_a_library_computes_has_no_name_of_the_users():
    error = problem(Model, case="sequence_shard_into_attention")
    assert "linear([4, 4, 8] {tp: S(0)}, attention.in_proj_weight" in error.what
    assert not any(repair.startswith("spmd.all_gather(h") for repair in error.repairs), error.repairs


def _layers_alone():
    up = nxd.ColumnParallelLinear(HIDDEN, INNER, gather_output=False)
    return nn.Sequential(nxd.ParallelEmbedding(VOCAB, HIDDEN), up, nxd.LayerNorm(INNER // 2))


def test_no_edits_where_no_line_is_the_users():
    error = problem(_layers_alone)
    assert "layer_norm" in error.what and error.repairs
    assert not any(getattr(repair, "edits", ()) for repair in error.repairs), error.repairs


def _pending_in_transformers():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(tiny_llama(num_hidden_layers=1))
    hf.swap(model)
    model.model.layers[0].mlp.down_proj.reduce_output = False
    return model


def test_no_edits_in_an_installed_package():
    error = problem(_pending_in_transformers)
    assert "modeling_llama.py" in str(error) and error.repairs
    assert not any(getattr(repair, "edits", ()) for repair in error.repairs), error.repairs


def test_an_operand_given_twice_is_two_places_in_the_line(monkeypatch):
    """A repair edits each of them."""
    line = ast.parse("x * x", mode="eval").body
    monkeypatch.setattr(provenance, "arguments", lambda here: [line.left, line.right])
    x = torch.zeros(1)
    here = SimpleNamespace(frame=sys._getframe(), called=None, text=lambda node: "x")
    named = provenance.name_operands([x, x], here)
    assert [one.node for one in named] == [line.left, line.right]
