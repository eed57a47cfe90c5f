"""Hold what the caller of a conversion asked for, after checking it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypedDict

import torch

from qtensor.api import parsed
from qtensor.checkpoints.errors import Place, refuse
from qtensor.checkpoints.saving import checked_path, parse_size
from qtensor.core.errors import QTensorError
from qtensor.quantizers import Quantizer

DEFAULT_EXCLUDE = ("*embed*", "*lm_head*", "*norm*", "*.gate.weight", "*router*")
"""Plain tensors that ``format=`` leaves plain unless ``include`` or ``exclude`` is given."""
DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "f16": torch.float16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "f32": torch.float32,
    "fp32": torch.float32,
    "float32": torch.float32,
}
"""Names of the dtypes of dense results."""


class Progress(NamedTuple):
    """Say how far a conversion is.

    Attributes:
        done: bytes of the source that are done, resumed shards included.
        total: bytes of all tensors of the source that are carried.
        seconds: time since the call began.
        worked: bytes of the source that this call converted.
        name: the tensor that was finished last.
    """

    done: int
    total: int
    seconds: float
    worked: int
    name: str

    @property
    def rate(self) -> float:
        """Return bytes a second of this call."""
        return self.worked / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Return the time left at that rate, or None before the first tensor."""
        return (self.total - self.done) / self.rate if self.worked else None


class Options(TypedDict, total=False):
    """List the keyword arguments that ``convert`` and ``dequantize`` share."""

    include: Iterable[str]
    """Shell patterns of logical names: ``format=`` concerns these alone."""
    exclude: Iterable[str]
    """Shell patterns of names that ``format=`` does not concern."""
    source_layout: str | None
    """Layout of the source; by default it is recognised."""
    shard_size: int | str
    """Most bytes of tensors in a file, as in ``save``; ``"5GB"`` by default."""
    overwrite: bool
    """True to replace a checkpoint that exists, as a whole."""
    resume: bool
    """False to begin again although an interrupted call left finished shards."""
    jobs: int | None
    """Number of threads; by default one for each core."""
    progress: Callable[[Progress], None] | None
    """Called after each tensor, and after each finished shard, on the caller's thread."""


@dataclass(frozen=True)
class Request:
    """Hold a checked request."""

    src: str
    dst: str
    layout: str
    quantizer: Quantizer | None = None
    """What ``format=`` names."""
    dtype: torch.dtype | None = None
    """Dtype of dense results; None converts to a layout."""
    rounding: str | None = "origin"
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None
    source_layout: str | None = None
    shard_size: int = 5 * 10**9
    overwrite: bool = False
    resume: bool = True
    jobs: int | None = None
    progress: Callable[[Progress], None] | None = None

    def chosen(self, name: str, plain: bool, quantized_source: bool) -> bool:
        """Return True if ``format=`` concerns a tensor.

        A plain tensor of a source with quantized weights is one that its producer left plain, so
        only ``include`` selects it.
        """
        if self.quantizer is None:
            return False
        exclude = self.exclude
        if exclude is None:
            exclude = DEFAULT_EXCLUDE if plain and self.include is None else ()
        if any(fnmatchcase(name, pattern) for pattern in exclude):
            return False
        if self.include is None:
            return not (plain and quantized_source)
        return any(fnmatchcase(name, pattern) for pattern in self.include)

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the bytes of the result, besides the source, for the journal."""
        return {
            "layout": self.layout,
            "format": self.quantizer.canonical if self.quantizer else None,
            "dtype": str(self.dtype),
            "rounding": self.rounding,
            "include": self.include,
            "exclude": self.exclude,
            "source_layout": self.source_layout,
            "shard_size": self.shard_size,
        }


def make_request(
    src: object, dst: object, layout: str, options: Mapping[str, Any], **more: Any
) -> Request:
    """Return the request of a call."""
    paths = checked_path(src, "src"), checked_path(dst, "dst")
    known = Options.__annotations__
    for name in options:
        if name not in known:
            rule = f"the options are {', '.join(known)}"
            refuse(Place(), rule, name, "Leave it out")
    values = dict(options)
    for name in ("include", "exclude"):
        values[name] = _patterns(name, values.get(name))
    values["shard_size"] = parse_size(values.get("shard_size", "5GB"))
    jobs = values.get("jobs")
    if jobs is not None and (type(jobs) is not int or jobs < 1):
        refuse(Place(), "jobs is a positive number of threads", repr(jobs), "Leave it out")
    if not (values.get("progress") is None or callable(values["progress"])):
        rule = "progress is a function of one argument, the state"
        refuse(Place(), rule, repr(values["progress"]), "Leave it out")
    request = Request(paths[0], paths[1], layout, **values, **more)
    _check_places(request)
    return request


def _patterns(name: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    several = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
    words = tuple(value) if several else (value,)
    if any(not isinstance(word, str) for word in words):
        refuse(Place(), f"{name} has shell patterns such as '*.mlp.*'", repr(value), "Pass texts")
    return words


def _check_places(request: Request) -> None:
    """Refuse a result that lies inside the source, or replaces it."""
    src, dst = os.path.realpath(request.src), os.path.realpath(request.dst)
    if os.path.commonpath([src, dst]) in (src, dst) and not _beside(src, dst):
        rule = "the result lies outside the source"
        refuse(Place(request.dst), rule, f"source {request.src!r}", "Choose another folder")
    if os.path.lexists(request.dst) and not request.overwrite and not _is_empty(request.dst):
        fix = "Choose another path, or pass overwrite=True"
        refuse(Place(request.dst), "the result must not exist", "an existing path", fix)


def _beside(src: str, dst: str) -> bool:
    """Return True if the source is one file and the result another path in its folder."""
    return src != dst and os.path.isfile(src) and not src.startswith(os.path.join(dst, ""))


def _is_empty(path: str) -> bool:
    return os.path.isdir(path) and not os.listdir(path)


def checked_format(fmt: str | Quantizer) -> Quantizer:
    """Return the quantizer of ``format=``."""
    try:
        found = parsed(fmt.canonical if isinstance(fmt, Quantizer) else fmt)
    except (QTensorError, AttributeError, TypeError) as error:
        rule = "format is a format id with options, such as 'mxfp6(packed=True)', or a quantizer"
        refuse(Place(), rule, repr(fmt), f"Choose another: {error}".rstrip("."), error)
    if found.needs_scale or found.stochastic_rounding:
        rule = "a conversion gives the same bytes in every run"
        got = f"{found.canonical}, which needs a factor or random numbers"
        refuse(Place(), rule, got, "Choose a format without delayed scaling or random rounding")
    return found


def checked_dtype(dtype: object) -> torch.dtype:
    """Return the dtype of dense results, from itself or a name such as ``"bf16"``."""
    found = DTYPES.get(dtype.lower()) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in DTYPES.values():
        rule = "dtype is bf16, f16 or f32"
        refuse(Place(), rule, repr(dtype), "Choose one of them")
    return found
