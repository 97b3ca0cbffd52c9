"""Low-rank adapters (LoRA, Hu et al., arXiv:2106.09685) on plain and on parallel layers, by NxD's names.

config.py    `LoraConfig`, also made of PEFT's
model.py     `LoraModel`, `get_lora_model`: which layers get adapters, what is trained, merging
layer.py     adapters on plain layers; tp_layer.py: on parallel ones
files.py     adapters in PEFT's format
"""

from .config import LoraConfig
from .model import LoraModel, get_lora_model

__all__ = ["LoraConfig", "LoraModel", "get_lora_model"]
