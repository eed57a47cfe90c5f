"""Load, quantize, run and save models of transformers with quantized weights.

Importing this module registers the quantization method ``"qtensor"`` with transformers. Then
``AutoModelForCausalLM.from_pretrained(path, quantization_config=QTensorConfig("nvfp4"))`` quantizes
a model while it is loaded, and checkpoints in our own layout load without further arguments.
docs/transformers.md shows what works.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qtensor.core.version import install_command

try:
    from transformers import AutoConfig
except ModuleNotFoundError as error:
    message = (
        f"qtensor.integrations.transformers needs transformers: {install_command('transformers')}"
    )
    raise ModuleNotFoundError(message) from error
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

import qtensor
from qtensor import checkpoints
from qtensor.api import parsed
from qtensor.checkpoints.buffers import unshared
from qtensor.checkpoints.layout_base import find_layout
from qtensor.checkpoints.saving import writable
from qtensor.core.errors import UnsupportedError, fail
from qtensor.integrations.caches import QTensorCache, kv_scales
from qtensor.integrations.experts import ExpertWeights
from qtensor.integrations.latent_attention import absorb_latent_attention
from qtensor.integrations.loading import (
    QuantizeWeight,
    Reader,
    is_transposed,
    module_of,
    transforms,
)
from qtensor.integrations.stacking import common_factors, quantize_each
from qtensor.quantizers import Quantizer
from qtensor.storage.tensor import QuantizedTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METHOD = "qtensor"
_VERSION = 1


@register_quantization_config(METHOD)
class QTensorConfig(QuantizationConfigMixin):
    """Say how a model of transformers is quantized, loaded and saved.

    Attributes:
        format: canonical text of the quantizer for weights, or None to load what a checkpoint
            stores.
        modules_to_not_convert: names of modules that stay as they are, besides the output
            embeddings and tied weights.
        layout: the layout that ``save_pretrained`` writes.
    """

    def __init__(
        self,
        format: str | Quantizer | None = None,
        *,
        modules_to_not_convert: list[str] | None = None,
        layout: str = METHOD,
        **entry: Any,
    ) -> None:
        """Make a configuration.

        Args:
            format: format of the weights, such as ``"nvfp4"``, ``"mxfp8"`` or a quantizer; None for
                checkpoints that are quantized already.
            modules_to_not_convert: names of modules, as transformers matches them: from the start
                of a name, as a regular expression, or as a suffix.
            layout: name of the layout that ``save_pretrained`` writes, such as ``"qtensor"`` or
                ``"compressed-tensors"``; it must be one that ``qtensor.checkpoints`` writes.
            **entry: other keys of ``quantization_config`` in a config.json of ours.

        Raises:
            QTensorError: the format, the layout or a key is unknown.
        """
        if entry.pop("quant_method", METHOD) != METHOD or entry.pop("version", _VERSION) != 1:
            fail("QTensorConfig", f"quant_method is {METHOD!r}, version 1", entry, "Update qtensor")
        if entry:
            fix = "Pass format, modules_to_not_convert or layout"
            fail("QTensorConfig", "its arguments must be known", ", ".join(entry), fix)
        self.quant_method = METHOD
        self.format = None if format is None else _weight_format(format)
        self.modules_to_not_convert = modules_to_not_convert
        if find_layout(layout).writer is None:
            fix = 'Use layout="qtensor"'
            fail("QTensorConfig", "save_pretrained writes the layout", layout, fix)
        self.layout = layout
        self._entry: dict[str, Any] | None = None

    def get(self, key: str, default: object = None) -> Any:
        """Return a value of ``to_dict``; transformers asks a config for ``quant_method`` so."""
        return self.to_dict().get(key, default)

    def to_dict(self) -> dict[str, Any]:
        """Return ``quantization_config`` of config.json, as the layout last written has it."""
        if self._entry is not None:
            return dict(self._entry)
        return {"quant_method": METHOD, "version": _VERSION}


def _weight_format(format: str | Quantizer) -> str:
    """Return the canonical text of a quantizer for weights."""
    quantizer = parsed(format) if isinstance(format, str) else qtensor.quantizer(format)
    if quantizer.needs_scale or not quantizer.rowwise or quantizer.columnwise:
        fix = 'Pass a format such as "nvfp4", "mxfp8" or "fp8"'
        rule = "weights are quantized rowwise, with factors of their own values"
        fail("QTensorConfig", rule, quantizer.canonical, fix)
    return quantizer.canonical


@register_quantizer(METHOD)
class QTensorQuantizer(HfQuantizer):
    """Load and save quantized parameters for ``from_pretrained`` and ``save_pretrained``.

    Attributes:
        dense: weights of the checkpoint that no format holds, with the reason; they are plain
            parameters with the values that the origin decodes.
    """

    requires_calibration = False
    quantization_config: QTensorConfig
    is_trainable = True
    """Gradients flow through frozen weights to adapters."""
    is_qat_trainable = True
    """The parameters that are not quantized can be trained."""
    is_compileable = True
    """``torch.compile`` takes quantized parameters."""

    def __init__(self, quantization_config: QTensorConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # transformers then loads one parameter after the other, and calls the operation of
        # get_quantize_ops. What is in the files decides later; a config may not tell.
        self.pre_quantized = False
        self.reader: Reader | None = None
        self.dense: dict[str, str] = {}
        self.kept: list[str] = []
        self._device: torch.types.Device = None

    def validate_environment(self, *_: object, device_map: object = None, **__: object) -> None:
        """Refuse devices that cannot hold quantized parameters while loading.

        Raises:
            UnsupportedError: ``device_map`` names the disk.
        """
        if isinstance(device_map, dict):
            if "disk" in device_map.values():
                fix = "Load on the CPU, then call disk_offload of qtensor.integrations.offload"
                rule = "from_pretrained cannot offload quantized weights to disk"
                fail("from_pretrained", rule, device_map, fix, UnsupportedError)
            devices = set(device_map.values())
            self._device = devices.pop() if len(devices) == 1 else None

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_: object
    ) -> Any:
        """Open the checkpoint, and find out which parameters to quantize."""
        config = self.quantization_config
        self.kept = self.get_modules_to_not_convert(
            model, config.modules_to_not_convert, model._keep_in_fp32_modules, True
        )
        checkpoint = _open(checkpoint_files)
        if checkpoint is not None and checkpoint.groups:
            if config.format is not None:
                got = f"layout {checkpoint.layout!r} in {checkpoint.path}"
                rule = "a format is for checkpoints without quantized weights"
                fail("from_pretrained", rule, got, "Pass QTensorConfig() without a format")
            self.reader = Reader(checkpoint, dict(model.state_dict()), model.dtype)
            ignored = [f"(^|\\.){name}$" for name in sorted(_factor_names(checkpoint))]
            known = list(model._keys_to_ignore_on_load_unexpected or [])
            model._keys_to_ignore_on_load_unexpected = known + ignored
        elif config.format is None:
            rule = "QTensorConfig() without a format loads quantized weights"
            got = "a checkpoint that has none"
            fail("from_pretrained", rule, got, 'Pass a format: QTensorConfig("nvfp4")')
        return model

    def update_weight_conversions(
        self, weight_conversions: list[Any], model: PreTrainedModel
    ) -> list[Any]:
        """Return the transforms of the loader, with ours if the checkpoint is quantized."""
        if self.reader is None:
            return weight_conversions
        return transforms(weight_conversions, self.reader)

    def param_needs_quantization(
        self, model: PreTrainedModel, param_name: str, **_: object
    ) -> bool:
        """Return True for the parameters that are quantized while loading."""
        if self.reader is not None or self.quantization_config.format is None:
            return False
        module, key = module_of(model, param_name)
        parameter = module._parameters.get(key)
        if parameter is None or not should_convert_module(param_name.rpartition(".")[0], self.kept):
            return False
        if isinstance(module, torch.nn.Linear):
            return key == "weight"
        return parameter.ndim == 3 and getattr(module, "num_experts", -1) == parameter.shape[0]

    def get_quantize_ops(self) -> QuantizeWeight:
        """Return the operation that the loader applies to a parameter."""
        return QuantizeWeight(self._quantize)

    def _quantize(self, model: PreTrainedModel, name: str, values: Tensor) -> Tensor:
        """Return the frozen, quantized parameter of a plain one."""
        if not self.param_needs_quantization(model, name):
            return values
        quantizer = parsed(str(self.quantization_config.format))
        if values.ndim == 2:
            return torch.nn.Parameter(quantizer(values), requires_grad=False)
        module, _ = module_of(model, name)
        swapped = is_transposed(module)
        rows = values.transpose(-2, -1).contiguous() if swapped else values
        weight = ExpertWeights(quantize_each(rows, quantizer), swapped)
        return torch.nn.Parameter(weight, requires_grad=False)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> Any:
        """Close the checkpoint, and move the weights to the device of the whole model."""
        if self.reader is not None:
            self.dense = self.reader.dense
            self.reader.checkpoint.close()
            self.reader = None
        if self._device is not None and torch.device(self._device).type != "cpu":
            model.to(self._device)
        return model

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> Any:
        """Replace quantized parameters by their values."""
        if isinstance(dtype, str):
            # After a save, model.config.dtype is a name.
            dtype = getattr(torch, dtype)
        for module in model.modules():
            parameters: dict[str, Any] = dict(module._parameters)
            for key, parameter in parameters.items():
                if _quantized(parameter):
                    values = parameter.detach().dequantize(dtype).contiguous()
                    module._parameters[key] = torch.nn.Parameter(values)
        return model

    # ---- saving

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the stored tensors of the layout, and the texts of the header.

        Raises:
            CheckpointError: the layout cannot hold a weight.
            UnsupportedError: the layout needs further files.
        """
        layout = self.quantization_config.layout
        writer = writable(layout, "")(_plain_config(model))
        state = weights(model)
        stored: dict[str, Tensor] = {}
        for name, tensor in state.items():
            if isinstance(tensor, QuantizedTensor):
                parts = writer.encode(name, tensor)
            else:
                parts = writer.plain(name, tensor)
            stored.update({key: unshared(part) for key, part in parts.items()})
        entry = writer.config().get("quantization_config")
        if entry is None and writer.files():
            rule = f"layout {layout!r} has files that save_pretrained does not write"
            fix = f"Call qtensor.checkpoints.save(weights(model), path, layout={layout!r}, config=)"
            fail("save_pretrained", rule, ", ".join(writer.files()), fix, UnsupportedError)
        self.quantization_config._entry = entry
        return stored, writer.metadata(state)

    def is_serializable(self) -> bool:
        """Return True: ``save_pretrained`` writes ``QTensorConfig.layout``."""
        return True


def pretrained_config(
    path: str | os.PathLike[str], quantization_config: QTensorConfig | None = None, **kwargs: Any
) -> Any:
    """Return the config of a checkpoint, with its quantization entry replaced by ours.

    transformers has its own class for most quantization methods, and refuses to mix it with
    ``QTensorConfig``. Passing this config selects ours:
    ``AutoModelForCausalLM.from_pretrained(path, config=pretrained_config(path))``.

    Args:
        path: a folder, or the name of a repository.
        quantization_config: ``QTensorConfig()`` if None.
        **kwargs: arguments of ``AutoConfig.from_pretrained``.

    Returns:
        A ``PreTrainedConfig``.

    Raises:
        QTensorError: the path names a file.
    """
    if os.path.isfile(path):
        fix = (
            "Pass the folder. A GGUF file has no config.json, and its weights have the names of "
            "llama.cpp: read it with qtensor.checkpoints.open"
        )
        rule = "path is a folder with a config.json, or the name of a repository"
        fail("pretrained_config", rule, f"the file {os.fspath(path)!r}", fix)
    config = AutoConfig.from_pretrained(path, **kwargs)
    config.quantization_config = quantization_config or QTensorConfig()
    text = config.get_text_config(decoder=True)
    if text is not config and getattr(text, "quantization_config", None) is not None:
        del text.quantization_config
    return config


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights of a model under the names of its checkpoints.

    Stacked experts are split where the checkpoints of the model store every expert apart, and tied
    weights are listed once. ``qtensor.checkpoints.save`` writes the result in any layout and in
    shards.

    Args:
        model: a model of transformers.

    Returns:
        Quantized and plain tensors by name.
    """
    state = {key: t for key, t in model.state_dict().items() if isinstance(t, Tensor)}
    plain = {key: t for key, t in state.items() if not _quantized(t)}
    kept = remove_tied_weights_from_state_dict(plain, model)
    state = {key: t for key, t in state.items() if key in kept or _quantized(t)}
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    done = {}
    for key, t in revert_weight_conversion(model, state).items():
        tensor = t.stored if isinstance(t, ExpertWeights) else t
        if isinstance(tensor, QuantizedTensor) and tensor.ndim == 2:
            tensor = common_factors(tensor)
        done[key] = tensor
    return done


def _quantized(tensor: object) -> bool:
    return isinstance(tensor, (QuantizedTensor, ExpertWeights))


def _plain_config(model: PreTrainedModel) -> dict[str, Any]:
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    return config


def _open(files: list[str] | None) -> checkpoints.Checkpoint | None:
    """Return the open checkpoint of these files, or None if it is no safetensors checkpoint."""
    if not files or not str(files[0]).endswith(".safetensors"):
        return None
    folder = os.path.dirname(os.path.abspath(files[0]))
    whole = {"model.safetensors"} if len(files) == 1 else None
    path = folder if whole is None or os.path.basename(files[0]) in whole else files[0]
    return checkpoints.open(path)


def _factor_names(checkpoint: checkpoints.Checkpoint) -> set[str]:
    """Return the last name parts of factors of activations and of the KV cache."""
    return {name.rpartition(".")[2] for name in checkpoint if checkpoint.is_factor(name)}


__all__ = [
    "ExpertWeights",
    "QTensorCache",
    "QTensorConfig",
    "QTensorQuantizer",
    "absorb_latent_attention",
    "kv_scales",
    "pretrained_config",
    "weights",
]
