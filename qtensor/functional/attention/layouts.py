"""Layouts of queries, keys and values, as users pass them and as attention computes on them."""

from __future__ import annotations

from torch import Tensor

from qtensor.core.errors import ArgumentTypeError, DtypeError, check, fail

FORMATS = ("sbhd", "bshd", "thd")
"""Names of layouts, as in Transformer Engine.

s is the sequence, b the batch, h the heads, d the head size, t the tokens of all sequences.
"""

_FLOATING = ("float32", "bfloat16", "float16")


def check_format(label: str, qkv_format: str) -> str:
    """Return a layout's name, or raise if it is unknown."""
    if qkv_format not in FORMATS:
        rule = f"qkv_format must be one of {', '.join(FORMATS)}"
        fail(label, rule, repr(qkv_format), "Choose one of them")
    return qkv_format


def sequence_dim(qkv_format: str) -> int:
    """Return the dim that holds the sequence."""
    return 1 if qkv_format == "bshd" else 0


def check_heads(label: str, q: Tensor, k: Tensor, v: Tensor, qkv_format: str) -> None:
    """Refuse queries, keys and values whose shapes or dtypes do not fit each other.

    Raises:
        QTensorError: the message names what does not fit.
    """
    # Sizes are not formatted before a check fails: compiled code would specialize on them.
    for name, t in (("query_layer", q), ("key_layer", k), ("value_layer", v)):
        if not isinstance(t, Tensor):
            fail(label, f"{name} must be a tensor", type(t).__name__, "Pass one", ArgumentTypeError)
        rule = f"{name} must be {qkv_format}: {len(qkv_format)} dims"
        check(t.ndim == len(qkv_format), label, rule, tuple(t.shape), "Reshape it")
        dtype = str(t.dtype).removeprefix("torch.")
        rule = f"{name} must be {', '.join(_FLOATING)}, as the queries"
        fits = dtype in _FLOATING and t.dtype is q.dtype
        check(fits, label, rule, dtype, "Convert it", DtypeError)
    rule = "queries and keys must have one head size"
    check(q.shape[-1] == k.shape[-1], label, rule, (q.shape[-1], k.shape[-1]), "Fix it")
    rule = "keys and values must have the same tokens and heads"
    got: tuple[object, object] = (k.shape, v.shape)
    check(k.shape[:-1] == v.shape[:-1], label, rule, got, "Fix one of them")
    rule = "the heads of the queries must be a multiple of those of the keys"
    got = (q.shape[-2], k.shape[-2])
    check(q.shape[-2] % k.shape[-2] == 0, label, rule, got, "Fix one of them")
    if qkv_format != "thd":
        batch = 1 - sequence_dim(qkv_format)
        rule = "queries and keys must have the same batch"
        got = (q.shape[batch], k.shape[batch])
        check(q.shape[batch] == k.shape[batch], label, rule, got, "Fix one of them")


def heads_first(t: Tensor, qkv_format: str) -> Tensor:
    """Return sbhd or bshd as (B, H, S, D)."""
    return t.transpose(1, 2) if qkv_format == "bshd" else t.permute(1, 2, 0, 3)


def heads_last(t: Tensor, qkv_format: str) -> Tensor:
    """Return (B, H, S, D) as (S, B, H * D) or (B, S, H * D)."""
    t = t.transpose(1, 2) if qkv_format == "bshd" else t.permute(2, 0, 1, 3)
    return t.flatten(2)
