"""Tensors that live on many ranks, in shards of any sizes."""
