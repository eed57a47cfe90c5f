"""Load a generated kernel's library, check its arguments, and launch it on torch's stream."""

from __future__ import annotations

import ctypes
import functools
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtensor.core.devices import device_guard
from qtensor.core.errors import check, fail

VERSION = 1
"""Version of the C interface: ``QT_GEMM_VERSION`` in qt_gemm_abi.h."""

ALIGNMENT = 16
"""TMA reads only from addresses that are multiples of this many bytes."""

CUDA_ERROR = 1000
"""A status is this plus the number of a CUDA error: ``QT_GEMM_CUDA``."""

_LIMIT = 1 << 31


class Arguments(ctypes.Structure):
    """The C struct ``qt_gemm_args``."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("version", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("m", "n", "k", "l")),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
        *(
            (name, ctypes.c_void_p)
            for name in ("a", "b", "sfa", "sfb", "scale_a", "scale_b", "bias", "c", "d")
        ),
        *(
            (name, ctypes.c_int32)
            for name in ("scale_a_rows", "scale_b_columns", "device", "sm_count")
        ),
    )


class _Info(ctypes.Structure):
    """The C struct ``qt_gemm_info``."""

    _fields_ = (
        ("version", ctypes.c_uint32),
        ("args_size", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
        ("spec", ctypes.c_char_p),
    )


class Kernel:
    """A kernel whose library is loaded.

    Attributes:
        name: name of its spec.
        spec: its spec as JSON.
        accumulates: True if the kernel can add to its result.

    Raises:
        OSError: the library cannot be loaded, has another interface, or holds another kernel.
    """

    def __init__(self, path: str, name: str) -> None:
        library = ctypes.CDLL(path)
        try:
            library.qt_gemm_describe.restype = ctypes.POINTER(_Info)
            info = library.qt_gemm_describe().contents
            self._can_implement = library.qt_gemm_can_implement
            self._workspace = library.qt_gemm_workspace
            self._factor_counts = library.qt_gemm_factor_counts
            self._run = library.qt_gemm_run
            self._status = library.qt_gemm_status
        except AttributeError as error:
            raise OSError(f"{path} is not a kernel library: {error}") from error
        theirs, ours = (info.version, info.args_size), (VERSION, ctypes.sizeof(Arguments))
        if theirs != ours:
            raise OSError(
                f"{path} has interface {theirs} (version, size), but this qtensor has {ours}; "
                "rebuild it"
            )
        self.name, self.spec = info.name.decode(), info.spec.decode()
        self.accumulates = json.loads(self.spec)["d"] == "f32"
        if self.name != name:
            raise OSError(f"{path} holds {self.name}, not {name}")
        pointer = ctypes.c_void_p
        self._can_implement.argtypes = (pointer,)
        self._workspace.argtypes, self._workspace.restype = (pointer,), ctypes.c_int64
        counts = ctypes.POINTER(ctypes.c_int64)
        self._factor_counts.argtypes = (pointer, counts, counts)
        self._run.argtypes = (pointer, pointer, ctypes.c_int64, pointer)
        self._status.argtypes, self._status.restype = (ctypes.c_int,), ctypes.c_char_p

    def can_implement(self, m: int, n: int, k: int, sm_count: int) -> str | None:
        """Return CUTLASS's reason to refuse these sizes, or None. Needs no device."""
        arguments = _arguments(m, n, k, 1, 0, sm_count)
        status = self._can_implement(ctypes.addressof(arguments))
        return None if status == 0 else self.status(status)

    def factor_counts(self, m: int, n: int, k: int) -> tuple[int, int]:
        """Return how many block factors of ``a`` and ``b`` a product reads, padding included."""
        a, b = ctypes.c_int64(), ctypes.c_int64()
        arguments = _arguments(m, n, k, 1, 0, 1)
        self._factor_counts(ctypes.addressof(arguments), ctypes.byref(a), ctypes.byref(b))
        return a.value, b.value

    def status(self, code: int) -> str:
        """Return the message of a status code."""
        return self._status(code).decode()

    def workspace(self, arguments: Arguments) -> int:
        """Return the size in bytes of the workspace that a launch needs."""
        size = self._workspace(ctypes.addressof(arguments))
        if size < 0:
            got = f"m={arguments.m}, n={arguments.n}, k={arguments.k}: {self.status(-size)}"
            fix = "Use backend='auto'"
            fail(f"gemm[{self.name}]", "the kernel must support the sizes", got, fix)
        return int(size)

    def run(self, arguments: Arguments, workspace: int | None, size: int, stream: int) -> None:
        """Launch on a stream.

        Raises:
            QTensorError: the launch failed.
        """
        status = self._run(ctypes.addressof(arguments), workspace, size, stream)
        if status:
            got = f"{self.status(status)} (status {status})"
            fix = "Use another backend"
            if status >= CUDA_ERROR:
                fix = "Run with CUDA_LAUNCH_BLOCKING=1 to see whether an earlier kernel failed"
            fail(f"gemm[{self.name}]", "the kernel must launch", got, fix)


def _arguments(m: int, n: int, k: int, batch: int, device: int, sm_count: int) -> Arguments:
    size = ctypes.sizeof(Arguments)
    sizes = dict(m=m, n=n, k=k, l=batch, device=device, sm_count=sm_count)
    return Arguments(struct_size=size, version=VERSION, alpha=1.0, beta=0.0, **sizes)


def oversize(sizes: tuple[int, int, int, int]) -> str | None:
    """Return why kernels, whose sizes are int32, cannot compute an (L, M, N, K) product, or None.

    In a batch, CUTLASS computes the distance of two matrices in int32 too.
    """
    batch, m, n, k = sizes
    if max(sizes) >= _LIMIT:
        return f"kernels take sizes below 2^31; got {max(sizes)}"
    largest = max(m * k, n * k, m * n)
    if batch > 1 and largest >= _LIMIT:
        return f"batched kernels take matrices of less than 2^31 elements; got {largest}"
    return None


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of a launch. All are contiguous and on one device.

    Attributes:
        a: codes (L, M, K) or (M, K), in the kernel's layout; 4-bit codes are packed two a byte.
        b: codes (L, N, K) or (N, K).
        out: result (L, M, N) or (M, N); with ``beta`` it also holds the values that are added to.
        sfa: block scale factors of ``a``, or None.
        sfb: block scale factors of ``b``, or None.
        scale_a: (1,) or (M,) float32, or None.
        scale_b: (1,) or (N,) float32, or None.
        bias: (N,) float32, or None.
    """

    a: Tensor
    b: Tensor
    out: Tensor
    sfa: Tensor | None = None
    sfb: Tensor | None = None
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    bias: Tensor | None = None

    @property
    def bytes(self) -> int:
        """The bytes of all tensors."""
        tensors = [getattr(self, name) for name in _NAMES]
        return sum(t.numel() * t.itemsize for t in tensors if t is not None)


_ALIGNED = ("a", "b", "out", "sfa", "sfb")
_FLOATS = ("scale_a", "scale_b", "bias")
_NAMES = (*_ALIGNED, *_FLOATS)


def fault(tensors: Tensors) -> str | None:
    """Return why a kernel cannot take these tensors, or None if it can."""
    device = tensors.out.device
    for name in _NAMES:
        tensor = getattr(tensors, name)
        if tensor is None:
            continue
        if tensor.device != device:
            return (
                f"all operands must be on one device; got {name} on {tensor.device}, "
                f"out on {device}"
            )
        if not tensor.is_contiguous():
            return f"{name} must be contiguous; got strides {tensor.stride()}"
        if name in _FLOATS:
            if tensor.dtype != torch.float32:
                return f"{name} must be float32; got {tensor.dtype}"
        elif tensor.data_ptr() % ALIGNMENT:
            return (
                f"{name} must start at a multiple of {ALIGNMENT} bytes; "
                f"got an address {tensor.data_ptr() % ALIGNMENT} bytes past one"
            )
    return None


@functools.cache
def _processors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _stream(device: torch.device) -> int:
    """Return the handle of torch's current stream; 0 for the CPU tensors that tests use."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.current_stream(device).cuda_stream)


class Launcher:
    """Launches one kernel for products of one size on one device; all but the pointers is prepared.

    A launcher may be used by several threads and inside a CUDA graph capture: it synchronizes
    nothing and takes its workspace from torch's allocator. The sizes are (L, M, N, K), and
    ``alpha`` is the factor of the product. The number of processors is read from the device if
    None.

    Raises:
        QTensorError: the kernel cannot compute products of these sizes.
    """

    def __init__(
        self,
        kernel: Kernel,
        sizes: tuple[int, int, int, int],
        device: torch.device,
        alpha: float = 1.0,
        processors: int | None = None,
    ) -> None:
        batch, m, n, k = sizes
        if (why := oversize(sizes)) is not None:
            rule, _, got = why.partition("; got ")
            fail(f"gemm[{kernel.name}]", rule, got, "Use backend='auto'")
        index = device.index or 0
        if processors is None:
            processors = _processors(index)
        self.kernel, self.sizes = kernel, sizes
        self._template = _arguments(m, n, k, batch, index, processors)
        self._template.alpha = alpha
        self._workspace = kernel.workspace(self._template)

    def __call__(self, tensors: Tensors, beta: float = 0.0) -> None:
        """Check the tensors and launch.

        ``beta`` is the factor of the values that ``tensors.out`` holds; 0 for kernels that cannot
        accumulate.

        Raises:
            QTensorError: the tensors or ``beta`` do not fit the kernel, or the launch failed.
        """
        rule, fix = "only kernels with a float32 result can add to it", "Request a float32 result"
        op = f"gemm[{self.kernel.name}]"
        check(beta == 0.0 or self.kernel.accumulates, op, rule, f"beta={beta}", fix)
        reason = fault(tensors)
        if reason is not None:
            rule, _, got = reason.partition("; got ")
            fail(op, rule, got, "Use backend='auto', or clone the tensor")
        self.launch(tensors, beta)

    def launch(self, tensors: Tensors, beta: float = 0.0) -> None:
        """Launch without checks, for tensors that ``fault`` has accepted."""
        arguments = Arguments.from_buffer_copy(self._template)
        self.fill(arguments, tensors)
        arguments.beta = beta
        workspace = None
        if self._workspace:
            device = tensors.out.device
            workspace = torch.empty(self._workspace, dtype=torch.uint8, device=device)
        pointer = None if workspace is None else workspace.data_ptr()
        with device_guard(tensors.out.device):
            self.kernel.run(arguments, pointer, self._workspace, _stream(tensors.out.device))

    @staticmethod
    def fill(arguments: Any, tensors: Tensors) -> None:
        """Write the addresses of the tensors into ``arguments``."""
        arguments.a, arguments.b = tensors.a.data_ptr(), tensors.b.data_ptr()
        arguments.c = arguments.d = tensors.out.data_ptr()
        for name in ("sfa", "sfb", "bias"):
            if (tensor := getattr(tensors, name)) is not None:
                setattr(arguments, name, tensor.data_ptr())
        if tensors.scale_a is not None:
            arguments.scale_a = tensors.scale_a.data_ptr()
            arguments.scale_a_rows = int(tensors.scale_a.numel() > 1)
        if tensors.scale_b is not None:
            arguments.scale_b = tensors.scale_b.data_ptr()
            arguments.scale_b_columns = int(tensors.scale_b.numel() > 1)
