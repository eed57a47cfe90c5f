"""The command line that all benchmarks share."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks import machine, peer
from benchmarks.peer import Peer

RESULTS = Path(__file__).parent / "results"
BURSTS = {True: 20, False: 100}
"""Largest number of bursts, by whether the run is quick."""
FUNCTION_SECONDS = {True: 0.05, False: 0.6}
"""Seconds for each function of a row, by whether the run is quick."""


@dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    quick: bool = False
    threads: int = 1
    peers: tuple[Peer, ...] = ()
    absent_peers: Mapping[str, str] = field(default_factory=dict)
    """Name of each missing peer -> the reason."""
    output: Path = RESULTS
    seconds: float | None = None
    """Time limit for all rows; rows that would begin later are reported as not measured."""
    began: float = field(default_factory=time.monotonic)
    sizes: tuple[str, ...] = ()
    """Sizes to measure; all of them if empty."""

    @property
    def bursts(self) -> int:
        """Largest number of bursts of each function."""
        return BURSTS[self.quick]

    @property
    def function_seconds(self) -> float:
        """Seconds for each function of a row."""
        return FUNCTION_SECONDS[self.quick]

    def out_of_time(self) -> bool:
        """True if no further row may begin."""
        return self.seconds is not None and time.monotonic() > self.began + self.seconds


def parser(name: str, text: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark takes."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=text)
    parser.add_argument(
        "--peers",
        default="torchao",
        help=f"comma-separated, or none; known: {', '.join(peer.MODULES)} (default: %(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer sizes and repeats, files *_quick"
    )
    parser.add_argument(
        "--threads", type=int, default=None, help="of torch (default: one a core; overhead: 1)"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=None, help="begin no row after this long")
    parser.add_argument("--sizes", default="", help="these alone, comma-separated: 8192x8192")
    return parser


def settings(options: argparse.Namespace) -> Settings:
    """Return the settings of parsed arguments, and set torch's threads, which compiled code keeps.

    Raises:
        SystemExit: an unknown peer.
    """
    try:
        peers, absent = peer.load(peer_names(options.peers))
    except ValueError as error:
        raise SystemExit(str(error)) from error
    threads = options.threads or machine.cores()
    torch.set_num_threads(threads)
    return Settings(
        options.quick,
        threads,
        tuple(peers),
        absent,
        options.output,
        options.seconds,
        sizes=tuple(peer_names(options.sizes)),
    )


def peer_names(text: str) -> list[str]:
    """Return the items of a comma-separated list; ``none`` is an empty list."""
    return [name.strip() for name in text.split(",") if name.strip() not in ("", "none")]


def parse(name: str, text: str | None, arguments: Sequence[str] | None = None) -> Settings:
    """Parse a command line and return its settings."""
    return settings(parser(name, text).parse_args(arguments))
