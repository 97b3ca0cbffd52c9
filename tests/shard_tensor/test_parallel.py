"""`parallelize_module`: a plan as torchtitan writes it, against one process and against torch's DTensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist import comm, spmd
from neuronx_dist.comm import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor, report
from neuronx_dist.shard_tensor.construct import shared_by_layers
from neuronx_dist.shard_tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from tests.shard_tensor.support.cases import assert_close, on_ranks
from tests.support.pool import processes

HEAD = 3
NAMES: dict[str, Any] = {
    "ColwiseParallel": ColwiseParallel,
    "RowwiseParallel": RowwiseParallel,
    "SequenceParallel": SequenceParallel,
    "PrepareModuleInput": PrepareModuleInput,
    "loss_parallel": loss_parallel,
    "parallelize_module": parallelize_module,
}


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(hidden, heads * HEAD, bias=False) for _ in range(3))
        self.wo = nn.Linear(heads * HEAD, hidden, bias=False)

    def forward(self, x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        q, k, v = (w(x).view(batch, seq, -1, HEAD).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = q * freqs, k * freqs
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, seq, -1))


class FeedForward(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(hidden, heads), FeedForward(hidden, inner)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)

    def forward(self, x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), freqs)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    def __init__(self, vocab: int = 16, hidden: int = 12, heads: int = 4, inner: int = 20, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleDict({str(i): Block(hidden, heads, inner) for i in range(2)})
        self.norm, self.output = nn.RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        self.register_buffer("freqs", torch.linspace(-1, 1, 32 * HEAD).view(32, HEAD))
        if tied:
            self.output.weight = self.tok_embeddings.weight
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        freqs = self.freqs[: tokens.shape[1]]
        for layer in self.layers.values():
            h = layer(h, freqs)
        return self.output(self.norm(h))


def apply_tp(model: Llama, mesh: Any, names: dict[str, Any], use_local: bool = True, sharded_loss: bool = True) -> None:
    """Divides a model as torchtitan's `parallelize.py` for Llama does, with the names of this package or of torch."""
    colwise, rowwise, sequence = names["ColwiseParallel"], names["RowwiseParallel"], names["SequenceParallel"]
    prepare, parallelize = names["PrepareModuleInput"], names["parallelize_module"]
    parallelize(
        model,
        mesh,
        {
            "tok_embeddings": rowwise(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=use_local),
            "norm": sequence(),
            "output": colwise(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if sharded_loss else Replicate(),
                use_local_output=not sharded_loss,
            ),
        },
    )
    for block in model.layers.values():
        plan = {
            "attention_norm": sequence(),
            "attention": prepare(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
            "attention.wq": colwise(use_local_output=use_local),
            "attention.wk": colwise(use_local_output=use_local),
            "attention.wv": colwise(use_local_output=use_local),
            "attention.wo": rowwise(output_layouts=Shard(1), use_local_output=use_local),
            "ffn_norm": sequence(),
            "feed_forward": prepare(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": colwise(),
            "feed_forward.w2": rowwise(output_layouts=Shard(1), use_local_output=use_local),
            "feed_forward.w3": colwise(),
        }
        parallelize(module=block, device_mesh=mesh, parallelize_plan=plan)


def data(seq: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab, (2, seq + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).to(torch.float64), labels.flatten(0, 1))


def check(model: Llama, twin: Llama, seq: int) -> None:
    """Compares loss, gradients, and the loss after a step with the same in one process."""
    tokens, labels = data(seq, twin.output.out_features)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    for _ in range(2):
        losses = []
        for each, optimizer in zip((model, twin), optimizers):
            optimizer.zero_grad()
            with loss_parallel():
                loss = loss_of(each(tokens), labels)
                loss.backward()
            losses.append(loss.full_tensor() if isinstance(loss, DTensor) else loss)
        assert_close(losses[0].detach(), losses[1].detach(), "loss")
        for (name, param), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert_close(param.grad.full_tensor(), expected.grad, name)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.each_value
@pytest.mark.parametrize("sharded_loss", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_plan_of_torchtitan(ranks, sharded_loss):
    def run(mesh):
        model = Llama()
        apply_tp(model, mesh, NAMES, sharded_loss=sharded_loss)
        check(model, Llama(), 8)

    on_ranks(ranks, run)


def test_a_plan_of_torchtitan_is_typed():
    """Plain tensors between styles have their layouts' types; a part of the sequence is refused as one of features."""

    def rank():
        mesh = DeviceMesh.from_axes("tp")
        tokens, labels = data(8, 16)
        with spmd.SpmdTypeMode():
            model = Llama()
            for x in (tokens, labels, model.freqs):
                spmd.assert_type(x, {"tp": spmd.R})
            apply_tp(model, mesh, NAMES)
            h = model.tok_embeddings(tokens)
            assert type(h) is torch.Tensor and spmd.get_local_type(h)["tp"] == spmd.S(1)
            loss_of(model(tokens), labels).backward()
            grad = model.layers["0"].attention_norm.weight.grad
            assert spmd.get_local_type(grad.to_local())["tp"] is spmd.I
            row = parallelize_module(nn.Linear(12, 4, dtype=torch.float64), mesh, RowwiseParallel())
            with pytest.raises(spmd.SpmdTypeError):
                row(h[..., :6])
        return True

    assert threads.run(Mesh(2, tp=2), rank) == [True, True]


def test_sizes_that_do_not_divide():
    """Rows of the vocabulary, heads, inner features; and a sequence, whose parts stay ShardTensors."""

    def run(mesh):
        sizes = {"vocab": 13, "heads": 5, "inner": 11}
        model = Llama(**sizes)
        apply_tp(model, mesh, NAMES, use_local=False)
        assert model.layers["0"].attention.wq.weight._spec.sizes == ((8, 7),)  # within a head
        check(model, Llama(**sizes), 7)

    on_ranks(2, run)


def test_tied_weights_stay_one_tensor():
    def run(mesh):
        model = Llama(tied=True)
        apply_tp(model, mesh, NAMES)
        assert model.output.weight is model.tok_embeddings.weight
        check(model, Llama(tied=True), 8)

    on_ranks(2, run)


class Net(nn.Module):
    def __init__(self, inner: int = 20) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, inner, dtype=torch.float64), nn.Linear(inner, 5, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def net_input() -> torch.Tensor:
    return torch.linspace(-1, 1, 3 * 4 * 6, dtype=torch.float64).view(3, 4, 6).requires_grad_()


@pytest.mark.parametrize("inner", [20, 11, 1])
@pytest.mark.parametrize("ranks", [2, 4])
def test_one_all_reduce_each_way(ranks, inner):
    def run(mesh):
        module, twin = (
            parallelize_module(Net(inner), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}),
            Net(inner),
        )
        x, whole = net_input(), net_input()
        with comm.record() as forward:
            y = module(x)
        with comm.record() as backward:
            y.square().mean().backward()
        assert [(call.verb, call.bytes) for call in forward] == [("all_reduce", 3 * 4 * 5 * 8)]
        assert [(call.verb, call.bytes) for call in backward] == [("all_reduce", 3 * 4 * 6 * 8)]
        expected = twin(whole)
        expected.square().mean().backward()
        assert type(y) is torch.Tensor
        assert_close(y.detach(), expected.detach(), "output")
        assert_close(x.grad, whole.grad, "gradient of the input")
        for (name, param), other in zip(module.named_parameters(), twin.parameters(), strict=True):
            assert_close(param.grad.full_tensor(), other.grad, name)

    on_ranks(ranks, run)


def test_a_report_names_style_and_module():
    def run(mesh):
        model = Llama()
        apply_tp(model, mesh, NAMES)
        tokens, labels = data(8, 16)
        with report() as r:
            loss_of(model(tokens), labels).backward()
        names = r.by_op()
        for name, verb in (
            ("PrepareModuleInput of attention", "all_gather"),
            ("PrepareModuleInput of attention, backward", "reduce_scatter"),
            ("RowwiseParallel of attention.wo", "reduce_scatter"),
            ("RowwiseParallel of attention.wo, backward", "all_gather"),
            ("ColwiseParallel of output", "all_gather"),
        ):
            assert verb in names[name].collectives, [*names]
        assert not {"before", "behind", "<lambda>", "op_hook"} & {*names}

    on_ranks(2, run)


class Pair(nn.Module):
    """A module of several inputs, one by keyword, and several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, x: Any, number: int, *, mask: Any) -> tuple[Any, str, Any]:
        self.seen = [x, mask]
        return x * number + mask, "no tensor", mask


def layouts_of(values: Any) -> list[Any]:
    return [(x.placements, tuple(x.shape)) if isinstance(x, DTensor) else tuple(x.shape) for x in values]


def test_inputs_and_outputs_are_prepared():
    """Positional ones and those by keyword; as ShardTensors and as plain parts; what has no layout is passed on."""

    def run(mesh):
        whole = torch.arange(12.0).view(4, 3)
        part = whole.chunk(2)[mesh.get_local_rank()].clone()
        inputs = {
            "input_layouts": (Shard(0), None),
            "desired_input_layouts": (Replicate(), None),
            "input_kwarg_layouts": {"mask": Shard(0)},
            "desired_input_kwarg_layouts": {"mask": Shard(0)},
        }
        outputs = {
            "output_layouts": (Replicate(), None, Shard(0)),
            "desired_output_layouts": (Shard(0), None, Replicate()),
        }
        module = parallelize_module(Pair(), mesh, PrepareModuleInput(**inputs))
        y, _, _ = module(part, 2, mask=part)
        assert layouts_of(module.seen) == [((Replicate(),), (4, 3)), ((Shard(0),), (4, 3))]
        assert_close(y.full_tensor(), whole * 3, "output")
        alone = {name: inputs[name] for name in ("input_layouts", "desired_input_layouts")}
        module = parallelize_module(Pair(), mesh, PrepareModuleInput(**alone, use_local_output=True))
        y, _, _ = module(part, 2, mask=whole)
        assert type(module.seen[0]) is torch.Tensor
        assert_close(y, whole * 3, "output of a plain input")
        both = PrepareModuleInputOutput(**inputs, **outputs, use_local_output=False)
        module = parallelize_module(Pair(), mesh, both)
        y, text, mask = module(part, 2, mask=part)
        assert text == "no tensor" and layouts_of((y, mask)) == [((Shard(0),), (4, 3)), ((Replicate(),), (4, 3))]
        assert_close(y.full_tensor(), whole * 3, "output")
        module = parallelize_module(Pair(), mesh, {"": PrepareModuleOutput(**outputs)})
        y, _, mask = module(whole, 2, mask=whole)
        assert layouts_of((y, mask)) == [(2, 3), (8, 3)]

    on_ranks(2, run)


def test_a_model_on_meta_gets_memory_when_it_is_parallel():
    """Parameters get memory after they are cut, as torchtitan does it."""

    def rank(mesh):
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        parallelize_module(module, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        module.to_empty(device="cpu")
        weight = module[0].weight
        assert weight.placements == (Shard(0),) and weight.to_local().shape == (4, 4)
        for param in module.parameters():
            nn.init.ones_(param)
        return module(torch.ones(2, 4)).tolist()

    assert on_ranks(2, rank) == [[[41.0] * 4] * 2] * 2


def test_patterns_as_fnmatch_has_them():
    def run(mesh):
        module = nn.ModuleDict({"layers": nn.ModuleList([Net(), Net()]), "head": Net()})
        parallelize_module(module, mesh, {"layers.*.up": ColwiseParallel(), "h??d.[du]*": RowwiseParallel()})
        cut = [name for name, param in module.named_parameters() if isinstance(param, DTensor)]
        assert cut == [
            *("layers.0.up.weight", "layers.0.up.bias", "layers.1.up.weight", "layers.1.up.bias"),
            *("head.up.weight", "head.up.bias", "head.down.weight", "head.down.bias"),
        ]
        with pytest.warns(UserWarning, match="no submodule of the module matches 'layers.2'"):
            parallelize_module(module, mesh, {"layers.2": ColwiseParallel()})
        with pytest.warns(UserWarning, match="no parallelize_plan"):
            assert parallelize_module(module, mesh) is module

    on_ranks(2, run)


def test_weights_of_the_source_rank():
    """All ranks get those of `src_data_rank`; without one each keeps its own."""

    def run(mesh):
        def filled():
            module = nn.Linear(2, 4)
            nn.init.constant_(module.weight, mesh.get_rank() + 1)
            return module

        for source, expected in ((0, [1.0, 1.0]), (1, [2.0, 2.0]), (None, [1.0, 2.0])):
            module = parallelize_module(filled(), mesh, ColwiseParallel(), src_data_rank=source)
            assert module.weight.full_tensor()[::2, 0].tolist() == expected
            module = parallelize_module(nn.Sequential(filled()), mesh, {"0": SequenceParallel()}, src_data_rank=source)
            assert module[0].weight.to_local()[0, 0].item() == expected[mesh.get_rank()]

    on_ranks(2, run)


def beside_torch(ranks: int) -> dict[str, dict[str, int]]:
    """Runs one plan by torch's names and by ours, compares every gradient, and returns the collectives of each."""
    import torch.distributed.tensor.parallel as theirs
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    models, counts, losses = [Llama(), Llama()], {}, []
    tokens, labels = data(8, 16)
    for model, names, mode in zip(models, (vars(theirs), NAMES), (CommDebugMode(), report())):
        apply_tp(model, mesh, names)
        with mode as counted, names["loss_parallel"]():
            loss = loss_of(model(tokens), labels)
            loss.backward()
        losses.append(loss.full_tensor().detach())
        by_name = {str(op).rpartition(".")[2]: count for op, count in counted.get_comm_counts().items()}
        assert sum(by_name.values()) == counted.get_total_counts()
        counts["ours" if names is NAMES else "torch's"] = by_name
    assert_close(losses[1], losses[0], "loss")
    for (name, param), other in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
        assert param.placements == other.placements, name
        assert_close(param.to_local().detach(), other.to_local().detach(), name)
        assert_close(param.grad.full_tensor(), other.grad.full_tensor(), f"gradient of {name}")  # Partial in torch
    return counts


@pytest.mark.slow
@pytest.mark.process
def test_beside_torchs_dtensor():
    """Torch leaves the gradients of the 5 norms Partial, so that their reduction is still to come."""
    for counts in processes(2).run(beside_torch, 2, mesh={}):
        assert counts["torch's"] == {"reduce_scatter_tensor": 10, "all_gather_into_tensor": 10, "all_reduce": 3}
        # the loss: 2 for 3
        assert counts["ours"] == {"reduce_scatter": 10, "all_gather": 10, "all_reduce": 2 + 5}


def test_an_input_that_layers_share():
    """Beside them a function that all ranks compute uses it, whose gradient counts once."""

    def run(mesh):
        x, whole = (
            distribute_tensor(net_input().detach(), mesh, [Shard(1)], sizes=[(3, 1)]).requires_grad_(),
            net_input(),
        )
        weight = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
        cut = distribute_tensor(weight, mesh, [Shard(0)])

        def loss(y, weight):
            return F.linear(y, weight).sin().sum() + F.linear(y, weight).cos().sum() + (y * y).sum()

        with comm.record() as calls:
            loss(shared_by_layers(x), cut).backward()
        loss(whole, weight).backward()
        assert_close(x.grad.full_tensor(), whole.grad, "gradient")
        assert [call.verb for call in calls] == ["exchange", "all_reduce", "all_reduce", "exchange"]

    on_ranks(2, run)
