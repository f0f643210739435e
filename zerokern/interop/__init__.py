"""Reads checkpoints and weights of other libraries, and writes weights for them."""
