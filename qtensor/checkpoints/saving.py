"""Write a model or a state dict as a checkpoint: one file, or shards with an index."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.checkpoints.activation_factors import (
    refuse_quantizers,
    with_calibration,
    with_transforms,
    without_quantizers,
)
from qtensor.checkpoints.checkpoint import Checkpoint
from qtensor.checkpoints.containers.safetensors import SafetensorsWriter, TensorSpec, sync_folder
from qtensor.checkpoints.containers.shard_files import INDEX_SUFFIX, read_json
from qtensor.checkpoints.errors import CheckpointError, Place, refuse
from qtensor.checkpoints.layout_base import Writer, find_layout, layouts
from qtensor.checkpoints.layouts.qtensor import without_note
from qtensor.checkpoints.modes import in_memory
from qtensor.checkpoints.publishing import FolderSwap, restore
from qtensor.storage.rebuild import tensor_of
from qtensor.storage.tensor import QuantizedTensor
from qtensor.weights.calibrated import Calibration

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Shard(NamedTuple):
    """Describe one file: its logical tensors, and the stored tensors."""

    names: list[str]
    specs: list[TensorSpec]


@in_memory
def save(
    model: torch.nn.Module | Mapping[str, Tensor],
    path: str | os.PathLike[str],
    layout: str = "qtensor",
    *,
    config: Mapping[str, Any] | None = None,
    calibration: Calibration | None = None,
    shard_size: int | str = "5GB",
    overwrite: bool = False,
) -> None:
    """Write tensors as a checkpoint; quantized tensors are moved byte for byte.

    Tensors are written one by one to temporary names, synced and renamed. A folder that holds a
    checkpoint is replaced as a whole, after the new one is complete: either the old or the new one
    is there at any moment. Other files and subfolders of it stay. Only the current folder of the
    process, mount points and folders in one that is not writable are written file by file.

    Args:
        model: a module, a state dict, or an open checkpoint.
        path: a file that ends in ``.safetensors`` (GGUF: ``.gguf``), or a folder, which also gets
            config.json and an index if there are several shards.
        layout: name of the layout.
        config: config.json of the model, without a quantization entry; by default that of an open
            checkpoint, or of a transformers model, or none.
        calibration: factors of activations, keys and values, which are written as the layout
            stores them; by default those that ``Calibration.apply`` gave a module.
        shard_size: most bytes of tensors in a file, as a number or a text such as ``"5GB"``; one
            weight is never split. A single file has no limit.
        overwrite: True to replace files that exist.

    Raises:
        CheckpointError: the layout cannot hold a tensor or a factor, a factor belongs to no
            quantized weight, a file exists, or the disk is full.
    """
    path = checked_path(path, "path")
    cls = writable(layout, path)
    state = _state_dict(model)
    if not isinstance(config, Mapping | None):
        rule = "config is the content of config.json, a mapping"
        refuse(Place(path), rule, type(config).__name__, "Pass a dict")
    writer = cls(without_quantization(config if config is not None else _config_of(model)))
    if isinstance(model, torch.nn.Module):
        state = without_quantizers(state)
        calibration = Calibration.of(model) if calibration is None else calibration
    refuse_quantizers(state)
    if not isinstance(state, Checkpoint):
        state = with_transforms(state, writer)
    if calibration is not None:
        state = with_calibration(state, writer, calibration)
    if isinstance(model, Checkpoint):
        _check_factors(model, layout)
        writer.source = model.source
        writer.follow(model.source, model.layout)
    target = os.path.abspath(path)
    if target.endswith(tuple({".safetensors", ".gguf"} - {writer.suffix})):
        rule = f"files of the layout end in {writer.suffix}"
        refuse(Place(target, "", layout), rule, os.path.basename(target), "Rename the file")
    if target.endswith(writer.suffix):
        shards = _plan(state, writer, None)
        _check_free([target], overwrite)
        _write(state, writer, dict.fromkeys([target], shards[0]))
        return
    sharded = writer.suffix == ".safetensors"
    shards = _plan(state, writer, parse_size(shard_size) if sharded else None)
    _save_folder(state, writer, target, shards, overwrite)


def _check_factors(checkpoint: Checkpoint, layout: str) -> None:
    """Refuse to write weights in another layout without the factors that lie outside of them.

    Raises:
        CheckpointError: the checkpoint reads such weights with their factors only under a second
            name, as GGUF files do without ``fold_scale``.
    """
    apart = [group.name for group in checkpoint.groups.values() if not group.listed]
    if apart and layout != checkpoint.layout:
        rule = "weights of another layout hold their tensor factors"
        fix = "Open the checkpoint with fold_scale=True"
        place = Place(checkpoint.path, "", checkpoint.layout)
        refuse(place, rule, f"factors of their own, as in {apart[0]!r}", fix)


def _save_folder(
    state: Mapping[str, Tensor], writer: Writer, folder: str, shards: list[Shard], overwrite: bool
) -> None:
    """Write the shards, the index and the JSON files of a folder."""
    names = shard_names(len(shards), writer.suffix)
    files = {os.path.join(folder, name): shard for name, shard in zip(names, shards, strict=True)}
    texts = texts_of(writer)
    index = f"model{INDEX_SUFFIX}"
    if len(shards) > 1:
        texts[index] = index_of(names, shards)
    for name, value in texts.items():
        _json_text(os.path.join(folder, name), value)
    try:
        restore(folder)
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        refuse(Place(folder), "the folder must be writable", error, "Check the path", error)
    every = [*files, *(os.path.join(folder, name) for name in (*texts, "model.safetensors", index))]
    _check_free(every, overwrite)
    swap = _swap(folder) if any(map(os.path.lexists, every)) else None
    if swap is None:
        _write_folder(state, writer, files, texts)
        return
    try:
        _keep_config(folder, texts)
        work = {
            os.path.join(swap.work, name): shard for name, shard in zip(names, shards, strict=True)
        }
        _write_folder(state, writer, work, texts)
        swap.publish(_old_files(folder, index))
    except BaseException:
        swap.discard()
        raise


def _write_folder(
    state: Mapping[str, Tensor],
    writer: Writer,
    files: Mapping[str, Shard],
    texts: Mapping[str, Mapping[str, Any]],
) -> None:
    """Write the files of a folder, and the index last."""
    _write(state, writer, files)
    folder = os.path.dirname(next(iter(files)))
    for name, value in sorted(texts.items(), key=lambda item: item[0].endswith(INDEX_SUFFIX)):
        write_json(os.path.join(folder, name), value)
    made = {*map(os.path.basename, files), *texts}
    # An older file of another kind would be read in place of this checkpoint.
    for name in {f"model{INDEX_SUFFIX}", "model.safetensors"} - made:
        stale = os.path.join(folder, name)
        if os.path.lexists(stale):
            os.unlink(stale)


def _swap(folder: str) -> FolderSwap | None:
    """Return a work folder, or None if a folder can only be written in place.

    That is the current folder of the process, which would lose it, a mount point or a folder with
    one, and a folder in one that the user cannot write.
    """
    path = os.path.realpath(folder)
    here = os.path.realpath(os.getcwd())
    if os.path.commonpath([path, here]) == path:
        return None
    try:
        inside = [os.path.join(path, name) for name in os.listdir(path)]
        if any(map(os.path.ismount, (path, *inside))):
            return None
        return FolderSwap(path)
    except OSError:
        return None


def _keep_config(folder: str, texts: dict[str, Any]) -> None:
    """Keep the config of a folder, without the entry that describes the old weights."""
    path = os.path.join(folder, "config.json")
    if "config.json" not in texts and os.path.isfile(path):
        with contextlib.suppress(CheckpointError):
            config = read_json(path)
            if without_quantization(config) != config:
                texts["config.json"] = without_quantization(config)


def _old_files(folder: str, index: str) -> set[str]:
    """Return the names of the files of the checkpoint that a folder holds."""
    names = {index, "model.safetensors", "hf_quant_config.json"}
    with contextlib.suppress(CheckpointError):
        if os.path.isfile(os.path.join(folder, index)):
            weight_map = read_json(os.path.join(folder, index)).get("weight_map")
            if isinstance(weight_map, dict):
                names |= {n for n in weight_map.values() if str(n).endswith(".safetensors")}
    return names


def texts_of(writer: Writer) -> dict[str, dict[str, Any]]:
    """Return the JSON files of a result by name."""
    texts = dict(writer.files())
    config = writer.config()
    if config:
        texts["config.json"] = config
    return texts


def shard_names(count: int, suffix: str = ".safetensors") -> list[str]:
    """Return the names of the files of a folder with that many shards."""
    if count == 1:
        return [f"model{suffix}"]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def index_of(names: Iterable[str], shards: Iterable[Shard]) -> dict[str, Any]:
    """Return the index of shards: which stored tensor lies in which file."""
    pairs = [(spec, name) for name, s in zip(names, shards, strict=True) for spec in s.specs]
    total = sum(spec.nbytes for spec, _ in pairs)
    return {
        "metadata": {"total_size": total},
        "weight_map": {spec.name: name for spec, name in pairs},
    }


def writable(layout: str, path: str | os.PathLike[str]) -> type[Writer]:
    """Return the writer of a layout."""
    cls = find_layout(layout)
    if cls.writer is None:
        written = [name for name, known in layouts().items() if known.writer]
        fix = f"Choose one of {', '.join(written)}"
        refuse(Place(os.fspath(path), "", layout), "the layout must be writable", layout, fix)
    return cls.writer


def _write(state: Mapping[str, Tensor], writer: Writer, files: Mapping[str, Shard]) -> None:
    """Write every file under a temporary name, then rename all of them."""
    finished: list[SafetensorsWriter] = []
    try:
        for path, shard in files.items():
            file = writer.open_file(path, shard.specs, shard.names)
            finished.append(file)
            for name in shard.names:
                for stored, tensor in _encode(writer, state, name).items():
                    file.write(stored, tensor)
            file.finish()
    except BaseException:
        for file in finished:
            file.abort()
        raise
    for file in finished:
        file.publish()


def _encode(writer: Writer, state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the stored tensors of a tensor.

    Raises:
        CheckpointError: the layout cannot hold it, or it is a weight of an open checkpoint that can
            only be read dense: decoding it must be the caller's decision.
    """
    tensor = _with_bytes(name, state[name])
    if isinstance(tensor, QuantizedTensor):
        return writer.encoded(name, tensor)
    if isinstance(state, Checkpoint) and name in state.groups:
        rule = "weights of an open checkpoint are written as they are stored"
        fix = "Save load_state_dict(path), which holds its dense values"
        refuse(Place(state.path, name, writer.layout), rule, state.why_dense(name), fix)
    return writer.plain(name, tensor)


def _with_bytes(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, whose memory holds its values."""
    if torch.nn.parameter.is_lazy(tensor):
        fix = "Call the module once, which gives its shape"
        refuse(Place("", name), "a tensor has a shape and values", "a lazy parameter", fix)
    stored = tensor_of(tensor).buffers() if isinstance(tensor, QuantizedTensor) else [tensor]
    for part in stored:
        if type(part).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            fix = "Pass plain or quantized tensors; of a DTensor, its full_tensor()"
            got = type(part).__name__
            refuse(Place("", name), "a tensor holds its values in memory of its own", got, fix)
        if part.is_meta or part.layout != torch.strided:
            got = "one on the meta device" if part.is_meta else str(part.layout)
            fix = "Load its values first" if part.is_meta else "Call to_dense()"
            refuse(Place("", name), "a tensor has values, stored densely", got, fix)
    if isinstance(tensor, QuantizedTensor):
        return tensor.detach()
    return tensor.detach().resolve_conj().resolve_neg()


def _plan(state: Mapping[str, Tensor], writer: Writer, limit: int | None) -> list[Shard]:
    """Return the files: weights in order, each whole, as many as ``limit`` bytes allow."""
    shards, size = [Shard([], [])], 0
    for name in state:
        stored = _encode(writer, state, name)
        specs = [TensorSpec(n, t.dtype, tuple(t.shape)) for n, t in stored.items()]
        nbytes = sum(spec.nbytes for spec in specs)
        if limit is not None and size and size + nbytes > limit:
            shards.append(Shard([], []))
            size = 0
        shards[-1].names.append(name)
        shards[-1].specs.extend(specs)
        size += nbytes
    check_unique(shards)
    return shards


def _is_text(text: str, encode: Callable[[str], bytes] = str.encode) -> bool:
    """Return True if a text can be encoded: it has no half of a surrogate pair."""
    try:
        encode(text)
    except UnicodeEncodeError:
        return False
    return True


def check_unique(shards: Iterable[Shard]) -> None:
    """Refuse two stored tensors of one name, and names that no file holds."""
    seen: set[str] = set()
    for spec in _specs(shards):
        if not _is_text(spec.name):
            rule = "stored names can be written as UTF-8"
            refuse(Place("", ascii(spec.name)), rule, "half of a character", "Rename it")
        if spec.name in seen:
            got = "two tensors that are stored under it"
            refuse(Place("", spec.name), "stored names are unique", got, "Rename one of them")
        seen.add(spec.name)


def _specs(shards: Iterable[Shard]) -> Iterator[TensorSpec]:
    for shard in shards:
        yield from shard.specs


def write_json(path: str, value: Mapping[str, Any]) -> None:
    """Write a JSON file under a temporary name, sync and rename it."""
    write_bytes(path, _json_text(path, value))


def write_bytes(path: str, data: bytes) -> None:
    """Write a file under a temporary name, sync and rename it."""
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(os.path.dirname(path))
    except OSError as error:
        if os.path.exists(temporary):
            os.unlink(temporary)
        refuse(Place(path), "the file must be writable", error, "Free space on the disk", error)


def _json_text(path: str, value: Mapping[str, Any]) -> bytes:
    """Return the bytes of a JSON file; infinite numbers are written as Python's json does."""
    try:
        return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        rule = "the values are texts, numbers, booleans, None, lists and dicts"
        refuse(Place(path), rule, error, "Change the config", error)


def checked_path(path: object, name: str) -> str:
    """Return a path as a text."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text or not _is_text(text, os.fsencode):
        fix = "Pass a path; open files are read by checkpoints.open"
        refuse(Place(), f"{name} is the path of a file or folder", repr(path), fix)
    return text


def _check_free(paths: Iterable[str], overwrite: bool) -> None:
    for path in paths:
        if os.path.lexists(path) and not overwrite:
            fix = "Choose another path, or pass overwrite=True"
            refuse(Place(path), "the file must not exist", "an existing file", fix)


def _state_dict(model: object) -> Mapping[str, Tensor]:
    state = model.state_dict() if isinstance(model, torch.nn.Module) else model
    if not isinstance(state, Mapping):
        got = type(model).__name__
        refuse(Place(), "model is a module or a mapping from names to tensors", got, "Pass one")
    if not isinstance(state, Checkpoint):
        for name, tensor in state.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                got = f"{type(tensor).__name__} for {name!r}"
                refuse(Place(), "a state dict maps names to tensors", got, "Leave it out")
    return state


def _config_of(model: object) -> Mapping[str, Any]:
    """Return the config of an open checkpoint or of a transformers model, or an empty dict."""
    config = getattr(model, "config", {})
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    return config if isinstance(config, Mapping) else {}


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json without the entries that describe quantized weights.

    MLX repeats its entry under ``quantization``; models of several parts may hold the entry in that
    of the language model.
    """
    config = without_note(config)
    left = {k: v for k, v in config.items() if k not in ("quantization_config", "expert_dtype")}
    if isinstance(left.get("quantization"), dict) and "bits" in left["quantization"]:
        del left["quantization"]
    for part in ("text_config", "llm_config"):
        if isinstance(left.get(part), dict):
            left[part] = {k: v for k, v in left[part].items() if k != "quantization_config"}
    return left


def parse_size(size: int | str) -> int:
    """Return a number of bytes from a number or a text such as ``"5GB"``."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"(\d{1,15})\s*([KMG]I?B)?", str(size).upper().strip())
    if match is None or int(match[1]) == 0:
        fix = 'Pass a text such as "5GB" or "500MiB"'
        refuse(Place(), "shard_size is a positive number of bytes", repr(size), fix)
    return int(match[1]) * _UNITS[match[2] or ""]
