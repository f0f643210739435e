"""Tensor, pipeline and expert parallelism beside zk.shard."""
