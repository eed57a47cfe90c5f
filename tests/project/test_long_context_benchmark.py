"""benchmarks.long_context: every row, bytes of caches and their tokens. No time is asserted."""

import json

import pytest
import torch

from benchmarks import long_context
from examples import generate as example

pytestmark = [
    pytest.mark.project,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model with weights large enough that its tokens differ from each other."""
    folder = tmp_path_factory.mktemp("dense")
    example.write_random(folder, "tiny", context=256)
    found = example.load(folder, "bfloat16")
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return found


def test_a_quick_run_writes_every_row(tmp_path):
    arguments = ["--quick", "--threads", "1", "--caches", "mxfp8", "bfloat16"]
    assert long_context.main([*arguments, "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.rglob("*.json")
    rows = json.loads(path.read_text())["rows"]
    names = [(row["weights"], row["cache"]) for row in rows]
    assert names == long_context.ways(["mxfp8", "bfloat16"])
    assert all(row["tokens_s"] > 0 for row in rows)
    ratios = {(row["weights"], row["cache"]): row["mb_ratio"] for row in rows}
    assert ratios["bfloat16", "static"] == 1
    assert ratios["mxfp4", "bfloat16"] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("cache", ["static", "bfloat16", "fp8_rowwise"])
def test_the_context_is_what_the_model_sees(cache, model):
    """A cache in bfloat16 has the tokens of transformers' own; another context has others."""
    _, size, want = long_context.measure(model, "dynamic", 100, 8)
    assert size == 2 * 2 * 2 * 100 * 32 * 2  # keys and values, layers, heads, tokens, head, bytes
    _, _, got = long_context.measure(model, cache, 100, 8)
    assert got.shape == want.shape == (1, 8)
    assert (got == want).sum() >= (4 if cache == "fp8_rowwise" else 8)
    _, _, other = long_context.measure(model, cache, 99, 8)
    assert (other != want).any()
