"""Small models of timm, torchvision and vit-pytorch."""

from __future__ import annotations

from typing import Any

from tests.shard_tensor.support.model_of import IMAGE, LARGE, SMALL, Dims, Inputs, Model, of, tensor

# --- timm

_VIT = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "img_size": 32}
_SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2)}
_CONVNEXT = {"depths": (1, 1, 1, 1), "dims": (4, 8, 8, 8)}


def timm(name: str, inputs: Inputs = SMALL, /, **options: Any) -> Model:
    return of("timm:create_model", inputs, IMAGE, name, pretrained=False, num_classes=5, **options)


TIMM = {
    "vit_tiny_patch16_224": timm("vit_tiny_patch16_224", **_VIT),
    "deit3_small_patch16_224": timm("deit3_small_patch16_224", **_VIT),
    "beit_base_patch16_224": timm("beit_base_patch16_224", **_VIT),
    "swin_tiny_patch4_window7_224": timm("swin_tiny_patch4_window7_224", **_SWIN),
    "swinv2_tiny_window8_256": timm("swinv2_tiny_window8_256", **_SWIN),
    "convnext_atto": timm("convnext_atto", **_CONVNEXT),
    "convnextv2_atto": timm("convnextv2_atto", **_CONVNEXT),
    "resnet18": timm("resnet18", layers=(1, 1, 1, 1), channels=(4, 8, 8, 8)),
    "densenet121": timm("densenet121", growth_rate=4, block_config=(2, 2)),
    "pvt_v2_b0": timm("pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 8, 16, 16), num_heads=(1, 2, 2, 2)),
    "xcit_nano_12_p16_224": timm("xcit_nano_12_p16_224", cls_attn_layers=1, **_VIT | {"depth": 1}),
    "cait_xxs24_224": timm("cait_xxs24_224", **_VIT | {"depth": 1}),
    "coatnet_0_rw_224": timm("coatnet_0_rw_224", LARGE, img_size=64, depths=(1, 1, 1, 1), embed_dim=(32, 32, 32, 32)),
    "MlpMixer": of(
        "timm.models.mlp_mixer:MlpMixer",
        SMALL,
        IMAGE,
        num_classes=5,
        img_size=32,
        patch_size=8,
        num_blocks=2,
        embed_dim=16,
    ),
    "MetaFormer": of("timm.models.metaformer:MetaFormer", SMALL, IMAGE, num_classes=5, depths=(1, 1), dims=(8, 8)),
    "FocalNet": of("timm.models.focalnet:FocalNet", SMALL, IMAGE, num_classes=5, depths=(1, 1), embed_dim=8),
}

# --- torchvision

TORCHVISION = {
    "SwinTransformer": of(
        "torchvision.models.swin_transformer:SwinTransformer",
        SMALL,
        IMAGE,
        [4, 4],
        8,
        [2, 2],
        [1, 2],
        [4, 4],
        stochastic_depth_prob=0.0,
        num_classes=5,
    ),
    "SwinTransformer3d": of(
        "torchvision.models.video.swin_transformer:SwinTransformer3d",
        tensor(1, 3, 8, 16, 16),
        {"0": (3, 4)},
        [2, 2, 2],
        8,
        [2],
        [1],
        [2, 4, 4],
        stochastic_depth_prob=0.0,
        num_classes=5,
    ),
    "VisionTransformer": of("torchvision.models:VisionTransformer", SMALL, IMAGE, 32, 8, 2, 2, 16, 32, num_classes=5),
    "MaxVit": of("torchvision.models:MaxVit", SMALL, IMAGE, (32, 32), 8, 4, [8, 16], [1, 1], 8, 0.0, num_classes=5),
    "squeezenet1_1": of("torchvision.models:squeezenet1_1", SMALL, IMAGE, num_classes=5),
}

# --- vit-pytorch

_LUCID = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 32}


def lucid(path: str, inputs: Inputs = SMALL, sharded: Dims = IMAGE, /, **options: Any) -> Model:
    return of(f"vit_pytorch.{path}", inputs, sharded, num_classes=5, **options)


VIT_PYTORCH = {
    "ViT": of("vit_pytorch.vit:ViT", SMALL, IMAGE, dim_head=8, **_LUCID),
    "SimpleViT": of("vit_pytorch.simple_vit:SimpleViT", SMALL, IMAGE, dim_head=8, **_LUCID),
    "SimpleViT with FFT": of(
        "vit_pytorch.simple_vit_with_fft:SimpleViT", SMALL, IMAGE, freq_patch_size=8, dim_head=8, **_LUCID
    ),
    "RvT": of("vit_pytorch.rvt:RvT", SMALL, IMAGE, dim_head=8, **_LUCID),
    "ViT of 3-D": lucid(
        "vit_3d:ViT",
        tensor(2, 1, 8, 16, 16),
        {"0": (3, 4)},
        image_size=16,
        image_patch_size=4,
        frames=8,
        frame_patch_size=4,
        dim=16,
        depth=1,
        heads=2,
        mlp_dim=16,
        channels=1,
        dim_head=8,
    ),
    "ViViT": lucid(
        "vivit:ViViT",
        tensor(2, 3, 4, 16, 16),
        {"0": (3, 2)},
        image_size=16,
        frames=4,
        image_patch_size=4,
        frame_patch_size=2,
        dim=16,
        spatial_depth=1,
        temporal_depth=1,
        heads=2,
        mlp_dim=16,
        dim_head=8,
    ),
    "CCT": lucid(
        "cct:CCT",
        img_size=32,
        embedding_dim=16,
        n_conv_layers=1,
        kernel_size=3,
        stride=2,
        padding=1,
        pooling_kernel_size=3,
        pooling_stride=2,
        pooling_padding=1,
        num_layers=1,
        num_heads=2,
        mlp_ratio=1.0,
        positional_embedding="learnable",
    ),
    "CvT": lucid(
        "cvt:CvT",
        s1_emb_dim=8,
        s1_heads=1,
        s1_depth=1,
        s2_emb_dim=8,
        s2_heads=1,
        s2_depth=1,
        s3_emb_dim=8,
        s3_heads=1,
        s3_depth=1,
    ),
    "CrossFormer": lucid(
        "crossformer:CrossFormer",
        LARGE,
        dim=(32, 32, 32, 32),
        depth=(1, 1, 1, 1),
        global_window_size=(4, 2, 2, 1),
        local_window_size=2,
    ),
    "MobileViT": lucid(
        "mobile_vit:MobileViT",
        LARGE,
        image_size=(64, 64),
        dims=[8, 8, 8],
        channels=[4, 4, 8, 8, 8, 8, 8, 8, 8, 8, 8],
        depths=(1, 1, 1),
    ),
    "XCiT": lucid(
        "xcit:XCiT",
        image_size=32,
        patch_size=8,
        dim=16,
        depth=1,
        cls_depth=1,
        heads=2,
        mlp_dim=16,
        dim_head=8,
        local_patch_kernel_size=3,
    ),
    "T2TViT": lucid(
        "t2t:T2TViT", dim=16, image_size=32, depth=1, heads=2, mlp_dim=16, t2t_layers=((7, 4), (3, 2)), dim_head=8
    ),
    "NesT": lucid("nest:NesT", image_size=32, patch_size=4, dim=8, heads=1, num_hierarchies=2, block_repeats=(1, 1)),
    "MaxViT": lucid("max_vit:MaxViT", dim_conv_stem=8, dim=8, dim_head=8, depth=(1, 1), window_size=4),
}
