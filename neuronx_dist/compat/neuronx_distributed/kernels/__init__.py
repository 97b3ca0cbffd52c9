"""NxD's attention kernels.

flash_attn.py             by torch's attention
ring_attention_kernel.py  over context-parallel ranks, by `neuronx_dist.attention`
"""

from .flash_attn import nki_flash_attn_func
from .ring_attention_kernel import nki_ring_attn_func

__all__ = ["nki_flash_attn_func", "nki_ring_attn_func"]
