"""Mixtures of experts: local experts over tp, all_to_all over ep, routers and their losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.parallel_layers import mappings
from neuronx_dist.spmd import I, P, R, S
from tests.checking.user_programs.model_base import HIDDEN, INNER, Model, X, experts, model, sharded

EXPERTS = 4
TP, EP = {"tp": 2}, {"dp": 2, "ep": 2}


@model(
    mesh=TP,
    inputs=X,
    bugs={
        "gates_of_the_first": "local experts are weighted by the gates of the first experts",
        "gates_not_copied": "the router's gradient is that of this rank's experts",
        "not_reduced": "each rank adds what its own experts say",
    },
)
class LoopOverExperts(Model):
    """Experts are sharded over tp; every rank sees all tokens."""

    def build(self):
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.up, self.down = sharded(0, EXPERTS, HIDDEN, INNER), sharded(0, EXPERTS, INNER, HIDDEN)

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        x_r = mappings.copy_to_tensor_model_parallel_region(x)
        if self.bug != "gates_not_copied":
            gates = mappings.copy_to_tensor_model_parallel_region(gates)
        local = self.up.shape[0]
        first = 0 if self.bug == "gates_of_the_first" else comm.rank("tp") * local
        y = torch.zeros_like(x)
        for e in range(local):
            y = y + gates[..., first + e, None] * (F.gelu(x_r @ self.up[e]) @ self.down[e])
        if self.bug != "not_reduced":
            y = mappings.reduce_from_tensor_model_parallel_region(y)
        return (x + y).square().mean()


@model(
    mesh=TP,
    inputs=X,
    bugs={"weights_over_local_experts": "the chosen gates are normalised over this rank's experts"},
)
class BatchedTopK(Model):
    """Top-2 gates as a dense matrix; local experts in one batched product."""

    def build(self):
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up, self.down = sharded(0, EXPERTS, HIDDEN, INNER), sharded(0, EXPERTS, INNER, HIDDEN)

    def forward(self, x):
        probabilities = self.router(x).softmax(-1)
        values, indices = probabilities.topk(2, dim=-1)
        gates = torch.zeros_like(probabilities).scatter(-1, indices, values)
        if self.bug:
            gates = spmd.convert(gates, "tp", src=I, dst=S(2))
            gates = gates / (gates.sum(-1, keepdim=True) + 1e-3)
        else:
            gates = spmd.convert(gates / (gates.sum(-1, keepdim=True) + 1e-3), "tp", src=I, dst=S(2))
        h = F.silu(torch.einsum("bsh,ehi->bsei", spmd.convert(x, "tp", src=I, dst=R), self.up))
        y = torch.einsum("bsei,eih,bse->bsh", h, self.down, gates)
        return (x + spmd.all_reduce(y, "tp", src=P, dst=I)).square().mean()


@model(
    mesh={"tp": 2, "dp": 2},
    inputs=X,
    bugs={"shared_expert_twice": "the shared expert's output is summed, and summed again with the routed ones'"},
)
class SharedExpert(Model):
    """DeepSeek's shared expert beside routed ones, with one reduction for both."""

    def build(self):
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        self.up, self.down = sharded(0, EXPERTS, HIDDEN, INNER), sharded(0, EXPERTS, INNER, HIDDEN)
        self.shared_up = nxd.ColumnParallelLinear(HIDDEN, INNER, bias=False, gather_output=False)
        self.shared_down = nxd.RowParallelLinear(
            INNER, HIDDEN, bias=False, input_is_parallel=True, reduce_output=self.bug is not None
        )

    def forward(self, x):
        gates = spmd.convert(self.gate(x).sigmoid(), "tp", src=I, dst=S(2))
        x_r = spmd.convert(x, "tp", src=I, dst=R)
        y = torch.einsum("bsh,ehi,eio,bse->bso", x_r, self.up, self.down, gates)
        y = y + self.shared_down(F.silu(self.shared_up(x)))
        return (x + mappings.reduce_from_tensor_model_parallel_region(y)).square().sum() / x.shape[0]


@model(
    mesh={"dp": 2},
    inputs=X,
    bugs={
        "counts_of_this_rank": "the balance is that of this rank's tokens: a mean of products, not a product of means"
    },
)
class BalanceLoss(Model):
    """Switch's auxiliary loss over the global batch."""

    def build(self):
        self.router = nn.Linear(HIDDEN, EXPERTS)

    def forward(self, x):
        probabilities = self.router(x.flatten(0, 1)).softmax(-1)  # [tokens, experts]
        counts = F.one_hot(probabilities.argmax(-1), EXPERTS).sum(0)
        tokens = probabilities.shape[0]
        if not self.bug:
            counts, tokens = comm.all_reduce(counts, "dp"), tokens * comm.size("dp")
        share = counts / tokens
        return EXPERTS * (share * probabilities.sum(0)).sum() / probabilities.shape[0]


@model(
    mesh=EP,
    inputs=X,
    bugs={
        "not_sent_back": "the tokens stay with the experts, and are weighted by the gates of others",
    },
)
class ExpertParallel(Model):
    """Tokens [experts, tokens, h] to the ranks of their experts and back, by the package's regions."""

    def build(self):
        self.router = nn.Linear(HIDDEN, EXPERTS)
        experts(self, "weight", EXPERTS, HIDDEN, HIDDEN)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        gates = self.router(tokens).softmax(-1)
        sent = mappings.enter_expert_parallel_region(tokens.expand(EXPERTS, -1, -1).contiguous())  # [e/ep, ep, t, h]
        y = torch.einsum("erth,ehk->ertk", sent, self.weight).relu()
        y = y.flatten(0, 1) if self.bug == "not_sent_back" else mappings.exit_expert_parallel_region(y)
        return (tokens + torch.einsum("eth,te->th", y, gates)).square().sum() / tokens.shape[0]


@model(
    mesh=EP,
    inputs=X,
    bugs={"combined_by_local_slots": "results are combined before they are back, from the slots of other tokens"},
)
class CapacityDispatch(Model):
    """GShard: one-hot dispatch to slots of a capacity that is never exceeded."""

    def build(self):
        self.router = nn.Linear(HIDDEN, EXPERTS)
        experts(self, "weight", EXPERTS, HIDDEN, HIDDEN)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        gates = self.router(tokens).softmax(-1)
        chosen = F.one_hot(gates.argmax(-1), EXPERTS)  # [t, e]
        slot = (chosen.cumsum(0) - 1) * chosen
        dispatch = F.one_hot(slot, tokens.shape[0]).to(x) * chosen.unsqueeze(-1)  # [t, e, c]
        sent = mappings.enter_expert_parallel_region(torch.einsum("tec,th->ech", dispatch, tokens))
        y = torch.tanh(torch.einsum("erch,ehk->erck", sent, self.weight))
        y = y.flatten(0, 1) if self.bug else mappings.exit_expert_parallel_region(y)
        y = torch.einsum("tec,ech,te->th", dispatch, y, gates)
        return (tokens + y).square().sum() / tokens.shape[0]
