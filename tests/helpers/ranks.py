"""Two gloo processes that stay alive and run the functions that a test sends."""

from __future__ import annotations

import datetime
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist
from torch_process import SERVER, CompilerProcess, collect_rarely

PATIENCE = 60
"""Seconds that a collective waits for the other rank; after a failure nobody waits so long."""


def _serve(
    rank: int,
    size: int,
    store: str,
    patience: int,
    connection: Connection,
    environment: dict[str, str],
) -> None:
    collect_rarely()
    os.environ.clear()  # of the server that forked this process
    os.environ.update(environment)
    torch.set_num_threads(1)
    # The cache on disk would serve graphs that another state of the library has lowered.
    torch._functorch.config.enable_autograd_cache = False
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=patience),
    )
    while True:
        message = connection.recv_bytes()
        if not message:
            break
        try:
            torch.manual_seed(0)
            function, args = pickle.loads(message)
            answer = (True, function(*args))
        except BaseException:  # noqa: BLE001 - reported by the test that asked
            answer = (False, f"rank {rank}:\n{traceback.format_exc()}")
        # Bytes: torch would hand on tensors as file descriptors of a process that may be gone.
        connection.send_bytes(pickle.dumps(answer))
    dist.destroy_process_group()


class RankError(AssertionError):
    """The exception of a rank, with its traceback."""


class Ranks:
    """``run(f, *args)`` calls ``f`` on every rank, from the same random state, and returns the
    results by rank.

    Started at the first call. After a failure the processes are ended, since the others may wait
    for the one that failed, and new ones serve the next call.
    """

    def __init__(self, folder: Path, size: int = 2, patience: int = PATIENCE) -> None:
        self.folder, self.size, self.patience = folder, size, patience
        self.processes: list[Any] = []
        self.connections: list[Connection] = []
        self.starts = 0

    def start(self) -> None:
        self.starts += 1
        for rank in range(self.size):
            ours, theirs = SERVER.Pipe()
            store = str(self.folder / f"store{self.starts}")
            args = (rank, self.size, store, self.patience, theirs, dict(os.environ))
            process = CompilerProcess(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self.processes:
            self.start()
        message = pickle.dumps((function, args))
        for connection in self.connections:
            connection.send_bytes(message)
        answers = self._collect()
        wrong = [value for good, value in answers.values() if not good]
        if wrong or len(answers) < self.size:
            self.stop(kill=True)
            raise RankError("\n".join(wrong) or f"only ranks {sorted(answers)} answered")
        return [answers[rank][1] for rank in range(self.size)]

    def _collect(self) -> dict[int, tuple[bool, Any]]:
        """Return answers by rank; after a failure the other ranks get two seconds."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + 5 * self.patience
        while len(answers) < self.size and time.monotonic() < deadline:
            for rank, connection in enumerate(self.connections):
                if rank in answers or not connection.poll(0.005):
                    continue
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    answers[rank] = (False, f"rank {rank} is gone")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + 2)
        return answers

    def stop(self, kill: bool = False) -> None:
        for process, connection in zip(self.processes, self.connections, strict=True):
            if kill:
                process.kill()
            else:
                connection.send_bytes(b"")
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.join()
            connection.close()
        self.processes, self.connections = [], []
