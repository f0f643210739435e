"""Whole training steps with parameters in host memory or on disk: zk.shard(tier=) against what people use now."""
