"""A cache of quantized keys and values that grows token by token."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from qtensor.api import Format
from qtensor.caches.global_value import wide_value
from qtensor.caches.options import (
    Asked,
    Options,
    check_counts,
    check_new,
    check_update,
    query_options,
    without_mean,
)
from qtensor.caches.pages import Pages
from qtensor.caches.store import Layout, Store
from qtensor.core.errors import UnsupportedError, check, fail
from qtensor.library.attention import ATTENTION, ATTENTION_PART, JOIN_ATTENTION

_MARGIN = 2.0
"""A global value that follows from the first tokens lets later ones be so many times larger."""
_FIRST = "first"


class KVCache:
    """Keys and values of the tokens of B sequences, quantized row by row as they are appended.

    Appending a token reads and writes no other token, and gives the bytes of quantizing all of them
    at once (with the same ``k_global``). Tokens have the positions 0, 1, ... of their sequence.

    Attributes:
        lengths: (B,) int64, the tokens of each sequence.
        k_mean: float32 (H, D) or (B, H, D) that is subtracted from the keys, or None.
        capacity: tokens of a sequence that there is room for.
        window: tokens that a query sees, its own the last; 0 for all.
        residual: tokens that a query reads in bfloat16, its own included.
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
        pages: int = 0,
        residual: int = 0,
        latent: bool = False,
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
            pages: number of pages that the caller assigns to sequences (``assign``); 0 lets each
                sequence have its own.
            residual: a query reads that many tokens, its own the last, in bfloat16, and those
                before them in the formats; 0 for none. A ring of pages holds them.
            latent: the values are the first E elements of the keys, of which nothing is stored, as
                in multi-head latent attention. E must be a multiple of the block size.
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
        check_counts("KVCache", 1, **sizes, v_head_size=v_head_size)
        check_counts(
            "KVCache", 0, window=window, page_size=page_size, pages=pages, residual=residual
        )
        place = torch.device(device or "cpu")
        self.capacity, self.window, self.grow, self.dtype = capacity, window, grow, dtype
        self.residual = residual
        own = Pages.of(batch, capacity, page_size, 0 if pages else window, grow, place)
        if pages:
            self._check_assigned(page_size, k_mean)
            own = Pages.assigned(batch, capacity, page_size, pages, place)
        if latent:
            rule = "a latent cache takes no v_format, v_global or k_mean"
            options = {"v_format": v_format, "v_global": v_global, "k_mean": k_mean}
            got = ", ".join(name for name, option in options.items() if option is not None)
            check(not got, "KVCache", rule, got, f"Leave {got} out")
        formats = (k_format, None if latent else k_format if v_format is None else v_format)
        layout = Layout(batch, heads, capacity, head_size, v_head_size or head_size, place)
        self._all = Store(formats, layout, own, window)
        self._recent = self._make_recent(layout, latent) if residual else None
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=place)
        self._most = 0
        """At least the largest length, where the cache grows."""
        self.k_mean = None
        if isinstance(k_mean, Tensor):  # A copy: `load_state_dict` writes into it.
            self.k_mean = k_mean.to(place, torch.float32, copy=True)
        if isinstance(k_mean, str):
            check(k_mean == _FIRST, "KVCache", "k_mean is 'first' or a tensor", k_mean, "Fix it")
            self.k_mean = torch.zeros(batch, heads, head_size, device=place)
        first = {"k_mean"} if isinstance(k_mean, str) else set()
        for name, rows, value in zip("kv", self._all.rows, (k_global, v_global), strict=False):
            if value is not None:
                rows.set_wide(f"{name}_global", value)
            elif rows.wide is not None:
                first.add(name)
        self._from_first = frozenset(first)
        self._unset = first

    def _check_assigned(self, page_size: int, k_mean: str | Tensor | None) -> None:
        """Refuse options that belong to fixed sequences, if the caller assigns the pages."""
        per_sequence = isinstance(k_mean, str) or (k_mean is not None and k_mean.ndim == 3)
        mean = "k_mean of each sequence"
        own = {"grow": self.grow, "residual": self.residual, mean: per_sequence}
        got = ", ".join([name for name, chosen in own.items() if chosen])
        rule = f"pages that the caller assigns exclude grow, residual and a {mean}"
        check(not got, "KVCache", rule, got, f"Leave {got} out")
        check(page_size > 0, "KVCache", "pages need a page_size", page_size, "Pass one, such as 16")

    def _make_recent(self, layout: Layout, latent: bool) -> Store:
        size, window = self.residual, self.window
        rule = "residual must be less than a window"
        fits = not window or size < window
        check(fits, "KVCache", rule, f"{size}, window={window}", "Pass a smaller residual")
        pages = Pages.of(layout.batch, layout.tokens, 0, size, self.grow, layout.device)
        formats = ("bfloat16", None if latent else "bfloat16")
        return Store(formats, layout, pages, size)

    @property
    def _stores(self) -> list[Store]:
        return [self._all] if self._recent is None else [self._all, self._recent]

    # ---- tokens

    def append(self, k: Tensor, v: Tensor | None, positions: Tensor | None = None) -> None:
        """Write new tokens.

        Args:
            k: (B, H, N, D), float32, bfloat16 or float16.
            v: (B, H, N, E); None for a latent cache.
            positions: (B, N) int64: where each token is written; a token with a negative position
                is not written. None for the N positions after ``lengths``.

        Raises:
            QTensorError: a shape or dtype is wrong, or the cache is too small.
            UnsupportedError: ``k`` or ``v`` requires grad while grad mode is on.
        """
        rule = "k must be (B, heads, tokens, head size)"
        check(k.ndim == 4, "KVCache.append", rule, tuple(k.shape), "Reshape it")
        check_new(k, v, latent=self._all.v is None)
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
            positions, lengths = given, torch.maximum(self.lengths, given.amax(1) + 1)
            most = int(lengths.max()) if self.grow else 0
        if self.grow:
            self._make_room(most)
        if self._unset:
            self._fix(k, v, positions)
        for store in self._stores:
            store.write(k, v, positions, lengths, self.k_mean)
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
            UnsupportedError: a ring of pages has forgotten tokens that a query would see; or ``q``,
                ``mask`` or ``sinks`` requires grad while grad mode is on.
        """
        asked = Asked(positions, first, mask, causal, soft_cap, sinks, scale, window)
        options = query_options(q, asked, self.window, self.k_mean is not None)
        options = without_mean(options, q, self.k_mean)
        self._all.check_ring(q.shape[2], self.lengths, options)
        if self._recent is None:
            return cast(Tensor, self._all.attend(ATTENTION, q, self.lengths, options))
        return self._attention_of_both(self._recent, q, options)

    def _attention_of_both(self, recent: Store, q: Tensor, options: Options) -> Tensor:
        """Return the attention over the last tokens, in bfloat16, and the earlier ones."""
        count, size = q.shape[2], self.residual
        near = options._replace(window=min(size, options.window or size))
        recent.check_ring(count, self.lengths, near)
        positions = options.positions
        if positions is None:
            positions = self._next_positions(count) - count
        early, late = options.split(positions, size, self.capacity)
        if early is None:
            late = late._replace(sinks=options.sinks)
            return cast(Tensor, recent.attend(ATTENTION, q, self.lengths, late))
        parts = self._all.attend(ATTENTION_PART, q, self.lengths, early)
        parts += recent.attend(ATTENTION_PART, q, self.lengths, late)
        return JOIN_ATTENTION(*parts, q.dtype, options.sinks)

    def update(self, q: Tensor, k: Tensor, v: Tensor | None, **options: Any) -> Tensor:
        """Append tokens, and return the attention of their queries.

        A ring of pages takes long prompts in parts, so that no query misses a token of its window.
        The result is the same as that of ``append`` and ``attention`` on a cache without a ring.

        Args:
            q: (B, Hq, N, D).
            k: (B, H, N, D).
            v: (B, H, N, E); None for a latent cache.
            **options: ``mask``, ``first``, ``soft_cap``, ``sinks``, ``scale`` and ``window`` of
                ``attention``.

        Returns:
            (B, Hq, N, E).
        """
        asked = query_options(q, Asked(**options), self.window, self.k_mean is not None)
        check_update(q, k, asked, self.lengths)
        check_new(k, v, latent=self._all.v is None)
        count = k.shape[2]
        step = min(store.step for store in self._stores)
        if count <= step:
            self.append(k, v)
            return self.attention(q, **options)
        self._fix_from_all(k, v)
        mask, sinks, results = options.pop("mask", None), options.pop("sinks", None), []
        for start in range(0, count, step):
            part = slice(start, start + step)
            self.append(k[:, :, part], None if v is None else v[:, :, part])
            shown = mask if mask is None or mask.shape[2] == 1 else mask[:, :, part]
            of_part = sinks if sinks is None or sinks.ndim == 1 else sinks[:, :, part]
            results.append(self.attention(q[:, :, part], mask=shown, sinks=of_part, **options))
        return torch.cat(results, 2)

    def _fix_from_all(self, k: Tensor, v: Tensor | None) -> None:
        """Derive what the first tokens decide from all of a prompt that is appended in parts."""
        if self._unset:
            self._fix(k, v, self._next_positions(k.shape[2]))
            self._unset = set()

    def _make_room(self, tokens: int) -> None:
        if tokens > self.capacity:
            self._resize(max(2 * self.capacity, tokens))

    def _resize(self, capacity: int) -> None:
        self.capacity = capacity
        for store in self._stores:
            store.resize(self.lengths.shape[0], capacity)

    def _fix(self, k: Tensor, v: Tensor | None, positions: Tensor) -> None:
        """Derive the mean and the global values from the first tokens."""
        valid = (positions >= 0)[:, None, :, None]
        k = torch.where(valid, k.float(), 0.0)
        if "k_mean" in self._unset and self.k_mean is not None:
            self.k_mean.copy_(k.sum(2) / valid.sum(2).clamp(min=1))
        if self.k_mean is not None:
            mean = self.k_mean if self.k_mean.ndim == 3 else self.k_mean[None]
            k = torch.where(valid, k - mean.unsqueeze(2), 0.0)
        for name, rows, x in zip("kv", self._all.rows, (k, v), strict=False):
            if name in self._unset and rows.wide is not None and x is not None:
                amax = torch.where(valid, x.float(), 0.0).abs().amax().clamp(min=2.0**-40)
                rows.wide.copy_(wide_value(rows.form, amax * _MARGIN))

    # ---- sequences

    def assign(self, block_table: Tensor, lengths: Tensor) -> None:
        """Let the cache have other sequences, in pages that the caller names.

        Sequences may share pages of common tokens, as long as none of them appends to these. The
        pages themselves stay as they are.

        Args:
            block_table: (B, pages of a sequence) int64: token t of sequence b is in row
                ``t % page_size`` of page ``block_table[b, t // page_size]``. The cache keeps this
                tensor, so a caller may write further pages into it. Entries behind the pages in
                use may hold anything.
            lengths: (B,) int64: tokens that each sequence has; they are copied.

        Raises:
            QTensorError: the cache has pages of its own, or a shape or dtype is wrong.
        """
        name, pages = "KVCache.assign", self._all.pages
        if pages is None or not pages.is_assigned:
            fail(
                name, "the cache has pages of its own", pages and pages.total, "Make it with pages="
            )
        fits = block_table.ndim == 2 and block_table.dtype is torch.int64
        fits = fits and block_table.device == self.lengths.device
        rule = f"block_table must be (sequences, pages) int64 on {self.lengths.device}"
        got = f"{tuple(block_table.shape)} {block_table.dtype} on {block_table.device}"
        check(fits, name, rule, got, "Fix it")
        rule = f"lengths must be {block_table.shape[:1]}"
        got = f"{tuple(lengths.shape)}"
        check(lengths.shape == block_table.shape[:1], name, rule, got, "Pass one for each sequence")
        self._all.pages = pages._replace(table=block_table)
        self.capacity = block_table.shape[1] * pages.size
        if lengths.shape == self.lengths.shape:  # The tensor of a compiled graph.
            self.lengths.copy_(lengths)
        else:
            self.lengths = lengths.to(self.lengths.device, torch.int64, copy=True)

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
        if self._all.pages is not None and self._all.pages.is_assigned:
            rule = "the caller assigns the pages, and knows which may be shared"
            fail("KVCache.select", rule, got, "Copy pages, and call assign", UnsupportedError)
        index = index.to(self.lengths.device, torch.int64)
        for store in self._stores:
            store.select(index)
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
        for store in self._stores:
            # The next token sees the window of one more.
            if bool((store.forgotten(self.lengths, new + 1) & (new < self.lengths)).any()):
                rule = "a ring of pages can go back to tokens whose window it still holds"
                fix = "Make the cache without window (it can be passed to attention) and residual"
                fail("KVCache.crop", rule, f"{lengths}", fix, UnsupportedError)
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
        return self._all.k.tensor(self.dtype)

    @property
    def values(self) -> Tensor:
        """The values, (B, H, capacity, E) or (pages, H, page, E), as ``keys``."""
        return self._all.values(self.dtype)

    @property
    def block_table(self) -> Tensor | None:
        """(B, pages of a sequence) int64: where the pages of each sequence are; None without."""
        return None if self._all.pages is None else self._all.pages.table

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(t.nbytes for t in self.state_dict().values())

    def to(self, device: torch.device | str) -> KVCache:
        """Move the buffers to a device, and return the cache."""
        place = torch.device(device)
        for store in self._stores:
            store.to(place)
        self.lengths = self.lengths.to(place)
        self.k_mean = None if self.k_mean is None else self.k_mean.to(place)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Return all buffers by name; they are not copied."""
        named = {"lengths": self.lengths}
        if self.k_mean is not None:
            named["k_mean"] = self.k_mean
        for prefix, store in zip(("", "recent_"), self._stores, strict=False):
            named |= {prefix + name: t for name, t in store.named_buffers().items()}
        return named

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy the buffers of a cache that was made with the same arguments.

        A cache that grows takes over a larger capacity.

        Raises:
            QTensorError: a buffer is missing or has another shape. The cache is as before.
        """
        if self.grow and "k_codes" in state:
            table, pages = state.get("block_table"), self._all.pages
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
        k, v = self._all.rows[0], self._all.rows[-1]
        shape = (self.lengths.shape[0], k.shape[1], self.capacity)
        sizes = f"k={k.form.text} {k.shape[3]}, v={v.form.text} {self._all.v_size}"
        options = {"window": self.window, "residual": self.residual, "grow": self.grow}
        options["latent"] = self._all.v is None
        shown = "".join(f", {name}={value}" for name, value in options.items() if value)
        return f"KVCache({shape}, {sizes}{shown})"
