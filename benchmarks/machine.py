"""The environment of a measurement."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import qtensor
from qtensor.kernels.cpu import native, sources

SHOWN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "OMP_PROC_BIND", "QTENSOR_AMX")
"""Variables that change the cost of threads, or who multiplies."""
IDENTITY = ("cpu", "cores", "instructions")
"""What makes two machines the same one."""
_INSTRUCTIONS = {"avx512": "AVX-512", "avx2": "AVX2", "baseline": "portable C++"}
_MORE = {"BF16": "avx512_bf16", "AMX": "amx_bf16"}
"""What CPUs with AVX-512 may have besides, and its name among the capabilities."""
_UNNAMED = {"r", "tm", "cpu", "processor"}
"""Words of a CPU's name that say nothing."""
_CORES = Path("/sys/devices/system/cpu")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(core_numbers())


def core_numbers() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def instructions() -> str:
    """Return the instruction set of the native kernels that compute here."""
    if isinstance(native.library(), str):
        return "no native kernels"
    isa = sources.choose_isa()
    found = sources.capabilities() if isa == "avx512" else {}
    more = [name for name, part in _MORE.items() if found.get(part)]
    return f"{_INSTRUCTIONS[isa]} with {' and '.join(more)}" if more else _INSTRUCTIONS[isa]


def last_cache_bytes(folder: Path = _CORES) -> int:
    """Return the bytes of the last cache level that this process may use; 0 if unknown.

    Args:
        folder: where Linux describes the cores.
    """
    caches: dict[tuple[int, str], int] = {}
    for core in core_numbers():
        for index in folder.glob(f"cpu{core}/cache/index*"):
            level, shared, size = (
                (index / name).read_text().strip() for name in ("level", "shared_cpu_list", "size")
            )
            caches[int(level), shared] = int(size.removesuffix("K")) * 1024
    last = max((level for level, _ in caches), default=0)
    return sum(size for (level, _), size in caches.items() if level == last)


def environment(threads: int, peers: Mapping[str, str]) -> dict[str, Any]:
    """Return device, versions and date.

    Args:
        threads: number of torch threads.
        peers: name to version.
    """
    return {
        "date": datetime.now(UTC).date().isoformat(),
        **identity(),
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
    instructions = f", {here['instructions']}" if "instructions" in here else ""
    return (
        f"{here['date']}. {here['cpu']}, {here['cores']} cores{instructions}, {threads}, "
        f"{here['system']} "
        f"{here['machine']}{variables}; Python {here['python']}, torch {here['torch']}, "
        f"qtensor {here['qtensor']}{peers}."
    )


def identity() -> dict[str, Any]:
    """Return the part of the environment that tells this machine from others."""
    return {"cpu": cpu_name(), "cores": cores(), "instructions": instructions()}


def is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two environments are those of one machine.

    Files that were written before instruction sets were recorded say nothing about them.
    """
    return all(one[key] == other[key] for key in IDENTITY if key in one and key in other)


def slug(here: Mapping[str, Any]) -> str:
    """Return a machine as a part of a file's name: ``intel_xeon_2_cores_avx512``."""
    text = f"{here['cpu'].partition('@')[0]} {here['cores']} cores {here['instructions']}"
    words = re.findall(r"[a-z0-9.]+", text.lower().replace("avx-", "avx"))
    return "_".join(word for word in words if word not in _UNNAMED)


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU model as the system names it, such as ``AMD EPYC (family 26)``.

    Virtual machines may hide the number of a model; its family then tells generations apart.

    Args:
        cpuinfo: where Linux describes the cores.
    """
    if not cpuinfo.exists():
        return platform.processor() or "unknown"
    pairs = (line.partition(":")[::2] for line in cpuinfo.read_text().splitlines())
    facts = {key.strip(): value.strip() for key, value in pairs}
    name = facts.get("model name", "unknown")
    hidden = facts.get("vendor_id") == "AuthenticAMD" and not re.search(r"\d", name)
    return f"{name} (family {facts['cpu family']})" if hidden else name
