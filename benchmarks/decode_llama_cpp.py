"""Calls of llama.cpp: products with its weights, through the C interface of its library ggml.

The library is that of the package llama-cpp-python, or of the folder that ``LLAMA_CPP_LIB_PATH``
names, as for that package.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = "LLAMA_CPP_LIB_PATH"
ROWS = 256
"""Different rows of a weight; more rows repeat them."""
_TYPES = 64
"""Numbers of types that are searched for a name."""
_POINTER, _SIZE, _INT, _LONG = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
_Log = ctypes.CFUNCTYPE(None, _INT, ctypes.c_char_p, _POINTER)


class _ContextOptions(ctypes.Structure):
    """``ggml_init_params``: how much memory holds the tensors' shapes, and not their data."""

    _fields_ = (("size", _SIZE), ("memory", _POINTER), ("without_data", ctypes.c_bool))


_BASE: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_version": (ctypes.c_char_p, ()),
    "ggml_log_set": (None, (_Log, _POINTER)),
    "ggml_type_name": (ctypes.c_char_p, (_INT,)),
    "ggml_row_size": (_SIZE, (_INT, _LONG)),
    "ggml_quantize_chunk": (_SIZE, (_INT, _POINTER, _POINTER, *(_LONG,) * 3, _POINTER)),
    "ggml_tensor_overhead": (_SIZE, ()),
    "ggml_graph_overhead": (_SIZE, ()),
    "ggml_init": (_POINTER, (_ContextOptions,)),
    "ggml_free": (None, (_POINTER,)),
    "ggml_new_tensor_2d": (_POINTER, (_POINTER, _INT, _LONG, _LONG)),
    "ggml_new_tensor_4d": (_POINTER, (_POINTER, _INT, *(_LONG,) * 4)),
    "ggml_mul_mat": (_POINTER, (_POINTER,) * 3),
    "ggml_flash_attn_ext": (_POINTER, (*(_POINTER,) * 5, *(ctypes.c_float,) * 3)),
    "ggml_new_graph": (_POINTER, (_POINTER,)),
    "ggml_build_forward_expand": (None, (_POINTER, _POINTER)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_POINTER, (_POINTER, _POINTER)),
    "ggml_backend_buft_name": (ctypes.c_char_p, (_POINTER,)),
    "ggml_backend_buffer_free": (None, (_POINTER,)),
    "ggml_backend_cpu_buffer_from_ptr": (_POINTER, (_POINTER, _SIZE)),
    "ggml_backend_tensor_alloc": (_INT, (_POINTER,) * 3),
    "ggml_backend_tensor_set": (None, (_POINTER, _POINTER, _SIZE, _SIZE)),
    "ggml_backend_get_default_buffer_type": (_POINTER, (_POINTER,)),
    "ggml_backend_get_device": (_POINTER, (_POINTER,)),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, (_POINTER, _POINTER)),
    "ggml_backend_dev_backend_reg": (_POINTER, (_POINTER,)),
    "ggml_backend_reg_get_proc_address": (_POINTER, (_POINTER, ctypes.c_char_p)),
    "ggml_backend_graph_compute": (_INT, (_POINTER, _POINTER)),
    "ggml_threadpool_params_init": (None, (_POINTER, _INT)),
}
_CPU: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_backend_cpu_init": (_POINTER, ()),
    "ggml_backend_cpu_set_n_threads": (None, (_POINTER, _INT)),
    "ggml_backend_cpu_set_threadpool": (None, (_POINTER, _POINTER)),
    "ggml_threadpool_new": (_POINTER, (_POINTER,)),
}
"""Name of each function of a library -> the types of its result and of its arguments."""


class Library:
    """The functions of ggml, by name without the prefix ``ggml_``."""

    def __init__(self, folder: Path) -> None:
        for name, functions in (("libggml-base.so", _BASE), ("libggml-cpu.so", _CPU)):
            self.__dict__[name] = handle = ctypes.CDLL(str(folder / name))
            for function, (result, arguments) in functions.items():
                entry = getattr(handle, function)
                entry.restype, entry.argtypes = result, arguments
                setattr(self, function.removeprefix("ggml_"), entry)
        # It reports every weight that it stores.
        self._silent = _Log(lambda *_: None)
        self.log_set(self._silent, None)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"ggml_{name} is not among the functions that the benchmark calls")

    def type_of(self, name: str) -> int:
        """Return the number of a type of values.

        Raises:
            RuntimeError: this version has no such type.
        """
        for number in range(_TYPES):
            if (self.type_name(number) or b"").decode() == name:
                return number
        raise RuntimeError(f"ggml {self.version().decode()} has no type {name}")

    @functools.cache  # noqa: B019 - there is one library
    def backend(self, threads: int) -> Any:
        """Return a CPU backend with its own threads, which wait between two calls."""
        options = ctypes.create_string_buffer(4096)  # more than the structure takes
        self.threadpool_params_init(options, threads)
        made = self.backend_cpu_init()
        self.backend_cpu_set_n_threads(made, threads)
        self.backend_cpu_set_threadpool(made, self.threadpool_new(options))
        return made

    def buffer_types(self) -> list[Any]:
        """Return the memory in which llama.cpp may keep weights, the preferred first."""
        device = self.backend_get_device(self.backend(1))
        registry = self.backend_dev_backend_reg(device)
        address = self.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        found = []
        if address:
            extra = ctypes.CFUNCTYPE(ctypes.POINTER(_POINTER), _POINTER)(address)(device)
            while extra[len(found)]:
                found.append(extra[len(found)])
        return [*found, self.backend_get_default_buffer_type(self.backend(1))]


@functools.cache
def library() -> Library:
    """Return the library.

    Raises:
        ImportError: there is none.
    """
    folder = os.environ.get(FOLDER)
    if folder is None:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError(f"no llama-cpp-python, and {FOLDER} is not set")
        folder = str(Path(spec.submodule_search_locations[0]) / "lib")
    try:
        return Library(Path(folder))
    except OSError as error:
        raise ImportError(str(error)) from error


class Owner:
    """A context of ggml, and the buffers of its tensors; both are freed with this object."""

    def __init__(self, ggml: Library) -> None:
        self._ggml = ggml
        size = 8 * ggml.tensor_overhead() + ggml.graph_overhead()
        self.context = ggml.init(_ContextOptions(size, None, True))
        self.buffers: list[Any] = []
        self._memory: list[Tensor] = []
        weakref.finalize(self, _free, ggml, self.context, self.buffers)

    def place(self, tensor: Any, memory: Tensor) -> None:
        """Let a tensor of ggml have the contiguous memory of a tensor of torch."""
        address = memory.data_ptr()
        self._memory.append(memory)
        self.buffers.append(self._ggml.backend_cpu_buffer_from_ptr(address, memory.nbytes))
        self._ggml.backend_tensor_alloc(self.buffers[-1], tensor, address)

    def computing(self, result: Any, y: Tensor, threads: int) -> Callable[[], Tensor]:
        """Return a call that computes a tensor of ggml, and returns ``y``, which has its memory."""
        ggml = self._ggml
        graph = ggml.new_graph(self.context)
        ggml.build_forward_expand(graph, result)
        compute, backend = ggml.backend_graph_compute, ggml.backend(threads)

        def call(owner: Owner = self) -> Tensor:
            if compute(backend, graph):
                raise RuntimeError("ggml_backend_graph_compute failed")
            return y

        return call


def _free(ggml: Library, context: Any, buffers: list[Any]) -> None:
    for buffer in buffers:
        ggml.backend_buffer_free(buffer)
    ggml.free(context)


class Matrix:
    """A weight (N, K) of normally distributed values in a type of ggml."""

    def __init__(self, name: str, n: int, k: int, generator: torch.Generator) -> None:
        """Quantize the values, and store them where llama.cpp would.

        Args:
            name: of the type: ``q4_0``.
            n: number of rows.
            k: number of columns.
            generator: of the values.

        Raises:
            ImportError: there is no library.
            RuntimeError: the library has no such type.
        """
        self._ggml = ggml = library()
        self._name, self._shape, self._type = name, (n, k), ggml.type_of(name)
        count = min(n, ROWS)
        x = torch.randn(count, k, generator=generator)
        part = torch.empty(count, ggml.row_size(self._type, k), dtype=torch.uint8)
        ggml.quantize_chunk(self._type, x.data_ptr(), part.data_ptr(), 0, count, k, None)
        self._codes = part
        stored = part.repeat(-(-n // count), 1)[:n].contiguous()
        self.nbytes = stored.nbytes
        for buffer_type in ggml.buffer_types():
            self._owner = Owner(ggml)
            self._weight = ggml.new_tensor_2d(self._owner.context, self._type, k, n)
            self._owner.buffers.append(
                ggml.backend_alloc_ctx_tensors_from_buft(self._owner.context, buffer_type)
            )
            if self._is_supported():
                break
        self.memory = ggml.backend_buft_name(buffer_type).decode()
        """Name of the buffer type; llama.cpp reorders weights in ``CPU_REPACK``."""
        ggml.backend_tensor_set(self._weight, stored.data_ptr(), 0, stored.nbytes)

    def _is_supported(self) -> bool:
        """Return whether the CPU multiplies with the weight where it is stored."""
        ggml, owner = self._ggml, Owner(self._ggml)
        x = ggml.new_tensor_2d(owner.context, ggml.type_of("f32"), self._shape[1], 1)
        product = ggml.mul_mat(owner.context, self._weight, x)
        device = ggml.backend_get_device(ggml.backend(1))
        return bool(ggml.backend_dev_supports_op(device, product))

    def values(self) -> Tensor:
        """Return (N, K) float32: the values of the codes."""
        n, k = self._shape
        part = torch.empty(self._codes.shape[0], k)
        decode = getattr(self._ggml.__dict__["libggml-base.so"], f"dequantize_row_{self._name}")
        decode.restype, decode.argtypes = None, (_POINTER, _POINTER, _LONG)
        decode(self._codes.data_ptr(), part.data_ptr(), part.numel())
        return part.repeat(-(-n // part.shape[0]), 1)[:n]

    def bind(self, x: Tensor, threads: int) -> Callable[[], Tensor]:
        """Return the call that multiplies.

        Args:
            x: (M, K) of any dtype; ggml takes it in float32.
            threads: of the call.

        Returns:
            A call that returns (M, N) float32, in the same memory each time.
        """
        ggml, owner, f32 = self._ggml, Owner(self._ggml), self._ggml.type_of("f32")
        x = x.float().contiguous()
        y = torch.empty(x.shape[0], self._shape[0])
        left = ggml.new_tensor_2d(owner.context, f32, x.shape[1], x.shape[0])
        product = ggml.mul_mat(owner.context, self._weight, left)
        owner.place(left, x)
        owner.place(product, y)
        computing = owner.computing(product, y, threads)

        def call(weight: Matrix = self) -> Tensor:
            return computing()

        return call
