"""Benchmark of text generation by a Llama-style model with quantized weights, on a CPU.

``python -m benchmarks.generation [--quick] [--compile] [--threads N] [--output DIR]`` keeps the
models of all rows in memory and lets them generate in turns. ``examples/generate.py`` is the
example that it uses.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers

from benchmarks import machine, suite
from benchmarks.report import Column, Report, Row
from benchmarks.settings import Settings, parser
from benchmarks.settings import settings as settings_of
from examples import generate as example
from examples.generate import Run

TITLE = "Generated tokens on a CPU"
TEXT = (
    "A random Llama-style model with {parameters:.2f} billion parameters ({size}): {prompt} prompt "
    "tokens, then greedy decoding with a static cache through `generate` of transformers. All "
    "models are in memory and generate in turns, {rounds} times {tokens} tokens each; *tokens/s* "
    "is the median. *MB*: bytes of all parameters; embeddings and norms stay in bfloat16. *x "
    "bf16*: against bfloat16 in eager code, tokens/s above 1 and MB below 1 are better."
)
SIZE = {False: "1b", True: "tiny"}
ROUNDS = {False: 3, True: 2}
TOKENS = {False: 10, True: 4}
PROMPT = 16
FORMATS = ("fp8", "mxfp8", "mxfp6", "mxfp4", "nvfp4")


def collect(folder: Path, names: Sequence[str], settings: Settings, compiled: bool) -> list[Row]:
    """Return a row for each model.

    Args:
        folder: of a dense model.
        names: as ``examples.generate.load`` takes them, "bfloat16" among them.
        settings: quick or not.
        compiled: measure compiled code too.
    """
    models = {name: example.load(folder, name) for name in names}
    vocabulary = next(iter(models.values())).config.vocab_size
    prompt = torch.randint(2, vocabulary, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    count = TOKENS[settings.quick]
    found: dict[str, list[Run]] = {}
    # A call that nothing counts loads and compiles.
    for measured in range(1 + ROUNDS[settings.quick]):
        for name, model in models.items():
            for way in (False, True)[: 1 + compiled]:
                run = example.measure(model, name, prompt, count, way)
                if measured:
                    found.setdefault(run.name, []).append(run)
    return rows_of(found)


def rows_of(found: Mapping[str, Sequence[Run]]) -> list[Row]:
    """Return the rows of all runs, by the name of the row."""
    speed = {
        name: statistics.median(run.tokens_per_second for run in runs)
        for name, runs in found.items()
    }
    size = {name: runs[0].megabytes for name, runs in found.items()}
    return [
        {
            "case": name,
            "mb": size[name],
            "mb_ratio": size[name] / size[example.BASE],
            "tokens_s": speed[name],
            "tokens_s_all": [run.tokens_per_second for run in found[name]],
            "ratio": speed[name] / speed[example.BASE],
        }
        for name in found
    ]


COLUMNS = (
    Column("case", "weights"),
    Column("mb", "MB", 0),
    Column("mb_ratio", "MB x bf16", 2),
    Column("tokens_s", "tokens/s", 2),
    Column("ratio", "x bf16", 2),
)


def document(rows: Sequence[Row], settings: Settings) -> Report:
    """Return the report of measured rows."""
    size = SIZE[settings.quick]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(example.config(size))
    text = TEXT.format(
        parameters=sum(parameter.numel() for parameter in model.parameters()) / 1e9,
        size=f"`examples/generate.py --size {size}`",
        prompt=PROMPT,
        rounds=ROUNDS[settings.quick],
        tokens=TOKENS[settings.quick],
    )
    here = machine.environment(settings.threads, {"transformers": transformers.__version__})
    return Report("generation", TITLE, text, here, COLUMNS, (), tuple(rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the results."""
    command = parser("generation", __doc__)
    command.add_argument("--compile", action="store_true", help="measure compiled code too")
    command.add_argument("--formats", nargs="*", default=FORMATS, help="default: %(default)s")
    command.add_argument("--keep", type=Path, help="folder for the random model, for another run")
    command.set_defaults(peers="none")
    options = command.parse_args(arguments)
    settings = settings_of(options)
    names = [*example.DENSE, *options.formats]
    with tempfile.TemporaryDirectory(prefix="qtensor-generation-") as temporary:
        folder = options.keep or Path(temporary)
        if not (folder / "config.json").exists():
            example.write_random(folder, SIZE[settings.quick])
        rows = collect(folder, names, settings, options.compile)
    return suite.finish(document(rows, settings), settings)


if __name__ == "__main__":
    sys.exit(main())
