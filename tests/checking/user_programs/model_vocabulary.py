"""Sharded vocabularies: lookups, logits, losses, sampling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.parallel_layers import mappings
from neuronx_dist.spmd import I, P, R, S, V
from tests.checking.user_programs.model_base import BATCH, HIDDEN, SEQ, TOKENS, TP, VOCAB, Model, model, sharded, whole
from tests.checking.user_programs.support import integers, normal

X = dict(x=normal(BATCH, SEQ, HIDDEN), labels=integers(VOCAB, BATCH, SEQ))


@model(
    mesh={"tp": 4},
    inputs=TOKENS,
    bugs={
        "foreign_tokens_not_masked": "tokens of other ranks get this rank's first row",
        "not_reduced": "each rank has the embeddings of its own tokens",
        "no_offset": "ids are not counted from the first row of the rank",
    },
)
class EmbeddingByHand(Model):
    """Megatron's masked lookup and sum."""

    def build(self):
        self.table = sharded(0, VOCAB, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids, labels):
        first = 0 if self.bug == "no_offset" else comm.rank("tp") * self.table.shape[0]
        foreign = (ids < first) | (ids >= first + self.table.shape[0])
        x = F.embedding((ids - first).masked_fill(foreign, 0), self.table)
        if self.bug != "foreign_tokens_not_masked":
            x = x.masked_fill(foreign.unsqueeze(-1), 0.0)
        if self.bug != "not_reduced":
            x = mappings.reduce_from_tensor_model_parallel_region(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@model(
    mesh=TP,
    inputs=X,
    bugs={
        "local_normaliser": "the exponentials are summed over the rank's part of the vocabulary",
        "local_maximum": "each rank subtracts its own maximum",
        "label_of_another_rank": "labels outside the rank's part are clamped into it, and not masked",
    },
)
class CrossEntropyByHand(Model):
    """Maximum, sum of exponentials and the label's logit, each over all ranks."""

    def build(self):
        self.inp, self.head = nn.Linear(HIDDEN, HIDDEN), sharded(0, VOCAB, HIDDEN)

    def forward(self, x, labels):
        logits = F.linear(mappings.copy_to_tensor_model_parallel_region(self.inp(x)), self.head)
        top = logits.detach().amax(-1)
        if self.bug != "local_maximum":
            top = comm.all_reduce(top, "tp", op="max")
        logits = logits - top.unsqueeze(-1)
        total = logits.exp().sum(-1)
        if self.bug != "local_normaliser":
            total = spmd.all_reduce(total, "tp", src=P, dst=I)
        size = logits.shape[-1]
        index = labels - comm.rank("tp") * size
        inside = (index >= 0) & (index < size)
        picked = logits.gather(-1, index.clamp(0, size - 1).unsqueeze(-1)).squeeze(-1)
        if self.bug != "label_of_another_rank":
            picked = picked * inside
        picked = spmd.all_reduce(picked, "tp", src=P, dst=I)
        return (total.log() - picked).mean()


@model(
    mesh=TP,
    inputs=X,
    bugs={"whole_logits": "gather_output is left at its default: each rank takes all logits for its part"},
)
class PackagedCrossEntropy(Model):
    """The package's head and loss."""

    def build(self):
        options = {} if self.bug else dict(gather_output=False)
        self.inp = nn.Linear(HIDDEN, HIDDEN)
        self.head = nxd.ColumnParallelLinear(HIDDEN, VOCAB, bias=False, **options)

    def forward(self, x, labels):
        return nxd.parallel_cross_entropy(self.head(self.inp(x)), labels).mean()


@model(
    mesh=TP,
    inputs=TOKENS,
    bugs={"hidden_not_copied": "the gradient of the hidden states is that of this rank's part of the vocabulary"},
)
class TiedEmbedding(Model):
    """The embedding's table is the head."""

    def build(self):
        self.embedding = nxd.ParallelEmbedding(VOCAB, HIDDEN)
        self.norm = nxd.RMSNorm(HIDDEN)

    def forward(self, ids, labels):
        x = self.norm(self.embedding(ids))
        if not self.bug:
            x = mappings.copy_to_tensor_model_parallel_region(x)
        return nxd.parallel_cross_entropy(F.linear(x, self.embedding.weight), labels).mean()


@model(
    mesh=TP,
    inputs=X,
    bugs={
        "mean_of_local_logits": "smoothing takes the mean over this rank's part of the vocabulary",
        "z_loss_of_local_logits": "the z-loss takes the log-sum-exp over this rank's part",
    },
)
class SmoothedWithZLoss(Model):
    """Label smoothing and z-loss beside the package's cross entropy."""

    def build(self):
        self.head = nxd.ColumnParallelLinear(HIDDEN, VOCAB, bias=False, gather_output=False)

    def forward(self, x, labels):
        logits = self.head(x)
        loss = nxd.parallel_cross_entropy(logits, labels)
        total = spmd.all_reduce(logits.exp().sum(-1), "tp", dst=I)
        if self.bug == "z_loss_of_local_logits":
            log_z = logits.logsumexp(-1)
        else:
            log_z = total.log()
        if self.bug == "mean_of_local_logits":
            average = logits.mean(-1)
        else:
            average = spmd.all_reduce(logits.sum(-1), "tp", dst=I) / VOCAB
        return (0.9 * loss + 0.1 * (total.log() - average) + 1e-2 * log_z.square()).mean()


@model(
    mesh=TP,
    inputs=X,
    bugs={"head_of_next_not_summed": "the second head's projection is partial, and goes into the shared head"},
)
class MultiTokenHeads(Model):
    """Two predictions from one trunk: the next token, and through a projection the one after it."""

    def build(self):
        self.trunk = nn.Linear(HIDDEN, HIDDEN)
        self.up = nxd.ColumnParallelLinear(HIDDEN, HIDDEN, gather_output=False)
        self.down = nxd.RowParallelLinear(
            HIDDEN, HIDDEN, bias=False, input_is_parallel=True, reduce_output=not self.bug
        )
        self.head = nxd.ColumnParallelLinear(HIDDEN, VOCAB, bias=False, gather_output=False)

    def forward(self, x, labels):
        x = torch.tanh(self.trunk(x))
        first = nxd.parallel_cross_entropy(self.head(x), labels).mean()
        after = self.head(self.down(F.silu(self.up(x)))[:, :-1])
        return first + 0.3 * nxd.parallel_cross_entropy(after, labels[:, 1:]).mean()


@model(
    mesh=TP,
    inputs=TOKENS,
    bugs={"index_without_offset": "the winner's index is counted from the first token of its rank"},
)
class GreedyFeedback(Model):
    """The greedy choice over sharded logits goes through the embedding again."""

    def build(self):
        self.embedding = nxd.ParallelEmbedding(VOCAB, HIDDEN)
        self.head = nxd.ColumnParallelLinear(HIDDEN, VOCAB, bias=False, gather_output=False)

    def choose(self, logits):
        value, index = logits.detach().max(-1)
        if not self.bug:
            index = index + comm.rank("tp") * logits.shape[-1]
        values = comm.all_gather(value.unsqueeze(0), "tp")  # [tp, b, s]
        indices = comm.all_gather(index.unsqueeze(0), "tp")
        return indices.gather(0, values.argmax(0, keepdim=True)).squeeze(0)

    def forward(self, ids, labels):
        logits = self.head(self.embedding(ids))
        again = self.head(self.embedding(self.choose(logits)))
        losses = nxd.parallel_cross_entropy(logits, labels) + nxd.parallel_cross_entropy(again, labels)
        return losses.mean()


@model(mesh=TP, inputs=X, bugs={"share_of_k": "each rank is asked for k/tp, as if the largest were spread evenly"})
class TopLogits(Model):
    """A distillation loss on the largest logits: local top-k, gathered, top-k again."""

    def build(self):
        self.head = nxd.ColumnParallelLinear(HIDDEN, VOCAB, bias=False, gather_output=False)

    def forward(self, x, labels):
        k = 4 // comm.size("tp") if self.bug else 4
        local = self.head(x).topk(k, dim=-1).values
        candidates = spmd.all_gather(local, "tp", src=S(-1), dst=I)
        return candidates.topk(4, dim=-1).values.log_softmax(-1).square().mean()


@model(
    mesh={"tp": 4},
    inputs=X,
    bugs={"counted_everywhere": "a whole head's loss is gathered so that its gradient is summed over ranks"},
)
class WholeLogits(Model):
    """Logits are gathered for torch's own cross entropy."""

    def build(self):
        self.head = sharded(0, VOCAB, HIDDEN)
        self.inp = whole(HIDDEN, HIDDEN)

    def forward(self, x, labels):
        x = spmd.convert(x @ self.inp, "tp", src=I, dst=R)
        dst = R if self.bug else I
        logits = spmd.all_gather(F.linear(x, self.head), "tp", src=S(-1), dst=dst)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@model(
    mesh=TP,
    inputs=X,
    bugs={"shards_in_rank_order_first": "the gathered parts are merged with the positions before the vocabulary"},
)
class StackedLogits(Model):
    """The gather gives a dim of ranks, which is moved beside the local vocabulary."""

    def build(self):
        self.head = nxd.ColumnParallelLinear(HIDDEN, VOCAB, bias=False, gather_output=False)

    def forward(self, x, labels):
        stacked = spmd.all_gather(self.head(x), "tp", src=V, dst=I)  # [tp, b, s, v/tp]
        order = (1, 0, 2, 3) if self.bug else (1, 2, 0, 3)
        logits = stacked.permute(*order).reshape(-1, VOCAB)
        return F.cross_entropy(logits, labels.flatten())
