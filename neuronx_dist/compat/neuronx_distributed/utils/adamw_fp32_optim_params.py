"""NxD's import path of AdamW with state in fp32."""

from ....optimizer import AdamW_FP32OptimParams

__all__ = ["AdamW_FP32OptimParams"]
