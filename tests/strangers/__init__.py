"""Code of others around our models: right, with the values of one process, or refused by name."""
