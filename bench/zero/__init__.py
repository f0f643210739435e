"""Whole training steps of a GPT on several ranks: zk.shard against what people use now."""
