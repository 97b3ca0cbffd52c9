"""Tiny models of many architectures, Hugging Face's and others, and the table of them that is `docs/models.md`.

`PYTHONPATH=. python -m tests.support.architectures` (`make models`) writes the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from neuronx_dist import comm
from neuronx_dist.hf.words import WORDS
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline.cut.partitioning import partition
from neuronx_dist.pipeline.cut.placement import misplaced
from neuronx_dist.pipeline.cut.splitting import StagePlan, split
from neuronx_dist.program.recorder import record
from neuronx_dist.program.recording import Recording
from tests.support.paths import ROOT

VOCAB, HIDDEN, HEADS, SEQ, ROWS = 32, 16, 4, 6, 4
DOCUMENT = ROOT / "docs" / "models.md"
MEASURED = ROOT / "tests" / "hf" / "measured.json"

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 16,
}
_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED: dict[str, Any] = {**_COMMON, **_TOKENS, "num_key_value_heads": 2}
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
_NO_DROPOUT_PROB: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def tokens() -> dict[str, torch.Tensor]:
    """Token ids, some of the labels ignored."""
    ids = torch.randint(3, VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, 0] = -100
    return {"input_ids": ids, "labels": labels}


def padded() -> dict[str, torch.Tensor]:
    """Sequences of several lengths, with the mask that says so."""
    inputs = tokens()
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, 4:] = mask[3, 5:] = 0
    return {**inputs, "labels": inputs["labels"].masked_fill(mask == 0, -100), "attention_mask": mask}


def packed() -> dict[str, torch.Tensor]:
    """Two sequences in each row, which the position ids show."""
    return {**tokens(), "position_ids": torch.arange(SEQ).remainder(SEQ // 2).repeat(ROWS, 1)}


def images() -> dict[str, torch.Tensor]:
    """Images of 8 by 8 pixels, of two classes."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(ROWS, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.arange(ROWS) % 2}


@dataclass(frozen=True)
class Architecture:
    """A model to be cut into stages.

    Attributes:
        name: as the table has it.
        model: name of its class in transformers; or what makes one, of a number of layers.
        layer_classes: names of the classes of its layers.
        config: arguments of its configuration.
        layers: which of these is the number of layers.
        inputs: what it is trained on.
        spec: where the loss is in its output.
        remarks: for the table.
        error: how the error begins that recording or cutting it raises, where it does.
    """

    name: str
    model: str | Callable[[int], nn.Module]
    layer_classes: tuple[str, ...]
    config: dict[str, Any] = field(default_factory=dict)
    layers: tuple[str, ...] = ("num_hidden_layers",)
    inputs: Callable[[], dict[str, torch.Tensor]] = tokens
    spec: Any = field(default_factory=lambda: {"loss": True, "logits": False})
    remarks: str = ""
    error: str = ""

    def make(self, layers: int = 4) -> nn.Module:
        """The model in float64 in training mode, equal at every call; norms and biases are not at trivial values."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            if callable(self.model):
                model = self.model(layers)
            else:
                model_class = getattr(transformers, self.model)
                counts = dict.fromkeys(self.layers, layers // len(self.layers))
                config = model_class.config_class(**self.config, **counts)
                if "experts_implementation" in self.config:
                    config._experts_implementation = self.config["experts_implementation"]
                config.use_cache = False
                model = model_class(config)
            model = model.double().train()
            with torch.no_grad():
                for param in model.parameters():
                    if param.ndim == 1:
                        param.add_(torch.randn_like(param) * 0.1)
        return model

    def classes(self, model: nn.Module) -> list[type]:
        return [c for c in {type(m): None for m in model.modules()} if c.__name__ in self.layer_classes]

    def recording(self, model: nn.Module) -> Recording:
        with comm.as_rank(Mesh(1), 0):
            return record(model, self.inputs(), self.classes(model))

    def plans(self, model: nn.Module, recording: Recording, pieces: int, traced: bool) -> list[StagePlan] | None:
        """Returns the programs of four stages; None: `traced` is needed, as parameters placed without it do not fit."""
        classes = self.classes(model)
        partitioned = partition(
            model,
            pieces,
            cuts="layers",
            layer_classes=classes,
            leaf_classes=classes,
            recording=recording if traced else None,
        )
        plans = split(recording, partitioned.cuts)
        return plans if misplaced(model, partitioned.placement, plans, range(pieces)) is None else None


# --- models that are not Hugging Face's -------------------------------------------------------------------------------


class ConvBlock(nn.Module):
    """A convolution with batch norm, whose statistics change in training."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    """Convolutions and pooling, then a linear head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ConvBlock(8 if index else 3, 8) for index in range(layers))
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(8, 2)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = pixel_values
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index < 2:
                x = self.pool(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class UNet(nn.Module):
    """Each layer on the way down hands its result to the one of its size on the way up, over the stages between."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        half = layers // 2
        self.down = nn.ModuleList(ConvBlock(8 if index else 3, 8) for index in range(half))
        self.middle = nn.Conv2d(8, 8, 1)
        self.up = nn.ModuleList(ConvBlock(16, 8) for _ in range(layers - half))
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, skips = pixel_values, []
        for block in self.down:
            skips.append(block(x))
            x = F.max_pool2d(skips[-1], 2) if len(skips) < 3 else skips[-1]
        x = self.middle(x)
        for block in self.up:
            skip = skips.pop()
            x = block(torch.cat([F.interpolate(x, skip.shape[2:]), skip], 1))
        return F.cross_entropy(self.head(x).mean((2, 3)), labels)


# --- all of them ------------------------------------------------------------------------------------------------------

ARCHITECTURES = [
    Architecture("Llama", "LlamaForCausalLM", ("LlamaDecoderLayer",), _GROUPED),
    Architecture(
        "Mistral", "MistralForCausalLM", ("MistralDecoderLayer",), {**_GROUPED, "head_dim": 4, "sliding_window": 4}
    ),
    Architecture(
        "Qwen 2",
        "Qwen2ForCausalLM",
        ("Qwen2DecoderLayer",),
        {**_GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    ),
    Architecture("Qwen 3", "Qwen3ForCausalLM", ("Qwen3DecoderLayer",), {**_GROUPED, "head_dim": 4}),
    Architecture(
        "Gemma 2", "Gemma2ForCausalLM", ("Gemma2DecoderLayer",), {**_GROUPED, "head_dim": 4, "sliding_window": 4}
    ),
    Architecture(
        "Gemma 3", "Gemma3ForCausalLM", ("Gemma3DecoderLayer",), {**_GROUPED, "head_dim": 4, "sliding_window": 4}
    ),
    Architecture("Phi", "PhiForCausalLM", ("PhiDecoderLayer",), _GROUPED),
    Architecture("Phi 3", "Phi3ForCausalLM", ("Phi3DecoderLayer",), _GROUPED),
    Architecture(
        "GPT-2",
        "GPT2LMHeadModel",
        ("GPT2Block",),
        {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_head": HEADS, "n_positions": 16, **_TOKENS}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        ("n_layer",),
    ),
    Architecture("GPT-NeoX", "GPTNeoXForCausalLM", ("GPTNeoXLayer",), {**_COMMON, **_TOKENS}),
    Architecture(
        "OPT",
        "OPTForCausalLM",
        ("OPTDecoderLayer",),
        {**_COMMON, **_TOKENS, "ffn_dim": 24, "word_embed_proj_dim": HIDDEN, "dropout": 0.0},
        remarks="the last norm is registered before the layers",
    ),
    Architecture(
        "BLOOM",
        "BloomForCausalLM",
        ("BloomBlock",),
        {"vocab_size": VOCAB, "hidden_size": HIDDEN, "n_head": HEADS, **_TOKENS, **_NO_DROPOUT},
        ("n_layer",),
    ),
    Architecture("BERT (masked language model)", "BertForMaskedLM", ("BertLayer",), {**_COMMON, **_NO_DROPOUT_PROB}),
    Architecture(
        "T5",
        "T5ForConditionalGeneration",
        ("T5Block",),
        {"vocab_size": VOCAB, "d_model": HIDDEN, "d_kv": 4, "d_ff": 24, "num_heads": HEADS, "dropout_rate": 0.0}
        | {"decoder_start_token_id": 0},
        ("num_layers", "num_decoder_layers"),
        remarks="encoder and decoder on one pipeline; the encoder's result goes along with the decoder's",
    ),
    Architecture(
        "Mixtral",
        "MixtralForCausalLM",
        ("MixtralDecoderLayer",),
        {**_GROUPED, "num_local_experts": 4, "sliding_window": None, "experts_implementation": "eager"},
        remarks="its experts ask which of them have tokens: recorded with values, once for each shape",
    ),
    Architecture(
        "ViT",
        "ViTForImageClassification",
        ("ViTLayer",),
        {"hidden_size": HIDDEN, "intermediate_size": 24, "num_attention_heads": HEADS, "image_size": 8, "patch_size": 4}
        | _NO_DROPOUT_PROB,
        inputs=images,
    ),
    Architecture(
        "Mamba",
        "MambaForCausalLM",
        ("MambaBlock",),
        {"vocab_size": VOCAB, "hidden_size": HIDDEN, "state_size": 4, "time_step_rank": 2, **_TOKENS},
    ),
    Architecture(
        "a U-net",
        UNet,
        ("ConvBlock",),
        inputs=images,
        spec=True,
        remarks="skips go over the stages between, with their gradients",
    ),
    Architecture(
        "a convolutional network",
        ConvNet,
        ("ConvBlock",),
        inputs=images,
        spec=True,
        remarks="batch norm per microbatch",
    ),
    Architecture(
        "ALBERT",
        "AlbertForMaskedLM",
        ("AlbertLayer",),
        {**_COMMON, **_NO_DROPOUT_PROB, "embedding_size": 8},
        remarks="one layer is called many times, so there is nothing to cut between",
        error="ValueError: auto_partition: 4 pipeline stages need at least 4 transformer layers, found 1",
    ),
]

# --- the table --------------------------------------------------------------------------------------------------------

# By word of a plan: what it is a word of, and what it does.
_WORDS = {
    "colwise": ("`Linear`, `Conv1D`, bare parameter", "shards the output over tp: `[b, s, out/tp]`"),
    "rowwise": ("`Linear`, `Conv1D`, bare parameter", "shards the input, `[b, s, in/tp]`, and sums products over tp"),
    "replicated_with_grad_allreduce": ("norm of local heads", "stays whole; its gradient is summed over tp"),
    "colwise_gather_output": ("`Linear`", "as `colwise`, and gathers the output: `[b, s, out]` on all ranks"),
    "colwise_rep": ("`Linear`", "`colwise_gather_output`, by its older name"),
    "rowwise_split_input": ("`Linear`", "as `rowwise`, of an input that is whole on all ranks: each takes its part"),
    "rowwise_rep": ("`Linear`", "`rowwise_split_input`, by its older name"),
    "packed_colwise": ("`Linear`, bare parameter", "as `colwise`, of two matrices in one (gate and up): parts of each"),
    "packed_rowwise": ("`Linear`, bare parameter", "as `rowwise`, of two matrices in one"),
    "embedding_rowwise": ("`Embedding`", "shards the rows of the table, the vocabulary"),
    "embedding_colwise": ("`Embedding`", "shards the columns of the table, and gathers the output"),
    "moe_tp_experts": ("module of experts", "takes tokens that are whole, and sums what the sharded experts return"),
    "moe_identity_expert": ("module", "an expert that returns its input, which is counted once"),
    "mla_kv_a_proj": ("`Linear`", "to the latent of keys and values: whole; the gradient of its rotary part is summed"),
    "all_reduce": ("module", "sums its output over tp"),
    "sequence_parallel": ("norm", "stays whole; `sequence_parallel=True` decides what is sharded over the sequence"),
    "local_params": ("module", "stays whole"),
    "replicate": ("any", "stays whole"),
    "packed_colwise_3": ("`Linear`, `Conv1D`", "ours: as `packed_colwise`, of three (query, key and value)"),
    "embedding_heads": ("`Embedding`", "ours: columns of a table with one for each head, which stay local"),
    "replicated_bias": ("bare parameter", "ours: a bias that is added to partial sums, once"),
    "local_heads": ("module", "ours: takes its heads of arguments for all heads (ALiBi, masks)"),
}

_TEXT = """# Models

## Swapped by `hf.swap`, in pipelines, by `parallelize`

Tiny ones, 2 layers of hidden size {hidden}, in float64. *yes* is measured (`tests/hf/measuring.py`): loss, logits and
all gradients are those of one process to 1e-10. Dropout rates are 0 in these measurements.

* *swap*: at tp 2 and 4; Mamba's mixers stay whole. *derived*: `plan="derived"`, at tp 2 and 4, without plan or table.
* *SP*: `sequence_parallel=True`, at tp 2.
* *pp*: `NxDPPModel`, on 2 stages, of the model as it is.
* *parallelize*: policy `"tp"` on 2 ranks, which proves the types of its program and compares its values.
* *padding*: `pad_heads=True, pad_vocab=True`, at tp 3. *replication*: 2 key/value heads at tp 4; `-`: a model
  has as many as others, or its attention is whole on every rank (Phi 3, OLMo 2 and 3, OLMoE, Granite MoE).
* *checked*: `spmd.check` of the swapped model proves its types, at tp 2. It has no values: code of experts that asks
  which of them have tokens is not proven.
* *refused*: an error with the reason before anything is changed.

| model | {columns} |
| --- |{rules}
{swapped}

Of transformers' tensor-parallel plans 125 are tested in this way at tp 2 (`tests/hf/test_every_plan.py`, which lists
the others). Architectures without a plan there, or with a wasteful one, have one in `neuronx_dist/hf/words.py`; any
other takes a plan in the same words, `hf.swap(model, plan={{"model.layers.*.mlp.up_proj": "colwise", ...}})`.

Sequence parallelism is refused, with the reason, where layers have several streams of hidden states (DeepSeek V4,
Gemma 3n, HY V4, Qwen 4), or take another argument of the complete sequence (Higgs Audio V2, Inkling 2).

With dropout of shards (of attention weights, or between columns and rows) call `nxd.model_parallel_manual_seed(seed)`
before training: each rank draws from a stream that it seeds.

`hf.swap(model, plan="derived", inputs=inputs)` needs no plan, and takes any module. Its forward is recorded on example
inputs (None: `model.dummy_inputs`). A region grows from a column layer through the calls that read its shards, as far
as their rules say that they are the same functions of shards, and ends in row layers: `colwise`, `packed_colwise`,
`rowwise`, biases by head. Then a copy with the weights of one rank is recorded, whose calls must have the numbers of a
rank; a number of heads in an attribute becomes the rank's.

* A layer outside of such regions gathers its output (`colwise_gather_output`): a matrix that a norm over all heads
  follows, queries, keys and values of unequal sizes in one matrix, or an autograd function without a rule.
* Experts in bare parameters, convolutions and small matrices stay whole, on every rank: a plan says `moe_tp_experts`.
* Refused, with the layer: a number of the whole size in forward that is no attribute (CodeGen's four blocks), heads
  that tp does not divide (where the config has them, they are replicated or, by `pad_heads=True`, padded), a forward
  that branches on values, and dropout of shards and of whole values in one module that its columns and row layers do
  not part (GPT-2's they do). So are bare parameters of the root that shards read, layers that training and evaluation
  would shard differently, and an embedding or a head whose weight other calls read.
* The proof holds for calls on shards. It does not see a number that is read from the shape of a weight whose layer
  gathers its output (`x / self.head.weight.shape[0]`), nor gradients of inputs beside shards: a proof of
  all layers would record the swapped model, whose layers communicate, and float masks are such inputs too.

Of architectures with neither a plan nor a table these are tested (`tests/hf/test_derived.py`): GPT BigCode, MPT, ESM,
DeBERTa 2, DINOv2, BEiT, and a hand-written decoder without a config; `spmd.check` proves all of them. A model of PEFT
is swapped in this way too, with its adapters: `hf.swap(get_peft_model(model, config), plan="derived", inputs=inputs)`.

Words that do not go together are refused where names and styles show it; a plan of one's own is proven by
`spmd.check(lambda: hf.swap(model, plan=plan), inputs, {{"tp": 2}})`.

### The loss and its logits

In training, the loss of a call with labels is computed from the head's input and weight, some 512 tokens at a time, and
no rank holds the logits of all tokens (`nxd.parallel_linear_cross_entropy`); in pipelines too, on the last stage.

* With labels, `output.logits` are this rank's columns, `[b, s, vocab/tp]`, in training and evaluation: their `argmax`
  and torch's `F.cross_entropy` of them are wrong at tp > 1. `nxd.parallel_cross_entropy` and `nxd.parallel_entropy`
  take them; `parallel_layers.mappings.gather_from_tensor_model_parallel_region(output.logits)` makes them whole.
  Without labels logits are whole.
* `output.logits` of such a call has the shape and dtype of this rank's logits, and computes them when a function of
  torch reads their values: after backward too, before the next optimizer step (later it raises an error). Under
  sequence parallelism that gathers the head's input: all ranks of tp read them, or none. The loss gives them no
  gradient: `output.logits.retain_grad()`, `register_hook` and `torch.autograd.grad(loss, logits)` raise an error.
* The loss is that of the logits, as with `fused_loss=False`, where something reads them first: models that scale or cap
  them (Cohere, Gemma 2, Granite), an adapter on the head, a hook, a loss of the user's; and in evaluation,
  in compiled code, on XLA, and where accelerate offloads the head. `fused_loss=True` raises an error, with the
  function's name, where the model reads its logits before the loss.
* Trainer, accelerate (its conversion to fp32 too) and `DistributedDataParallel` leave them uncomputed; `fully_shard`
  computes them, as it hooks every output. An `autograd.Function` takes `output.logits + 0`, and so returns a module
  around the model that has a full backward hook. torch's collectives take them, without a gradient.
* Between forward and backward a rank holds the gradient of the head's weight in fp32, for every microbatch in flight on
  the last stage: 1 with 1F1B, all with GPipe, where `fused_loss=False` may take less memory.

For policy losses `nxd.parallel_linear_logprobs(hidden, weight, labels)` gives log-probabilities and entropies, with
gradients, without logits of all tokens. Of a swapped model:

```
hidden = model.model(ids).last_hidden_state                            # [b, s, h]; under sequence parallelism s/tp
labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)       # the next tokens
log_p, entropy = nxd.parallel_linear_logprobs(hidden, model.lm_head.weight, labels, temperature=0.7)    # [b, s] each
```

With sequence parallelism pass `sequence_dimension=1`, and of a head with a bias `bias=model.lm_head.bias` (Phi, GPT-J).
Models that scale or cap their logits (Cohere, Gemma 2, Granite) do so after the head: divide `hidden` by Granite's
`logits_scaling`, multiply it by Cohere's `logit_scale`; capped logits are no linear function. Of logits there are
`nxd.parallel_entropy` and NxD's `from_parallel_logits_to_logprobs`.

### Experts over ep

Where the mesh has ep > 1 (a part of dp), `hf.swap(model)` keeps whole experts on each ep rank, and sends tokens to
them: in every module with `num_experts` matrices in bare parameters, whose forward takes tokens, experts and weights,
as almost all of transformers' are. That forward runs as it is, by any of its implementations, on the rows of this
rank's experts. Over tp each expert is sharded, as before. `ep=1` leaves all experts on every rank. Llama 4's experts
take a row for each token and expert, most of them 0: those that are not 0 are sent, and computed, where transformers
computes all.

* Per layer, forward and backward: 1 exchange of `k * tokens` rows `[h]` there and 1 back, whatever tp is; 1 all_to_all
  of `num_experts` integers in forward. No token is dropped; ranks may have any numbers of tokens, an expert none.
* Gradients of experts are summed over edp. `reduce_gradients`, the norm, ZeRO-1 and checkpoints know them; weights are
  loaded, drawn and saved as at ep 1.
* The auxiliary loss (`output_router_logits=True`) is over the tokens of all data ranks, not the mean of the losses of
  each (without a pipeline). For other models: `modules.moe.load_balancing_loss_func`.
* `generate` goes on on all ep ranks until the sequences of each have ended (`synced_gpus=True`); results are those of
  one process.
* Tested (`tests/hf/test_experts.py`: loss, all gradients, weights after five steps, to 1e-10 in float64) at ep 1, 2, 4
  and tp 1, 2: Mixtral, Qwen 2 and 3 MoE, Qwen 3 Next, OLMoE, DeepSeek V3, gpt-oss, GLM-4 MoE, ERNIE 4.5 MoE, MiniMax,
  HunYuan MoE, Llama 4. Not distributed, with an error: DBRX, Granite MoE, Longcat, whose experts have other forms.

### Sequences over cp

Where the mesh has cp > 1, each rank has a part of every sequence, and `hf.swap(model)` gives the model an attention
that sees the parts of all ranks. All ranks of cp load the same rows: sample and seed by `comm.rank("dp")`, not by
the world's rank. [long-context.md](long-context.md) has the loop, which splits each batch. A pipeline takes the same
part: `run_train(**part, num_items_in_batch=..)`.

A rank's loss is its share: the mean over dp and cp is that of one process. Pass labels as for transformers, not
shifted, and split once. `generate` takes `use_cache=False` and complete prompts on all ranks. Dropout outside of
attention draws equal masks for the parts of a sequence where all ranks are seeded equally, as they are for the initial
weights; `model_parallel_manual_seed(seed + 1000 * comm.rank("cp"))` after that gives each part masks of its own.

`get_batch_on_this_context_parallel_rank` shifts labels before the split, so that the last token of a part predicts the
first of the next one, and adds `position_ids`. In zig-zag order rank r has chunks r and 2cp - 1 - r of 2cp, and all
ranks compute as much under a causal mask; without `balance` parts are contiguous, as NxD's. The model sees by
`position_ids` how a sequence was split. Where packed documents can be read both ways, the balance of the calls counts;
without a call, or after calls with both, they are refused, as positions that are no split, on all ranks.

All ranks of cp call this function in the training loop, with the same batch (the first batch is compared). It leaves
out an `attention_mask` of ones, or of padding on the right: causal attention shows such padding to no other token. Its
labels are to be -100. Masks that hide other tokens are refused, and auxiliary losses of routers, which would count
padding. Only tensors with the length of `input_ids` in dim 1 are split. That a batch was split for the right kind of
model (`causal`) is known of its tensors, not of their copies where one job splits batches of both kinds.

For masked language models (BERT, ALBERT) pass `causal=False`: labels are not shifted, and padding becomes a document
of its own. Their loss is the mean over the labels of all ranks.

* `hf.swap(model, context_parallel="ring")`: keys and values go around. `"ulysses"`: each rank has some heads of the
  complete sequence; needs heads that tp x cp divides, key/value heads may be fewer. `"ring+ulysses:2"`: 2 adjacent
  ranks divide their heads, and keys go around the cp/2 pairs (arXiv:2405.07719); `"ring+ulysses"`: any divisor.
  `"auto"`, the default: in each call the one of them by which a rank sends fewest bytes, from the heads, key/value
  heads, window, split and documents of the call. Each that is taken is logged once, at level INFO; for Llama 3 8B,
  4096 tokens per rank in bf16: `attention over cp=4 is ulysses; a rank sends per call: ring 151 MB in 9 messages,
  ring+ulysses:2 134 MB in 7 messages, ulysses 126 MB in 4 messages`.
* Packed documents: `position_ids` restart at each. A token sees its document only, in parts, windows and sinks
  alike; a document may be longer than a part. Labels of first tokens are to be -100.
* Gradients: `reduce_gradients` and ZeRO-1 average over dp and cp. Without `num_items_in_batch` the loss is the mean
  over the labels of all data ranks.
* In layers of your own: `nxd.ring_attention(q, k, v)` and `nxd.ulysses_attention(q, k, v)`, with `degree=2` both
  together, take this rank's part, `[b, heads, s/cp, e]` with positions already applied, with `causal`, `window`,
  `sinks`, `cu_seqlens` of all ranks, `balance` as in the split, and any axis; `lengths` where parts are not equally
  long. The loss is the sum of the cross entropy of `part["labels"]`, divided by
  `nxd.global_num_items(part["labels"])`.

Per layer, of a rank's part of q, k, v and the output (`row`: of one key and its value, over batch and local heads):

| | forward | backward |
| --- | --- | --- |
| ring | cp - 1 exchanges of `row * s/cp` | 2 (cp - 1) exchanges of `row * s/cp` |
| Ulysses | all_to_all of q, k, v; all_to_all of the output | the same |
| both, u ranks by heads | the same over u, and cp/u - 1 exchanges of `row * s/cp` | the same, 2 (cp/u - 1) exchanges |

Blocks that no rank sees do not go around: under a window that is no longer than a contiguous part the ring has 1
exchange forward and 2 backward. Beside it, per forward one all_gather of `position_ids`, for whose values the host
waits. Activations are 1/cp: bytes saved for backward 1.01 of it by a ring, 1.07 by Ulysses, which saves the output of
attention in two orders (a swapped Llama, cp 2 and 4). The predicted memory is that of real processes within 2 %.

Causal attention of 2 x 4096 tokens, forward and backward, takes 0.95 of the ideal, half of one process, by a ring in
zig-zag order, 0.67 in contiguous parts, 0.96 by Ulysses; keys gathered by hand under a mask 0.46 (2 CPU cores at
load 5, `python benchmarks/context_parallel.py --quick`, 2026-11-27).

* Tested (`tests/hf/test_context_parallel.py`: loss, all gradients, weights after three steps, to 1e-10 in float64;
  transformers' own loss is in float32) at cp 2 and 4 with tp 2, dp 2, pp 2, sequence parallelism and recomputed
  layers, and on imitated devices ([docs/devices.md](devices.md)); of the table above 30 models are exact at cp 2.
* Refused, with the reason: models that are neither causal nor masked language models; attention in code of its own
  (BLOOM, Falcon, GPT-J); states along the sequence (Mamba); scores that are capped (Gemma 2); masks that are more than
  causal, a window and documents (Gemma 3, Llama 4), or windows that only the mask has (Qwen 2 MoE and Phi MoE with
  `sliding_window`); positions that begin after `pad_token_id` (RoBERTa); rotary frequencies that depend on the length
  (`dynamic`, `longrope`). A subclass of yours is judged by the class of transformers from which it inherits. In a call,
  of the model or its decoder: an `attention_mask` (the split leaves out that of padding), attention dropout, caches,
  labels that are not shifted, missing `position_ids`, which some attentions do not get (DistilBERT); an attention whose
  forward did not call the one that swap has set. On XLA cp is refused, since positions have no values there.

### Words of a plan

A plan has a word for each matrix of the model but the embedding and the head, whose words (`embedding_rowwise`,
`colwise`) are added. Names are those of `model.named_modules()`, or of bare parameters, with `*` in place of numbers;
as in transformers they have no other patterns. In a module between local columns and rows (an attention, an MLP) each
norm needs a word too. `b` batch, `s` sequence, `/tp`: the size of one rank. Words that put whole experts on ranks
(`grouped_gemm`, `ep_dispatch_experts`) are refused: ep does that, whatever the plan.

| word | of | what it does |
| --- | --- | --- |
{words}

## On a pipeline

Which models `NxDPPModel` cuts into stages. Each row is tested: a tiny one (4 layers of hidden size {hidden}) on 2 and 4
stages, and with two chunks on each of 2, whose loss and gradients equal those of one process to 1e-10 in float64
(`tests/pipeline/test_architectures.py`). `make models` writes this page, here with transformers {transformers}; a test
compares.

* *layers*: the class for `transformer_layer_cls`.
* *sent*: how many tensors a stage sends to the next, on 4 stages.
* *trace*: whether `model.trace(kwargs={{...example inputs...}})` is needed right after the constructor: where layers
  run in another order than they are registered in.

| model | class | layers | sent | trace | remarks |
| --- | --- | --- | --- | --- | --- |
{rows}

### Models that cannot be cut

{refused}
A pipeline needs shapes that depend on the inputs' shapes alone, and a forward whose Python code does not branch on
values outside of its layers. Models of transformers are recorded with `config.use_cache` off, as for training: with a
cache they do not look whether `position_ids` show several sequences in a row, and without they do.
"""


def row(architecture: Architecture) -> str:
    """A line of the table, of what its recording shows."""
    model = architecture.make()
    recording = architecture.recording(model)
    untraced = architecture.plans(model, recording, 4, traced=False)
    plans = untraced or architecture.plans(model, recording, 4, traced=True)
    assert plans is not None
    sent = ", ".join(str(len(plan.sent)) for plan in plans[:-1])
    name = f"`{architecture.model}`" if isinstance(architecture.model, str) else ""
    layers = ", ".join(f"`{layer}`" for layer in architecture.layer_classes) if name else ""
    cells = [architecture.name, name, layers, sent, "no" if untraced else "yes", architecture.remarks]
    return "| " + " | ".join(cells) + " |"


def raised(architecture: Architecture) -> str:
    """Returns the error of recording a model, or of cutting it into four stages."""
    try:
        model = architecture.make()
        architecture.plans(model, architecture.recording(model), 4, traced=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def document() -> str:
    recorded = [architecture for architecture in ARCHITECTURES if not architecture.error]
    refused = [
        f"* {architecture.name}: {architecture.remarks}\n\n      {architecture.error} ...\n"
        for architecture in ARCHITECTURES
        if architecture.error
    ]
    measured = json.loads(MEASURED.read_text())
    columns = list(next(iter(measured.values())))
    return _TEXT.format(
        hidden=HIDDEN,
        words="\n".join(f"| `{word}` | {_WORDS[word][0]} | {_WORDS[word][1]} |" for word in WORDS),
        columns=" | ".join(columns),
        rules=" --- |" * len(columns),
        swapped="\n".join(f"| {name} | {' | '.join(cells.values())} |" for name, cells in measured.items()),
        transformers=transformers.__version__,
        rows="\n".join(row(architecture) for architecture in recorded),
        refused="\n".join(refused),
    )


if __name__ == "__main__":
    DOCUMENT.write_text(document())
