"""Generate text with quantized weights, and compare speed and memory with bfloat16 and float32.

``python examples/generate.py`` makes a random Llama-style model with about 1 billion parameters
(``--size``), or takes the folder of a real one (``--model``). It loads the model in float32, in
bfloat16 and with the weights of its linear layers in each format of ``--formats``, and prints the
bytes of the parameters and the tokens a second of greedy decoding with a static cache. With
``--compile`` it does so for compiled code too, and with ``--cache FORMAT`` for a quantized cache of
keys and values. It needs the extra ``transformers``.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from qtensor.integrations.transformers import QTensorCache, QTensorConfig

FORMATS = ("fp8", "mxfp8", "mxfp4", "nvfp4")
DENSE = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BASE = "bfloat16"
"""The row with which the others are compared."""
SIZES: dict[str, dict[str, int]] = {
    # The layers of Llama 3.2 1B and the vocabulary of Llama 2: 1.04 billion parameters.
    "1b": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    # 0.11 billion parameters, for a first look.
    "small": {
        "vocab_size": 8192,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "vocab_size": 64,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


@dataclass(frozen=True)
class Run:
    """What was measured of one model."""

    name: str
    """"float32", "bfloat16" or the format of the weights, and whether the code is compiled."""
    megabytes: float
    """Megabytes of all parameters: weights, factors, embeddings and norms."""
    prompt_seconds: float
    """Seconds from the call to the first new token, compilation included."""
    tokens_per_second: float
    """Speed after the first two new tokens, which include compilation."""
    tokens: Tensor
    """(batch, new tokens) integers."""


class Clock:
    """A streamer of ``generate``: notes the time of every token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Note the time; ``generate`` passes the prompt first, then each new token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing: the last token was noted."""


def config(size: str, context: int = 2048) -> LlamaConfig:
    """Return the config of a Llama-style model with tied embeddings.

    Args:
        size: a key of ``SIZES``.
        context: the largest number of positions.
    """
    return LlamaConfig(
        **SIZES[size],
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )


def write_random(folder: Path, size: str, seed: int = 0, context: int = 2048) -> None:
    """Write a random bfloat16 model to a folder.

    Args:
        folder: is created.
        size: a key of ``SIZES``.
        seed: of the weights.
        context: the largest number of positions.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(size, context), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def load(folder: Path, name: str) -> Any:
    """Return the model of a folder.

    Args:
        folder: of a dense model, in the layout of transformers.
        name: "float32" or "bfloat16", or the format in which the weights of linear layers are
            stored; everything else is bfloat16 then.
    """
    if name in DENSE:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=DENSE[name]).eval()
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=QTensorConfig(name)
    ).eval()


def quantized_cache(model: Any, prompt: Tensor, capacity: int, fmt: str) -> QTensorCache:
    """Return a cache of fixed capacity, and let the model's attention read its codes.

    Args:
        model: of transformers.
        prompt: (batch, tokens) integers.
        capacity: tokens of the prompt and of the result.
        fmt: format of keys and values.
    """
    model.set_attn_implementation("qtensor")
    own = model.config
    cache = QTensorCache(own, fmt, capacity=capacity)
    # Compiled code cannot make the buffers.
    cache.early_initialization(
        prompt.shape[0], own.num_key_value_heads, own.head_dim, model.dtype, prompt.device
    )
    return cache


def generate(
    model: Any, prompt: Tensor, count: int, compiled: bool = False, cache: str | None = None
) -> tuple[Any, Clock]:
    """Decode greedily with a static cache.

    Args:
        model: of transformers.
        prompt: (batch, tokens) integers.
        count: new tokens for each row.
        compiled: call the model through ``torch.compile(..., fullgraph=True)``.
        cache: format of keys and values; None for those of the model's dtype.

    Returns:
        The new tokens (batch, count), and the clock that noted the time of each.
    """
    clock = Clock()
    plain = model.forward
    options: dict[str, Any] = {"cache_implementation": "static"}
    if cache is not None:
        capacity = prompt.shape[1] + count
        options = {"past_key_values": quantized_cache(model, prompt, capacity, cache)}
    if compiled:
        model.forward = torch.compile(plain, fullgraph=True)
    try:
        out = model.generate(
            prompt,
            max_new_tokens=count,
            do_sample=False,
            **options,
            streamer=clock if prompt.shape[0] == 1 else None,
        )
    finally:
        model.forward = plain
    return out[:, prompt.shape[1] :], clock


def measure(
    model: Any,
    name: str,
    prompt: Tensor,
    count: int,
    compiled: bool = False,
    cache: str | None = None,
) -> Run:
    """Return the memory and the speed of a model; the arguments are those of ``generate``."""
    start = time.perf_counter()
    tokens, clock = generate(model, prompt, count, compiled, cache)
    # times[0] is that of the prompt itself. Compiled code is compiled for the second token.
    _, first, second, *_, last = clock.times
    return Run(
        name + ", compiled" * compiled + (f", {cache} cache" if cache else ""),
        sum(parameter.nbytes for parameter in model.parameters()) / 1e6,
        first - start,
        (count - 2) / (last - second),
        tokens,
    )


def runs(
    folder: Path,
    names: Sequence[str],
    prompt: Tensor,
    count: int,
    compiled: bool,
    cache: str | None = None,
) -> Iterator[Run]:
    """Yield the runs of every model, one model in memory at a time.

    Args:
        folder: of a dense model.
        names: rows, as ``load`` takes them.
        prompt: (1, tokens) integers.
        count: new tokens, at least 4.
        compiled: measure compiled code too.
        cache: measure with keys and values in this format too.
    """
    for name in names:
        model = load(folder, name)
        for kept in dict.fromkeys((None, cache)):
            yield measure(model, name, prompt, count, cache=kept)
            if compiled:
                torch._dynamo.reset()
                yield measure(model, name, prompt, count, compiled=True, cache=kept)
        del model
        gc.collect()


def table(found: Sequence[Run]) -> list[str]:
    """Return the lines of a Markdown table, with ratios to the eager bfloat16 run."""
    base = next(run for run in found if run.name == BASE)
    lines = [
        "| weights | MB | x bf16 | tokens/s | x bf16 | prompt s | tokens as bf16 |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for run in found:
        equal = int((run.tokens == base.tokens).sum())
        lines.append(
            f"| {run.name} | {run.megabytes:,.0f} | {run.megabytes / base.megabytes:.2f} "
            f"| {run.tokens_per_second:.1f} | {run.tokens_per_second / base.tokens_per_second:.2f} "
            f"| {run.prompt_seconds:.2f} | {equal} of {run.tokens.numel()} |"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the models and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="folder of a dense model (default: random)")
    parser.add_argument("--size", choices=SIZES, default="1b", help="of the random model")
    parser.add_argument("--formats", nargs="*", default=FORMATS, help="default: %(default)s")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of the random prompt")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens, at least 4")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--compile", action="store_true", help="measure compiled code too")
    parser.add_argument("--cache", metavar="FORMAT", help="keys and values in this format too")
    options = parser.parse_args(arguments)
    if options.tokens < 4:
        parser.error(f"--tokens must be at least 4; got {options.tokens}")
    torch.set_num_threads(options.threads)
    names = [*DENSE, *options.formats]
    with tempfile.TemporaryDirectory(prefix="qtensor-generate-") as temporary:
        folder = options.model or Path(temporary)
        if options.model is None:
            write_random(folder, options.size)
        torch.manual_seed(1)
        vocabulary = AutoConfig.from_pretrained(folder).get_text_config().vocab_size
        prompt = torch.randint(2, vocabulary, (1, options.prompt))
        found = list(runs(folder, names, prompt, options.tokens, options.compile, options.cache))
    print(f"{options.threads} threads, {options.prompt} prompt tokens, {options.tokens} new tokens")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
