"""Options of adapters: NxD's `LoraConfig`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from ...unknown_keywords import names_the_nearest

__all__ = ["LoraConfig"]

# Options of PEFT's config that change an adapter in a way that is not possible here, and their values without effect.
# (PEFT sets `fan_in_fan_out` by the class of the layer: it is True in files of GPT-2, and changes nothing.)
_PEFT_ONLY: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "use_qalora": (False,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "exclude_modules": (None, []),
    "trainable_token_indices": (None, []),
    "lora_bias": (False,),
}


@dataclass
class LoraConfig:
    """Options of adapters.

    Attributes:
        lora_rank: r, the number of rows of A.
        target_modules: names, or ends of names, of the layers that get adapters; or a regular expression that matches
            whole names. None: the query and value projections of a known Hugging Face architecture.
        lora_alpha: the adapter is scaled by lora_alpha / r, or with `use_rslora` by lora_alpha / sqrt(r)
            (arXiv:2312.03732).
        lora_dropout: probability of dropout on the adapter's input.
        bias: biases that are trained: "none", "all", or "lora_only" (those of layers with adapters).
        init_lora_weights: A is drawn by Kaiming's uniform distribution ("default"), or is Gaussian with standard
            deviation 1 / r ("gaussian"). B is zero.
        modules_to_save: substrings of parameter names; these parameters are trained and saved too.
        lora_verbose: print the number of trained parameters, on rank 0.
        load_lora_from_ckpt: load the adapters of `lora_save_dir`/`lora_load_tag` when the model is made.
        lora_save_dir: folder of `save_lora`. When adapters are loaded from it, `target_modules` may be left out.
        lora_load_tag: folder in `lora_save_dir`; None: that folder itself, or the newest folder in it with adapters.
        enable_lora: False: the model gets no adapters.
        merge_lora, save_lora_base, save_lora_config_adapter, merge_sharded_lora: without effect: files have whole
            adapters and their config; `save_checkpoint` saves the base model too, and `merge_lora()` merges.
    """

    lora_rank: int = 16
    target_modules: list[str] | str | None = None
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    bias: Literal["none", "all", "lora_only"] = "none"
    use_rslora: bool = False
    init_lora_weights: Literal["default", "gaussian"] = "default"
    modules_to_save: list[str] | None = None
    lora_verbose: bool = False
    load_lora_from_ckpt: bool = False
    lora_load_tag: str | None = None
    lora_save_dir: str = "lora_adapter"
    merge_lora: bool = False
    save_lora_base: bool = False
    save_lora_config_adapter: bool = True
    merge_sharded_lora: bool = True
    enable_lora: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.lora_rank, int) or self.lora_rank < 1:
            raise ValueError(f"LoraConfig: lora_rank must be an integer of at least 1, got {self.lora_rank!r}")
        if not 0.0 <= self.lora_dropout < 1.0:
            raise ValueError(f"LoraConfig: lora_dropout must be in [0, 1), got {self.lora_dropout!r}")
        possible = {"bias": ("none", "all", "lora_only"), "init_lora_weights": ("default", "gaussian")}
        for option, values in possible.items():
            if getattr(self, option) not in values:
                raise ValueError(f"LoraConfig: {option} is one of {', '.join(values)}, got {getattr(self, option)!r}")

    @property
    def scaling(self) -> float:
        """The factor of the adapter's output."""
        return self.lora_alpha / (math.sqrt(self.lora_rank) if self.use_rslora else self.lora_rank)

    @classmethod
    def of(cls, config: Any) -> LoraConfig:
        """Returns the config itself, or the one that equals PEFT's `LoraConfig`, as an object or as its JSON dict.

        Raises:
            TypeError: it is neither.
            ValueError: PEFT's has an option that is not possible here.
        """
        if isinstance(config, cls):
            return config
        options = config if isinstance(config, dict) else getattr(config, "__dict__", {})
        if "r" not in options or "lora_alpha" not in options:
            raise TypeError(f"adapters need a LoraConfig, or PEFT's LoraConfig, got {type(config).__name__}")
        for option, neutral in _PEFT_ONLY.items():
            if options.get(option, neutral[0]) not in neutral:
                raise ValueError(
                    f"{option}={options[option]!r} of PEFT's LoraConfig is not possible here: leave it out"
                )
        initial = options.get("init_lora_weights", True)
        if initial not in (True, "default", "gaussian"):
            raise ValueError(
                f"init_lora_weights={initial!r} of PEFT's LoraConfig is not possible here: pass True or 'gaussian'"
            )
        target = options.get("target_modules")
        return cls(
            lora_rank=options["r"],
            target_modules=target if isinstance(target, str) or target is None else sorted(target),
            lora_alpha=options["lora_alpha"],
            lora_dropout=options.get("lora_dropout", 0.0),
            bias=options.get("bias", "none"),
            use_rslora=bool(options.get("use_rslora")),
            init_lora_weights="gaussian" if initial == "gaussian" else "default",
            modules_to_save=options.get("modules_to_save"),
        )

    def for_peft(self) -> dict[str, Any]:
        """Returns the content of PEFT's `adapter_config.json`."""
        return {
            "peft_type": "LORA",
            "r": self.lora_rank,
            "target_modules": self.target_modules,
            "lora_alpha": self.lora_alpha,
            "lora_dropout": self.lora_dropout,
            "bias": self.bias,
            "use_rslora": self.use_rslora,
            "init_lora_weights": "gaussian" if self.init_lora_weights == "gaussian" else True,
            "modules_to_save": self.modules_to_save,
            "fan_in_fan_out": False,
            "inference_mode": True,
        }


LoraConfig.__init__ = names_the_nearest(  # type: ignore[method-assign]
    LoraConfig.__init__, "LoraConfig", {"r": "lora_rank, or pass PEFT's LoraConfig as it is"}
)
