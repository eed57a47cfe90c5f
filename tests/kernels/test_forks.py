"""A child of a fork computes, whatever the other threads of its parent did at that moment."""

from __future__ import annotations

import torch_process

from qtensor.build.cache import build
from qtensor.kernels.cpu import sources

LOCKS = (b"GOMP_critical", b"GOMP_atomic", b"omp_set_lock", b"pthread_mutex_lock", b"call_once")


def test_no_kernel_takes_a_lock() -> None:
    # Another thread may hold it when the process forks, and the child would wait for ever.
    kernels, attention = sources.kernel_build_specs(sources.choose_isa())
    for spec in (kernels, attention, sources.ops_build_spec()):
        symbols = build(spec).read_bytes()
        assert not [lock for lock in LOCKS if lock in symbols], spec.name
    assert b"GOMP_parallel" in build(kernels).read_bytes()


DESCRIPTIONS = '''
import os, signal, warnings
import torch, qtensor

warnings.simplefilter("ignore")
# A long text takes C++ long to look up. TorchScript calls the op in another thread, without Python.
TEXT = "fp8(amax_epsilon=" + "0" * 120000 + ")"
script = torch.jit.CompilationUnit("""
def repeat(x, text: str, count: int):
    rows = 0
    for _ in range(count):
        rows += torch.ops.qtensor.quantize(x, text)[0].size(0)
    return rows

def start(x, text: str, count: int):
    return torch.jit.fork(repeat, x, text, count)
""")
torch.set_num_threads(1)
for _ in range(3):
    torch.ops.qtensor.quantize(torch.ones(1, 32), TEXT)
running = script.start(torch.ones(1, 32), TEXT, 1 << 40)
statuses = []
while len(statuses) < 20 and not any(statuses):
    child = os.fork()
    if not child:
        signal.alarm(20)
        for _ in range(3):
            torch.ops.qtensor.quantize(torch.ones(3, 32), "fp8")
        os._exit(0)
    statuses.append(os.waitpid(child, 0)[1])
assert not running.done()
print(statuses, flush=True)
os._exit(1 if any(statuses) else 0)
'''


def test_what_the_ops_know() -> None:
    torch_process.run(DESCRIPTIONS)


SHARED_STEPS = """
import os, signal, threading, time, warnings
import torch, qtensor
from qtensor.library.native_ops import left_to_python
from qtensor.library import delayed

warnings.simplefilter("ignore")
held = threading.Event()

def hold():
    with delayed._STEP_LOCK:
        held.set()
        time.sleep(0.2)

threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if not child:
    signal.alarm(20)
    step, counter = torch.tensor([0]), torch.tensor([6])
    with left_to_python():
        torch.ops.qtensor.advance_step_(step, False, counter)
    os._exit(int(step) - 7)
assert os.waitpid(child, 0)[1] == 0
"""


def test_steps_of_a_shared_counter() -> None:
    torch_process.run(SHARED_STEPS)
