"""Caches of keys and values that attention reads as they are stored."""

from qtensor.caches.global_value import global_value
from qtensor.caches.kv_cache import KVCache

__all__ = ["KVCache", "global_value"]
