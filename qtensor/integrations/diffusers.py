"""Load, quantize, run and save models and pipelines of diffusers with quantized weights.

Importing this module registers the method ``"qtensor"`` with diffusers and with transformers, whose
models are the text encoders of pipelines. docs/diffusers.md shows what works.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

try:
    from diffusers.quantizers import auto
except ModuleNotFoundError as error:
    message = "qtensor.integrations.diffusers needs diffusers: install the extra diffusers"
    raise ModuleNotFoundError(message) from error
from diffusers.models.modeling_utils import ModelMixin
from diffusers.quantizers.base import DiffusersQuantizer

from qtensor import checkpoints
from qtensor.api import parsed
from qtensor.checkpoints import Checkpoint
from qtensor.checkpoints.activation_factors import with_transforms
from qtensor.checkpoints.buffers import in_dtype, unshared
from qtensor.checkpoints.checkpoint import Rounding, check_rounding
from qtensor.checkpoints.containers.memory import MemoryContainer
from qtensor.checkpoints.containers.shard_files import path_of
from qtensor.checkpoints.modes import in_memory
from qtensor.checkpoints.saving import writable
from qtensor.core.errors import QTensorError, UnsupportedError, fail
from qtensor.core.texts import some
from qtensor.integrations.loading import module_of
from qtensor.integrations.quantization_config import METHOD
from qtensor.integrations.transformers import QTensorConfig
from qtensor.modules.input_hook import TRANSFORM
from qtensor.modules.input_transform import undo_transforms
from qtensor.storage.tensor import QuantizedTensor
from qtensor.weights.calibrated import Calibration
from qtensor.weights.layers import match
from qtensor.weights.shown import show_formats


class QTensorQuantizer(DiffusersQuantizer):
    """Load and save quantized parameters for ``from_pretrained`` and ``from_single_file``.

    Attributes:
        dense: weights that are plain parameters, with the reason: the checkpoint has them in no
            format of ours, or they do not fit the format that was asked for.
    """

    use_keep_in_fp32_modules = True
    quantization_config: QTensorConfig

    def __init__(self, quantization_config: QTensorConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.dense: dict[str, str] = {}
        self._checkpoint: Checkpoint | None = None
        self._dtype: torch.dtype | None = None
        self._fp32: list[str] = []

    def update_torch_dtype(self, torch_dtype: torch.dtype) -> torch.dtype:
        """Note the dtype that weights show."""
        self._dtype = torch_dtype
        return torch_dtype

    def validate_environment(self, *_: object, device_map: Any = None, **__: object) -> None:
        """Refuse devices that cannot hold quantized parameters while loading.

        Raises:
            UnsupportedError: ``device_map`` names the disk.
        """
        if isinstance(device_map, dict) and "disk" in device_map.values():
            fix = "Load on the CPU, then use group or sequential offload"
            rule = "from_pretrained cannot offload quantized weights to disk"
            fail("from_pretrained", rule, device_map, fix, UnsupportedError)

    # ---- stored weights

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: Any) -> list[str]:
        """Open the files of a folder, and return the logical names of their tensors.

        Raises:
            QTensorError: a format is asked for and the files hold quantized weights, or neither.
        """
        files = [str(file) for file in checkpoint_files]
        if not all(file.endswith(".safetensors") for file in files):
            return loaded_keys
        checkpoint = checkpoints.open(path_of(files), accept_rotated=True)
        self._check(checkpoint)
        if not _is_ours(checkpoint):
            checkpoint.close()
            return loaded_keys
        self._checkpoint = checkpoint
        return [name for name in checkpoint if not checkpoint.is_factor(name)]

    def _check(self, checkpoint: Checkpoint) -> None:
        """Refuse a format for quantized weights, and plain weights without a format."""
        wanted, ours = self.quantization_config.format, _is_ours(checkpoint)
        if wanted is not None and ours:
            got = f"layout {checkpoint.layout!r} in {checkpoint.path}"
            rule = "a format is for checkpoints without quantized weights or rotated inputs"
            fail("QTensorConfig", rule, got, "Pass QTensorConfig() without a format")
        if wanted is None and not ours:
            rule = "QTensorConfig() without a format loads quantized weights"
            got = f"{checkpoint.path}, which has none"
            fail("QTensorConfig", rule, got, 'Pass a format: QTensorConfig("nvfp4")')

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the logical tensors of the stored ones, quantized where a format holds them.

        ``state_dict`` are those of one file: of a folder that is open, or of a single file.
        """
        if self._checkpoint is not None:
            return self._read(self._checkpoint, state_dict)
        if any(isinstance(tensor, QuantizedTensor) for tensor in state_dict.values()):
            return state_dict  # load_single_file has read it
        checkpoint = _described(state_dict)
        self._check(checkpoint)
        _refuse_transforms(checkpoint)
        return self._read(checkpoint, state_dict) if checkpoint.groups else state_dict

    @in_memory
    def _read(self, checkpoint: Checkpoint, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint whose first stored part is in ``stored``, a file."""
        first = {
            next(iter(group.roles.values())).name: name
            for name, group in checkpoint.groups.items()
            if group.listed
        }
        parts = {info.name for group in checkpoint.groups.values() for info in group.roles.values()}
        found: dict[str, Tensor] = {}
        for name in stored:
            if name in first:
                tensor = checkpoint[first[name]]
                if not isinstance(tensor, QuantizedTensor):
                    self.dense[first[name]] = str(checkpoint.why_dense(first[name]))
                found[first[name]] = _in_dtype(tensor, self._dtype)
            elif name not in parts and not checkpoint.is_factor(name):
                found[name] = checkpoint[name]
        return found

    @property
    def supports_parallel_loading(self) -> bool:
        """Return False: the files of a folder are read through one open checkpoint."""
        return False

    # ---- parameters

    def check_if_quantized_param(
        self, model: nn.Module, param_value: Tensor, param_name: str, *_: object, **__: object
    ) -> bool:
        """Return True for quantized values, and for the weights that are quantized now."""
        if isinstance(param_value, QuantizedTensor):
            return True
        module, key = module_of(model, param_name)
        if key != "weight" or not isinstance(module, nn.Linear):
            return False
        return self._format_of(param_name) is not None

    def _format_of(self, param_name: str) -> str | None:
        """Return the format in which the weight of a linear layer is quantized, or None."""
        formats = self.quantization_config.format
        skipped = [*(self.quantization_config.modules_to_not_convert or ()), *self._fp32]
        if formats is None or any(part in param_name for part in skipped):
            return None
        if isinstance(formats, str):
            return formats
        layer = param_name.rpartition(".")[0]
        found = match("QTensorConfig", formats, [layer], "format", every=False)
        return formats[found[layer]] if found else None

    def create_quantized_param(
        self,
        model: nn.Module,
        param_value: Tensor,
        param_name: str,
        target_device: Any,
        *_: object,
        **__: object,
    ) -> None:
        """Set a frozen, quantized parameter; a weight that does not fit the format stays plain."""
        module, key = module_of(model, param_name)
        value = param_value.to(target_device)
        if not isinstance(value, QuantizedTensor):
            quantizer = parsed(str(self._format_of(param_name)))
            try:
                value = quantizer(value)
            except QTensorError as error:
                self.dense[param_name] = str(error)
        quantized = isinstance(value, QuantizedTensor)
        module._parameters[key] = nn.Parameter(value, requires_grad=not quantized)

    def _process_model_before_weight_loading(
        self, model: nn.Module, keep_in_fp32_modules: Any = (), **_: object
    ) -> None:
        self._fp32 = [name for name in keep_in_fp32_modules or () if name]
        formats = self.quantization_config.format
        if isinstance(formats, dict):
            layers = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
            match("QTensorConfig", formats, layers, "format")

    def _process_model_after_weight_loading(self, model: nn.Module, **_: object) -> nn.Module:
        if self._checkpoint is not None:
            checkpoints.apply_transforms(self._checkpoint, model)
            self._checkpoint.close()
            self._checkpoint = None
        for module in model.modules():
            show_formats(module)
        return model

    def _dequantize(self, model: nn.Module) -> nn.Module:
        """Replace quantized parameters by their values; inputs stay as they are from then on."""
        for module in model.modules():
            for key, parameter in list(module._parameters.items()):
                if isinstance(parameter, QuantizedTensor):
                    module._parameters[key] = nn.Parameter(parameter.detach().dequantize())
        undo_transforms(model)
        Calibration.remove(model)
        return model

    # ---- saving

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Any], safe_serialization: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the stored tensors of the layout ``qtensor``, and the texts of the header.

        Raises:
            UnsupportedError: ``safe_serialization`` is False.
        """
        if not safe_serialization:
            fix = "Leave safe_serialization out"
            fail("save_pretrained", "files are safetensors", "pickles", fix, UnsupportedError)
        writer = writable(self.quantization_config.layout, "")({})
        stored: dict[str, Tensor] = {}
        for name, tensor in with_transforms(state_dict, writer).items():
            own = tensor.detach()
            if isinstance(own, QuantizedTensor):
                stored |= writer.encode(name, own)
            else:
                stored |= writer.plain(name, own)
        return unshared(stored), writer.metadata(state_dict)

    @property
    def is_serializable(self) -> bool:
        """Return True: ``save_pretrained`` writes the layout ``qtensor``.

        Raises:
            UnsupportedError: the config names another layout; nothing is written yet.
        """
        if self.quantization_config.layout != METHOD:
            fix = "Call qtensor.checkpoints.save(model.state_dict(), path, layout=)"
            rule = 'save_pretrained of diffusers writes layout="qtensor"'
            got = self.quantization_config.layout
            fail("save_pretrained", rule, got, fix, UnsupportedError)
        return True

    @property
    def is_trainable(self) -> bool:
        """Return True: gradients flow through frozen weights to adapters."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Return True: ``torch.compile`` takes quantized parameters."""
        return True


def _in_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor that shows a dtype; codes are shared."""
    if dtype is None or tensor.dtype == dtype:
        return tensor
    if isinstance(tensor, QuantizedTensor):
        return in_dtype(tensor, dtype)
    return tensor.to(dtype)


def adopt(model: ModelMixin) -> None:
    """Let ``save_pretrained`` write a model that was quantized or rotated after loading."""
    quantized = any(isinstance(parameter, QuantizedTensor) for parameter in model.parameters())
    rotates = any(TRANSFORM in module._modules for module in model.modules())
    if (quantized or rotates) and getattr(model, "hf_quantizer", None) is None:
        model.hf_quantizer = QTensorQuantizer(QTensorConfig())
        model.register_to_config(quantization_config=model.hf_quantizer.quantization_config)


def _is_ours(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has what diffusers cannot load without us."""
    return bool(checkpoint.groups or checkpoint.input_transforms)


def _refuse_transforms(checkpoint: Checkpoint) -> None:
    """Refuse a single file whose layers transform their inputs: its names are not the model's.

    Raises:
        UnsupportedError: the file has such layers.
    """
    if checkpoint.input_transforms:
        rule = "weights of a single file are for inputs that are neither scaled nor rotated"
        got = f"such inputs of {some(checkpoint.input_transforms)}"
        fix = "Write the file for plain inputs: qtensor.checkpoints.dequantize"
        fail("from_single_file", rule, got, fix, UnsupportedError)


def _described(state_dict: Mapping[str, Tensor]) -> Checkpoint:
    """Return the tensors of a single file as a checkpoint, by the descriptions among them.

    diffusers hands them over without the header of the file, which may describe them instead.

    Raises:
        CheckpointError: the layout is not known.
    """
    container = MemoryContainer(state_dict, "the single file")
    return Checkpoint(container, "bfl" if _is_bfl(state_dict) else None)


def _is_bfl(state_dict: Mapping[str, Tensor]) -> bool:
    """Return True for factors of rows, or of blocks in the order of rows, without a description.

    diffusers has the same rule: a file with such names is one of Black Forest Labs.
    """
    names = {name.rpartition(".")[2] for name in state_dict}
    if names & {"comfy_quant", "scaled_fp8"}:
        return False
    return any(
        name.endswith(".weight_scale") and scale.ndim == (1 if scale.itemsize == 4 else 2)
        for name, scale in state_dict.items()
    )


def load_single_file(
    model_class: type,
    path: str | os.PathLike[str],
    *,
    rounding: Rounding = None,
    layout: str | None = None,
    shape: Mapping[str, tuple[int, ...]] | None = None,
    **options: Any,
) -> Any:
    """Return a model of diffusers with the weights of a quantized single file.

    ``model_class.from_single_file(path, quantization_config=QTensorConfig())`` reads files whose
    tensors describe themselves, and those of Black Forest Labs. This function also reads the
    header, where ComfyUI may keep its description.

    Args:
        model_class: such as ``diffusers.FluxTransformer2DModel``.
        path: a safetensors file of ComfyUI or Black Forest Labs, or another one that
            ``qtensor.checkpoints.open`` reads.
        rounding: None for quantized parameters, which decode by our arithmetic; ``"origin"`` for
            plain ones, with the values of the origin to the last bit.
        layout: name of the layout, ``"bfl"`` for a file of Black Forest Labs; by default it is
            recognised.
        shape: ComfyUI: names of weights and their shapes before padding.
        **options: arguments of ``from_single_file``, such as ``config`` and ``torch_dtype``.

    Raises:
        CheckpointError: the file is not sound, its layout is not known, or ``rounding`` is another.
        UnsupportedError: layers of the file scale or rotate their inputs.
    """
    check_rounding(rounding)
    own: dict[str, Any] = {} if shape is None else {"shape": shape}
    dtype = options.get("torch_dtype", options.get("dtype"))
    with checkpoints.open(path, layout, **own) as checkpoint:
        _refuse_transforms(checkpoint)
        state = {}
        for name in checkpoint:
            if checkpoint.is_factor(name):
                continue
            if rounding == "origin" and name in checkpoint.groups:
                state[name] = checkpoint.dense(name, dtype)
            else:
                state[name] = _in_dtype_of_weights(checkpoint, name, dtype)
        if rounding is None and checkpoint.groups:
            options["quantization_config"] = QTensorConfig()
    return model_class.from_single_file(state, **options)  # type: ignore[attr-defined]


def _in_dtype_of_weights(checkpoint: Checkpoint, name: str, dtype: torch.dtype | None) -> Tensor:
    tensor = checkpoint[name]
    return _in_dtype(tensor, dtype) if name in checkpoint.groups else tensor


auto.AUTO_QUANTIZER_MAPPING[METHOD] = QTensorQuantizer
auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = QTensorConfig

__all__ = ["QTensorConfig", "QTensorQuantizer", "load_single_file"]
