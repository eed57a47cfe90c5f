"""Caches of keys and values that attention reads as they are stored."""

from qtensor.caches.kv_cache import KVCache, global_value

__all__ = ["KVCache", "global_value"]
