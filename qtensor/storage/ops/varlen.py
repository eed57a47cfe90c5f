"""Compute attention over sequences of different lengths, with the arguments of ``varlen_attn``."""

from __future__ import annotations

from torch import Tensor

from qtensor.core.errors import check
from qtensor.library.varlen import VARLEN_ATTENTION
from qtensor.storage.base import TensorOrStorage
from qtensor.storage.ops.attention import refuse_gradient, stored


def varlen_attention(
    query: Tensor,
    key: TensorOrStorage,
    value: TensorOrStorage,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """Return the attention of N sequences, as ``torch.nn.attention.varlen.varlen_attn`` has it.

    Keys and values may be quantized, and all devices serve. The last query of a sequence is at the
    position of its last token. The result has no gradient, and its bits depend on no other
    sequence, so there is no ``num_splits``.

    Args:
        query: (Tq, Hq, D), the queries of all sequences, one after the other.
        key: (Tk, H, D), or (pages, page, H, D) with a block table.
        value: (Tk, H, E), or (pages, page, H, E).
        cu_seq_q: (N + 1,) integers: the queries of sequence i are ``cu_seq_q[i]`` to
            ``cu_seq_q[i + 1]``.
        cu_seq_k: the same for keys; None with a block table.
        max_q: at least the most queries of a sequence.
        max_k: at least the most keys of a sequence that are used.
        scale: ``1 / sqrt(D)`` if None.
        window_size: how many tokens before and after its own a query sees; -1 for all.
        enable_gqa: allow fewer heads of keys than of queries.
        seqused_k: (N,) integers: only so many keys of each sequence are used; at most those that
            it has.
        block_table: (N, pages of a sequence) int64 or int32; needs ``seqused_k``.

    Returns:
        (Tq, Hq, E) in the dtype of ``query``.

    Raises:
        QTensorError: shapes, heads, lengths or ``max_q`` and ``max_k`` do not fit each other.
        UnsupportedError: a gradient is needed.
    """
    op = "varlen_attention"
    refuse_gradient(op, query=query, key=key, value=value)
    k, v = stored("key", key), stored("value", value)
    rule, got = "heads differ only with enable_gqa=True", f"{query.shape[1]} and {key.shape[-2]}"
    check(enable_gqa or query.shape[1] == key.shape[-2], op, rule, got, "Pass it")
    return VARLEN_ATTENTION(
        *(query, k.codes, k.factors, v.codes, v.factors, k.format, v.format, cu_seq_q),
        *(None if block_table is not None else cu_seq_k, max_q, max_k),
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        before=window_size[0],
        after=window_size[1],
        seqused_k=seqused_k,
        block_table=block_table,
        k_global=k.wide,
        v_global=v.wide,
    )
