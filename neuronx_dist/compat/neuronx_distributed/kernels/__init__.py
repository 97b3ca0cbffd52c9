"""NxD's attention kernels, by torch's attention and by the ring of this package."""

from .flash_attn import nki_flash_attn_func
from .ring_attention_kernel import nki_ring_attn_func

__all__ = ["nki_flash_attn_func", "nki_ring_attn_func"]
