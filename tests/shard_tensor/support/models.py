"""Small models of packages that others wrote, by package; those of pictures are in `picture_models.py`."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from tests.shard_tensor.support.model_of import IMAGE, SMALL, Dims, Inputs, Model, of, tensor
from tests.shard_tensor.support.picture_models import TIMM, TORCHVISION, VIT_PYTORCH

# --- x-transformers


def _x_transformer(kind: str, layers: str, heads: dict[str, Any], **options: Any) -> nn.Module:
    package = importlib.import_module("x_transformers")
    blocks = getattr(package, layers)(dim=16, depth=2, heads=2, attn_dim_head=8, **options)
    made: nn.Module = getattr(package, kind)(attn_layers=blocks, **heads)
    return made


def x_transformer(kind: str, layers: str, inputs: Inputs, dims: Dims, heads: dict[str, Any], **options: Any) -> Model:
    return Model(lambda: _x_transformer(kind, layers, heads, **options), inputs, dims)


def tokens(length: int = 12, name: str = "0") -> Inputs:
    return lambda: {name: torch.randint(3, 40, (2, length))}


SEQUENCE: Dims = {"0": (1, 0)}
_TEXT = {"num_tokens": 40, "max_seq_len": 16}

X_TRANSFORMERS = {
    "Decoder": x_transformer("TransformerWrapper", "Decoder", tokens(), SEQUENCE, _TEXT),
    "Decoder with RoPE, SwiGLU, RMSNorm": x_transformer(
        "TransformerWrapper",
        "Decoder",
        tokens(),
        SEQUENCE,
        _TEXT,
        rotary_pos_emb=True,
        ff_swish=True,
        ff_glu=True,
        use_rmsnorm=True,
    ),
    "Decoder with ALiBi": x_transformer(
        "TransformerWrapper", "Decoder", tokens(), SEQUENCE, _TEXT, alibi_pos_bias=True, alibi_num_heads=2
    ),
    "ViTransformerWrapper": x_transformer(
        "ViTransformerWrapper", "Encoder", SMALL, IMAGE, {"image_size": 32, "patch_size": 8, "num_classes": 5}
    ),
    "ContinuousTransformerWrapper": x_transformer(
        "ContinuousTransformerWrapper",
        "Encoder",
        tensor(2, 12, 6),
        SEQUENCE,
        {"dim_in": 6, "dim_out": 4, "max_seq_len": 16},
    ),
}

# --- MONAI

_PLANE = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
_VOLUME = _PLANE | {"spatial_dims": 3}


def monai(name: str, *size: int, **options: Any) -> Model:
    return of(f"monai.networks.nets:{name}", tensor(2, 1, *size), IMAGE, **options)


MONAI = {
    "UNet of 3-D": monai("UNet", 16, 16, 16, channels=(4, 8, 8), strides=(2, 2), num_res_units=1, **_VOLUME),
    "UNet of 2-D": monai("UNet", 32, 32, channels=(4, 8, 8), strides=(2, 2), **_PLANE),
    "SegResNet": monai("SegResNet", 16, 16, 16, init_filters=8, blocks_down=(1, 1), blocks_up=(1,), **_VOLUME),
    "DynUNet": monai(
        "DynUNet",
        16,
        16,
        16,
        kernel_size=[3, 3, 3],
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=[4, 8, 8],
        **_VOLUME,
    ),
    "UNETR": monai(
        "UNETR",
        16,
        16,
        16,
        img_size=(16, 16, 16),
        feature_size=4,
        hidden_size=16,
        mlp_dim=16,
        num_heads=2,
        in_channels=1,
        out_channels=2,
    ),
    "AttentionUnet": monai("AttentionUnet", 16, 16, 16, channels=(4, 8), strides=(2,), **_VOLUME),
}

# --- diffusers

_DIFFUSED: dict[str, Any] = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}


def noisy(shape: tuple[int, ...] = (2, 3, 16, 16), **others: torch.Tensor) -> Inputs:
    return lambda: {"sample": torch.randn(shape), "timestep": torch.tensor([3.0, 7.0]), **others}


DIFFUSERS = {
    "UNet2DModel": of(
        "diffusers:UNet2DModel",
        noisy(),
        {"sample": (2, 3)},
        output="sample",
        sample_size=16,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        **_DIFFUSED,
    ),
    "UNet2DConditionModel": of(
        "diffusers:UNet2DConditionModel",
        noisy(encoder_hidden_states=torch.linspace(-1, 1, 80).view(2, 5, 8)),
        {"sample": (2, 3)},
        output="sample",
        sample_size=16,
        in_channels=3,
        out_channels=3,
        cross_attention_dim=8,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        **_DIFFUSED,
    ),
    "AutoencoderKL": of(
        "diffusers:AutoencoderKL",
        tensor(2, 3, 16, 16, name="sample"),
        {"sample": (2, 3)},
        output="sample",
        latent_channels=2,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        **_DIFFUSED,
    ),
    "DiTTransformer2DModel": of(
        "diffusers:DiTTransformer2DModel",
        lambda: {
            "hidden_states": torch.randn(2, 3, 16, 16),
            "timestep": torch.tensor([3, 7]),
            "class_labels": torch.tensor([1, 2]),
        },
        {"hidden_states": (2, 3)},
        output="sample",
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=3,
        num_layers=1,
        sample_size=16,
        norm_num_groups=1,
        num_embeds_ada_norm=10,
    ),
}

# --- neuraloperator

_FNO = {"in_channels": 2, "out_channels": 1, "hidden_channels": 4, "n_layers": 2}


def _operator(name: str, **options: Any) -> nn.Module:
    importlib.import_module("tensorly").set_backend("pytorch")
    made: nn.Module = getattr(importlib.import_module("neuralop.models"), name)(**options)
    return made


def operator(name: str, *size: int, dims: tuple[int, int] = (2, 3), **options: Any) -> Model:
    return Model(lambda: _operator(name, **options), tensor(2, 2, *size), {"0": dims})


NEURALOP = {
    "FNO of 1-D": operator("FNO", 32, dims=(2, 0), n_modes=(8,), **_FNO),
    "FNO of 2-D": operator("FNO", 16, 16, n_modes=(6, 6), **_FNO),
    "FNO of 3-D": operator("FNO", 8, 8, 8, n_modes=(4, 4, 4), **_FNO),
    "TFNO": operator("TFNO", 16, 16, n_modes=(6, 6), factorization="Tucker", rank=0.5, **_FNO),
    "UNO": operator(
        "UNO",
        16,
        16,
        in_channels=2,
        out_channels=1,
        hidden_channels=4,
        n_layers=3,
        uno_out_channels=[4, 4, 4],
        uno_n_modes=[[6, 6], [4, 4], [6, 6]],
        uno_scalings=[[1, 1], [0.5, 0.5], [2, 2]],
        channel_mlp_skip="linear",
    ),
}

# --- PyTorch Geometric


def graph() -> dict[str, torch.Tensor]:
    source = torch.arange(14).repeat(3)
    target = (source + torch.tensor([1, 3, 6]).repeat_interleave(14)) % 14
    return {"0": torch.randn(14, 6), "1": torch.stack([source, target])}


def geometric(name: str, **options: Any) -> Model:
    return of(
        f"torch_geometric.nn:{name}",
        graph,
        {"0": (0, 1)},
        in_channels=6,
        hidden_channels=8,
        num_layers=2,
        out_channels=4,
        **options,
    )


GEOMETRIC = {
    "GCN": geometric("GCN"),
    "GraphSAGE": geometric("GraphSAGE"),
    "GAT": geometric("GAT"),
    "GIN": geometric("GIN"),
    "PNA": geometric("PNA", aggregators=["mean", "max", "std"], scalers=["identity"], deg=torch.tensor([0, 0, 0, 14])),
}

# --- transformers

_LANGUAGE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
_PIXELS = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
IDS: Dims = {"input_ids": (1, 0)}
PICTURE: Dims = {"pixel_values": (2, 3)}


def _hugging(config: str, model: str, **options: Any) -> nn.Module:
    package = importlib.import_module("transformers")
    made: nn.Module = getattr(package, model)(getattr(package, config)(**options))
    return made


def text(config: str, model: str, **options: Any) -> Model:
    return Model(lambda: _hugging(config, model, **options), tokens(name="input_ids"), IDS, "logits")


def vision(config: str, model: str, **options: Any) -> Model:
    pixels = tensor(2, 3, 32, 32, name="pixel_values")
    return Model(lambda: _hugging(config, model, **options), pixels, PICTURE, "logits")


_ROPE = _LANGUAGE | {"num_key_value_heads": 2}

TRANSFORMERS = {
    "LlamaForCausalLM": text("LlamaConfig", "LlamaForCausalLM", **_ROPE),
    "MistralForCausalLM": text("MistralConfig", "MistralForCausalLM", sliding_window=4, **_ROPE),
    "Qwen3ForCausalLM": text("Qwen3Config", "Qwen3ForCausalLM", head_dim=8, **_ROPE),
    "Gemma2ForCausalLM": text("Gemma2Config", "Gemma2ForCausalLM", head_dim=8, **_ROPE),
    "MixtralForCausalLM": text(
        "MixtralConfig", "MixtralForCausalLM", num_local_experts=4, experts_implementation="eager", **_ROPE
    ),
    "GPT2LMHeadModel": text(
        "GPT2Config",
        "GPT2LMHeadModel",
        vocab_size=40,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "BertForMaskedLM": text(
        "BertConfig", "BertForMaskedLM", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **_LANGUAGE
    ),
    "MambaForCausalLM": text(
        "MambaConfig", "MambaForCausalLM", vocab_size=40, hidden_size=8, state_size=4, num_hidden_layers=1
    ),
    "T5ForConditionalGeneration": Model(
        lambda: _hugging(
            "T5Config",
            "T5ForConditionalGeneration",
            vocab_size=40,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
        ),
        lambda: {name: torch.randint(3, 40, (2, n)) for name, n in (("input_ids", 12), ("decoder_input_ids", 7))},
        {"input_ids": (1, 0), "decoder_input_ids": (1, 0)},
        "logits",
    ),
    "PerceiverModel": Model(
        lambda: _hugging(
            "PerceiverConfig",
            "PerceiverModel",
            num_latents=4,
            d_latents=16,
            d_model=8,
            num_blocks=1,
            num_self_attends_per_block=2,
            num_self_attention_heads=2,
            num_cross_attention_heads=2,
            attention_probs_dropout_prob=0.0,
        ),
        tensor(2, 12, 8, name="inputs"),
        {"inputs": (1, 0)},
        "last_hidden_state",
    ),
    "ViTForImageClassification": vision("ViTConfig", "ViTForImageClassification", **_PIXELS),
    "SwinForImageClassification": vision(
        "SwinConfig",
        "SwinForImageClassification",
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[1, 2],
        window_size=4,
        drop_path_rate=0.0,
    ),
    "SegformerForSemanticSegmentation": vision(
        "SegformerConfig",
        "SegformerForSemanticSegmentation",
        hidden_sizes=[8, 8, 8, 8],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=8,
        drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
    ),
    "ConvNextForImageClassification": vision(
        "ConvNextConfig", "ConvNextForImageClassification", hidden_sizes=[4, 8, 8, 8], depths=[1, 1, 1, 1]
    ),
    "DPTForSemanticSegmentation": vision(
        "DPTConfig",
        "DPTForSemanticSegmentation",
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        is_hybrid=False,
        semantic_classifier_dropout=0.0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **_PIXELS | {"num_hidden_layers": 4},
    ),
}

PACKAGES: dict[str, dict[str, Model]] = {
    "transformers": TRANSFORMERS,
    "timm": TIMM,
    "torchvision": TORCHVISION,
    "vit_pytorch": VIT_PYTORCH,
    "x_transformers": X_TRANSFORMERS,
    "monai": MONAI,
    "diffusers": DIFFUSERS,
    "neuralop": NEURALOP,
    "torch_geometric": GEOMETRIC,
}
