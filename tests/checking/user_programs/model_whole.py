"""Whole models and their steps: Hugging Face's, pipelines, weights that are used twice, axes that are folded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, hf
from neuronx_dist.parallel_layers import mappings
from neuronx_dist.spmd import S
from tests.checking.user_programs.model_base import BATCH, HIDDEN, INNER, SEQ, TOKENS, VOCAB, Model, X, model
from tests.checking.user_programs.support import integers, normal, programs

HF_TOKENS = dict(input_ids=integers(VOCAB, BATCH, SEQ), labels=integers(VOCAB, BATCH, SEQ))
UNEVEN = dict(input_ids=integers(VOCAB, BATCH, SEQ), labels=integers(VOCAB, BATCH, SEQ, ignored=0.3))


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=4)
    config = LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=SEQ, **sizes, **options)
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config).to(torch.get_default_dtype())


@programs(
    mesh={"tp": 2},
    inputs=HF_TOKENS,
    bugs={"z_loss_of_local_logits": "with labels the model gives local logits, and the z-loss takes them for all"},
)
def llama_with_z_loss(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        if bug:
            out = model(**batch)
            log_z = out.logits.logsumexp(-1)
            loss = out.loss
        else:
            logits = model(batch["input_ids"]).logits  # without labels: all of the vocabulary
            log_z = logits.logsumexp(-1)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        (loss + 0.01 * log_z.square().mean()).backward()
        nxd.reduce_gradients(model)
        optimizer.step()

    return dict(model_fn=lambda: hf.swap(llama()), step=step)


@programs(
    mesh={"dp": 2, "tp": 2},
    inputs=UNEVEN,
    bugs={
        "count_of_this_rank": "each rank divides by its own number of labels, of which there are not equally many",
        "no_reduction": "no gradient is averaged over dp, and none of a sequence-parallel norm is summed",
    },
)
def llama_sequence_parallel(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        items = nxd.global_num_items(batch["labels"])
        if bug == "count_of_this_rank":
            items = (batch["labels"][:, 1:] != -100).sum()
        model(**batch, num_items_in_batch=items).loss.backward()
        if bug != "no_reduction":
            nxd.reduce_gradients(model)
        optimizer.step()

    return dict(model_fn=lambda: hf.swap(llama(), sequence_parallel=True), step=step)


@programs(mesh={"dp": 2}, inputs=HF_TOKENS)
def llama_with_labels_alone(bug):
    """Every row has the same number of labels, so the mean of a rank is its share of the mean."""
    return dict(model_fn=lambda: hf.swap(llama()))


class TiedLanguageModel(Model):
    """Embedding, blocks, and the embedding's table as the head."""

    def build(self):
        self.embedding = nxd.ParallelEmbedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm = nn.LayerNorm(HIDDEN)
        reduced_elsewhere = self.bug == "hidden_not_copied"
        self.head = nxd.ColumnParallelLinear(
            HIDDEN, VOCAB, bias=False, gather_output=False, input_is_replicated=reduced_elsewhere
        )
        self.head.weight = self.embedding.weight

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return nxd.parallel_cross_entropy(self.head(self.norm(x)), labels).mean()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nxd.ColumnParallelLinear(HIDDEN, INNER, gather_output=False)
        self.down = nxd.RowParallelLinear(INNER, HIDDEN, input_is_parallel=True)

    def forward(self, x):
        return x + self.down(F.silu(self.up(x)))


@programs(
    mesh={"pp": 2, "tp": 2},
    inputs=TOKENS,
    bugs={
        "hidden_not_copied": "the gradient before the tied head is that of this rank's part of the vocabulary",
        "norm_of_a_rank": "gradients are clipped by the norm of those that this rank has",
    },
)
def tied_pipeline(bug):
    def model_fn():
        return nxd.NxDPPModel(
            TiedLanguageModel(bug).to(torch.get_default_dtype()),
            transformer_layer_cls=Block,
            num_microbatches=2,
            auto_partition=True,
            input_names=["ids", "labels"],
            output_loss_value_spec=True,
        )

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        model.run_train(**batch)
        parameters = list(model.local_parameters())
        if bug == "norm_of_a_rank":
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        else:
            nxd.clip_grad_norm(parameters, 0.1)
        optimizer.step()

    return dict(model_fn=model_fn, step=step)


class SharedBlock(Model):
    """One sequence-parallel block that is used twice (ALBERT)."""

    def build(self):
        sequence = dict(sequence_parallel_enabled=True, sequence_dimension=1)
        self.norm = nxd.RMSNorm(HIDDEN, sequence_parallel_enabled=True)
        self.up = nxd.ColumnParallelLinear(HIDDEN, INNER, gather_output=False, **sequence)
        self.down = nxd.RowParallelLinear(INNER, HIDDEN, input_is_parallel=True, bias=False, **sequence)

    def forward(self, x):
        x = mappings.scatter_to_sequence_parallel_region(x, 1)
        for _ in range(2):
            x = x + self.down(F.gelu(self.up(self.norm(x))))
        return mappings.gather_from_sequence_parallel_region(x, 1, to_model_parallel=False).square().mean()


@programs(
    mesh={"tp": 2},
    inputs=X,
    bugs={
        "norm_summed_twice": "the norm's gradient is summed by hand, and again by reduce_gradients",
        "sharded_weights_summed": "the loop by hand sums the gradients of sharded weights too",
    },
)
def shared_block(bug):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        model(**batch).backward()
        for p in model.parameters():
            if getattr(p, "sequence_parallel_enabled", False) or bug == "sharded_weights_summed":
                p.grad = comm.all_reduce(p.grad, "tp")
        if bug == "norm_summed_twice":
            nxd.reduce_gradients(model)
        optimizer.step()

    return dict(model_fn=lambda: SharedBlock(bug).to(torch.get_default_dtype()), step=step)


@programs(
    mesh={"dp": 2, "cp": 2},
    inputs=dict(x=normal(BATCH, SEQ, HIDDEN), labels=integers(VOCAB, BATCH, SEQ, ignored=0.3)),
    in_types={"x": {"cp": S(1)}, "labels": {"cp": S(1)}},
    bugs={
        "count_over_dp_alone": "labels are counted over dp, and not over the parts of the sequence",
        "gradients_over_dp_alone": "gradients are summed over dp alone",
    },
)
def folded_axes(bug):
    """A loss over all tokens: counted over dp and cp, gradients summed over both."""

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        losses = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        valid = (batch["labels"] != -100).sum()
        count = comm.all_reduce(valid, "dp" if bug == "count_over_dp_alone" else ("dp", "cp"))
        (losses / count).backward()
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad, "dp" if bug == "gradients_over_dp_alone" else ("dp", "cp"))
        optimizer.step()

    return dict(model_fn=lambda: nn.Sequential(nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Linear(INNER, VOCAB)), step=step)


@model(
    mesh={"dp": 2, "tp": 2},
    inputs=TOKENS,
    bugs={"last_block_not_reduced": "one of the blocks was built without its reduction"},
)
class SmallTransformer(Model):
    """The README's layers, twice, with its mean over the data."""

    def build(self):
        self.embedding = nxd.ParallelEmbedding(VOCAB, HIDDEN)
        self.ups = nn.ModuleList([nxd.ColumnParallelLinear(HIDDEN, INNER, gather_output=False) for _ in range(2)])
        self.downs = nn.ModuleList(
            [
                nxd.RowParallelLinear(INNER, HIDDEN, input_is_parallel=True, reduce_output=not (self.bug and i))
                for i in range(2)
            ]
        )
        self.head = nxd.ColumnParallelLinear(HIDDEN, VOCAB, bias=False, gather_output=False)

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for up, down in zip(self.ups, self.downs):
            x = x + down(F.silu(up(x)))
        return nxd.parallel_cross_entropy(self.head(x), labels).mean()
