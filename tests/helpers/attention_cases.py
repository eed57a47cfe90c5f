"""Caches of keys and values, calls of the op ``attention``, and what the oracle says of them."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oracle
import torch
from formats import rand
from oracle import attention as oracle_attention
from torch import Tensor

from qtensor.core.row_format import row_format

FORMATS = (
    "fp8_rowwise",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "bfloat16",
    "fp8",
    "mxfp6",
    "fp8_rowwise(dtype=e5m2)",
    "mxfp6(dtype=e3m2)",
    "mxfp6(packed=True)",
    "mxfp8(dtype=e5m2)",
    "float16",
    "float32",
)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
WIDE = {"nvfp4": 30.0, "fp8": 0.25}
"""The global values of the formats that have one."""


@dataclass
class Side:
    """The buffers of keys or of values."""

    text: str
    codes: Tensor
    factors: Tensor | None
    wide: Tensor | None

    def map(self, function: Any) -> Side:
        """Return the side with ``function`` applied to codes and factors."""
        factors = None if self.factors is None else function(self.factors)
        return dataclasses.replace(self, codes=function(self.codes), factors=factors)


def empty_side(text: str, lead: tuple[int, ...], size: int) -> Side:
    """Return zeroed buffers of rows with ``size`` values; ``lead`` is (B, H, capacity)."""
    form, wide = row_format(text), None
    if form.divisor:
        wide = torch.tensor([WIDE[text.partition("(")[0]]])
    factors = None
    if form.factor is not None:
        factors = torch.zeros(*lead, form.factors(size), dtype=form.factor)
    return Side(text, torch.zeros(*lead, form.entries(size), dtype=form.dtype), factors, wide)


def append(
    k: Side, v: Side, keys: Tensor, values: Tensor, positions: Tensor, **options: Any
) -> None:
    """Write rows into both sides."""
    torch.ops.qtensor.cache_append_(
        *(keys, values, positions, k.codes, k.factors, v.codes, v.factors, k.text, v.text),
        **{"k_global": k.wide, "v_global": v.wide, **options},
    )


def attend(
    q: Tensor, k: Side, v: Side, lengths: Tensor, op: str = "attention", **options: Any
) -> Any:
    """Call the op, or ``attention_part``."""
    options.setdefault("scale", q.shape[-1] ** -0.5)
    return getattr(torch.ops.qtensor, op)(
        *(q, k.codes, k.factors, v.codes, v.factors, k.text, v.text, lengths),
        **{"k_global": k.wide, "v_global": v.wide, **options},
    )


@dataclass
class Problem:
    """A call of the op and its arguments.

    `lengths` are tokens of each sequence; `size` and `v_size` head sizes; `groups` heads of queries
    for each of `heads`; `queries` the last ones of each sequence.
    """

    k_format: str = "fp8_rowwise"
    v_format: str = ""
    dtype: torch.dtype = torch.bfloat16
    lengths: tuple[int, ...] = (300,)
    heads: int = 1
    groups: int = 2
    queries: int = 1
    size: int = 64
    v_size: int = 0
    page: int = 0
    spare: int = 7
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.v_format = self.v_format or self.k_format
        self.v_size = self.v_size or self.size

    @property
    def lengths_tensor(self) -> Tensor:
        return torch.tensor(self.lengths)

    def q(self) -> Tensor:
        heads = self.heads * self.groups
        shape = (len(self.lengths), heads, self.queries, self.size)
        return rand(*shape, seed=self.seed + 1).to(self.dtype)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return keys and values, (B, H, longest, size), of different magnitudes."""
        lead = (len(self.lengths), self.heads, max(self.lengths))
        spread = torch.exp2(torch.arange(lead[2]) % 5 - 3.0)[:, None]
        k = rand(*lead, self.size, seed=self.seed + 2) * 2
        v = rand(*lead, self.v_size, seed=self.seed + 3) * spread
        return k.bfloat16().float(), v.bfloat16().float()

    def cache(self) -> tuple[Side, Side, dict[str, Tensor]]:
        """Return both sides, and the block table as an option of the op if there are pages."""
        batch, longest = len(self.lengths), max(self.lengths)
        lead, options = (batch, self.heads, longest + self.spare), {}
        if self.page:
            width = -(-longest // self.page)
            count = batch * width
            order = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed))
            options = {"block_table": order.view(batch, width)}
            lead = (count, self.heads, self.page)
        k = empty_side(self.k_format, lead, self.size)
        v = empty_side(self.v_format, lead, self.v_size)
        positions = torch.arange(longest).expand(batch, longest)
        append(k, v, *self.rows(), positions, **options)
        return k, v, options

    def run(self, **more: Any) -> Any:
        """Call the op; ``more`` replaces options, or names another op."""
        k, v, paged = self.cache()
        options = {**self.options, **paged, **more}
        lengths = options.pop("lengths", self.lengths_tensor)
        return attend(self.q(), k, v, lengths, **options)

    def expected(self, *others: Problem) -> Tensor:
        """Return what the oracle says; of the tokens of one other problem too."""
        sides = [dataclasses.replace(each, page=0).cache() for each in (self, *others)]
        batch, heads, queries, _ = self.q().shape
        out = torch.zeros(batch, heads, queries, self.v_size)
        attend = oracle_attention.attend_both if others else oracle_attention.attend
        for b in range(batch):
            for h in range(heads):
                rows = [[stored(t, b, h // self.groups) for t in (k, v)] for k, v, _ in sides]
                for m in range(queries):
                    asked = [each.query(b, h, m) for each in (self, *others)]
                    result = attend(asked, rows) if others else attend(asked[0], *rows[0])
                    out[b, h, m] = torch.from_numpy(result)
        return out.to(self.dtype)

    def query(self, b: int, h: int, m: int) -> oracle_attention.Query:
        """Return a query as the oracle reads it."""
        options, (first, last) = self.options, self.range(b, m)
        sinks = options.get("sinks")
        return oracle_attention.Query(
            self.q()[b, h, m].float().numpy(),
            first,
            last,
            options.get("scale", self.size**-0.5),
            options.get("soft_cap", 0.0),
            None if sinks is None else float(sinks[h] if sinks.ndim == 1 else sinks[b, h, m]),
            self.mask_of(b, h, m),
            self.dtype is torch.bfloat16,
        )

    def range(self, b: int, m: int) -> tuple[int, int]:
        """Return the first and the last token that a query sees."""
        options, length = self.options, self.lengths[b]
        position = length - self.queries + m
        if "positions" in options:
            position = int(options["positions"][b, m])
        last = min(length - 1, position) if options.get("causal", True) else length - 1
        first = int(options["first"][b]) if "first" in options else 0
        window = options.get("window", 0)
        return max(first, position - window + 1, 0) if window else first, last

    def mask_of(self, b: int, h: int, m: int) -> np.ndarray | None:
        """Return what is added to the scores of a query."""
        mask = self.options.get("mask")
        if mask is None:
            return None
        row = mask.expand(len(self.lengths), self.heads * self.groups, self.queries, -1)[b, h, m]
        if mask.dtype is torch.bool:
            row = torch.where(row, 0.0, -math.inf)
        return row.float().numpy()


def random_problem(seed: int, limit: int = 6000) -> Problem | None:
    """Return a problem that the oracle solves in about a second, or None.

    ``limit`` is of the number of scores.
    """
    choose = random.Random(seed)
    lengths = choose.choices((1, 3, 16, 17, 40, 255, 256, 257, 300, 1030), k=choose.choice((1, 2)))
    queries, groups, heads = (
        choose.choice((1, 1, 2, 5)),
        choose.randint(1, 9),
        choose.choice((1, 2)),
    )
    options: dict[str, Any] = {"causal": choose.random() < 0.8}
    if options["causal"] and choose.random() < 0.3:
        options["window"] = choose.choice((1, 16, 100, 260))
    if choose.random() < 0.2:
        options["soft_cap"] = 3.0
    generator = torch.Generator().manual_seed(seed)
    if choose.random() < 0.3:
        options["sinks"] = torch.randn(heads * groups, generator=generator)
    if choose.random() < 0.2:
        options["first"] = torch.tensor([choose.randint(0, 20) for _ in lengths])
    if choose.random() < 0.3:
        sizes = [choose.choice((1, n)) for n in (len(lengths), heads * groups, queries)]
        mask = torch.randn(*sizes, max(lengths), generator=generator)
        hidden = mask.masked_fill(mask > 1, -torch.inf).to(choose.choice(DTYPES))
        options["mask"] = mask > 0 if choose.random() < 0.5 else hidden
    if max(lengths) * heads * groups * queries * len(lengths) > limit:
        return None
    return Problem(
        choose.choice(FORMATS),
        choose.choice(FORMATS),
        choose.choice(DTYPES),
        tuple(lengths),
        heads,
        groups,
        queries,
        size=choose.choice((32, 64, 96, 128, 256)),
        v_size=choose.choice((32, 64, 96, 128, 160)),
        page=choose.choice((0, 0, 0, 16, 48, 24, 7)),
        seed=seed,
        options=options,
    )


def stored(side: Side, b: int, h: int) -> oracle_attention.Stored:
    """Return the rows of a sequence and head as the oracle reads them."""
    form = row_format(side.text)
    codes = side.codes[b, h]
    if form.element is None:
        return oracle_attention.Stored(codes.float().numpy(), plain=True)
    element, packed = oracle.ELEMENTS[form.element.name], codes.numpy()
    size = form.size(codes.shape[-1])
    unpack = {(2, 1): oracle.unpack4, (4, 3): oracle.unpack6}.get(form.group)
    values = oracle.decode(packed if unpack is None else unpack(packed, size), element)
    factors, wide = None, 1.0
    if side.factors is not None:
        bits = side.factors[b, h].numpy()
        if form.factor is torch.float32:
            factors = bits
        elif side.wide is not None:
            factors = oracle.decode(bits, oracle.ELEMENTS["e4m3"])
        else:
            factors = np.where(bits == 255, np.nan, np.ldexp(1.0, bits.astype(int) - 127))
            factors = factors.astype(np.float32)
    if side.wide is not None:
        wide = float(np.float32(side.wide.item()) / np.float32(form.divisor))
    return oracle_attention.Stored(values, factors, form.block, wide, form.four_bits)


# ---- arguments of valid raw calls ----------------------------------------------------------------


def _problem(make: Any) -> Problem:
    choose = make.random
    lengths = tuple(choose.choice((1, 5, 40)) for _ in range(choose.choice((1, 2))))
    return Problem(
        choose.choice(FORMATS),
        choose.choice(FORMATS),
        make.dtype,
        lengths,
        heads=choose.choice((1, 2)),
        groups=choose.choice((1, 2)),
        queries=choose.choice((1, 2)),
        size=choose.choice((32, 64)),
        v_size=choose.choice((32, 64)),
        page=choose.choice((0, 0, 16)),
        seed=choose.randint(0, 99),
    )


def attention_arguments(make: Any) -> dict[str, Any]:
    """Return the arguments of a valid call of ``attention``."""
    problem = _problem(make)
    k, v, paged = problem.cache()
    batch, heads = len(problem.lengths), problem.heads * problem.groups
    longest = max(problem.lengths)
    mask = make.maybe(torch.randn(batch, 1, problem.queries, longest))
    if mask is not None and make.random.random() < 0.5:
        mask = mask > 0
    positions = (problem.lengths_tensor[:, None] - 1).expand(batch, problem.queries).clone()
    causal = make.random.random() < 0.7
    return {
        **{"q": problem.q(), "k": k.codes, "k_factors": k.factors, "v": v.codes},
        **{"v_factors": v.factors, "k_format": k.text, "v_format": v.text},
        **{"lengths": problem.lengths_tensor, "scale": 0.1, "causal": causal},
        **{"window": make.random.choice((0, 3)) if causal else 0},
        **{"soft_cap": make.random.choice((0.0, 30.0)), "positions": make.maybe(positions)},
        **{"first": make.maybe(torch.zeros(batch, dtype=torch.int64)), "mask": mask},
        **{"sinks": make.maybe(torch.randn(heads)), "k_global": k.wide, "v_global": v.wide},
        "block_table": paged.get("block_table"),
    }


def append_arguments(make: Any) -> dict[str, Any]:
    """Return the arguments of a valid call of ``cache_append_``."""
    problem = _problem(make)
    k, v, paged = problem.cache()
    batch, count = len(problem.lengths), min(problem.lengths)
    keys, values = (make.floats(*t.shape[:2], count, t.shape[3]) for t in problem.rows())
    return {
        **{"k": keys, "v": values, "positions": torch.arange(count).repeat(batch, 1)},
        **{"k_codes": k.codes, "k_factors": k.factors, "v_codes": v.codes},
        **{"v_factors": v.factors, "k_format": k.text, "v_format": v.text},
        **{"k_mean": make.maybe(torch.randn(problem.heads, problem.size))},
        **{"block_table": paged.get("block_table"), "k_global": k.wide, "v_global": v.wide},
    }


def join_arguments(make: Any) -> dict[str, Any]:
    """Return the arguments of a valid call of ``join_attention``."""
    shape = (make.random.choice((1, 2)), 2, make.random.choice((1, 3)))
    parts = [torch.randn(*shape, 32), torch.rand(*shape, 2), torch.randn(*shape, 32)]
    return {
        **dict(zip(("values", "sums", "more_values"), parts, strict=True)),
        **{"more_sums": torch.rand(*shape, 2), "dtype": make.dtype},
        "sinks": make.maybe(torch.randn(2)),
    }


def varlen_arguments(make: Any) -> dict[str, Any]:
    """Return the arguments of a valid call of ``varlen_attention``."""
    choose = make.random
    queries, keys = (choose.choices((1, 3, 5), k=2) for _ in range(2))
    paged, text, form = choose.random() < 0.3, *choose.choices(FORMATS, k=2)
    lead = (6, 4, 2) if paged else (1, sum(keys), 2)
    k, v = (empty_side(each, lead, 32).map(lambda t: t if paged else t[0]) for each in (text, form))
    sums = [torch.tensor([0, *n], dtype=torch.int32).cumsum(0) for n in (queries, keys)]
    used = torch.tensor(keys) if paged else make.maybe(torch.tensor(keys))
    return {
        **{"q": make.floats(sum(queries), 4, 32), "k": k.codes, "k_factors": k.factors},
        **{"v": v.codes, "v_factors": v.factors, "k_format": text, "v_format": form},
        **{"cu_seq_q": sums[0], "cu_seq_k": None if paged else sums[1], "max_q": 5, "max_k": 5},
        **{"scale": 0.1, "before": choose.choice((-1, 0, 2)), "after": choose.choice((-1, 0, 2))},
        **{"seqused_k": used, "k_global": k.wide, "v_global": v.wide},
        "block_table": torch.tensor([[5, 0], [2, 3]]) if paged else None,
    }


MAKERS = {
    "varlen_attention": varlen_arguments,
    "attention": attention_arguments,
    "attention_part": lambda make: {**attention_arguments(make), "sinks": None},
    "join_attention": join_arguments,
    "cache_append_": append_arguments,
}


def attention_samples(name: str) -> Any:
    """Return a function that yields arguments for ``torch.library.opcheck``."""
    schema = getattr(torch.ops.qtensor, name).default._schema

    def samples(case: object) -> Any:
        from raw_op_cases import Maker  # noqa: PLC0415 - it imports this module

        for seed in range(8):
            arguments = MAKERS[name](Maker(seed))
            yield tuple(arguments[a.name] for a in schema.arguments), {}

    return samples
