"""What the demo and `bench.quality` train: a small GPT on Python's own sources, and the optimizers that compete."""
