"""The CPU kernels of a process that starts before they are compiled.

The whole library takes a processor more than a minute to compile. A process that finds no library
starts another process that compiles it, at a low priority. Until the library is there, each kernel
that a call needs is compiled alone, which takes seconds, and goes to the cache, too. The bytes are
those of the library.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qtensor.build import cache
from qtensor.core.errors import QTensorError
from qtensor.kernels.cpu import loading, prebuilt, sources
from qtensor.kernels.cpu.sources import Piece
from qtensor.kernels.cpu.structs import CQuantizer

_DTYPES = ("Float32", "Bfloat16", "Float16")
"""Names in C++, in the order of `native.DTYPES`."""
_HEAD = struct.Struct("=3q")
"""The first arguments of `qt_quantize` and `qt_dequantize`: quantizer, data and dtype."""
_NO_KERNEL = 1
"""The status of a call that the reference must serve."""
_PROGRAM = """
import os, sys
if os.fork():
    os._exit(0)
os.nice(5)
from qtensor.kernels.cpu import prebuilt
prebuilt.provide_once(sys.argv[1])
"""
"""The process that compiles is not a child of this one: its end is nobody's to wait for."""


def in_background() -> bool:
    """Return whether this process may start another one, which compiles the library."""
    frozen = getattr(sys, "frozen", False)  # then sys.executable is not Python
    allowed = os.environ.get("QTENSOR_BACKGROUND") != "0"
    return allowed and bool(sys.executable) and not frozen and hasattr(os, "fork")


def complete(isa: str, kernels: Path | None) -> Path:
    """Return the kernels, and build what is missing: all, or the C++ ops of other sources.

    Raises:
        BuildError: there are no kernels, and they cannot be built.
    """
    if kernels is None or not in_background():
        return prebuilt.provide(isa)
    with contextlib.suppress(QTensorError):  # Without a compiler, Python serves the ops.
        sources.ops_build_spec().find_compiler()
        _start_build(isa)
    return kernels


class Pieces:
    """The functions of `loading.Library`, each compiled at its first call.

    Attributes:
        handle: this object.
        successor: the library once it is compiled, or why there are no kernels; None before.

    Raises:
        CompilerNotFound: no compiler runs.
    """

    def __init__(self, isa: str) -> None:
        self.handle: Any = self
        self.successor: loading.Library | str | None = None
        self._isa = isa
        self._spec = sources.build_spec(isa)
        self._spec.find_compiler()
        self._functions: dict[tuple[Piece, str], Callable[..., int]] = {}
        self._library: Path | None = None  # where it will be, once a piece shows which folder
        _start_build(isa)

    def current(self) -> loading.Library | Pieces | str:
        """Return what serves the next call: the library, if it has been compiled."""
        if self._library is not None and self._library.exists():
            self._find_library()
        return self if self.successor is None else self.successor

    def _find_library(self) -> None:
        self._library = None
        with contextlib.suppress(QTensorError):
            path = prebuilt.find_compiled(self._spec)
            if path is not None:
                self.successor = loading.serve(self._isa, path)

    # ---- functions of c_interface.cpp

    def qt_quantize(self, packed: bytes) -> int:
        """Run the function of this name."""
        return self._run(_piece_of("quantize", packed), "qt_quantize", packed)

    def qt_dequantize(self, packed: bytes) -> int:
        """Run the function of this name."""
        return self._run(_piece_of("dequantize", packed), "qt_dequantize", packed)

    def qt_linear(self, packed: bytes) -> int:
        """Run the function of this name."""
        return self._run(Piece("linear"), "qt_linear", packed)

    def qt_integer_products(self, packed: bytes) -> int:
        """Run the function of this name."""
        return self._run(Piece("integer_products"), "qt_integer_products", packed)

    def qt_norm(self, call: Any, dtype: int) -> int:
        """Run the function of this name."""
        return self._run(Piece("norm", _DTYPES[dtype]), "qt_norm", call, dtype)

    def qt_sum_rows(self, call: Any, dtype: int) -> int:
        """Run the function of this name."""
        return self._run(Piece("norm", _DTYPES[dtype]), "qt_sum_rows", call, dtype)

    def qt_activation(self, call: Any, dtype: int) -> int:
        """Run the function of this name."""
        return self._run(Piece("activation", _DTYPES[dtype]), "qt_activation", call, dtype)

    def qt_fused(self, *_: object) -> int:
        """Leave the call to the kernels that it joins."""
        return _NO_KERNEL

    # ---- pieces

    def _run(self, piece: Piece, name: str, *args: Any) -> int:
        function = self._functions.get((piece, name)) or self._load(piece, name)
        return _NO_KERNEL if function is None else function(*args)

    def _load(self, piece: Piece, name: str) -> Callable[..., int] | None:
        if self.successor is not None:
            return None
        try:
            path = cache.build(sources.piece_spec(self._isa, piece), notice=self._announce)
            function = loading.function_of(path, name)
        except (QTensorError, OSError) as error:
            # A build of the library that has ended removes the pieces.
            self._find_library()
            if self.successor is None:
                self.successor = loading.do_without(str(error))
            return None
        library = cache.library_path(self._spec)
        self._library = path.parents[1] / library.parent.name / library.name
        self._functions[piece, name] = function
        return function

    def _announce(self, _: str) -> None:
        _tell_once(cache.seconds(self._spec))


def _piece_of(function: str, packed: bytes) -> Piece:
    address, _, dtype = _HEAD.unpack_from(packed)
    quantizer = CQuantizer.from_address(address)
    number = quantizer.element * 10000 + quantizer.codes * 1000 + quantizer.block
    return Piece(function, _DTYPES[dtype], number)


@functools.cache
def _tell_once(time_needed: str) -> None:
    print(
        "qtensor: compiling CPU kernels, some seconds in each new kind of call until all are "
        f"compiled in the background (once, {time_needed} in all; cached in {cache.cache_dir()})",
        file=sys.stderr,
        flush=True,
    )


def _start_build(isa: str) -> None:
    """Start a process that compiles the library and goes on when this process ends.

    It has a session of its own, so that an interrupt at the terminal does not reach it.
    """
    root = str(Path(prebuilt.__file__).parents[3])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    quiet = subprocess.DEVNULL  # the terminal shows one notice, that of this process
    with contextlib.suppress(OSError):
        subprocess.run(
            (sys.executable, "-c", _PROGRAM, isa),
            stdin=quiet,
            stdout=quiet,
            stderr=quiet,
            env=os.environ | {"PYTHONPATH": paths},
            start_new_session=True,
            check=False,
        )
