"""The command line that the benchmarks share."""

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
"""At most, quick or not."""
FUNCTION_SECONDS = {True: 0.05, False: 0.6}
"""For each function of a row."""


@dataclass(frozen=True)
class Settings:
    """How to measure."""

    quick: bool = False
    threads: int = 1
    peers: tuple[Peer, ...] = ()
    absent_peers: Mapping[str, str] = field(default_factory=dict)
    """Name to reason."""
    output: Path = RESULTS
    seconds: float | None = None
    """For all rows; those that would begin later are named as not measured."""
    began: float = field(default_factory=time.monotonic)
    sizes: tuple[str, ...] = ()
    """The only ones that are measured; all of them if empty."""

    @property
    def bursts(self) -> int:
        """Of each function, at most."""
        return BURSTS[self.quick]

    @property
    def function_seconds(self) -> float:
        """For each function of a row."""
        return FUNCTION_SECONDS[self.quick]

    def out_of_time(self) -> bool:
        """Whether no further row may begin."""
        return self.seconds is not None and time.monotonic() > self.began + self.seconds


def parser(name: str, text: str | None) -> argparse.ArgumentParser:
    """With the options that every benchmark takes."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=text)
    made.add_argument(
        "--peers",
        default="torchao",
        help=f"comma-separated, or none; known: {', '.join(peer.MODULES)} (default: %(default)s)",
    )
    made.add_argument("--quick", action="store_true", help="fewer sizes and repeats, files *_quick")
    made.add_argument(
        "--threads", type=int, default=None, help="of torch (default: one a core; overhead: 1)"
    )
    made.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    made.add_argument("--seconds", type=float, default=None, help="begin no row after this long")
    made.add_argument("--sizes", default="", help="these alone, comma-separated: 8192x8192")
    return made


def settings(options: argparse.Namespace) -> Settings:
    """From parsed arguments. Sets the threads of torch, which compiled code keeps.

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
    """Of a comma-separated list; ``none`` is an empty one."""
    return [name.strip() for name in text.split(",") if name.strip() not in ("", "none")]


def parse(name: str, text: str | None, arguments: Sequence[str] | None = None) -> Settings:
    """The settings of a command line."""
    return settings(parser(name, text).parse_args(arguments))
