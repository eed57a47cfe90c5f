"""The environment of a measurement."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import qtensor

SHOWN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "OMP_PROC_BIND")
"""Variables that change the cost of threads."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(threads: int, peers: Mapping[str, str]) -> dict[str, Any]:
    """Return device, versions and date.

    Args:
        threads: number of torch threads.
        peers: name to version.
    """
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_name(),
        "cores": cores(),
        "threads": threads,
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "qtensor": qtensor.__version__,
        "peers": dict(peers),
        "variables": {name: os.environ[name] for name in SHOWN if name in os.environ},
    }


def sentence(here: Mapping[str, Any]) -> str:
    """Return the environment as a line of Markdown."""
    threads = "1 thread" if here["threads"] == 1 else f"{here['threads']} threads"
    peers = "".join(f", {name} {version}" for name, version in here["peers"].items())
    variables = "".join(f", {name}={value}" for name, value in here["variables"].items())
    return (
        f"{here['date']}. {here['cpu']}, {here['cores']} cores, {threads}, {here['system']} "
        f"{here['machine']}{variables}; Python {here['python']}, torch {here['torch']}, "
        f"qtensor {here['qtensor']}{peers}."
    )


def cpu_name() -> str:
    """Return the CPU model as the system names it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
