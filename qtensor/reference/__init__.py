"""The oracle: every format's arithmetic in pure torch, float32 at each step (docs/numerics.md).

These functions run on real tensors only, inside the bodies of the library's ops; they never trace.
"""
