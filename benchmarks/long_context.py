"""Benchmark of generated tokens after a long context, by the format of keys and values, on a CPU.

``python -m benchmarks.long_context [--quick] [--threads N] [--caches mxfp8 nvfp4] [--output DIR]``
fills the caches with random keys and values, so that no model has to read thousands of tokens
first, and lets the models of ``examples/generate.py`` generate in turns.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, StaticCache

from benchmarks import machine, suite
from benchmarks.report import Column, Report, Row
from benchmarks.settings import Settings, parser
from benchmarks.settings import settings as settings_of
from examples import generate as example
from qtensor.integrations.caches import NewTokens
from qtensor.integrations.transformers import QTensorCache

TITLE = "Generated tokens after a long context on a CPU"
TEXT = (
    "A random Llama-style model ({size}), greedy decoding through `generate` of transformers in "
    "eager code, after as many tokens of context as the heading says. Their keys and values are "
    "random and were put into the caches directly. *dynamic*, *static*: caches of transformers in "
    "bfloat16 with its default attention; the others are `QTensorCache` with "
    '`attn_implementation="qtensor"`. All models are in memory and generate in turns, {rounds} '
    "times {tokens} tokens each; *tokens/s* is the median. *MB*: bytes of the cache. *x bf16*: "
    "against the faster cache of transformers with weights in bfloat16 (tokens/s), and against its "
    "static cache (MB)."
)
SIZE = {False: "1b", True: "tiny"}
CONTEXTS = {False: (2048, 8192), True: (64,)}
ROUNDS = {False: 3, True: 1}
TOKENS = {False: 8, True: 4}
WEIGHTS = "mxfp4"
CACHES = ("fp8_rowwise", "mxfp8", "mxfp4", "nvfp4", "bfloat16")
THEIRS = ("dynamic", "static")


class Way(NamedTuple):
    """A row: the weights of a model, and its cache."""

    weights: str
    cache: str


def ways(caches: Sequence[str]) -> list[Way]:
    """Return the rows; ``caches`` are formats of ours."""
    theirs = [Way(weights, cache) for weights in (example.BASE, WEIGHTS) for cache in THEIRS]
    return [*theirs, *(Way(WEIGHTS, cache) for cache in caches)]


def filled(model: Any, cache: str, context: int, room: int) -> Any:
    """Return a cache with random tokens, and let the model have the attention that reads it.

    Args:
        model: of transformers.
        cache: "dynamic", "static", or a format of keys and values.
        context: number of tokens.
        room: further tokens that the cache must take.
    """
    own, made = model.config, None
    model.set_attn_implementation("sdpa" if cache in THEIRS else "qtensor")
    if cache == "dynamic":
        made = DynamicCache(config=own)
    elif cache == "static":
        made = StaticCache(config=own, max_cache_len=context + room)
    else:
        made = QTensorCache(own, cache, capacity=context + room)
    random = torch.Generator().manual_seed(0)
    shape = (1, own.num_key_value_heads, context, own.head_dim)
    k, v = (torch.randn(shape, generator=random).to(model.dtype) for _ in range(2))
    for index in range(own.num_hidden_layers):
        new, _ = made.update(k, v, index)
        if isinstance(new, NewTokens):  # The attention function would append them.
            new.cache.append(k, v)
    return made


def nbytes(cache: Any) -> int:
    """Return the bytes of keys and values."""
    if isinstance(cache, QTensorCache):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def measure(model: Any, cache: str, context: int, count: int) -> tuple[float, int, Tensor]:
    """Return the tokens a second of a model, the bytes of its cache, and the new tokens."""
    made = filled(model, cache, context, count + 1)
    size, clock = nbytes(made), example.Clock()
    random = torch.Generator().manual_seed(1)
    prompt = torch.randint(2, model.config.vocab_size, (1, context + 1), generator=random)
    tokens = model.generate(
        prompt, past_key_values=made, max_new_tokens=count, do_sample=False, streamer=clock
    )
    _, _, second, *_, last = clock.times
    return (count - 2) / (last - second), size, tokens[:, context + 1 :]


def collect(models: dict[str, Any], caches: Sequence[str], settings: Settings) -> list[Row]:
    """Return the rows of all contexts.

    Args:
        models: by the format of their weights.
        caches: formats of ours.
        settings: quick or not.
    """
    rows: list[Row] = []
    for context in CONTEXTS[settings.quick]:
        speeds: dict[Way, list[float]] = {way: [] for way in ways(caches)}
        sizes: dict[Way, int] = {}
        for measured in range(1 + ROUNDS[settings.quick]):  # The first one only warms up.
            for way, found in speeds.items():
                speed, sizes[way], _ = measure(
                    models[way.weights], way.cache, context, TOKENS[settings.quick]
                )
                found += [speed] * bool(measured)
        median = {way: statistics.median(found) for way, found in speeds.items()}
        base = max(median[Way(example.BASE, cache)] for cache in THEIRS)
        rows += [
            {
                "context": f"{context} tokens",
                "weights": way.weights,
                "cache": way.cache,
                "mb": sizes[way] / 1e6,
                "mb_ratio": sizes[way] / sizes[Way(example.BASE, "static")],
                "tokens_s": median[way],
                "tokens_s_all": found,
                "ratio": median[way] / base,
            }
            for way, found in speeds.items()
        ]
    return rows


COLUMNS = (
    Column("weights", "weights"),
    Column("cache", "cache"),
    Column("mb", "MB", 1),
    Column("mb_ratio", "MB x bf16", 2),
    Column("tokens_s", "tokens/s", 2),
    Column("ratio", "x bf16", 2),
)


def document(rows: Sequence[Row], settings: Settings) -> Report:
    """Return the report of measured rows."""
    text = TEXT.format(
        size=f"`examples/generate.py --size {SIZE[settings.quick]}`",
        rounds=ROUNDS[settings.quick],
        tokens=TOKENS[settings.quick],
    )
    here = machine.environment(settings.threads, {"transformers": transformers.__version__})
    return Report("long_context", TITLE, text, here, COLUMNS, ("context",), tuple(rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the results."""
    command = parser("long_context", __doc__)
    command.add_argument("--caches", nargs="*", default=CACHES, help="default: %(default)s")
    command.add_argument("--keep", type=Path, help="folder for the random model, for another run")
    command.set_defaults(peers="none")
    options = command.parse_args(arguments)
    settings = settings_of(options)
    with tempfile.TemporaryDirectory(prefix="qtensor-context-") as temporary:
        folder = options.keep or Path(temporary)
        if not (folder / "config.json").exists():
            example.write_random(folder, SIZE[settings.quick], context=16384)
        models = {name: example.load(folder, name) for name in (example.BASE, WEIGHTS)}
        rows = collect(models, options.caches, settings)
    return suite.finish(document(rows, settings), settings)


if __name__ == "__main__":
    sys.exit(main())
