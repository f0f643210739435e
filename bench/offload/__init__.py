"""Whole training steps with the optimizer's state in host memory: zk.AdamW(tier="cpu") against what people use now."""
