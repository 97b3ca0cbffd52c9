"""A small Mixtral and a small DBRX in the style of NxD's examples: attention of `modeling_llama.py`, and experts."""

import torch
from modeling_llama import Attention, Config, LlamaForCausalLM, RMSNorm, init_normal
from neuronx_distributed.modules.moe.expert_mlps import ExpertMLPs
from neuronx_distributed.modules.moe.loss_function import load_balancing_loss_func
from neuronx_distributed.modules.moe.model import MoE
from neuronx_distributed.modules.moe.routing import RouterTopK
from neuronx_distributed.parallel_layers.layer_norm import LayerNorm
from neuronx_distributed.parallel_layers.parallel_state import get_data_parallel_size
from torch import nn


class MixtralConfig(Config):
    num_local_experts, num_experts_per_tok, capacity_factor = 4, 2, None
    output_router_logits, router_aux_loss_coef, token_shuffle_group_size = True, 0.02, 1


class DbrxConfig(MixtralConfig):
    num_local_experts, num_experts_per_tok, capacity_factor = 8, 3, 0.0
    router_aux_loss_coef, token_shuffle_group_size, clip_qkv = 0.05, 2, 8.0


def initialize_moe_layer(config):
    router = RouterTopK(
        num_experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        hidden_size=config.hidden_size,
        sequence_parallel_enabled=config.sequence_parallel_enabled,
        sequence_dimension=0,
    )
    init_normal(router.linear_router.weight)
    expert_mlps = ExpertMLPs(
        num_experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        hidden_act="silu",
        glu_mlp=True,
        capacity_factor=config.capacity_factor,
        normalize_top_k_affinities=True,
        init_method=init_normal,
        output_layer_init_method=init_normal,
    )
    return MoE(
        router=router,
        expert_mlps=expert_mlps,
        sequence_parallel_enabled=config.sequence_parallel_enabled,
        sequence_dimension=0,
        return_router_logits=config.output_router_logits,
        token_shuffle_group_size=min(config.token_shuffle_group_size, get_data_parallel_size()),
        token_shuffle_seed=1234,
    )


class MixtralDecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn, self.mlp = Attention(config), initialize_moe_layer(config)
        self.input_layernorm, self.post_attention_layernorm = self.norm(config), self.norm(config)

    def norm(self, config):
        return RMSNorm(config.hidden_size, config.sequence_parallel_enabled)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out, router_logits = self.mlp(self.post_attention_layernorm(x))
        return x + out, router_logits


class DbrxDecoderLayer(MixtralDecoderLayer):
    def norm(self, config):
        return LayerNorm(config.hidden_size, bias=False, sequence_parallel_enabled=config.sequence_parallel_enabled)


class MixtralForCausalLM(LlamaForCausalLM):
    layer_class = MixtralDecoderLayer

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(self.layer_class(config) for _ in range(config.num_hidden_layers))

    def forward(self, input_ids, attention_mask, labels):
        self.router_logits = []
        loss, logits = super().forward(input_ids, attention_mask, labels)
        auxiliary = load_balancing_loss_func(
            torch.cat(self.router_logits), self.config.num_local_experts, self.config.num_experts_per_tok
        )
        return loss + self.config.router_aux_loss_coef * auxiliary, logits

    def run_layer(self, layer, x, cos, sin):
        x, router_logits = layer(x, cos, sin)
        self.router_logits.append(router_logits)
        return x


class DbrxForCausalLM(MixtralForCausalLM):
    layer_class = DbrxDecoderLayer
