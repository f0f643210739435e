"""Builds a model one unit at a time: `zk.build`."""
