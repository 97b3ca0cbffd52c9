"""NxD's overrides of transformers' functions."""
