"""Finds out why ranks wait for each other; plugs into zerokern.comm as its observer."""
