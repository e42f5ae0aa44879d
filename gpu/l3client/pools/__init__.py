"""The KV tensors of one worker, seen as pages of bytes: one class for MHA and GQA, one for MLA."""

from l3client.pools.base import KVPool
from l3client.pools.mha import MHAPool
from l3client.pools.mla import MLAPool

__all__ = ["KVPool", "MHAPool", "MLAPool"]
