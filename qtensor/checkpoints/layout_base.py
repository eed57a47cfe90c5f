"""Define what a layout is, register layouts, and recognise the layout of a checkpoint.

A layout is one file in ``checkpoints/layouts/``: a subclass of ``Layout``, which reads, and a
subclass of ``Writer`` if the layout can be written. docs/adding_a_layout.md shows one.
"""

from __future__ import annotations

import abc
import functools
import importlib
import pkgutil
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from qtensor.api import quantizer_of
from qtensor.checkpoints.buffers import Parts, assemble
from qtensor.checkpoints.containers.base import TensorInfo
from qtensor.checkpoints.containers.safetensors import SafetensorsWriter, TensorSpec
from qtensor.checkpoints.copies import Forms
from qtensor.checkpoints.errors import Place, refuse
from qtensor.checkpoints.ignoring import NAMES, carried, ignored_names, translated
from qtensor.checkpoints.input_transforms import ROTATED, stored_transforms
from qtensor.checkpoints.leftovers import leftovers
from qtensor.checkpoints.source import Source
from qtensor.modules.input_transform import InputTransform
from qtensor.quantizers import Quantizer
from qtensor.storage.tensor import QuantizedTensor

FACTOR, DIVISOR = "factor", "divisor"
"""What a stored number is: codes are multiplied by it, or divided."""

Loaded = Mapping[str, Tensor]
"""The stored tensors of a group, by role."""


@dataclass(frozen=True)
class DenseOnly:
    """Say why a group cannot be a quantized tensor; it is then decoded to a plain one."""

    reason: str


@dataclass(frozen=True)
class Unreadable:
    """Say why a group cannot be read at all; asking for it raises an error with the reason."""

    reason: str


Target = Quantizer | DenseOnly | Unreadable
"""What a weight becomes: the quantizer of a tensor, or why it cannot be one."""


class Group(NamedTuple):
    """Describe one weight of a checkpoint: its stored tensors, and what it becomes.

    A layout makes groups from the header alone and has checked every shape.
    """

    name: str
    """The logical name, for example ``"model.layers.0.mlp.up_proj.weight"``."""
    roles: Mapping[str, TensorInfo]
    """The layout's own word -> the stored tensor, for example ``"codes"`` and ``"scale"``."""
    shape: tuple[int, ...]
    """The logical shape: the shape of the dense values."""
    dtype: torch.dtype
    """The nominal dtype, and the default dtype of the dense values."""
    target: Target
    """The quantizer of the quantized tensor, or why it cannot be one."""
    scheme: str = ""
    """The layout's own name of the format, for tables: ``"nvfp4-pack-quantized"``."""
    options: Any = None
    """Further facts that the layout needs to decode the group."""
    transposed: bool = False
    """True if the quantized tensor has the last two dims of ``shape`` swapped: stacked experts
    whose origin multiplies by (E, K, N), while blocks of ours run along the last dim."""
    matrix: tuple[int, ...] | None = None
    """The shape (N, K) in which the weight of a convolution is quantized; None for others."""
    listed: bool = True
    """False for a second reading of tensors under another name, which the mapping leaves out."""

    @property
    def quantizer(self) -> Quantizer:
        """Return the target, where it is known to be a quantizer."""
        assert isinstance(self.target, Quantizer)  # noqa: S101 - ``read`` is called for no other
        return self.target


class Layout(abc.ABC):
    """Read checkpoints of one layout; an instance belongs to one open checkpoint."""

    name: ClassVar[str]
    """The name that users write: ``"compressed-tensors"``."""
    rank: ClassVar[int]
    """Layouts are asked in this order; the numbers are those of the rules in docs/checkpoints.md,
    times ten."""
    methods: ClassVar[Sequence[str]] = ()
    """Values of ``quant_method`` in the config that name this layout."""
    factor_names: ClassVar[frozenset[str]] = frozenset({"input_scale", "k_scale", "v_scale"})
    """Last name parts of plain tensors that are factors: ``dtype=`` does not change their dtype."""
    input_factors: ClassVar[Mapping[str, str]] = {"input_scale": FACTOR}
    """Last name part of a factor of activations -> ``FACTOR`` or ``DIVISOR``."""
    kv_factors: ClassVar[tuple[str, str]] = ("k_scale", "v_scale")
    """Names of the factors of the KV cache, relative to the module of the attention."""
    writer: ClassVar[type[Writer] | None] = None
    """Writes the layout; None if it is read only."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        _LAYOUTS[cls.name] = cls

    options: ClassVar[tuple[str, ...]] = ()
    """Keyword arguments of ``open`` that the layout takes."""
    conversion_options: ClassVar[Mapping[str, Any]] = {}
    """Arguments with which conversion opens a checkpoint, if its weights need other tensors."""

    def __init__(self, source: Source, **options: object) -> None:
        """Read the configuration of a checkpoint.

        Args:
            source: names, shapes, header texts and JSON files.
            **options: the ``options`` that the caller of ``open`` gave.

        Raises:
            CheckpointError: the configuration names something that is not read, or an option is
                unknown.
        """
        self.source = source
        self.warns = not options.get(ROTATED)
        for name in options:
            if name not in (*self.options, ROTATED):
                known = ", ".join((*self.options, ROTATED))
                self.refuse("", f"open() takes {known}", name, "Leave the option out")

    @classmethod
    def recognises(cls, source: Source) -> bool:
        """Return True if the checkpoint has this layout; read no tensor data."""
        return source.method in cls.methods

    @abc.abstractmethod
    def groups(self) -> Iterable[Group]:
        """Return a group for each quantized weight, after checking every shape.

        Stored tensors in no group are plain tensors under their own names.

        Raises:
            CheckpointError: a factor is missing, or a shape or dtype does not fit.
        """

    def read(self, group: Group, stored: Loaded) -> QuantizedTensor | DenseOnly:
        """Return a group as a quantized tensor, by moving bytes.

        It is only called if ``group.target`` is a quantizer. By default the roles are "codes" and
        "scale", which lie as in our rowwise data.

        Args:
            group: one of ``groups()``.
            stored: the stored tensors by role, mapped from the file; codes are not copied.

        Raises:
            CheckpointError: a value of a factor is not legal.
        """
        parts = Parts(stored["codes"], stored["scale"])
        return assemble(group.quantizer, group.shape, group.dtype, parts)

    @abc.abstractmethod
    def decode(self, group: Group, stored: Loaded, dtype: torch.dtype) -> Tensor:
        """Return the values of a group by the arithmetic of the origin, to the last bit.

        Args:
            group: one of ``groups()``.
            stored: the stored tensors by role.
            dtype: dtype of the result, ``group.dtype`` unless the caller asks for another one.

        Raises:
            CheckpointError: a value of a factor is not legal.
        """

    def input_format(self, group: Group) -> str:
        """Return the format in which the config says that the inputs of a weight are quantized.

        It is the canonical text of a quantizer, or "" for inputs in high precision, the default.
        Formats with a factor of the whole tensor need one of ``input_factors`` in the file.
        """
        return ""

    def inputs_are_dynamic(self, group: Group) -> bool:
        """Return True if each input of a weight has factors of its own: the file needs none."""
        return False

    def input_transforms(self) -> dict[str, InputTransform]:
        """Return what must happen to the inputs of layers, by module, or refuse what cannot be.

        The weights of these layers are right only together with it. None by default.
        """
        return stored_transforms(self.source)

    def inner_names(self) -> Iterable[str]:
        """Return the names of tensors inside plain ones, such as pickled states; none by default.

        They are read by name and with ``rounding="origin"``, and are not written again.
        """
        return ()

    def inner(self, name: str) -> Tensor | None:
        """Return a tensor that lies inside a plain one, or None if there is none of the name.

        Raises:
            CheckpointError: the outer tensor is damaged.
        """
        return None

    def rows_apart(self, group: Group) -> bool:
        """Return True if ``decode`` of some rows of a 2-D group gives those rows of its values.

        The rows begin at a multiple of 128. Conversion then decodes the weight in parts. Of each
        stored tensor it passes the rows themselves, one row for every 128 (so blocks of another
        height need False), or all of it if it has one element.
        """
        return False

    def decodes_as_ours(self, group: Group, dtype: torch.dtype) -> bool:
        """Return True if ``decode`` gives the values of ``read(...).dequantize(dtype)``.

        Conversion then uses the faster ``dequantize``. An E8M0 factor of 255 is checked there.
        """
        return False

    # ---- helpers for authors

    def place(self, tensor: str = "") -> Place:
        """Return the place for errors of this checkpoint."""
        info = self.source.tensors.get(tensor)
        return Place(info.file if info else self.source.path, tensor, self.name)

    def refuse(self, tensor: str, rule: str, got: object, fix: str) -> NoReturn:
        """Raise a ``CheckpointError`` that names the file, the tensor and this layout."""
        refuse(self.place(tensor), rule, got, fix)

    def expect(
        self, info: TensorInfo, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], why: str
    ) -> None:
        """Refuse a stored tensor of another shape or dtype.

        Args:
            info: the tensor.
            shapes: the legal shapes.
            dtypes: the legal dtypes, as safetensors names them.
            why: what decides the shape, for example ``"the weight (48, 64) in blocks of 128x128"``.

        Raises:
            CheckpointError: the shape or the dtype is none of the legal ones.
        """
        if info.shape not in shapes or info.dtype not in dtypes:
            legal = " or ".join(str(list(shape)) for shape in shapes)
            rule = f"{why} needs {' or '.join(dtypes)} of shape {legal}"
            fix = "Check the config against the file, or export the checkpoint again"
            self.refuse(info.name, rule, f"{info.dtype} of shape {list(info.shape)}", fix)

    def pair(self, sizes: Any, rule: str) -> tuple[int, int]:
        """Return rows and columns of a block that the config gives, or refuse it by ``rule``."""
        ok = isinstance(sizes, list) and len(sizes) == 2
        if not ok or any(type(n) is not int or not 0 < n < 2**31 for n in sizes):
            self.refuse("", rule, repr(sizes), "Check config.json")
        return sizes[0], sizes[1]

    def tensor_factor(self, group: Group, stored: Loaded, rule: str, fix: str) -> Tensor:
        """Return the tensor with the role "factor" after checking its values.

        Raises:
            CheckpointError: ``rule`` is broken, which says that they are finite and not negative.
        """
        factor = stored["factor"]
        bad = ~(torch.isfinite(factor) & (factor >= 0))
        if bool(bad.any()):
            self.refuse(group.roles["factor"].name, rule, factor.flatten().tolist(), fix)
        return factor

    def refuse_leftovers(self, used: Container[str]) -> None:
        """Refuse codes and factors that ``groups`` left over: they would pass as plain values.

        For layouts whose config says that weights are quantized: a float8 or packed tensor without
        a factor that the layout knows is an error. Packed codes are uint8 or int8 matrices that are
        the ``weight`` of a module, stacked ones, or ones with a factor beside them.

        Raises:
            CheckpointError: such a tensor is left; the message names it.
        """
        for info, rule in leftovers(self.source.tensors, used):
            fix = (
                "Check the config against the file, download the missing shard, export it again, "
                "or leave out layout="
            )
            self.refuse(info.name, rule, f"{info.dtype} of shape {list(info.shape)}", fix)


class Writer(abc.ABC):
    """Write checkpoints of one layout; an instance collects what one checkpoint's config needs."""

    layout: ClassVar[str]
    formats: ClassVar[tuple[str, ...]]
    """The format ids that the layout holds, for error messages."""
    suffix: ClassVar[str] = ".safetensors"
    """The end of the names of files."""
    source: Source | None = None
    """The open checkpoint that is written again, or None: what the tensors do not hold, such as
    the shape of a factor or key-values of GGUF, is taken from it."""
    input_factors: ClassVar[Mapping[str, tuple[str, str]]] = {"": ("input_scale", FACTOR)}
    """Format of a weight -> last name part of the factor of its activations, and ``FACTOR`` or
    ``DIVISOR``; the key "" stands for all other formats."""
    factor_shape: ClassVar[tuple[int, ...]] = ()
    """Shape of a factor of activations or of the KV cache."""
    ignore_style: ClassVar[str] = NAMES
    """How the config names ignored modules: a constant of ``ignoring``."""
    ignored_before: Sequence[str] = ()
    """Entries of the source's list of ignored modules, in this style; ``ignored`` carries them."""
    takes_scales = takes_rotations = False
    """Whether the layout can say that inputs of layers are scaled, or rotated."""
    keeps_names: ClassVar[bool] = False
    """True if the layout stores every plain tensor under its name, factors of others included."""
    swizzled: ClassVar[bool | None] = False
    """Whether factors of blocks are stored swizzled; None: as in the tensor."""
    tensor_factor: ClassVar[str] = FACTOR
    """``FACTOR`` or ``DIVISOR``: what is stored for NVFP4; "" keeps either."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Begin a checkpoint.

        Args:
            config: config.json of the model, without a quantization entry; may be empty.
        """
        self.model_config = dict(config)
        self.copied: Source | None = None
        """The checkpoint of this layout that is written again; see ``follow``."""
        self._forms = Forms()
        self._narrow: dict[str, bool] = {}
        """Weight -> True if its FP8 factors are stored in 16 bits."""
        self.plain_dims: dict[str, int] = {}
        """Plain tensor -> number of its dims; ``plain`` fills it."""
        self.input_formats: dict[str, str] = {}
        """Module -> format of its inputs, where a calibration names it."""

    @abc.abstractmethod
    def encode(self, name: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Return the stored tensors of a quantized tensor by name; bytes are moved.

        It is called twice for each tensor: for the header, and for the data. The first call may
        pass a tensor on the meta device, whose values cannot be read; the second call must return
        the same names, shapes and dtypes.

        Raises:
            CheckpointError: the layout cannot hold the tensor; the message names the formats.
        """

    def plain(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the stored tensors of a plain tensor; by default it is stored as it is."""
        self.plain_dims[name] = tensor.ndim
        return {name: tensor}

    def ignored(self, quantized: Iterable[str]) -> list[str]:
        """Return the list of ignored modules for a config.

        It has the entries of the source that still apply, and the other modules whose 2-D weight is
        plain.

        Args:
            quantized: names of the quantized weights, or of their modules.
        """
        plain = [
            name.removesuffix(".weight")
            for name, ndim in self.plain_dims.items()
            if name.endswith(".weight") and ndim == 2
        ]
        modules = (name.removesuffix(".weight") for name in quantized)
        return carried(self.ignored_before, plain, modules, self.ignore_style)

    def follow(self, source: Source, layout: str) -> None:
        """Take from an open checkpoint what its copy keeps.

        That is the list of ignored modules and, in the same layout, dtypes and shapes of factors.
        """
        names = ignored_names(source)
        if layout == self.layout and source.kind == "safetensors":
            self.copied = source
        if layout != self.layout:
            found = (translated(name, self.ignore_style) for name in names)
            names = [name for name in found if name]
        self.ignored_before = names

    def metadata(self, names: Iterable[str]) -> dict[str, str]:
        """Return the header texts of a file that holds these logical tensors."""
        return {"format": "pt"}

    def open_file(
        self, path: str, specs: Iterable[TensorSpec], names: Iterable[str]
    ) -> SafetensorsWriter:
        """Return an open file for these stored tensors, which hold the logical tensors ``names``.

        Raises:
            CheckpointError: the file cannot be written.
        """
        return SafetensorsWriter(path, specs, self.metadata(names))

    def notes(self) -> list[str]:
        """Return what the stored form of the weights loses, for the report of a conversion."""
        return []

    def config(self) -> dict[str, Any]:
        """Return config.json with the layout's entry; called after every ``encode``."""
        return self.model_config

    def files(self) -> dict[str, dict[str, Any]]:
        """Return other JSON files of the folder, by name."""
        return {}

    def encoded(self, name: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Return ``encode(name, tensor)``, with factors of a copy in their dtypes and shapes."""
        stored = self.encode(name, tensor)
        return stored if self.copied is None else self._forms.restored(stored, self.copied.tensors)

    def need_rowwise(self, name: str, tensor: QuantizedTensor) -> None:
        """Refuse a tensor without rowwise data, or whose columnwise data give its values.

        Raises:
            CheckpointError: the rowwise data are not there, or give other values.
        """
        quantizer = quantizer_of(tensor)
        if not quantizer.rowwise or quantizer.columnwise_value:
            self.refuse(name, "the layout holds rowwise data", quantizer.canonical)

    def narrowed(self, name: str, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the FP8 factors of a weight in its nominal dtype if that is exact.

        That is how origins store them. The first call decides, as it does for ``encode``.
        """
        if name not in self._narrow:
            half = dtype in (torch.bfloat16, torch.float16) and not scale.is_meta
            self._narrow[name] = half and torch.equal(scale.to(dtype).float(), scale)
        return scale.to(dtype) if self._narrow[name] else scale

    def refuse(self, tensor: str, rule: str, got: object, fix: str = "") -> NoReturn:
        """Raise a ``CheckpointError`` that names the tensor, the layout and its formats."""
        fix = fix or f"Write layout 'qtensor', or quantize to one of {', '.join(self.formats)}"
        refuse(Place("", tensor, self.layout), rule, got, fix)


# ---- the registry

_LAYOUTS: dict[str, type[Layout]] = {}
_REFUSED = {
    "fp_quant": "its weights are rotated",
    "fouroversix": "its files are not specified",
    "nvfp4": "transformers does not serialize it",
    **dict.fromkeys(("gptq", "awq", "bitsandbytes", "hqq", "eetq", "aqlm"), "an integer format"),
}
"""Values of ``quant_method`` that no layout reads -> why."""


def layouts() -> dict[str, type[Layout]]:
    """Return all layouts by name, in the order in which they are asked."""
    _import_layouts()
    return dict(sorted(_LAYOUTS.items(), key=lambda item: item[1].rank))


@functools.cache
def _import_layouts() -> None:
    package = importlib.import_module("qtensor.checkpoints.layouts")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def find_layout(name: str) -> type[Layout]:
    """Return the layout of that name."""
    known = layouts()
    if name not in known:
        fix = f"Choose one of {', '.join(known)}"
        refuse(Place(layout=str(name)), "layout= is the name of a layout", repr(name), fix)
    return known[name]


def recognise(source: Source) -> type[Layout]:
    """Return the layout of a checkpoint: the first one, by rank, that recognises it."""
    known = layouts()
    for layout in known.values():
        if layout.recognises(source):
            return layout
    got = f"quant_method {source.method!r}" if source.method else "none of their marks"
    if source.method in _REFUSED:
        got += f" ({_REFUSED[source.method]})"
    rule = f"the layouts that are read are {', '.join(known)}"
    refuse(Place(source.path), rule, got, "Pass layout=, or export the model in one of them")
