"""The keys that each query of an attention sees."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.errors import ArgumentTypeError, check, fail

MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
"""Types of masks, as in Transformer Engine."""

_ALIASES = {"padding,causal": "padding_causal", "causal,padding": "padding_causal"}

Window = tuple[int, int]
Masks = Tensor | tuple[Tensor, Tensor] | None


class MaskOptions(NamedTuple):
    """A mask without its tensors: the part of it that the types and sizes alone decide.

    Attributes:
        kind: one of ``MASK_TYPES``.
        window: keys before and after its own position that a query sees; -1 for all.
        bottom_right: the position of a query counts from the last key, not from the first.
    """

    kind: str
    window: Window
    bottom_right: bool

    @property
    def is_padded(self) -> bool:
        """Whether sequences have lengths of their own."""
        return self.kind.startswith("padding")

    @property
    def is_causal_kind(self) -> bool:
        """Whether the type hides the keys after a query."""
        return "causal" in self.kind

    def is_plain(self) -> bool:
        """Return whether every query sees every key."""
        return self.kind == "no_mask" and self.window == (-1, -1)

    def is_causal(self, queries: int, keys: int) -> bool:
        """Return whether query i sees the keys 0 to i."""
        aligned = not self.bottom_right or queries == keys
        return self.kind.startswith("causal") and self.window == (-1, 0) and aligned


def mask_options(
    label: str, kind: str, window: Window | None, bottom_right: bool | None = None
) -> MaskOptions:
    """Return the checked options of a mask; None stands for the choice of the type.

    Raises:
        QTensorError: an unknown type, or a window that does not go with it.
    """
    kind = _ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in MASK_TYPES:
        rule = f"attn_mask_type must be one of {', '.join(MASK_TYPES)}"
        fail(label, rule, repr(kind), "Choose one of them")
    causal = "causal" in kind
    if window is None:
        window = (-1, -1)
    is_pair = isinstance(window, tuple | list) and len(window) == 2
    if not is_pair or not all([type(size) is int and size >= -1 for size in window]):
        rule = "window_size must be two integers: the keys before and after a query, -1 for all"
        fail(label, rule, repr(window), "Pass for example (127, 0)", ArgumentTypeError)
    left, right = window
    if causal:
        rule = "a causal mask has no keys after the query"
        check(right < 1, label, rule, f"window_size={window}", f"Pass ({left}, 0)")
        right = 0
    if kind.endswith("bottom_right"):
        bottom_right = True
    elif causal:
        bottom_right = False
    return MaskOptions(kind, (left, right), True if bottom_right is None else bool(bottom_right))


class Lengths(NamedTuple):
    """What hides the padding of queries and of keys.

    Attributes:
        queries: (B,) int64, the number of tokens of each sequence.
        keys: the same for the keys.
        is_query: (B, Sq) bool: the token is not padding.
        is_key: (B, Skv) bool.
    """

    queries: Tensor
    keys: Tensor
    is_query: Tensor
    is_key: Tensor


def _from_cumulative(label: str, name: str, cu_seqlens: Tensor, size: int) -> tuple[Tensor, Tensor]:
    check_cumulative(label, name, cu_seqlens)
    lengths = cu_seqlens.long().diff()
    tokens = torch.arange(size, device=cu_seqlens.device)
    return lengths, tokens < lengths.unsqueeze(1)


def check_cumulative(label: str, name: str, cu_seqlens: Tensor) -> None:
    """Refuse sums of lengths that are not (B + 1,) integers."""
    integer = not (cu_seqlens.is_floating_point() or cu_seqlens.dtype is torch.bool)
    rule = f"{name} must be (batch size + 1,) integers, the sums of the lengths, from 0 on"
    got = (cu_seqlens.dtype, tuple(cu_seqlens.shape))
    check(cu_seqlens.ndim == 1 and integer, label, rule, got, "Pass such a tensor")


def padding_lengths(
    label: str,
    masks: Masks,
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    sizes: tuple[int, int],
) -> Lengths:
    """Return the lengths of padded sequences, from their sums or from masks of the padding.

    Args:
        label: the module, for errors.
        masks: (B, 1, 1, S) bool, True for padding; for cross attention a tuple of two.
        cu_seqlens: sums of the lengths (B + 1,) of queries and keys, which go before the masks.
        sizes: the padded lengths of queries and keys.

    Raises:
        QTensorError: neither masks nor sums, or masks of another shape or dtype.
    """
    q, kv = cu_seqlens
    if q is not None:
        kv = q if kv is None else kv
        q_lengths, is_query = _from_cumulative(label, "cu_seqlens_q", q, sizes[0])
        k_lengths, is_key = _from_cumulative(label, "cu_seqlens_kv", kv, sizes[1])
        return Lengths(q_lengths, k_lengths, is_query, is_key)
    if masks is None:
        rule = "a padding mask needs the lengths of the sequences"
        fix = "Pass cu_seqlens_q (and cu_seqlens_kv), or attention_mask"
        fail(label, rule, "neither", fix)
    pair = (masks, masks) if isinstance(masks, Tensor) else masks
    real = []
    for mask, size in zip(pair, sizes, strict=True):
        fits = mask.dtype is torch.bool and mask.ndim == 4 and mask.shape[-1] == size
        if not (fits and mask.shape[1] == mask.shape[2] == 1):
            rule = f"attention_mask of padding must be bool, (batch size, 1, 1, {size})"
            fix = "Pass one for queries and keys, or a tuple of two; True hides a token"
            fail(label, rule, (mask.dtype, tuple(mask.shape)), fix)
        real.append(~mask[:, 0, 0])
    return Lengths(real[0].sum(1), real[1].sum(1), *real)


def positions(
    options: MaskOptions, sizes: tuple[int, int], device: torch.device, lengths: Lengths | None
) -> tuple[Tensor, Tensor]:
    """Return the positions of queries, (Sq, 1) or (B, 1, Sq, 1), and of keys, (Skv,).

    Args:
        options: of the mask; it says whether positions count from the last key.
        sizes: Sq and Skv.
        device: of the results.
        lengths: of padded sequences.
    """
    queries = torch.arange(sizes[0], device=device).unsqueeze(1)
    keys = torch.arange(sizes[1], device=device)
    if options.bottom_right and lengths is not None:
        queries = queries + (lengths.keys - lengths.queries)[:, None, None, None]
    elif options.bottom_right:
        queries = queries + (sizes[1] - sizes[0])
    return queries, keys


def visible(
    options: MaskOptions,
    sizes: tuple[int, int],
    device: torch.device,
    lengths: Lengths | None = None,
    hidden: Tensor | None = None,
) -> Tensor:
    """Return which keys each query sees, bool, broadcastable to (B, H, Sq, Skv).

    Args:
        options: of the mask.
        sizes: Sq and Skv.
        device: of the result.
        lengths: of padded sequences.
        hidden: bool, broadcastable to (B, H, Sq, Skv), True for what an arbitrary mask hides.
    """
    queries, keys = positions(options, sizes, device, lengths)
    left, right = options.window
    seen = torch.ones((1, 1), dtype=torch.bool, device=device)
    if right >= 0:
        seen = keys <= queries + right
    if left >= 0:
        seen = seen & (keys >= queries - left)
    if lengths is not None:
        seen = seen & lengths.is_query[:, None, :, None] & lengths.is_key[:, None, None, :]
    return seen if hidden is None else seen & ~hidden
