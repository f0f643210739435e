"""Finds out why ranks wait for each other, and plays ranks in threads; plugs into zerokern.comm as its observer."""
