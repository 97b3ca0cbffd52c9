"""Every parallel layer in every option, each in a small model whose loss has the right type: all of them are right."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.modules.qkv_linear import GQAQKVColumnParallelLinear
from neuronx_dist.parallel_layers import mappings as m
from neuronx_dist.parallel_layers.fused_columns import fuse_columns
from neuronx_dist.spmd import I, P, R, S

HIDDEN, INNER, VOCAB, ROWS, SEQ = 8, 16, 32, 4, 8
Column, Row = nxd.ColumnParallelLinear, nxd.RowParallelLinear


def total(y: torch.Tensor) -> torch.Tensor:
    return y.square().sum() * comm.size(("dp", "cp"))


def summed(y: torch.Tensor) -> torch.Tensor:
    """The loss of an output that is sharded over tp."""
    return spmd.all_reduce(total(y), "tp", src=P, dst=I)


def whole(y: torch.Tensor) -> torch.Tensor:
    """The loss of a partial output."""
    return total(spmd.all_reduce(y, "tp", src=P, dst=I))


def split(dim: int, axis: str = "tp") -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda y: spmd.convert(y, axis, src=I, dst=S(dim))


def replicated(y: torch.Tensor) -> torch.Tensor:
    return spmd.convert(y, "tp", src=I, dst=R)


def once(y: torch.Tensor) -> torch.Tensor:
    """A partial value of one that every rank has."""
    return spmd.convert(y, "tp", src=R, dst=P)


class Around(nn.Module):
    """A layer before, whose gradients must be right too; `enter`; the layer; a loss."""

    def __init__(self, layer: Any, enter: Any = None, loss: Any = total) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.layer, self.enter, self.loss = layer, enter, loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y = self.layer(y if self.enter is None else self.enter(y))
        if isinstance(y, tuple):  # skip_bias_add
            y = y[0] if y[1] is None else y[0] + y[1]
        return self.loss(y)


class Fused(nn.Module):
    def __init__(self, bias: bool = True, **options: Any) -> None:
        super().__init__()
        columns = [Column(HIDDEN, INNER, bias=bias, gather_output=False, **options) for _ in range(3)]
        fuse_columns(columns)
        self.gate, self.up, self.third = columns
        options.pop("input_is_replicated", None)
        self.down = Row(INNER, HIDDEN, input_is_parallel=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x) + self.third(x))


class Attention(nn.Module):
    """Queries, keys and values by one layer: 4 query heads over 4 / multiplier key/value heads."""

    def __init__(self, multiplier: int = 1, **options: Any) -> None:
        super().__init__()
        gathers = options.setdefault("gather_output", False)
        sizes = [INNER, INNER // multiplier]
        self.qkv = GQAQKVColumnParallelLinear(HIDDEN, sizes, kv_size_multiplier=multiplier, **options)
        names = ("sequence_parallel_enabled", "sequence_dimension")
        self.o = Row(INNER, HIDDEN, input_is_parallel=not gathers, **{x: options[x] for x in names if x in options})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x)
        return self.o(query * key.sigmoid() + value)


class GateUp(nn.Module):
    """Gate and up in one weight: `chunk` cuts a stride-2 output where its blocks meet."""

    def __init__(self) -> None:
        super().__init__()
        self.up = Column(HIDDEN, 2 * INNER, stride=2, gather_output=False)
        self.down = Row(INNER, HIDDEN, input_is_parallel=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Embedded(nn.Module):
    def __init__(self, loss: Any, options: dict[str, Any]) -> None:
        super().__init__()
        self.embed, self.loss = nxd.ParallelEmbedding(VOCAB, HIDDEN, **options), loss

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.loss(self.embed(ids))


class CrossEntropy(nn.Module):
    """Embedding, head, loss; `tied`: one weight."""

    def __init__(self, sequence_parallel: bool, tied: bool = False, **options: Any) -> None:
        super().__init__()
        kind = dict(sequence_parallel_enabled=sequence_parallel, sequence_dimension=1)
        self.embed = nxd.ParallelEmbedding(VOCAB, HIDDEN, **kind)
        self.head = Column(HIDDEN, VOCAB, bias=False, gather_output=False, **kind)
        if tied:
            self.head.weight = self.embed.weight
        self.options = options

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        losses = nxd.parallel_cross_entropy(self.head(self.embed(ids)), ids, **self.options)
        return losses.sum() * comm.size(("dp", "cp"))


def _linears() -> dict[str, Callable[[], nn.Module]]:
    found: dict[str, Callable[[], nn.Module]] = {}

    def case(name: str, layer: Callable[[], nn.Module], enter: Any = None, loss: Any = total) -> None:
        found[name] = lambda: Around(layer(), enter, loss)

    for bias in (True, False):
        word = "bias" if bias else "no bias"
        column = functools.partial(Column, HIDDEN, INNER, bias=bias)
        row = functools.partial(Row, HIDDEN, INNER, bias=bias)
        inside = functools.partial(row, input_is_parallel=True)
        for stride in (1, 2):
            case(f"column, gathered, {word}, stride {stride}", functools.partial(column, stride=stride))
            sharded = functools.partial(column, gather_output=False, stride=stride)
            case(f"column, {word}, stride {stride}", sharded, None, summed)
            case(f"row, {word}, stride {stride}", functools.partial(row, stride=stride))
        for dim in (0, 1):
            kind = dict(sequence_parallel_enabled=True, sequence_dimension=dim)
            case(f"column, {word}, sequence {dim}", functools.partial(column, gather_output=False, **kind), split(dim),
                 summed)  # fmt: skip
            case(f"row, {word}, sequence {dim}", functools.partial(inside, **kind), split(-1), summed)
        case(f"row, {word}, parallel input", inside, split(-1))
        case(f"row, {word}, partial output", functools.partial(inside, reduce_output=False), split(-1), whole)
        case(f"column, {word}, replicated input",
             functools.partial(column, gather_output=False, input_is_replicated=True), replicated, summed)  # fmt: skip
        case(f"column, {word}, replicas", functools.partial(column, gather_output=False, replicas=2), None, summed)
        kind = dict(sequence_parallel_enabled=True, sequence_dimension=1, gather_output=False, replicas=2)
        case(f"column, {word}, replicas, sequence 1", functools.partial(column, **kind), split(1), summed)
        case(f"fused, {word}", functools.partial(Fused, bias))
        case(f"column, gathered, {word}, padded", functools.partial(Column, HIDDEN, INNER - 2, bias, pad=True))
        for multiplier in (1, 2):
            attention = functools.partial(Attention, multiplier, bias=bias)
            case(f"attention, {word}, multiplier {multiplier}", attention)
            case(
                f"attention, {word}, multiplier {multiplier}, gathered",
                functools.partial(attention, gather_output=True),
            )
            kind = dict(sequence_parallel_enabled=True, sequence_dimension=1)
            case(
                f"attention, {word}, multiplier {multiplier}, sequence 1",
                functools.partial(attention, **kind),
                split(1),
                summed,
            )
    for kind in (dict(), dict(gather_output=False)):
        layer = functools.partial(Column, HIDDEN, INNER, skip_bias_add=True, **kind)
        if kind:
            copied = functools.partial(layer, replicas=2)
            case("column, skipped bias, replicas", copied, None, summed)
        case(f"column, skipped bias, {kind}", layer, None, summed if kind else total)
    case("row, skipped bias", functools.partial(Row, HIDDEN, INNER, skip_bias_add=True))
    kind = dict(sequence_parallel_enabled=True, input_is_parallel=True)
    case("row, skipped bias, sequence", functools.partial(Row, HIDDEN, INNER, skip_bias_add=True, **kind), split(-1),
         summed)  # fmt: skip
    case("fused, replicated input", functools.partial(Fused, input_is_replicated=True), replicated)
    for dim in (0, 1):
        layer = functools.partial(Fused, sequence_parallel_enabled=True, sequence_dimension=dim)
        case(f"fused, sequence {dim}", layer, split(dim), summed)
    case("gate and up in one", GateUp)
    for norm in (nxd.LayerNorm, nxd.RMSNorm):
        case(norm.__name__, functools.partial(norm, HIDDEN))
        case(f"{norm.__name__}, sequence", functools.partial(norm, HIDDEN, sequence_parallel_enabled=True), split(1),
             summed)  # fmt: skip
    return found


LINEARS = _linears()

# of ParallelEmbedding: options, loss
EMBEDDINGS: dict[str, tuple[dict[str, Any], Any]] = {"vocab, max_norm": (dict(max_norm=1.0), total)}
for _dim in (False, True):
    _name, _kind = ("hidden" if _dim else "vocab"), dict(shard_across_embedding=_dim)
    EMBEDDINGS[_name] = (_kind, total)
    EMBEDDINGS[f"{_name}, partial"] = (dict(_kind, collect_output=False), summed if _dim else whole)
    EMBEDDINGS[f"{_name}, sparse"] = (dict(_kind, sparse=True), total)
    for _padding in (3, -1):
        EMBEDDINGS[f"{_name}, padding_idx {_padding}"] = (dict(_kind, padding_idx=_padding), total)
    for _sequence in (0, 1):
        _more = dict(sequence_parallel_enabled=True, sequence_dimension=_sequence)
        EMBEDDINGS[f"{_name}, sequence {_sequence}"] = (dict(_kind, **_more), summed)
EMBEDDINGS["hidden, scale_grad_by_freq"] = (dict(shard_across_embedding=True, scale_grad_by_freq=True), total)

LOSSES: list[dict[str, Any]] = [dict(), dict(label_smoothing=0.1), dict(ignore_index=5), dict(tied=True)]

MAPPINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "copy, reduce": lambda x: total(
        m.reduce_from_tensor_model_parallel_region(once(m.copy_to_tensor_model_parallel_region(x)))
    ),
    "scatter, gather": lambda x: total(
        m.gather_from_tensor_model_parallel_region(m.scatter_to_tensor_model_parallel_region(x).tanh())
    ),
    "sequence: scatter, gather": lambda x: total(
        m.gather_from_sequence_parallel_region(
            m.scatter_to_sequence_parallel_region(x, 1).tanh(), 1, to_model_parallel=False
        )
    ),
    "sequence: scatter, gather, reduce-scatter": lambda x: summed(
        m.reduce_scatter_to_sequence_parallel_region(
            once(m.gather_from_sequence_parallel_region(m.scatter_to_sequence_parallel_region(x, 1), 1)), 1
        )
    ),
    "with_dim": lambda x: total(
        m.gather_from_tensor_model_parallel_region_with_dim(
            m.reduce_scatter_to_tensor_model_parallel_region_with_dim(
                once(m.copy_to_tensor_model_parallel_region(x)), 1
            ),
            1,
        )
    ),
    "channels": lambda x: total(
        m.gather_from_tensor_model_parallel_region_with_dim(
            m.scatter_input_channels_to_tensor_model_parallel_region(x), 1
        )
    ),
    "last dim": lambda x: summed(
        m.reduce_scatter_last_dim_to_tensor_parallel_region(
            once(m.all_gather_last_dim_from_tensor_parallel_region(m.scatter_to_tensor_model_parallel_region(x)))
        )
    ),
    "all_to_all": lambda x: summed(m.all_to_all("tp", m.scatter_to_tensor_model_parallel_region(x).transpose(0, 2))),
    "context": lambda x: total(m.reduce_from_context_model_parallel_region(x.sum((0, 1)))),
}


class Mapped(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.function = nn.Linear(HIDDEN, HIDDEN), MAPPINGS[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.first(x))


CHECKPOINTS: dict[str, Any] = {
    "": None,
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "not reentrant": functools.partial(checkpoint, use_reentrant=False),
    "spmd": spmd.random.checkpoint,
}


class Block(nn.Module):
    """Norm, column, row and a residual; dropout of the sharded part, of the whole, or of both."""

    def __init__(self, sequence_parallel: bool, dropout: str, checkpointing: str, **options: Any) -> None:
        super().__init__()
        kind = dict(sequence_parallel_enabled=True, sequence_dimension=1) if sequence_parallel else {}
        self.norm = nxd.LayerNorm(HIDDEN, sequence_parallel_enabled=sequence_parallel, dtype=options.get("dtype"))
        self.up = Column(HIDDEN, INNER, gather_output=False, **kind, **options)
        self.down = Row(INNER, HIDDEN, input_is_parallel=True, **kind, **options)
        self.dropout, self.checkpointing = dropout, checkpointing

    def body(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.up(self.norm(x)))
        if "sharded" in self.dropout:
            with spmd.random.streams().fork():
                y = F.dropout(y, 0.1)
        y = self.down(y)
        return x + (F.dropout(y, 0.1) if "whole" in self.dropout else y)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        function = CHECKPOINTS[self.checkpointing]
        return self.body(x) if function is None else function(self.body, x)


class Net(nn.Module):
    def __init__(
        self, sequence_parallel: bool = False, dropout: str = "", checkpointing: str = "", **options: Any
    ) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN, dtype=options.get("dtype"))
        self.blocks = nn.ModuleList(Block(sequence_parallel, dropout, checkpointing, **options) for _ in range(2))
        self.sequence_parallel = sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.sequence_parallel:
            x = m.scatter_to_sequence_parallel_region(x, 1)
        for block in self.blocks:
            x = block(x)
        loss = x.float().square().sum() * comm.size(("dp", "cp"))
        return m.reduce_from_tensor_model_parallel_region(loss) if self.sequence_parallel else loss


def net(**options: Any) -> nn.Module:
    nxd.model_parallel_manual_seed(1234)
    return Net(**options)


def trained(wrapper: Any, cls: Any, dtype: torch.dtype = torch.float32, groups: bool = False, **options: Any) -> Any:
    """A model and its optimizer, which `wrapper` (None: nothing) is around."""
    model = Net(sequence_parallel=True, dtype=dtype)
    params: Any = list(model.parameters())
    if groups:
        params = [dict(params=params[:3], weight_decay=0.0), dict(params=params[3:], lr=0.5)]
    return model, cls(params, lr=0.1) if wrapper is None else wrapper(params, cls, lr=0.1, **options)


def accumulate(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    """A step on two microbatches, with clipping."""
    for _ in range(2):
        (model(x) / 2).backward()
    nxd.reduce_gradients(model, average_over_data=type(optimizer) is not nxd.NeuronZero1Optimizer)
    if not isinstance(optimizer, nxd.NeuronZero1Optimizer):
        nxd.clip_grad_norm(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


class Experts(nn.Module):
    """Every token goes to every expert, weighted by a gate: each rank of ep has some experts, and its own tokens."""

    def __init__(self, scatter_gather: bool = False, count: int = 4) -> None:
        super().__init__()
        self.scatter_gather = scatter_gather
        self.gate = nn.Linear(HIDDEN, count, bias=False)
        self.weight = nn.Parameter(torch.empty(count // comm.size("ep"), HIDDEN, HIDDEN))
        self.weight.expert_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = torch.einsum("bse,bsh->ebsh", self.gate(x).softmax(-1), x).flatten(1, 2)
        tokens = m.enter_expert_parallel_region(tokens, self.scatter_gather)
        tokens = torch.einsum("epch,ehk->epck", tokens, self.weight)
        tokens = m.exit_expert_parallel_region(tokens, self.scatter_gather)
        return x + tokens.sum(0).unflatten(0, x.shape[:2])


def experts(scatter_gather: bool = False, wrapper: Any = None) -> Any:
    model = Around(Experts(scatter_gather))
    return model if wrapper is None else (model, wrapper(list(model.parameters()), torch.optim.AdamW, lr=0.1))
