"""The public functions around `zk.shard`."""

from zerokern.api.building import build
from zerokern.api.gathering import gathered
from zerokern.api.sharding import no_sync, shard, shards

__all__ = ["build", "gathered", "no_sync", "shard", "shards"]
