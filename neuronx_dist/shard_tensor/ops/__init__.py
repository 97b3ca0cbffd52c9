"""Operators on shards, one family a file: plain local tensors, the sizes of all shards, and an axis."""
