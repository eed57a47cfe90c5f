"""Memory and time of a model of transformers: bfloat16, quantized while loading, loaded quantized.

``python -m benchmarks.transformers_memory FOLDER`` writes a random Llama or Qwen3-MoE there, then
loads it in a new process each way and generates a few tokens. It prints the bytes of the
parameters, the peaks of memory beyond that of the imports, and seconds. Resident memory counts the
pages of mapped files that were read; anonymous memory counts allocations alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

WAYS = ("bfloat16", "quantize", "quantized")


def config(kind: str) -> Any:
    """Return the config of a model with about 0.6 billion parameters."""
    from transformers import LlamaConfig, Qwen3MoeConfig  # noqa: PLC0415 - the parent needs none

    common = {"vocab_size": 8192, "hidden_size": 2048, "num_attention_heads": 16}
    if kind == "llama":
        return LlamaConfig(
            **common, num_hidden_layers=12, intermediate_size=5632, num_key_value_heads=4
        )
    return Qwen3MoeConfig(
        **common,
        num_hidden_layers=6,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=768,
        num_key_value_heads=4,
        head_dim=128,
    )


def memory() -> tuple[int, int]:
    """Return the resident and the anonymous memory of this process, in bytes."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    resident, own = (int(text.partition(key)[2].split()[0]) for key in ("VmRSS:", "RssAnon:"))
    return resident * 1024, own * 1024


class Peak(threading.Thread):
    """Sample the memory every two milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first = self.most = memory()
        self.running = True

    def megabytes(self) -> tuple[float, float]:
        """Return the peaks so far, beyond the memory at the start."""
        resident, own = (
            (most - first) / 1e6 for most, first in zip(self.most, self.first, strict=True)
        )
        return resident, own

    def run(self) -> None:
        """Sample until ``running`` is False."""
        while self.running:
            now = memory()
            self.most = (max(self.most[0], now[0]), max(self.most[1], now[1]))
            time.sleep(0.002)


def child(folder: Path, way: str, fmt: str, tokens: int) -> None:
    """Load a model one way, generate, and print the figures as JSON."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    from qtensor.integrations.transformers import QTensorConfig  # noqa: PLC0415

    source = folder / ("quantized" if way == "quantized" else "dense")
    options = {"quantization_config": QTensorConfig(fmt)} if way == "quantize" else {}
    peak = Peak()
    peak.start()
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(source, **options)
    loaded, after_load = time.perf_counter(), peak.megabytes()
    out = model.generate(torch.arange(3, 19)[None], max_new_tokens=tokens, do_sample=False)
    done = time.perf_counter()
    peak.running = False
    if way == "quantize":
        model.save_pretrained(folder / "quantized")
    figures = {
        "parameters MB": sum(p.nbytes for p in model.parameters()) / 1e6,
        "resident MB": peak.megabytes()[0],
        "anonymous MB": peak.megabytes()[1],
        "anonymous while loading MB": after_load[1],
        "load s": loaded - start,
        "s per token": (done - loaded) / (out.shape[1] - 16),
    }
    print(json.dumps(figures))


def main() -> None:
    """Run every way in its own process and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=("llama", "qwen3-moe"), default="llama")
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--way", choices=(*WAYS, "write"))
    arguments = parser.parse_args()
    folder = arguments.folder / arguments.kind
    if arguments.way == "write":
        import torch  # noqa: PLC0415
        from transformers import AutoModelForCausalLM  # noqa: PLC0415

        model = AutoModelForCausalLM.from_config(config(arguments.kind), dtype=torch.bfloat16)
        model.save_pretrained(folder / "dense")
        return
    if arguments.way is not None:
        child(folder, arguments.way, arguments.format, arguments.tokens)
        return
    for way in ("write", *WAYS):
        command = [sys.executable, "-m", "benchmarks.transformers_memory", str(arguments.folder)]
        command += ["--kind", arguments.kind, "--format", arguments.format, "--way", way]
        command += ["--tokens", str(arguments.tokens)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        if way != "write":
            figures = json.loads(done.stdout.splitlines()[-1])
            print(way, ", ".join(f"{name} {value:,.2f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
