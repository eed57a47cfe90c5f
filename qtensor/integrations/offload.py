"""Place the weights of a model on devices and on disk with accelerate."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qtensor import checkpoints
from qtensor.checkpoints.activation_factors import without_quantizers
from qtensor.core.errors import UnsupportedError, fail
from qtensor.integrations.experts import ExpertWeights
from qtensor.modules.input_hook import QUANTIZER, TRANSFORM


class StoredWeights(Mapping[str, Tensor]):
    """Map the names of a model's state dict to tensors in the mapped files of a checkpoint."""

    def __init__(self, state: Mapping[str, Any], folder: str) -> None:
        """Open the checkpoint in which ``state`` was saved.

        Tied tensors are one object in ``state``; the folder holds each once, under its first name.
        The few numbers by which layers transform and quantize their inputs stay in memory.
        """
        first: dict[int, str] = {}
        self._stored = {name: first.setdefault(id(t), name) for name, t in state.items()}
        self._swapped = {n: t.swapped for n, t in state.items() if isinstance(t, ExpertWeights)}
        steps = {TRANSFORM, QUANTIZER}
        self._kept = {n: t for n, t in state.items() if steps & set(n.split("."))}
        self._checkpoint = checkpoints.open(folder)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._kept:
            return self._kept[name]
        tensor = self._checkpoint[self._stored[name]]
        if name in self._swapped:
            return ExpertWeights(tensor, self._swapped[name])
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def disk_offload(
    model: nn.Module,
    folder: str | os.PathLike[str],
    execution_device: torch.types.Device = None,
    *,
    overwrite: bool = False,
    **options: Any,
) -> Any:
    """Do what ``accelerate.disk_offload`` does, for models with quantized weights too.

    ``accelerate.disk_offload`` writes one plain array for each parameter, which a quantized weight
    is not. Here the state dict is saved in our layout, and ``accelerate.cpu_offload`` takes each
    weight from the mapped files when its layer runs. On the CPU a weight is not copied: it lies in
    pages of the file, which the system can drop.

    Args:
        model: a module; its parameters move to the meta device between calls.
        folder: gets the weights; it must stay as long as the model is used.
        execution_device: device of the products; by default the first parameter's.
        overwrite: True to replace a checkpoint in the folder.
        **options: further arguments of ``accelerate.cpu_offload``.

    Returns:
        The model.

    Raises:
        CheckpointError: the folder holds a checkpoint, or the disk is full.
        UnsupportedError: accelerate is not installed, or ``state_dict`` is among the options.
    """
    accelerate = _accelerate("disk_offload")
    if "state_dict" in options:
        fix = "Leave it out, or call accelerate.cpu_offload"
        fail("disk_offload", "the weights are those of the model", "state_dict=", fix)
    state = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    seen: set[int] = set()
    unique = {n: t for n, t in state.items() if not (id(t) in seen or seen.add(id(t)))}  # type: ignore[func-returns-value]
    plain = {n: t.stored if isinstance(t, ExpertWeights) else t for n, t in unique.items()}
    if execution_device is None:
        execution_device = next(iter(model.parameters())).device
    checkpoints.save(without_quantizers(plain), folder, overwrite=overwrite)
    weights = StoredWeights(state, os.path.abspath(folder))
    return accelerate.cpu_offload(model, execution_device, state_dict=weights, **options)


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, str | int | torch.device],
    main_device: str | int | torch.device | None = None,
    *,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    force_hooks: bool = False,
) -> Any:
    """Do what ``accelerate.dispatch_model`` does, for models with quantized weights too.

    accelerate knows tied weights by their address, which a quantized tensor does not have. Here
    modules are placed by the same hooks of accelerate, without addresses: a tied weight that is
    offloaded is copied for each module that uses it.

    Args:
        model: a module.
        device_map: a device for each module by name, such as that of
            ``accelerate.infer_auto_device_map``. Beside a GPU, modules on ``"cpu"`` run on
            ``main_device``, and their weights are copied there for each call.
        main_device: by default the first device that is not the CPU, or the CPU.
        offload_buffers: True to move the buffers of modules on ``"cpu"`` likewise.
        skip_keys: names of arguments that are not moved between devices; by default those that a
            model of transformers names.
        force_hooks: True for hooks also where one device has all modules.

    Returns:
        The model.

    Raises:
        QTensorError: the map names the disk.
        ValueError: the map names no device for a parameter.
        UnsupportedError: accelerate is not installed.
    """
    _accelerate("dispatch_model")
    from accelerate import utils  # noqa: PLC0415 only this function needs it
    from accelerate.hooks import attach_align_device_hook_on_blocks  # noqa: PLC0415

    if "disk" in device_map.values():
        fix = f"Call disk_offload of {__name__} for a whole model"
        fail("dispatch_model", "modules are on devices", dict(device_map), fix)
    utils.check_device_map(model, dict(device_map))
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    if len(set(device_map.values())) == 1 and not force_hooks:
        return model.to(next(iter(device_map.values())))
    execution, offloaded = _placed(device_map, main_device)
    names = [name for name, moves in offloaded.items() if moves]
    state = utils.extract_submodules_state_dict(model.state_dict(), names) if names else None
    tied = utils.find_tied_parameters(model)
    attach_align_device_hook_on_blocks(
        model,
        execution_device=execution,
        offload=offloaded,
        weights_map=state,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys or getattr(model, "_skip_keys_device_placement", None),
    )
    utils.retie_parameters(model, tied)
    return model


def _placed(
    device_map: Mapping[str, str | int | torch.device], main_device: str | int | torch.device | None
) -> tuple[dict[str, str | int | torch.device], dict[str, bool]]:
    """Return where each module runs, the rest of the model (``""``) too, and which ones move."""
    if main_device is None:
        others = (device for device in device_map.values() if str(device) != "cpu")
        main_device = next(others, "cpu")
    execution = {
        name: main_device if str(device) == "cpu" else device for name, device in device_map.items()
    }
    # Without another device there is nowhere to move from; one memory serves "mps" and the CPU.
    moves = str(main_device).partition(":")[0] not in ("cpu", "mps")
    offloaded = {name: moves and str(device) == "cpu" for name, device in device_map.items()}
    return {**execution, "": main_device}, offloaded


def _accelerate(op: str) -> Any:
    """Return the module accelerate.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        import accelerate  # noqa: PLC0415 an optional package
    except ImportError:
        fix = "Call pip install accelerate"
        fail(op, "accelerate must be installed", "no accelerate", fix, UnsupportedError)
    return accelerate


__all__ = ["StoredWeights", "disk_offload", "dispatch_model"]
