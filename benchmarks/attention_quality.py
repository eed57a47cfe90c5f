"""Benchmark of what attention and language models lose by quantized keys and values.

``python -m benchmarks.attention_quality [--gpt small_gpt.pt] [--llama small_llama.pt] [--quick]
[--output DIR]`` measures the error of attention, and the perplexity of the model of
``examples/small_gpt.py`` and of a small Llama of transformers. A model without a file is trained.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import qtensor
from benchmarks import machine, suite
from benchmarks.report import Column, Report, Row
from benchmarks.settings import parser
from benchmarks.settings import settings as settings_of
from examples import small_gpt

TITLE = "What attention loses by quantized keys and values"
TEXT = (
    "Keys and values are appended to a `qtensor.KVCache` in two parts: the first half of the "
    "tokens, which also fixes what first tokens decide (the mean of the keys, the maximum of "
    "`nvfp4`), and the others. *option*: `mean` is `k_mean`, `residual` keeps the last "
    "{residual} tokens of each query in bfloat16. *bits*: of a value, for heads of 128 and 4096 "
    "tokens. *dB*: "
    "signal to noise ratio of the attention's output against float32 on the original keys and "
    "values; of the layers of both models, mean over layers and windows; *outliers*: of random "
    "keys of which four channels of each head have a mean of 6 to 12 times the spread of the "
    "others, *RoPE*: with rotary embedding after it. *Perplexity*: of a byte in the second half "
    "of {windows} windows of held-out sources of Python's standard library. *GPT*: "
    "`examples/small_gpt.py`, {gpt:.1f} million parameters, heads of 32, no rotary embedding; "
    "*Llama*: {llama:.1f} million, two heads of keys of 64 for four of queries. Without "
    "quantization: {plain_gpt:.4f} and {plain_llama:.4f}. One seed."
)
PACKED = "mxfp6(packed=True)"
FORMATS = (
    ("bfloat16", "bfloat16"),
    ("fp8_rowwise", "fp8_rowwise"),
    ("mxfp8", "mxfp8"),
    (PACKED, PACKED),
    ("fp8_rowwise", "nvfp4"),
    ("nvfp4", "nvfp4"),
    ("mxfp4", "mxfp4"),
)
"""Formats of keys and of values."""
GPT = small_gpt.Config()
LLAMA = small_gpt.Config(width=256, heads=4, layers=4, hidden=704, context=256, steps=400)
KV_HEADS = 2
RESIDUAL = 32
OPTIONS = ("none", "mean", "residual")
Operands = tuple[Tensor, Tensor, Tensor]
"""q (B, Hq, S, D), k (B, H, S, D) and v (B, H, S, D)."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """How keys and values are stored."""

    k: str
    v: str
    option: str

    @property
    def name(self) -> str:
        """The first column of the row."""
        return self.k if self.k == self.v else f"{self.k}, {self.v}"

    def cache(self, batch: int, heads: int, size: int, tokens: int) -> qtensor.KVCache:
        """Return an empty cache."""
        packed = qtensor.quantizer("mxfp6", packed=True)
        k_format, v_format = (packed if name == PACKED else name for name in (self.k, self.v))
        return qtensor.KVCache(
            *(batch, heads, size, tokens),
            k_format=k_format,
            v_format=v_format,
            k_mean="first" if self.option == "mean" else None,
            residual=RESIDUAL if self.option == "residual" else 0,
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return causal attention: of the first half of the tokens, then of the others."""
        batch, heads, tokens, size = k.shape
        cache = self.cache(batch, heads, size, tokens)
        parts = (slice(tokens // 2), slice(tokens // 2, None))
        return torch.cat([cache.update(*(t[:, :, part] for t in (q, k, v))) for part in parts], 2)

    def bits(self) -> float:
        """Return the bits of a value, factors included."""
        return 8 * self.cache(1, 8, 128, 4096).nbytes / (2 * 8 * 128 * 4096)


def cases() -> Iterator[Case]:
    """Yield the rows of the table."""
    for k, v in FORMATS:
        for option in OPTIONS if k != "bfloat16" else OPTIONS[:1]:
            yield Case(k, v, option)


class AttentionBy(TorchFunctionMode):
    """Gives the causal attention of a model to another function."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Replace ``scaled_dot_product_attention`` alone."""
        if function is F.scaled_dot_product_attention:
            return self.attend(*args[:3])
        return function(*args, **(kwargs or {}))


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention in the dtype of the operands."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


# ---- operands


def seen_by(model: nn.Module, rows: Tensor) -> list[Operands]:
    """Return what the attention of each layer gets for windows (B, T) of tokens."""
    found: list[Operands] = []

    def record(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found.append((q, k, v))
        return plain(q, k, v)

    with torch.no_grad(), AttentionBy(record):
        for part in rows.split(8):
            model(part)
    return found


def outliers(tokens: int, rotary: bool, heads: int = 8, size: int = 128) -> Operands:
    """Return random operands whose keys have four channels a head with a large mean.

    Queries are small there, as those of a model that works with such keys.

    Args:
        tokens: S.
        rotary: turn queries and keys by their position, as models with RoPE do.
        heads: of keys and of queries.
        size: of a head.
    """
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, size, generator=random) for _ in range(3))
    where = torch.stack([torch.randperm(size, generator=random)[:4] for _ in range(heads)])
    sign = torch.randint(2, (heads, 4), generator=random) * 2 - 1
    mean = torch.zeros(heads, size)
    mean.scatter_(1, where, sign * (6 + 6 * torch.rand(heads, 4, generator=random)))
    k = k + mean[:, None]
    q = torch.where(mean[:, None] != 0, 0.3 * q, q)
    return (turned(q), turned(k), v) if rotary else (q, k, v)


def turned(t: Tensor) -> Tensor:
    """Return rows (B, H, S, D) with rotary embedding of base 500,000, as in Llama 3."""
    half = t.shape[-1] // 2
    rates = 500_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(t.shape[-2])[:, None] * rates
    low, high, cos, sin = t[..., :half], t[..., half:], angle.cos().float(), angle.sin().float()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def decibels(case: Case, operands: Sequence[Operands]) -> float:
    """Return the mean signal to noise ratio of the outputs."""
    ratios = []
    for q, k, v in operands:
        exact = plain(q, k, v).double()
        noise = (case.attend(q, k, v).double() - exact).square().sum()
        ratios.append(float(10 * torch.log10(exact.square().sum() / noise)))
    return sum(ratios) / len(ratios)


# ---- models


class Logits(nn.Module):
    """A model of transformers that returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (B, T, V) of tokens (B, T)."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


def llama(c: small_gpt.Config) -> Logits:
    """Return an untrained Llama of bytes."""
    from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: PLC0415 - an extra

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=small_gpt.VOCABULARY,
        hidden_size=c.width,
        intermediate_size=c.hidden,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=c.context,
    )
    return Logits(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"))


def trained_llama(path: Path, data: Tensor, c: small_gpt.Config) -> Logits:
    """Return the Llama of a file, which is written if it is missing."""
    model = llama(c)
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
    else:
        small_gpt.fit(model, data, c)
        torch.save(model.state_dict(), path)
    return model.eval()


def trained_gpt(path: Path, data: Tensor, c: small_gpt.Config) -> tuple[nn.Module, int]:
    """Return the GPT of a file, which is written if it is missing, and its context."""
    if not path.exists():
        small_gpt.save(small_gpt.train(data, c), c, path)
    model, found = small_gpt.load(path)
    return model, found.context


# ---- rows


def measure(
    models: dict[str, tuple[nn.Module, int]], held_out: Tensor, windows: int, tokens: int
) -> tuple[list[Row], dict[str, float]]:
    """Return a row for each case, and the perplexities without quantization.

    Args:
        models: name -> the model and its context.
        held_out: bytes that no model was trained on.
        windows: of a perplexity; an eighth of them for the error of attention.
        tokens: of the random operands.
    """
    perplexity = {
        name: partial(small_gpt.perplexity, model, held_out, context, windows)
        for name, (model, context) in models.items()
    }
    operands = {
        name: seen_by(model, small_gpt.windows(held_out, windows // 8, context, seed=1 << 22))
        for name, (model, context) in models.items()
    }
    operands |= {name: [outliers(tokens, name == "rope")] for name in ("outliers", "rope")}
    rows = []
    for case in cases():
        row: Row = {"case": case.name, "option": case.option, "bits": case.bits()}
        row |= {f"{name}_db": decibels(case, found) for name, found in operands.items()}
        for name, measured in perplexity.items():
            with AttentionBy(case.attend):
                row[f"{name}_perplexity"] = measured()
        print(row, flush=True)
        rows.append(row)
    return rows, {name: measured() for name, measured in perplexity.items()}


COLUMNS = (
    Column("case", "cache"),
    Column("option", "option"),
    Column("bits", "bits", 2),
    Column("gpt_db", "GPT dB", 1),
    Column("llama_db", "Llama dB", 1),
    Column("outliers_db", "outliers dB", 1),
    Column("rope_db", "with RoPE dB", 1),
    Column("gpt_perplexity", "GPT perplexity", 4),
    Column("llama_perplexity", "Llama perplexity", 4),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the results."""
    command = parser("attention_quality", __doc__)
    command.add_argument("--gpt", type=Path, default=Path("small_gpt.pt"), help="of small_gpt.py")
    command.add_argument("--llama", type=Path, default=Path("small_llama.pt"), help="its weights")
    command.set_defaults(peers="none")
    options = command.parse_args(arguments)
    settings = settings_of(options)
    data, held_out = small_gpt.corpus()
    sizes = [GPT, LLAMA]
    if settings.quick:
        sizes = [replace(size, steps=3) for size in sizes]
    models = {
        "gpt": trained_gpt(options.gpt, data, sizes[0]),
        "llama": (trained_llama(options.llama, data, sizes[1]), sizes[1].context),
    }
    windows, tokens = (8, 256) if settings.quick else (256, 2048)
    rows, exact = measure(models, held_out, windows, tokens)
    millions = {k: sum(p.numel() for p in m.parameters()) / 1e6 for k, (m, _) in models.items()}
    text = TEXT.format(
        windows=windows,
        residual=RESIDUAL,
        **millions,
        **{f"plain_{name}": value for name, value in exact.items()},
    )
    here = machine.environment(settings.threads, {})
    report = Report("attention_quality", TITLE, text, here, COLUMNS, (), tuple(rows))
    return suite.finish(report, settings)


if __name__ == "__main__":
    sys.exit(main())
