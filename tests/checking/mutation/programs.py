"""Small programs, one of which uses each collective of the package: what is checked, and how its values are compared.

Each is a model with a loss (or a Llama, a layer for each stage), on 2 x 2 ranks, so that another axis is another thing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

import neuronx_dist as nxd
from neuronx_dist import comm, hf, spmd, trainer
from neuronx_dist.modules.lora import LoraConfig
from neuronx_dist.modules.lora.tp_layer import LoraParallelLinear
from neuronx_dist.modules.moe import (
    ExpertMLPs,
    MoE,
    RouterTopK,
    SharedExperts,
    load_balancing_loss_func,
    router_z_loss_func,
)
from neuronx_dist.modules.qkv_linear import GQAQKVColumnParallelLinear
from neuronx_dist.parallel_layers import fuse_columns, grads, mappings
from neuronx_dist.parallel_layers.conv import InputChannelParallelConv2d, OutputChannelParallelConv2d
from neuronx_dist.parallel_layers.layer_norm import LayerNorm
from tests.checking.mutation.checked_program import Program
from tests.parity import mutation_cases
from tests.support.llama_training import Case
from tests.support.more_architectures import OF_TRANSFORMERS

__all__ = ["PROGRAMS"]

HIDDEN, INNER, ROWS, SEQ, VOCAB = 8, 16, 2, 4, 8
_EP = {"dp": 2, "tp": 2, "ep": 2}
_CP = {"cp": 2, "dp": 2}


# --- layers and regions -----------------------------------------------------------------------------------------------


class Net(nn.Module):
    """`[rows, seq, hidden]` through a replicated linear layer, whose gradient shows what is wrong behind it, to a loss.

    The parts are modules by name; `body(net, x)` says what is done with them.
    """

    def __init__(self, body: Callable[[Any, torch.Tensor], torch.Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        for name, part in parts.items():
            setattr(self, name, part)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(self, self.first(x))
        return (y - x if y.dim() == x.dim() else y).square().sum() / x.shape[0]


def _x() -> torch.Tensor:
    return torch.linspace(-1, 1, ROWS * SEQ * HIDDEN).view(ROWS, SEQ, HIDDEN)


def _net(body: Callable[[Any, torch.Tensor], torch.Tensor], **parts: Callable[[], nn.Module]) -> Program:
    return Program(lambda: Net(body, **{name: make() for name, make in parts.items()}), _x())


_column = partial(nxd.ColumnParallelLinear, HIDDEN, INNER, gather_output=False)
_row = partial(nxd.RowParallelLinear, INNER, HIDDEN, input_is_parallel=True)
_sequence = dict(sequence_parallel_enabled=True, sequence_dimension=1)


def _adapted(layer: Any, **options: Any) -> Callable[[], nn.Module]:
    """Makes a layer with an adapter, whose second matrix is not zero."""

    def make() -> nn.Module:
        adapted = LoraParallelLinear(layer(**options), LoraConfig(lora_rank=2))
        if not adapted.lora_B.weight.is_meta:
            nn.init.ones_(adapted.lora_B.weight)
        return adapted

    return make


def _mlp(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net.down(F.gelu(net.up(x)))


def _attention(net: Any, x: torch.Tensor) -> torch.Tensor:
    query, *others = net.qkv(x)
    if comm.size("tp") == 1:  # otherwise each rank has all keys and values
        others = [other.repeat(1, 1, 2) for other in others]
    key, value = others
    return net.down(query * key.sigmoid() + value)


def _convolutions(net: Any, x: torch.Tensor) -> torch.Tensor:
    image = x.transpose(1, 2).unflatten(2, (2, -1))  # [rows, hidden, 2, seq / 2]: features are channels
    return net.down(F.gelu(net.up(image))).flatten(2).transpose(1, 2)


def _sequence_mlp(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = mappings.scatter_to_sequence_parallel_region(x, 1)
    return mappings.gather_from_sequence_parallel_region(x + _mlp(net, net.norm(x)), 1, to_model_parallel=False)


def _megatron(net: Any, x: torch.Tensor) -> torch.Tensor:
    """The MLP with sequence parallelism out of regions: the layers do not communicate."""
    x = mappings.scatter_to_sequence_parallel_region(x, 1)
    x = mappings.gather_from_sequence_parallel_region(net.norm(x), 1)
    x = F.linear(F.gelu(F.linear(x, net.up.weight, net.up.bias)), net.down.weight)
    x = mappings.reduce_scatter_to_sequence_parallel_region(x, 1)
    return mappings.gather_from_sequence_parallel_region(x, 1, to_model_parallel=False)


def _tensor_parallel(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = mappings.copy_to_tensor_model_parallel_region(x)
    x = F.linear(F.gelu(F.linear(x, net.up.weight, net.up.bias)), net.down.weight)
    return mappings.reduce_from_tensor_model_parallel_region(x)


def _last_dim(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Features are gathered to be contracted with a shard of the output, and summed and scattered."""
    x = mappings.scatter_to_tensor_model_parallel_region(x)
    x = mappings.all_gather_last_dim_from_tensor_parallel_region(x)
    x = F.linear(F.gelu(F.linear(x, net.up.weight, net.up.bias)), net.down.weight)
    x = mappings.reduce_scatter_last_dim_to_tensor_parallel_region(x)
    return mappings.gather_from_tensor_model_parallel_region(x)


def _with_dim(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = mappings.copy_to_tensor_model_parallel_region(x)
    x = F.linear(F.gelu(F.linear(x, net.up.weight, net.up.bias)), net.down.weight)
    x = mappings.reduce_scatter_to_tensor_model_parallel_region_with_dim(x, 1)
    return mappings.gather_from_tensor_model_parallel_region_with_dim(x, 1)


def _channels(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = mappings.scatter_input_channels_to_tensor_model_parallel_region(x)
    return mappings.gather_from_tensor_model_parallel_region_with_dim(F.gelu(x), 1)


def _context(net: Any, x: torch.Tensor) -> torch.Tensor:
    """The sequence is sharded over cp."""
    total = mappings.reduce_from_context_model_parallel_region(F.gelu(x).sum(1))
    return total - comm.all_reduce(x.detach().sum(1), "cp")


class Context(Net):
    """All ranks of cp have the loss, and average the gradients of their parts of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * comm.size("cp")


def _even_all_to_all(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = spmd.convert(x.flatten(0, 1), "tp", src=spmd.I, dst=spmd.S(0))
    x = mappings.all_to_all("tp", F.linear(mappings.all_to_all("tp", x), net.up.weight))
    return spmd.all_gather(x, "tp", src=spmd.S(0), dst=spmd.I).unflatten(0, (-1, SEQ))


class Experts(nn.Module):
    """Scales tokens `[experts/ep, ep, capacity, hidden]` by a weight of each expert."""

    def __init__(self) -> None:
        super().__init__()
        ep = comm.size("ep")
        self.weight = nn.Parameter(torch.empty(SEQ // ep, HIDDEN))
        spmd.set_spec(self, "weight", spmd.ShardSpec("ep", 0, 1, ep, (SEQ, HIDDEN)))
        self.weight.expert_model_parallel = True  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x) * self.weight[:, None, None]


def _mixture(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Top-2 of four experts, under a factor of the losses of routing."""
    sequence = net.moe.sequence_parallel_enabled
    x = mappings.scatter_to_sequence_parallel_region(x, 1) if sequence else x
    out, logits = net.moe(x)
    if sequence:
        out = mappings.gather_from_sequence_parallel_region(out, 1, to_model_parallel=False)
    return out * (1 + load_balancing_loss_func(logits, 4, 2) + router_z_loss_func(logits))


def _moe(sequence_parallel: bool = False) -> MoE:
    experts = ExpertMLPs(4, 2, HIDDEN, INNER, "gelu", False, None, bias=True)
    shared = SharedExperts(HIDDEN, INNER, 1, "gelu")
    options: Any = dict(sequence_parallel_enabled=sequence_parallel, sequence_dimension=1, return_router_logits=True)
    return MoE(RouterTopK(4, 2, HIDDEN), experts, shared, **options)


def _experts(scatter_gather: bool, net: Any, x: torch.Tensor) -> torch.Tensor:
    tokens = x.transpose(0, 1).contiguous()  # [experts, capacity, hidden]: each position of a row has its expert
    inside = mappings.enter_expert_parallel_region(tokens, scatter_gather)
    return mappings.exit_expert_parallel_region(net.experts(inside), scatter_gather).transpose(0, 1)


def _fused() -> Net:
    net = Net(
        lambda net, x: net.down(F.silu(net.gate(x)) * net.up(x)),
        gate=_column(bias=False),
        up=_column(bias=False),
        down=_row(),
    )
    fuse_columns([net.gate, net.up])
    return net


class Tokens(nn.Module):
    """Ids through an embedding to a loss. What comes out sharded along the sequence is gathered."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nxd.ParallelEmbedding(VOCAB, HIDDEN, sequence_dimension=1, **options)
        self.last = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        if self.embedding.sequence_parallel_enabled:
            x = mappings.gather_from_sequence_parallel_region(x, 1, to_model_parallel=False)
        return self.last(x).square().sum() / ids.shape[0]


class Classifier(nn.Module):
    """Hidden states to logits over a sharded vocabulary, and their cross entropy."""

    def __init__(self, smoothing: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.head = nxd.ColumnParallelLinear(HIDDEN, VOCAB, gather_output=False, bias=False)
        self.smoothing = smoothing

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = nxd.parallel_cross_entropy(100 * self.head(self.first(x)), labels, self.smoothing)
        return losses.sum() / labels.numel()


class FusedClassifier(Classifier):
    """The same with output layer and loss in one function; with `sequence` each rank has a part of the sequence."""

    def __init__(self, sequence: bool = False) -> None:
        super().__init__()
        self.sequence = sequence

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, dim = 100 * self.first(x), None
        if self.sequence:
            x, dim = mappings.scatter_to_sequence_parallel_region(x, 1), 1
        return nxd.parallel_linear_cross_entropy(x, self.head.weight, labels, sequence_dimension=dim)


def _ids() -> torch.Tensor:
    return (torch.arange(ROWS * SEQ) * 5 % VOCAB).view(ROWS, SEQ)


# --- the step ---------------------------------------------------------------------------------------------------------


def _sequence_net() -> Net:
    return Net(_sequence_mlp, up=_column(**_sequence), down=_row(**_sequence), norm=LayerNorm(HIDDEN, **_norm))


_norm = dict(sequence_parallel_enabled=True)


def _clipped_step(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).backward()
    nxd.reduce_gradients(model)
    grads.clip_grad_norm(model.parameters(), 1.0)
    optimizer.step()


def _step_by_names_of_nxd(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).backward()
    grads.allreduce_sequence_parallel_gradients(optimizer)
    grads.bucket_allreduce_gradients([param.grad for param in model.parameters()])
    optimizer.step()


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    config = trainer.neuronx_distributed_config()
    model = trainer.NxDModel(_sequence_net(), config)
    return model, trainer.initialize_parallel_optimizer(config, torch.optim.SGD, model.parameters(), lr=0.1)


def _step_of_the_trainer(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    model.run_train(x)
    optimizer.step()


def _context_step(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).backward()
    grads.allreduce_context_parallel_gradients(optimizer)
    optimizer.step()


def _context_and_data_step(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).backward()
    grads.allreduce_context_parallel_gradients(optimizer)
    grads.bucket_allreduce_gradients([param.grad for param in model.parameters()])
    optimizer.step()


def _zero_step(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).backward()
    optimizer.step()


def _with_zero(make: Callable[[], Any], axis: str | None = None) -> Any:
    """A model and its ZeRO-1, sharded as usual or over one axis only."""
    model = make()
    groups = None if axis is None else comm.current().mesh.groups(axis)
    return model, nxd.NeuronZero1Optimizer(model.parameters(), torch.optim.SGD, sharding_groups=groups, lr=0.1)


def _experts_step(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).backward()
    grads.bucket_allreduce_gradients([param.grad for param in model.parameters()])
    grads.bucket_allreduce_gradients([param.grad for param in model.first.parameters()], reduce_over_ep_group=True)
    optimizer.step()


# --- Llama ------------------------------------------------------------------------------------------------------------


def _llama(
    sp: bool = False,
    zero1: bool = False,
    tied: bool = False,
    plain: bool = False,
    kind: str = "Llama",
    heads: tuple[int, int] = (4, 2),
    layers: int = 1,
) -> Any:
    import transformers

    sizes = dict(vocab_size=32, intermediate_size=32, num_hidden_layers=layers, max_position_embeddings=16)
    sizes |= dict(hidden_size=4 * heads[0], num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=4)
    config = getattr(transformers, f"{kind}Config")(**sizes, tie_word_embeddings=tied)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    hf.swap(module, sequence_parallel=sp, pad_heads=True)
    if plain:
        return module
    return nxd.NxDPPModel(
        module,
        transformer_layer_cls=hf.transformer_layer_class(module),
        num_microbatches=1,
        input_names=["input_ids", "labels", "num_items_in_batch"],
        output_loss_value_spec={"loss": True, "logits": False},
        auto_partition=True,
        broadcast_and_average_loss=True,
        use_zero1_optimizer=zero1,
    )


def _swapped(name: str, sp: bool = False) -> Any:
    """An architecture with other layers than a Llama's."""
    (architecture,) = [each for each in OF_TRANSFORMERS if each.name == name]
    return hf.swap(architecture.make(2 * len(architecture.layers)), sequence_parallel=sp)


def _with_a_shared_bias() -> Any:
    """BERT whose head shares a bias with its parent."""
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    rates = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = transformers.BertConfig(**sizes, **rates, is_decoder=True)
    return hf.swap(transformers.BertLMHeadModel(config).double())


class Items(nn.Module):
    """A sum over the valid labels of a microbatch, divided by their number as `global_num_items` gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = self.first(x).square().sum(-1) * (labels != -100)
        return losses.sum() / grads.global_num_items(labels, shift=False)


def _some_labels() -> torch.Tensor:
    return _ids().masked_fill(_ids() % 3 == 0, -100)


def _architecture_inputs() -> dict[str, torch.Tensor]:
    ids = (torch.arange(4 * 6) * 7 % 32).view(4, 6)
    return {"input_ids": ids, "labels": ids}


def _loss_of_a_model(model: Any, optimizer: Any, inputs: dict[str, torch.Tensor]) -> None:
    model(**inputs).loss.backward()
    nxd.reduce_gradients(model)


def _logits(model: Any, optimizer: Any, ids: torch.Tensor) -> None:
    logits = model(input_ids=ids).logits
    F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    nxd.reduce_gradients(model)
    optimizer.step()


def _numbers_of(case: str, *args: Any, **options: Any) -> Callable[[], None]:
    """Values of a case of the numeric mutation tests."""

    def values() -> None:
        getattr(mutation_cases, case)(*args, *([Case(**options)] if options else ()))

    return values


def _example_step(model: Any, optimizer: Any, batch: dict[str, torch.Tensor]) -> None:
    """A step of the training example: the number of labels, forward and backward, clipping and ZeRO-1."""
    items = nxd.global_num_items(batch["labels"], 1)
    model.run_train(**{**batch, "num_items_in_batch": items})
    optimizer.step()
    optimizer.zero_grad()


def _with_optimizer(**options: Any) -> Any:
    model = _llama(zero1=True, **options)
    return model, nxd.NeuronZero1Optimizer(list(model.local_parameters()), torch.optim.AdamW, max_norm=1.0, lr=1e-3)


def _batch() -> dict[str, torch.Tensor]:
    ids = (torch.arange(2 * 8) * 7 % 32).view(2, 8)
    return dict(input_ids=ids, labels=ids, num_items_in_batch=torch.full((), 14.0))


PROGRAMS: dict[str, Program] = {
    "mlp": _net(_mlp, up=_column, down=_row),
    "attention": _net(
        _attention,
        qkv=lambda: GQAQKVColumnParallelLinear(
            HIDDEN, [INNER, INNER // 2], gather_output=False, kv_size_multiplier=comm.size("tp")
        ),
        down=_row,
    ),
    "adapters": _net(_mlp, up=_adapted(_column), down=_adapted(_row)),
    "adapters, sequence": Program(
        lambda: Net(
            _sequence_mlp,
            up=_adapted(_column, **_sequence)(),
            down=_adapted(_row, **_sequence)(),
            norm=LayerNorm(HIDDEN, **_norm),
        ),
        _x(),
    ),
    "adapter, split": _net(_mlp, up=partial(nn.Linear, HIDDEN, INNER), down=_adapted(_row, input_is_parallel=False)),
    "adapter, partial": _net(
        lambda net, x: mappings.reduce_from_tensor_model_parallel_region(_mlp(net, x)),
        up=_column,
        down=_adapted(_row, reduce_output=False),
    ),
    "convolutions": _net(
        _convolutions,
        up=partial(OutputChannelParallelConv2d, HIDDEN, INNER, 1),
        down=partial(InputChannelParallelConv2d, INNER, HIDDEN, 1),
    ),
    "convolution of groups": _net(
        _convolutions,
        up=partial(OutputChannelParallelConv2d, HIDDEN, INNER, 1, groups=4),
        down=partial(InputChannelParallelConv2d, INNER, HIDDEN, 1, groups=2),
    ),
    "sequence": Program(_sequence_net, _x()),
    "fused": Program(_fused, _x()),
    "gathered": _net(_mlp, up=partial(_column, gather_output=True), down=partial(nn.Linear, INNER, HIDDEN)),
    "gathered blocks": _net(
        _mlp, up=partial(_column, gather_output=True, stride=2), down=partial(nn.Linear, INNER, HIDDEN)
    ),
    "split": _net(_mlp, up=partial(nn.Linear, HIDDEN, INNER), down=partial(_row, input_is_parallel=False)),
    "partial": _net(
        lambda net, x: mappings.reduce_from_tensor_model_parallel_region(_mlp(net, x)),
        up=_column,
        down=partial(_row, reduce_output=False),
    ),
    "megatron": _net(_megatron, up=_column, down=partial(_row, bias=False), norm=partial(LayerNorm, HIDDEN, **_norm)),
    "tensor parallel": _net(_tensor_parallel, up=_column, down=partial(_row, bias=False)),
    "last dim": _net(_last_dim, up=_column, down=partial(_row, bias=False)),
    "with dim": _net(_with_dim, up=_column, down=partial(_row, bias=False)),
    "channels": _net(_channels),
    "all to all": Program(
        lambda: Net(_even_all_to_all, up=_column(bias=False)), _x(), values=_numbers_of("megatron_all_to_all")
    ),
    "embedding": Program(Tokens, _ids()),
    "embedding, sequence": Program(Tokens, _ids(), options=dict(sequence_parallel_enabled=True)),
    "embedding, columns": Program(Tokens, _ids(), options=dict(shard_across_embedding=True)),
    "embedding, columns, sequence": Program(
        Tokens, _ids(), options=dict(shard_across_embedding=True, sequence_parallel_enabled=True)
    ),
    "cross entropy": Program(Classifier, (_x(), _ids())),
    "cross entropy, smooth": Program(Classifier, (_x(), _ids()), options=dict(smoothing=0.1)),
    "linear cross entropy": Program(FusedClassifier, (_x(), _ids())),
    "linear cross entropy, sequence": Program(FusedClassifier, (_x(), _ids()), options=dict(sequence=True)),
    "mixture": Program(lambda: Net(_mixture, moe=_moe()), _x(), mesh=_EP),
    "mixture, sequence": Program(lambda: Net(_mixture, moe=_moe(True)), _x(), mesh=_EP),
    "experts": Program(lambda: Net(partial(_experts, False), experts=Experts()), _x(), mesh=_EP),
    "experts, scattered": Program(lambda: Net(partial(_experts, True), experts=Experts()), _x(), mesh=_EP),
    "items": Program(Items, (_x(), _some_labels())),
    "context": Program(
        lambda: Context(_context),
        _x(),
        mesh=_CP,
        in_types=dict(dp=spmd.S(0), cp=spmd.S(1)),
        values=_numbers_of("region", "reduce_from_context_model_parallel_region"),
    ),
    "llama": Program(_llama, _batch(), values=_numbers_of("steps_of_a_pipeline", tp=2, dp=2)),
    "llama, sequence": Program(
        _llama,
        _batch(),
        options=dict(sp=True),
        values=_numbers_of("steps_of_a_pipeline", tp=2, dp=2, sequence_parallel=True),
    ),
    "llama, zero": Program(
        _llama,
        _batch(),
        options=dict(zero1=True),
        values=_numbers_of("steps_of_a_pipeline", tp=2, dp=2, optimizer="zero1"),
    ),
    "llama, tied stages": Program(
        _llama,
        _batch(),
        mesh={"pp": 2, "tp": 2},
        options=dict(tied=True, layers=2),
        values=_numbers_of("steps_of_a_pipeline", pp=2, tp=2, tied=True),
    ),
    "llama, stages": Program(
        _llama,
        _batch(),
        mesh={"pp": 2, "dp": 2},
        options=dict(layers=2),
        values=_numbers_of("steps_of_a_pipeline", pp=2, dp=2),
    ),
    "llama, example": Program(
        _with_optimizer,
        _batch(),
        step=_example_step,
        values=_numbers_of("steps_of_a_pipeline", tp=2, dp=2, optimizer="zero1", clip=0.1),
    ),
    "qwen": Program(_llama, _batch(), mesh={"tp": 2}, options=dict(kind="Qwen3")),
    "llama, one key/value head": Program(_llama, _batch(), mesh={"tp": 2}, options=dict(heads=(3, 1))),
    **{
        f"{name}{', sequence' if sp else ''}": Program(
            _swapped, _architecture_inputs(), mesh={"tp": 2}, options=dict(name=name, sp=sp), step=_loss_of_a_model
        )
        for name, sp in (("GPT-2", False), ("GPT-2", True), ("Phi 3", True), ("T5", False))
    },
    "shared bias": Program(_with_a_shared_bias, _architecture_inputs(), mesh={"tp": 2}, step=_loss_of_a_model),
    "llama, logits": Program(
        _llama, _batch()["input_ids"], options=dict(plain=True), step=_logits, values=_numbers_of("full_logits")
    ),
    "clipped": Program(_sequence_net, _x(), step=_clipped_step),
    "trainer": Program(_trained, _x(), step=_step_of_the_trainer),
    "names of nxd": Program(_sequence_net, _x(), step=_step_by_names_of_nxd),
    "names of nxd, context": Program(
        lambda: Net(_mlp, up=_column(), down=_row()),
        _x(),
        mesh={"cp": 2, "tp": 2},
        in_types=dict(cp=spmd.S(0)),
        step=_context_step,
    ),
    "names of nxd, context and data": Program(
        lambda: Net(_mlp, up=_column(), down=_row()),
        _x(),
        mesh={"dp": 2, "cp": 2},
        in_types=dict(cp=spmd.S(0)),
        step=_context_and_data_step,
    ),
    "zero, groups": Program(
        lambda: _with_zero(lambda: Net(_mlp, up=_column(), down=_row()), "dp"),
        _x(),
        mesh={"dp": 2, "cp": 2},
        in_types=dict(cp=spmd.S(0)),
        step=_zero_step,
    ),
    "experts, zero": Program(
        lambda: _with_zero(lambda: Net(partial(_experts, False), experts=Experts())), _x(), mesh=_EP, step=_zero_step
    ),
    "names of nxd, experts": Program(
        lambda: Net(partial(_experts, False), experts=Experts()), _x(), mesh={"dp": 4, "ep": 2}, step=_experts_step
    ),
}
