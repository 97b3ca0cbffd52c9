"""A small Llama in the style of NxD's examples: parallel layers, rotary embeddings, sequence first with SP."""

import math
from functools import partial

import neuronx_distributed.parallel_layers.utils as neuronx_dist_utils
import torch
from neuronx_distributed.kernels.flash_attn import nki_flash_attn_func
from neuronx_distributed.kernels.ring_attention_kernel import nki_ring_attn_func
from neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from neuronx_distributed.overrides.transformer_overrides import apply_rotary_pos_emb
from neuronx_distributed.parallel_layers import mappings
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy
from neuronx_distributed.parallel_layers.parallel_state import (
    get_context_model_parallel_rank,
    get_context_model_parallel_size,
    get_context_model_parallel_src_tgt_pairs,
    get_tensor_model_parallel_size,
)
from torch import nn
from torch.nn import functional as F
from torch_xla.utils.checkpoint import checkpoint


class Config:
    vocab_size, hidden_size, intermediate_size, num_hidden_layers = 256, 32, 48, 4
    num_attention_heads, num_key_value_heads, kv_shared_group_size = 4, 2, 1
    sequence_parallel_enabled = qkv_linear = use_flash_attention = selective_checkpoint_enabled = False
    fuse_qkv = True

    def __init__(self, **options):
        self.__dict__.update(options)


init_normal = partial(nn.init.normal_, mean=0.0, std=0.1)


class RMSNorm(nn.Module):
    def __init__(self, size, sequence_parallel_enabled):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.weight.sequence_parallel_enabled = sequence_parallel_enabled

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class CoreAttention(nn.Module):
    def forward(self, q, k, v):
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.shape[-1])
        mask = torch.triu(torch.ones((1, 1, q.shape[2], k.shape[2]), device="xla"), diagonal=1).bool()
        return torch.matmul(F.softmax(scores.masked_fill_(mask, -10000.0), dim=-1), v)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        hidden, tp = config.hidden_size, get_tensor_model_parallel_size()
        self.head_dim = hidden // config.num_attention_heads
        shared = dict(bias=False, init_method=init_normal, sequence_parallel_enabled=config.sequence_parallel_enabled)
        kv = config.num_key_value_heads * self.head_dim
        if config.qkv_linear:
            self.qkv_proj = GQAQKVColumnParallelLinear(
                hidden,
                [hidden, kv],
                gather_output=False,
                kv_size_multiplier=config.kv_shared_group_size,
                fuse_qkv=config.fuse_qkv,
                **shared,
            )
        else:
            self.q_proj = ColumnParallelLinear(hidden, hidden, gather_output=False, **shared)
            self.k_proj = ColumnParallelLinear(hidden, kv, gather_output=False, **shared)
            self.v_proj = ColumnParallelLinear(hidden, kv, gather_output=False, **shared)
        self.o_proj = RowParallelLinear(hidden, hidden, input_is_parallel=True, **shared)
        self.heads = neuronx_dist_utils.divide(config.num_attention_heads, tp)
        self.kv_heads = neuronx_dist_utils.divide(config.num_key_value_heads * config.kv_shared_group_size, tp)
        self.core_attn = CoreAttention()

    def forward(self, x, cos, sin):
        q, k, v = self.qkv_proj(x) if self.config.qkv_linear else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        first = self.config.sequence_parallel_enabled  # [s, b, h] with sequence parallelism
        order = (1, 2, 0, 3) if first else (0, 2, 1, 3)
        q = q.view(*q.shape[:2], self.heads, self.head_dim).permute(order)
        k, v = (y.view(*y.shape[:2], self.kv_heads, self.head_dim).permute(order) for y in (k, v))
        q, k = apply_rotary_pos_emb(q, k, cos, sin, None, self.config.use_flash_attention, False)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=1) for y in (k, v))
        if get_context_model_parallel_size() > 1:
            out = nki_ring_attn_func(q, k, v, torch.distributed.get_rank(), get_context_model_parallel_src_tgt_pairs())
        elif self.config.use_flash_attention:
            out = nki_flash_attn_func(q, k, v, transpose_nki_inputs=False)
        elif self.config.selective_checkpoint_enabled:
            out = checkpoint(self.core_attn, q, k, v)
        else:
            out = self.core_attn(q, k, v)
        out = out.permute(2, 0, 1, 3) if first else out.transpose(1, 2)
        return self.o_proj(out.reshape(*out.shape[:2], self.heads * self.head_dim))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        shared = dict(bias=False, init_method=init_normal, sequence_parallel_enabled=config.sequence_parallel_enabled)
        self.gate_up_proj = ColumnParallelLinear(
            config.hidden_size, 2 * config.intermediate_size, stride=2, gather_output=False, **shared
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, input_is_parallel=True, **shared
        )
        self.split_size = config.intermediate_size // get_tensor_model_parallel_size()

    def forward(self, x):
        gate, up = self.gate_up_proj(x).split(self.split_size, dim=2)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.sequence_parallel_enabled)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.sequence_parallel_enabled)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = ParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            init_method=init_normal,
            sequence_parallel_enabled=config.sequence_parallel_enabled,
        )
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.sequence_parallel_enabled)
        self.lm_head = ColumnParallelLinear(
            config.hidden_size, config.vocab_size, bias=False, gather_output=False, init_method=init_normal
        )

    def forward(self, input_ids, attention_mask, labels):
        length = input_ids.shape[1]
        start = get_context_model_parallel_rank() * length
        dim = self.config.hidden_size // self.config.num_attention_heads
        positions = torch.arange(start, start + length, device=input_ids.device).float()
        frequencies = positions[:, None] * 10000.0 ** (-torch.arange(0, dim, 2, device=input_ids.device) / dim)
        angles = torch.cat((frequencies, frequencies), dim=-1)[None]
        cos, sin = angles.cos(), angles.sin()
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = self.run_layer(layer, x, cos, sin)
        x = self.norm(x)
        if self.config.sequence_parallel_enabled:
            x = mappings.gather_from_sequence_parallel_region(x, to_model_parallel=False)
        logits = self.lm_head(x)
        if self.config.sequence_parallel_enabled:
            logits = logits.transpose(0, 1).contiguous()
        if get_context_model_parallel_size() == 1:  # labels of a context-parallel rank are shifted already
            logits, labels = logits[:, :-1].contiguous(), labels[:, 1:].contiguous()
        valid = labels != -100
        losses = parallel_cross_entropy(logits, labels.clamp(min=0)) * valid
        return losses.sum() / input_ids.numel(), logits.detach()

    def run_layer(self, layer, x, cos, sin):
        return layer(x, cos, sin)


def init_weights(module, device):
    """Draws weights after the model was built on meta."""
    if isinstance(module, RMSNorm):
        module.weight.data.fill_(1.0)
    elif isinstance(module, (ParallelEmbedding, RowParallelLinear, ColumnParallelLinear)):
        module.init_weight_cpu()
    elif isinstance(module, GQAQKVColumnParallelLinear):
        module.initialize_weight_biases()
