"""10,000 damaged checkpoints of every container and layout, in processes that watch themselves.

hostile_cases.py lists the kinds of damage, hostile_process.py reads the files. A case fails

- if anything but a CheckpointError comes out,
- if the error does not name the file, and the tensor if its entry was damaged,
- if damage that no valid file can have is not seen,
- if a tensor that the file describes as before has other values, or
- if reading opens a file outside the folder, writes, imports or starts anything.
"""

import json
import os
from collections import Counter

import pytest
from hostile_cases import KINDS
from places import PYTHONPATH
from torch_process import TorchProcess

CASES = 10_000
LIMIT = 1500
"""Seconds for all cases of a process; they take about two minutes."""
MEMORY = 1_200_000_000
"""Most bytes of a process, torch included."""


def start(folder, first, last, step, code="import hostile_process; hostile_process.main()"):
    folder.mkdir()
    arguments = [str(folder), *map(str, (first, last, step))]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    return TorchProcess(code, *arguments, environment=environment)


def result(process):
    done = process.finish(LIMIT)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def run(folder, count, processes):
    """Run the first ``count`` cases; return {kind: {outcome: number}} and the failures."""
    parts = [start(folder / str(i), i, count, processes) for i in range(processes)]
    kinds, failures = {}, []
    for part in map(result, parts):
        failures += part["failures"]
        assert part["peak"] < MEMORY
        for kind, outcomes in part["kinds"].items():
            kinds[kind] = Counter(kinds.get(kind, {})) + Counter(outcomes)
    assert sum(sum(outcomes.values()) for outcomes in kinds.values()) == count
    assert kinds.keys() == KINDS.keys()
    return kinds, failures


def test_hundreds_of_damaged_checkpoints(tmp_path):
    """The first cases of those below: 4 or more of each kind."""
    kinds, failures = run(tmp_path, 4 * len(KINDS), 1)
    assert failures == []
    assert sum(outcomes["refused"] for outcomes in kinds.values()) > 2 * len(KINDS)


@pytest.mark.nightly(reason="four minutes; the test above runs the first cases")
@pytest.mark.timeout(2 * LIMIT)
def test_ten_thousand_damaged_checkpoints(tmp_path):
    kinds, failures = run(tmp_path, CASES, 2)
    for kind, outcomes in kinds.items():
        print(f"{kind}: {dict(outcomes)}")
    assert failures == []
    assert min(sum(outcomes.values()) for outcomes in kinds.values()) >= CASES // len(KINDS)


PLANTS = """
import os
import hostile_process as process

def endless():
    while True:
        pass

plants = [
    lambda: open("/etc/passwd"),
    lambda: open("x", "w"),
    lambda: os.listdir(".."),
    lambda: os.system("true"),
    lambda: eval("1 + 1"),
    lambda: {}["planted"],
    lambda: bytearray(10**9),
    endless,
]

def planted(path, real=process.checkpoints.verify, state=[]):
    if process.SECONDS == 1:  # the undamaged folders were read
        state.append(plants[len(state)])
        state[-1]()
    return real(path)

process.checkpoints.verify = planted
run = process.Run.__init__

def ready(self, work):
    run(self, work)
    process.SECONDS = 1

process.Run.__init__ = ready
process.main()
"""
SEEN = (
    "open ('/etc/passwd'",
    "open ('x'",
    "os.listdir ('..'",
    "os.system",
    "compile|exec",
    "KeyError",
    "MemoryError",
    "TimeoutError",
)


def test_the_process_sees_what_must_not_happen(tmp_path):
    failures = result(start(tmp_path / "0", 0, len(SEEN), 1, PLANTS))["failures"]
    for number, words in enumerate(SEEN):
        texts = [text for text in failures if text.startswith(f"case {number},")]
        assert any(word in text for text in texts for word in words.split("|")), (number, failures)
