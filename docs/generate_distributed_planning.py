"""Write the tables of docs/distributed_planning.md between its markers.

Processes with gloo count the bytes that each rank gives to collectives, on two, three and four
ranks, and the script compares them with the formulas of the page. ``--check`` writes nothing and
fails if a count differs or the page is out of date.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))  # the started processes read it, too

from distributed_cells import traffic  # noqa: E402 - see above
from distributed_cells.traffic import (  # noqa: E402
    ACTIVATIONS,
    STATES,
    STORED,
    TOKENS,
    WEIGHTS,
    K,
    N,
)
from ranks import Ranks  # noqa: E402

DOCUMENT = ROOT / "docs" / "distributed_planning.md"
SIZES = (2, 3, 4)


# ---- the tables ----------------------------------------------------------------------------------


class CountError(AssertionError):
    """Signal a count that its formula does not give."""


class Measurements:
    """Run measurements on groups of two, three and four ranks."""

    def __init__(self, folder: Path) -> None:
        self.groups = [Ranks(folder / str(size), size, 60) for size in SIZES]
        for group in self.groups:
            group.folder.mkdir()

    def __call__(self, function: Callable[..., Any], name: str) -> list[Any]:
        """Return the largest result over ranks, for each number of ranks."""
        return [max(group.run(function, name)) for group in self.groups]

    def stop(self) -> None:
        """End all processes."""
        for group in self.groups:
            group.stop(kill=True)


def row_of(name: str, bits: float, values: int, counts: list[int], slack: int = 0) -> str:
    """Return a row of bytes by number of ranks beside the formula.

    Args:
        name: the first column.
        bits: bits a value, by the formula.
        values: number of values that each rank gives, times the number of ranks.
        counts: bytes counted on two, three and four ranks.
        slack: bytes that padding and headers may add.

    Raises:
        CountError: a count is below its formula, or above it by more than ``slack``.
    """
    for size, count in zip(SIZES, counts, strict=True):
        want = values / size * bits / 8
        if not want <= count <= want + slack:
            raise CountError(f"{name} on {size} ranks: {count} bytes, the formula gives {want}")
    return f"| {name} | {bits:.4g} | " + " | ".join(f"{count:,}" for count in counts) + " |"


HEAD = ["| {} | bits a value | 2 ranks | 3 ranks | 4 ranks |", "|---|---:|---:|---:|---:|"]
PADDING = 6 * 16
"""Each buffer of a quantized gather is padded to 16 bytes, and there are at most six."""
TORCHAO = "torchao, `enable_fsdp_float8_all_gather`"
HEADER = 64
"""A collective on a quantized tensor sends a hash of its quantizer first, and pads."""


def weights(measure: Measurements) -> list[str]:
    """Return the gathers of one weight."""
    rows = [HEAD[0].format("weight"), HEAD[1]]
    for name, bits in (("float32", 32), ("bfloat16", 16)):
        rows.append(row_of(name, bits, N * K, measure(traffic.gather_of_weights, name)))
    rows.append(row_of(TORCHAO, 8, N * K, measure(traffic.gather_by_torchao, TORCHAO)))
    for name, (_, _, bits) in WEIGHTS.items():
        rows.append(row_of(name, bits, N * K, measure(traffic.gather_of_weights, name), PADDING))
    return rows


def gradients(measure: Measurements) -> list[str]:
    """Return the reductions of its gradient."""
    rows = [HEAD[0].format("gradients"), HEAD[1]]
    for name, bits in (
        ("`fully_shard`, reduced in float32", 32),
        ("`fully_shard`, reduced in bfloat16", 16),
        ("DDP", 32),
    ):
        counts = measure(traffic.reduction_of_gradients, name)
        for count in counts:
            if count * 8 != N * K * bits:
                raise CountError(f"{name}: {count} bytes")
        rows.append(f"| {name} | {bits} | " + " | ".join(f"{c:,}" for c in counts) + " |")
    return rows


def activations(measure: Measurements) -> list[str]:
    """Return the gathers of rows."""
    rows = [HEAD[0].format("rows of activations"), HEAD[1]]
    rows.append(
        row_of("bfloat16", 16, TOKENS * K, measure(traffic.gather_of_activations, "bfloat16"))
    )
    for name, (_, bits) in ACTIVATIONS.items():
        rows.append(
            row_of(name, bits, TOKENS * K, measure(traffic.gather_of_activations, name), HEADER)
        )
    return rows


def memory(measure: Measurements) -> list[str]:
    """Return bytes a parameter of weights and of the state of an optimizer."""
    rows = ["| stored | bytes a parameter of the rank's shard |", "|---|---:|"]
    for label, function, cases in (
        ("weight", traffic.stored_bytes, STORED),
        ("averages of AdamW", traffic.state_bytes, STATES),
    ):
        for name, (_, want) in cases.items():
            for count, parameters in measure(function, name):
                # Padding of the factors, and factors of a whole tensor: less than a thousandth.
                if not want <= count / parameters <= want * 1.001:
                    raise CountError(f"{label}, {name}: {count / parameters}, formula {want}")
            rows.append(f"| {label}, {name} | {want:.4g} |")
    return rows


PARAMETERS = 70e9
LAYERS = 80


def computed() -> list[str]:
    """Return gigabytes that one rank receives in a step, for weights and gradients."""
    rows = [
        "| weights travel as | gathers, R = 8 | R = 64 | R = 1024 | R = 8192 |",
        "|---|---:|---:|---:|---:|",
    ]
    formats: dict[str, float] = {"float32": 32, "bfloat16": 16}
    formats |= {name: bits for name, (_, _, bits) in WEIGHTS.items()}
    for name, bits in formats.items():
        gigabytes = [2 * (r - 1) / r * PARAMETERS * bits / 8 / 1e9 for r in (8, 64, 1024, 8192)]
        rows.append(f"| {name} | " + " | ".join(f"{g:.1f}" for g in gigabytes) + " |")
    return rows


def shards() -> list[str]:
    """Return gigabytes of weight, gradient and state that a rank holds."""
    rows = [
        "| weight, gradient, state (bytes a parameter) | R = 8 | R = 64 | R = 1024 | R = 8192 |",
        "|---|---:|---:|---:|---:|",
    ]
    kinds = {
        "float32, float32, float32: 4 + 4 + 8": 16.0,
        "float32, float32, `mxfp8`: 4 + 4 + 2.06": 8 + STATES['`"mxfp8"`'][1],
        "`MXFP8BlockScaling`, float32, `mxfp8`: 2.06 + 4 + 2.06": 4
        + STORED["`MXFP8BlockScaling`"][1]
        + STATES['`"mxfp8"`'][1],
        "`NVFP4BlockScaling`, float32, `mxfp8`: 1.125 + 4 + 2.06": 4
        + STORED["`NVFP4BlockScaling`"][1]
        + STATES['`"mxfp8"`'][1],
    }
    for name, size in kinds.items():
        gigabytes = [PARAMETERS * size / r / 1e9 for r in (8, 64, 1024, 8192)]
        rows.append(f"| {name} | " + " | ".join(f"{g:.3g}" for g in gigabytes) + " |")
    return rows


def tables() -> dict[str, list[str]]:
    """Return the lines of each table."""
    with tempfile.TemporaryDirectory() as folder:
        measure = Measurements(Path(folder))
        try:
            return {
                "weights": weights(measure),
                "gradients": gradients(measure),
                "activations": activations(measure),
                "memory": memory(measure),
                "computed": computed(),
                "shards": shards(),
            }
        finally:
            measure.stop()


def fill(page: str, found: dict[str, list[str]]) -> str:
    """Return the page with each table between ``<!-- NAME -->`` and ``<!-- end -->``."""
    for name, lines in found.items():
        before, marker, rest = page.partition(f"<!-- {name} -->\n")
        if not marker:
            raise CountError(f"the page has no marker for {name}")
        _, end, after = rest.partition("<!-- end -->")
        page = before + marker + "\n" + "\n".join(lines) + "\n\n" + end + after
    return page


def main() -> int:
    """Write the tables, or compare them with ``--check``, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if out of date")
    check = parser.parse_args().check
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    old = DOCUMENT.read_text()
    try:
        new = fill(old, tables())
    except CountError as error:
        print(f"docs/{DOCUMENT.name}: {error}", file=sys.stderr)
        return 1
    if not check:
        DOCUMENT.write_text(new)
    elif new != old:
        print(
            "docs/distributed_planning.md is out of date. Run: "
            "python docs/generate_distributed_planning.py",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
