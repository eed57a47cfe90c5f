"""A cache of quantized keys and values that grows token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtensor.api import Format, quantizer
from qtensor.caches.pages import Pages
from qtensor.caches.rows import Rows
from qtensor.core.errors import UnsupportedError, check, fail
from qtensor.core.row_format import RowFormat, row_format
from qtensor.library.attention import ATTENTION
from qtensor.library.cache import CACHE_APPEND
from qtensor.library.quantize import QUANTIZE

_MARGIN = 2.0
"""A global value that follows from the first tokens lets later ones be so many times larger."""
_FIRST = "first"


def global_value(fmt: Format, amax: float | Tensor) -> Tensor:
    """Return the value of a whole cache with which numbers up to ``amax`` are encoded.

    Args:
        fmt: ``"fp8"``, whose value is its ``scale_inv``, or ``"nvfp4"``, whose value is its amax.
        amax: the largest absolute value that keys, or values, are expected to have.

    Returns:
        float32 (1,), for ``k_global`` or ``v_global`` of ``KVCache``.

    Raises:
        QTensorError: the format has no such value.
    """
    form = row_format(quantizer(fmt).canonical)
    rule = "the format must have a value of the whole cache"
    check(form.divisor > 0, "global_value", rule, form.text, "Leave it out")
    return _wide(form, torch.as_tensor(amax, dtype=torch.float32))


def _wide(form: RowFormat, amax: Tensor) -> Tensor:
    if form.factor is not None:
        return amax.reshape(1)
    wide: Tensor = QUANTIZE(amax.reshape(1, 1), form.text)[-1]
    return wide


class KVCache:
    """Keys and values of the tokens of B sequences, quantized row by row as they are appended.

    Appending a token reads and writes no other token, and gives the bytes of quantizing all of them
    at once (with the same ``k_global``). Tokens have the positions 0, 1, ... of their sequence.

    Attributes:
        lengths: (B,) int64, the tokens of each sequence.
        k_mean: float32 (H, D) or (B, H, D) that is subtracted from the keys, or None.
        capacity: tokens of a sequence that there is room for.
        window: tokens that a query sees, its own the last; 0 for all.
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        head_size: int,
        capacity: int,
        *,
        k_format: Format = "fp8_rowwise",
        v_format: Format | None = None,
        v_head_size: int | None = None,
        grow: bool = False,
        window: int = 0,
        page_size: int = 0,
        k_mean: str | Tensor | None = None,
        k_global: float | Tensor | None = None,
        v_global: float | Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        """Make an empty cache.

        Args:
            batch: number B of sequences.
            heads: number H of heads of keys and values.
            head_size: size D of keys.
            capacity: tokens of a sequence that there is room for.
            k_format: format of the keys: a format id, a quantizer, or "bfloat16", "float16",
                "float32". Blocks must divide the head size.
            v_format: format of the values; that of the keys if None.
            v_head_size: size E of values; ``head_size`` if None.
            grow: double the capacity where it does not suffice. Compiled code needs False.
            window: keep the tokens that a sliding window of this size sees, in a ring of pages, and
                forget older ones; 0 for all tokens.
            page_size: tokens of a page; 0 for one block of memory for each sequence.
            k_mean: ``"first"`` subtracts from all keys the mean of the first ones that are appended
                to their sequence and head. Softmax does not see it. Where channels of the keys have
                means that are large beside their spread, the keys that remain have smaller errors;
                elsewhere they may have larger ones. Or the mean itself, (H, D) or (B, H, D).
            k_global: the amax of "nvfp4" or the ``scale_inv`` of "fp8" (see ``global_value``); if
                None, the first keys that are appended fix it, with room for twice their maximum.
            v_global: the same for the values.
            dtype: nominal dtype of ``keys`` and ``values``.
            device: of the buffers.

        Raises:
            QTensorError: a format, size or option is wrong.
        """
        sizes = {"batch": batch, "heads": heads, "head_size": head_size, "capacity": capacity}
        for name, size in sizes.items():
            check(size > 0, "KVCache", f"{name} must be at least 1", size, "Fix it")
        place = torch.device(device or "cpu")
        self.capacity, self.window, self.grow, self.dtype = capacity, window, grow, dtype
        self._pages = Pages.of(batch, capacity, page_size, window, grow, place)
        places, tokens = (batch, capacity) if self._pages is None else self._pages.shape
        v_format = k_format if v_format is None else v_format
        self._k = Rows(k_format, (places, heads, tokens, head_size), place)
        self._v = Rows(v_format, (places, heads, tokens, v_head_size or head_size), place)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=place)
        self._most = 0
        """At least the largest length, where the cache grows."""
        first = {"k_mean"} if isinstance(k_mean, str) else set()
        self.k_mean = None
        if isinstance(k_mean, Tensor):  # A copy: `load_state_dict` writes into it.
            self.k_mean = k_mean.to(place, torch.float32, copy=True)
        if isinstance(k_mean, str):
            check(k_mean == _FIRST, "KVCache", "k_mean is 'first' or a tensor", k_mean, "Fix it")
            self.k_mean = torch.zeros(batch, heads, head_size, device=place)
        for name, rows, value in (("k", self._k, k_global), ("v", self._v, v_global)):
            if value is not None:
                rows.set_wide(f"{name}_global", value)
            elif rows.wide is not None:
                first.add(name)
        self._from_first = frozenset(first)
        self._unset = first

    # ---- tokens

    def append(self, k: Tensor, v: Tensor, positions: Tensor | None = None) -> None:
        """Write new tokens.

        Args:
            k: (B, H, N, D), float32, bfloat16 or float16.
            v: (B, H, N, E).
            positions: (B, N) int64: where each token is written; a token with a negative position
                is not written. None for the N positions after ``lengths``.

        Raises:
            QTensorError: a shape or dtype is wrong, or the cache is too small.
        """
        rule = "k must be (B, heads, tokens, head size)"
        check(k.ndim == 4, "KVCache.append", rule, tuple(k.shape), "Reshape it")
        count, given = k.shape[2], positions
        if not count:
            return
        if given is None:
            positions, lengths = self._next_positions(count), self.lengths + count
            most = self._most + count
        else:
            rule, got = f"positions must be (batch size, {count})", tuple(given.shape)
            fits = got == (self.lengths.shape[0], count)
            check(fits, "KVCache.append", rule, got, "Pass one for each token")
            positions = given
            lengths = torch.maximum(self.lengths, given.amax(1) + 1)
            most = int(lengths.max()) if self.grow else 0
        if self.grow:
            self._make_room(most)
        if self._unset:
            self._fix(k, v, positions)
        written = positions
        if self._pages is not None and 0 < self._pages.kept < count:
            written = torch.where(positions < lengths[:, None] - self._pages.kept, -1, positions)
        CACHE_APPEND(
            *(k, v, written, self._k.codes, self._k.factors, self._v.codes, self._v.factors),
            *(self._k.form.text, self._v.form.text, self.k_mean, self.block_table),
            *(self._k.wide, self._v.wide),
        )
        # Only tokens that were written fix what the first ones decide. A graph cannot ask.
        if given is None or torch.compiler.is_compiling() or bool((given >= 0).any()):
            self._unset = set()
        self.lengths.copy_(lengths)
        if self.grow:
            self._most = most

    def _next_positions(self, count: int) -> Tensor:
        steps = torch.arange(count, device=self.lengths.device)
        return self.lengths.unsqueeze(1) + steps

    def attention(
        self,
        q: Tensor,
        *,
        positions: Tensor | None = None,
        first: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = True,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Return the attention of queries over the tokens of the cache.

        Args:
            q: (B, Hq, M, D), float32, bfloat16 or float16; H divides Hq.
            positions: (B, M) int64: the position of each query; None for the last M tokens.
            first: (B,) int64: tokens before it are not seen (left padding).
            mask: (B or 1, Hq or 1, M or 1, S), bool (True: seen) or floating (added to the scores).
                For a ring of pages without ``causal``, it must hide the tokens before the window.
            causal: let each query see tokens up to its position alone.
            soft_cap: replace scores s by ``soft_cap * tanh(s / soft_cap)``; 0 for none.
            sinks: (Hq,) or (B, Hq, M): a score for each query that has no value, as in gpt-oss.
            scale: ``1 / sqrt(D)`` if None.
            window: as in ``KVCache``; the window of the cache if None.

        Returns:
            (B, Hq, M, E) in the dtype of ``q``, without a gradient; 0 for a query that sees no
            token.

        Raises:
            QTensorError: a shape, dtype or option is wrong; or a soft cap, which does not commute
                with a mean.
            UnsupportedError: a ring of pages has forgotten tokens that a query would see.
        """
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        window = self.window if window is None else window
        if self._pages is not None and self._pages.kept:
            self._check_ring(self._pages, q.shape[2], positions, window, causal or mask is None)
        if self.k_mean is not None:
            rule, fix = "keys without their mean change capped scores", "Leave out k_mean"
            check(not soft_cap, "KVCache.attention", rule, f"soft_cap={soft_cap}", fix)
            sinks = sinks if sinks is None else _shifted(sinks, q, self.k_mean, scale)
        return ATTENTION(
            *(q, self._k.codes, self._k.factors, self._v.codes, self._v.factors),
            *(self._k.form.text, self._v.form.text, self.lengths, scale, causal),
            *(window, soft_cap, positions, first, mask, sinks),
            *(self.block_table, self._k.wide, self._v.wide),
        )

    def update(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Append tokens, and return the attention of their queries.

        A ring of pages takes long prompts in parts, so that no query misses a token of its window.
        The result is the same as that of ``append`` and ``attention`` on a cache without a ring.

        Args:
            q: (B, Hq, N, D).
            k: (B, H, N, D).
            v: (B, H, N, E).
            **options: ``mask``, ``first``, ``soft_cap``, ``sinks``, ``scale`` and ``window`` of
                ``attention``.

        Returns:
            (B, Hq, N, E).
        """
        count = k.shape[2]
        rule, got = "q and k must have as many tokens", f"{q.shape[2]} and {count}"
        check(q.shape[2] == count, "KVCache.update", rule, got, "Call append and attention")
        if self._pages is None or not self._pages.kept or count <= self._pages.size:
            self.append(k, v)
            return self.attention(q, **options)
        self._fix_from_all(k, v)
        mask, sinks, results = options.pop("mask", None), options.pop("sinks", None), []
        for start in range(0, count, self._pages.size):
            part = slice(start, start + self._pages.size)
            self.append(k[:, :, part], v[:, :, part])
            shown = mask if mask is None or mask.shape[2] == 1 else mask[:, :, part]
            of_part = sinks if sinks is None or sinks.ndim == 1 else sinks[:, :, part]
            results.append(self.attention(q[:, :, part], mask=shown, sinks=of_part, **options))
        return torch.cat(results, 2)

    def _fix_from_all(self, k: Tensor, v: Tensor) -> None:
        """Derive what the first tokens decide from all of a prompt that is appended in parts."""
        if self._unset:
            self._fix(k, v, self._next_positions(k.shape[2]))
            self._unset = set()

    def _check_ring(
        self, pages: Pages, queries: int, positions: Tensor | None, window: int, by_window: bool
    ) -> None:
        """Refuse queries that would see tokens that the ring has overwritten."""
        name = "KVCache.attention"
        fix = "Make the cache without window, and pass it to attention"
        if by_window and not 0 < window <= self.window:
            rule = f"a ring of pages holds the {self.window} tokens of its window"
            fail(name, rule, f"window={window}", fix, UnsupportedError)
        if positions is None and queries <= pages.size:
            return  # `append` leaves the windows of the last page of tokens.
        oldest = self.lengths - queries if positions is None else positions.amin(1)
        seen = (oldest - self.window + 1).clamp(min=0)
        if not torch.compiler.is_compiling() and bool((pages.oldest(self.lengths) > seen).any()):
            rule = "a ring of pages has forgotten tokens that a query would see"
            fail(name, rule, f"{queries} queries", fix, UnsupportedError)

    def _make_room(self, tokens: int) -> None:
        if tokens > self.capacity:
            self._resize(max(2 * self.capacity, tokens))

    def _resize(self, capacity: int) -> None:
        self.capacity = capacity
        each, size = 1, self.capacity
        if self._pages is not None:
            self._pages = self._pages.wider(self.capacity)
            each, size = self._pages.each, self._pages.size
        if self._pages is None or not self._pages.kept:
            for rows in (self._k, self._v):
                rows.resize(self.lengths.shape[0], each, size)

    def _fix(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Derive the mean and the global values from the first tokens."""
        valid = (positions >= 0)[:, None, :, None]
        k = torch.where(valid, k.float(), 0.0)
        if "k_mean" in self._unset and self.k_mean is not None:
            self.k_mean.copy_(k.sum(2) / valid.sum(2).clamp(min=1))
        if self.k_mean is not None:
            mean = self.k_mean if self.k_mean.ndim == 3 else self.k_mean[None]
            k = torch.where(valid, k - mean.unsqueeze(2), 0.0)
        for name, rows, x in (("k", self._k, k), ("v", self._v, v)):
            if name in self._unset and rows.wide is not None:
                amax = torch.where(valid, x.float(), 0.0).abs().amax().clamp(min=2.0**-40)
                rows.wide.copy_(_wide(rows.form, amax * _MARGIN))

    # ---- sequences

    def select(self, index: Tensor) -> None:
        """Let sequence i continue as sequence ``index[i]``; the number of sequences may change.

        Args:
            index: (new B,) integers, for example the beams that a search keeps.

        Raises:
            QTensorError: ``index`` has another shape or dtype.
        """
        rule = "index must be (sequences,) integers"
        fits = index.ndim == 1 and index.dtype in (torch.int64, torch.int32)
        got = f"{index.dtype} {tuple(index.shape)}"
        check(fits, "KVCache.select", rule, got, "Pass mask.nonzero().flatten() for a mask")
        index = index.to(self.lengths.device, torch.int64)
        places = index
        if self._pages is not None:
            places = self._pages.places(index)
            self._pages = self._pages.of_batch(index.shape[0])
        self._k.select(places)
        self._v.select(places)
        self.lengths = self.lengths[index]
        if self.k_mean is not None and self.k_mean.ndim == 3:
            self.k_mean = self.k_mean[index]

    def crop(self, lengths: int | Tensor) -> None:
        """Forget the tokens from position ``lengths`` on.

        Args:
            lengths: for all sequences, or (B,) int64.

        Raises:
            QTensorError: ``lengths`` is negative or has another shape.
            UnsupportedError: a ring of pages has forgotten tokens that the window would show again.
        """
        kept = torch.as_tensor(lengths, device=self.lengths.device)
        rule = "lengths must be one number of at least 0, or one for each sequence"
        fits = kept.ndim == 0 or kept.shape == self.lengths.shape
        check(fits and bool((kept >= 0).all()), "KVCache.crop", rule, lengths, "Pass such numbers")
        new = torch.minimum(self.lengths, kept)
        if self._pages is not None and self._pages.kept:
            oldest = self._pages.oldest(self.lengths)
            if bool(((oldest > (new - self.window + 1).clamp(min=0)) & (new < self.lengths)).any()):
                rule = "a ring of pages can go back to tokens whose window it still holds"
                got, fix = f"{lengths}", "Make the cache without window, and pass it to attention"
                fail("KVCache.crop", rule, got, fix, UnsupportedError)
        self.lengths = new
        self._most = int(new.max()) if self.grow else 0

    def reset(self) -> None:
        """Forget all tokens, and what the first ones have fixed."""
        self.lengths = torch.zeros_like(self.lengths)
        self._most, self._unset = 0, set(self._from_first)

    # ---- buffers

    @property
    def keys(self) -> Tensor:
        """The keys, minus ``k_mean``: a tensor (B, H, capacity, D), or (pages, H, page, D).

        It shares the buffers. Rows from ``lengths`` on have no meaning.
        """
        return self._k.tensor(self.dtype)

    @property
    def values(self) -> Tensor:
        """The values, (B, H, capacity, E) or (pages, H, page, E), as ``keys``."""
        return self._v.tensor(self.dtype)

    @property
    def block_table(self) -> Tensor | None:
        """(B, pages of a sequence) int64: where the pages of each sequence are; None without."""
        return None if self._pages is None else self._pages.table

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(t.nbytes for t in self.state_dict().values())

    def to(self, device: torch.device | str) -> KVCache:
        """Move the buffers to a device, and return the cache."""
        place = torch.device(device)
        self._k.to(place)
        self._v.to(place)
        self.lengths = self.lengths.to(place)
        self.k_mean = None if self.k_mean is None else self.k_mean.to(place)
        self._pages = None if self._pages is None else self._pages.to(place)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Return all buffers by name; they are not copied."""
        named = {"lengths": self.lengths, "k_mean": self.k_mean, "block_table": self.block_table}
        for name, rows in (("k", self._k), ("v", self._v)):
            named |= {f"{name}_{key}": t for key, t in rows.named_buffers().items()}
        return {name: t for name, t in named.items() if t is not None}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy the buffers of a cache that was made with the same arguments.

        A cache that grows takes over a larger capacity.

        Raises:
            QTensorError: a buffer is missing or has another shape. The cache is as before.
        """
        if self.grow and "k_codes" in state:
            table, pages = state.get("block_table"), self._pages
            tokens = state["k_codes"].shape[2]
            if pages is not None and table is not None:
                tokens = table.shape[-1] * pages.size
            if tokens > self.capacity:
                self._resize(tokens)
        own = self.state_dict()
        shapes = [{name: tuple(t.shape) for name, t in each.items()} for each in (own, state)]
        if shapes[0] != shapes[1]:
            differ = sorted(n for n in {*own, *state} if shapes[0].get(n) != shapes[1].get(n))
            rule = "the state must have the buffers of this cache"
            fail("KVCache.load_state_dict", rule, ", ".join(differ), "Use the same arguments")
        for name, t in own.items():
            t.copy_(state[name])
        self._most = int(self.lengths.max()) if self.grow else 0
        self._unset = set() if bool(self.lengths.any()) else set(self._from_first)

    def __repr__(self) -> str:
        k, v = self._k.form.text, self._v.form.text
        shape = (self.lengths.shape[0], self._k.shape[1], self.capacity)
        return f"KVCache({shape}, k={k} {self._k.shape[3]}, v={v} {self._v.shape[3]})"


def _shifted(sinks: Tensor, q: Tensor, mean: Tensor, scale: float) -> Tensor:
    """Return the sinks minus what the mean adds to the scores of the tokens, (B, Hq, M)."""
    mean = mean.repeat_interleave(q.shape[1] // mean.shape[-2], -2).unsqueeze(-2)
    sinks = sinks.float() if sinks.ndim == 3 else sinks.float()[:, None]
    return sinks - (q.float() * mean).sum(-1) * scale
