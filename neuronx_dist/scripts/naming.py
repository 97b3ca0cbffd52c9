"""Rules for names and divided dims of parameters in NeuronX Distributed's files, which converters may change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..checkpoint.nxd.parameter_layout import HeadOrder, by_rank

__all__ = ["NamingRules", "StateDict"]

StateDict = dict[str, torch.Tensor]


class NamingRules:
    """Names of Hugging Face's models and NxD's, and which dim of a parameter is divided over tp.

    Attributes:
        embedding_partition_dim, qkv_partition_dim, gate_up_proj_partition_dim, down_proj_partition_dim,
            o_proj_partition_dim: the dim that is divided over tp.
        attribute_map: Hugging Face's names of config values -> the model's, where they differ; dots lead into dicts.
        layer_name_pattern: matches the name of a layer, with its number, at the beginning of a parameter's.
    """

    embedding_partition_dim = 0
    qkv_partition_dim = 0
    gate_up_proj_partition_dim = 0
    down_proj_partition_dim = 1
    o_proj_partition_dim = 1
    attribute_map: Mapping[str, str] = {}
    layer_name = "layers"
    layer_name_pattern = r"^(model\.layers\.\d+)"

    def get_partition_dim(self, name: str) -> int:
        """The dim of a parameter that is divided over tp.

        Raises:
            AssertionError: the name does not tell.
        """
        for fits, dim in (
            (any(part in name for part in ("embed_tokens", "lm_head")), self.embedding_partition_dim),
            (self.is_qkv_weight(name), self.qkv_partition_dim),
            (any(part in name for part in ("gate_proj", "up_proj")), self.gate_up_proj_partition_dim),
            ("down_proj" in name, self.down_proj_partition_dim),
            ("o_proj" in name, self.o_proj_partition_dim),
        ):
            if fits:
                return dim
        raise AssertionError(f"the sharded dim of {name} is unknown: override get_partition_dim")

    def is_qkv_weight(self, name: str) -> bool:
        """Returns whether a parameter is a projection of attention's inputs."""
        return any(part in name for part in ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value"))

    def get_hf_to_nxd_model_keys(self, qkv_linear: bool = True, is_gqa: bool = True) -> tuple[dict[str, str], ...]:
        """The last two parts of names: Hugging Face's -> NxD's, and NxD's -> Hugging Face's."""
        to_nxd = {
            f"{letter}_proj.weight": f"qkv_proj.weight_{letter}"
            if qkv_linear
            else f"{letter}_proj.weight"
            if is_gqa
            else "qkv_proj.weight"
            for letter in "qkv"
        }
        return to_nxd, {nxd: hf for hf, nxd in to_nxd.items()}

    def get_weight_key(
        self, keys_hf_to_nxd: Mapping[str, str], keys_nxd_to_hf: Mapping[str, str], name: str, hf_to_nxd: bool
    ) -> str:
        """The name of a projection in the other format; any other name unchanged."""
        *path, module, entry = name.split(".")
        keys = keys_hf_to_nxd if hf_to_nxd else keys_nxd_to_hf
        other = keys.get(f"{module}.{entry.replace('bias', 'weight')}")
        if other is None or not self.is_qkv_weight(name):
            return name
        return ".".join([*path, other.replace("weight", "bias") if "bias" in entry else other])

    def get_fused_qkv_key(self) -> str:
        """The last two parts of the name of the projection that `--fuse_qkv` makes."""
        return "qkv_proj.weight_qkv"

    def coalesce_qkv(self, state_dict: StateDict, config: Mapping[str, Any], tp_degree: int) -> StateDict:
        """Fuses three projections to `qkv_proj.weight`: rank by rank, its rows of each."""
        for name in [key for key in state_dict if key.endswith("q_proj.weight")]:
            parts = [state_dict.pop(name.replace("q_proj", f"{letter}_proj")) for letter in "qkv"]
            state_dict[name.replace("q_proj", "qkv_proj")] = by_rank(parts, tp_degree)
        return state_dict

    # --- the config ---------------------------------------------------------------------------------------------------

    def _get_config_value(self, config: Mapping[str, Any], name: str, default: Any = None) -> Any:
        """A config value by Hugging Face's name, which `attribute_map` translates."""
        value: Any = config
        for key in self.attribute_map.get(name, name).split("."):
            if not isinstance(value, Mapping) or key not in value:
                return config.get(name, default)
            value = value[key]
        return value

    def _heads(self, args: Any, config: Mapping[str, Any]) -> HeadOrder:
        queries = self._get_config_value(config, "num_attention_heads")
        kv_heads = self._get_config_value(config, "num_key_value_heads", queries)
        return HeadOrder(kv_heads, args.kv_size_multiplier, args.hw_backend == "trn2")

    def _is_gqa(self, config: Mapping[str, Any]) -> bool:
        queries = self._get_config_value(config, "num_attention_heads")
        return bool(self._get_config_value(config, "num_key_value_heads", queries) != queries)

    def _query_rows(self, config: Mapping[str, Any]) -> int:
        """Number of rows of the whole query projection."""
        heads, hidden = (self._get_config_value(config, name) for name in ("num_attention_heads", "hidden_size"))
        return int(heads * (self._get_config_value(config, "head_dim") or hidden // heads))

    def _divided_dim(self, name: str, value: torch.Tensor) -> int | None:
        """The dim that is divided over tp; None for the bias of a layer whose weight is divided by columns."""
        try:
            dim = self.get_partition_dim(name)
        except AssertionError:
            return None
        return dim if dim < value.dim() else None
