"""The reference: the arithmetic of every format in plain torch, in float32 (docs/numerics.md).

All other backends produce the same bytes as these functions.

The functions take real tensors only. They run inside the bodies of the library's ops and are never
traced.
"""
