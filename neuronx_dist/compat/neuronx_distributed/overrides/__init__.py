"""NxD's overrides of transformers' functions.

transformer_overrides.py  rotary embeddings
"""
