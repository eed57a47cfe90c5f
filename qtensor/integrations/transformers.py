"""Load, quantize, run and save models of transformers with quantized weights.

Importing this module registers the quantization method ``"qtensor"`` with transformers. Then
``AutoModelForCausalLM.from_pretrained(path, quantization_config=QTensorConfig("nvfp4"))`` quantizes
a model while it is loaded, and checkpoints in our own layout load without further arguments.
docs/transformers.md shows what works.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qtensor.core.version import install_command

try:
    from transformers.core_model_loading import revert_weight_conversion
except ModuleNotFoundError as error:
    message = (
        f"qtensor.integrations.transformers needs transformers: {install_command('transformers')}"
    )
    raise ModuleNotFoundError(message) from error
from transformers.modeling_utils import PreTrainedModel, remove_tied_weights_from_state_dict
from transformers.quantizers import HfQuantizer, register_quantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from qtensor import checkpoints
from qtensor.api import parsed
from qtensor.checkpoints.activation_factors import (
    with_calibration,
    with_transforms,
    without_quantizers,
)
from qtensor.checkpoints.buffers import unshared
from qtensor.checkpoints.containers.shard_files import path_of
from qtensor.checkpoints.input_transforms import PRE_SCALE, ROTATION
from qtensor.checkpoints.layouts.qtensor import NOTE, read_label, without_note
from qtensor.checkpoints.saving import without_quantization, writable
from qtensor.core.errors import UnsupportedError, check, fail
from qtensor.debug.layers import is_conv1d
from qtensor.integrations.caches import QTensorCache, kv_scales
from qtensor.integrations.expert_factors import for_checkpoint, quantize_inputs
from qtensor.integrations.experts import ExpertWeights
from qtensor.integrations.latent_attention import absorb_latent_attention
from qtensor.integrations.loading import (
    QuantizeWeight,
    Reader,
    is_transposed,
    module_of,
    plain_tied_modules,
    transforms,
)
from qtensor.integrations.methods import forget_text_entry, pretrained_config, take_methods
from qtensor.integrations.quantization_config import METHOD, QTensorConfig
from qtensor.integrations.stacking import common_factors, quantize_each
from qtensor.modules.input_hook import TRANSFORM
from qtensor.modules.input_transform import undo_transforms
from qtensor.storage.rebuild import reshaped, tensor_of
from qtensor.storage.tensor import QuantizedTensor
from qtensor.weights.calibrated import Calibration
from qtensor.weights.layers import match
from qtensor.weights.shown import WeakMethod, show_formats

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


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
        self.kept_always: list[str] = []
        """Modules that stay dense even where the dict of formats names them."""
        self._device: torch.types.Device = None

    def validate_environment(self, *_: object, device_map: object = None, **__: object) -> None:
        """Refuse devices that cannot hold quantized parameters while loading.

        Raises:
            UnsupportedError: ``device_map`` names the disk, or several devices.
        """
        if isinstance(device_map, dict):
            devices = set(device_map.values())
            if "disk" in devices or len(devices) > 1:
                fix = "Load on the CPU, then call {} of qtensor.integrations.offload"
                fix = fix.format("disk_offload" if "disk" in devices else "dispatch_model")
                rule = "from_pretrained loads quantized weights to one device"
                fail("from_pretrained", rule, device_map, fix, UnsupportedError)
            self._device = devices.pop() if devices else None

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Take out of a config what described the files: they decide what is loaded."""
        _set_fusions(config, without_note(vars(config)).get("fusion_config"))
        forget_text_entry(config)
        return config

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_: object
    ) -> Any:
        """Open the checkpoint, and find out which parameters to quantize."""
        config = self.quantization_config
        kept, wide = config.modules_to_not_convert, model._keep_in_fp32_modules
        self.kept = self.get_modules_to_not_convert(model, kept, wide, True)
        tied = [
            name.rpartition(".")[0] for pair in model.all_tied_weights_keys.items() for name in pair
        ]
        self.kept_always = [*tied, *(kept or ()), *(wide or ())]
        if isinstance(config.format, dict):
            layers = [_layer_of(model, name) for name, _ in model.named_parameters()]
            match("QTensorConfig", config.format, [name for name in layers if name], "format")
        checkpoint = _open(checkpoint_files)
        if checkpoint is not None and (checkpoint.groups or checkpoint.input_transforms):
            if config.format is not None:
                got = f"layout {checkpoint.layout!r} in {checkpoint.path}"
                rule = "a format is for checkpoints without quantized weights or rotated inputs"
                fail("from_pretrained", rule, got, "Pass QTensorConfig() without a format")
            self.reader = Reader(checkpoint, dict(model.state_dict()), model.dtype)
            ignored = {rf"(^|\.){name}$" for name in _factor_names(checkpoint)}
            known = set(model._keys_to_ignore_on_load_unexpected or ())
            model._keys_to_ignore_on_load_unexpected = known | ignored
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
        return self.reader is None and self._format_of(model, param_name) is not None

    def _format_of(self, model: PreTrainedModel, param_name: str) -> str | None:
        """Return the format in which a parameter is quantized while loading, or None."""
        formats = self.quantization_config.format
        layer = _layer_of(model, param_name)
        if formats is None or layer is None:
            return None
        kept = self.kept_always if isinstance(formats, dict) and layer in formats else self.kept
        if not should_convert_module(param_name.rpartition(".")[0], kept):
            return None
        if isinstance(formats, str):
            return formats
        found = match("QTensorConfig", formats, [layer], "format", every=False)
        return formats[found[layer]] if found else None

    def get_quantize_ops(self) -> QuantizeWeight:
        """Return the operation that the loader applies to a parameter."""
        return QuantizeWeight(self._quantize)

    def _quantize(self, model: PreTrainedModel, name: str, values: Tensor) -> Tensor:
        """Return the frozen, quantized parameter of a plain one."""
        if not self.param_needs_quantization(model, name):
            return values
        quantizer = parsed(str(self._format_of(model, name)))
        module, _ = module_of(model, name)
        if values.ndim == 2:
            turned = is_conv1d(module)
            weight = quantizer(values.t() if turned else values)
            return torch.nn.Parameter(weight.t() if turned else weight, requires_grad=False)
        swapped = is_transposed(module)
        rows = values.transpose(-2, -1).contiguous() if swapped else values
        weight = ExpertWeights(quantize_each(rows, quantizer), swapped)
        return torch.nn.Parameter(weight, requires_grad=False)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> Any:
        """Close the checkpoint, and move the weights to the device of the whole model."""
        if self.reader is not None:
            self.dense = self.reader.dense
            checkpoints.apply_transforms(self.reader.checkpoint, model)
            if self.quantization_config.activations:
                quantize_inputs(model, checkpoints.calibration(self.reader.checkpoint))
            self.reader.checkpoint.close()
            self.reader = None
        if self._device is not None and torch.device(self._device).type != "cpu":
            model.to(self._device)
        for module in model.modules():
            show_formats(module)
        # A dense model with rotated inputs can still be cast by float() and half().
        model.is_quantized = any(map(_quantized, model.parameters()))
        if not isinstance(vars(model).get("get_memory_footprint"), WeakMethod):
            model.get_memory_footprint = WeakMethod(_footprint, model)
            model.register_load_state_dict_pre_hook(_assemble_stored)
        return model

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> Any:
        """Replace quantized parameters by their values; inputs stay as they are from then on."""
        self.update_attn_implementation(model.config)
        if isinstance(dtype, str):
            # After a save, model.config.dtype is a name.
            dtype = getattr(torch, dtype)
        for module in model.modules():
            parameters: dict[str, Any] = dict(module._parameters)
            for key, parameter in parameters.items():
                if _quantized(parameter):
                    values = parameter.detach().dequantize(dtype).contiguous()
                    module._parameters[key] = torch.nn.Parameter(values)
        undo_transforms(model)
        Calibration.remove(model)
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
        # Their loaders would look for the codes of these modules, which files do not hold.
        writer.ignored_before = plain_tied_modules(model)
        calibration = Calibration.of(model)
        state = with_transforms(weights(model), writer)
        state = with_calibration(state, writer, for_checkpoint(model, calibration))
        stored: dict[str, Tensor] = {}
        for name, tensor in state.items():
            if isinstance(tensor, QuantizedTensor):
                parts = writer.encode(name, tensor)
            else:
                parts = writer.plain(name, tensor)
            stored.update(parts)
        config = writer.config()
        entry = config.get("quantization_config")
        if entry is not None and layout == METHOD and calibration.inputs:
            entry["activations"] = True
        if entry is None and writer.files():
            rule = f"layout {layout!r} has files that save_pretrained does not write"
            fix = f"Call qtensor.checkpoints.save(weights(model), path, layout={layout!r}, config=)"
            fail("save_pretrained", rule, ", ".join(writer.files()), fix, UnsupportedError)
        self.quantization_config._entry = entry
        _set_fusions(model.config, config.get("fusion_config"))
        return unshared(stored), writer.metadata(state)

    def is_serializable(self) -> bool:
        """Return True: ``save_pretrained`` writes ``QTensorConfig.layout``."""
        return True


def _layer_of(model: PreTrainedModel, param_name: str) -> str | None:
    """Return the name of the layer whose weight a parameter is, as ``quantize_`` names layers."""
    module, key = module_of(model, param_name)
    parameter = module._parameters.get(key)
    if parameter is None:
        return None
    if isinstance(module, torch.nn.Linear) or is_conv1d(module):
        return param_name.rpartition(".")[0] if key == "weight" else None
    stacked = parameter.ndim == 3 and getattr(module, "num_experts", -1) == parameter.shape[0]
    return param_name if stacked else None


def attach(model: PreTrainedModel) -> None:
    """Let ``save_pretrained`` write the quantized weights of a model that was loaded without them.

    It then writes rotations of inputs too. ``qtensor.quantize_`` and ``rotate_`` do this for models
    of transformers. Call it where parameters were replaced by hand.

    Args:
        model: a model; it gets what ``from_pretrained`` with a ``QTensorConfig`` gives it.

    Raises:
        QTensorError: it is not a model of transformers, or has neither quantized weights nor
            rotated inputs.
        UnsupportedError: another library has quantized the model.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        rule = "the model must be one of transformers with quantized parameters"
        fix = "Quantize its weights first, as qtensor.quantize_(model, ...) does"
        check(_needs_quantizer(model), "attach", rule, type(model).__name__, fix)
        config = copy.deepcopy(model.config)
        for module in model.modules():
            if getattr(module, "config", None) is model.config and module is not model:
                module.config = config
        model.config = config
        model.hf_quantizer = quantizer = QTensorQuantizer(QTensorConfig())
        model.quantization_method = METHOD
    if not isinstance(quantizer, QTensorQuantizer):
        rule = "a model has weights of one library"
        fix = "Load it without quantization first"
        fail("attach", rule, type(quantizer).__name__, fix, UnsupportedError)
    quantizer.postprocess_model(model)


def adopt(model: PreTrainedModel) -> None:
    """Do what ``attach`` does, but for a model that another library has quantized in part."""
    quantizer = getattr(model, "hf_quantizer", None)
    if isinstance(quantizer, QTensorQuantizer) or (quantizer is None and _needs_quantizer(model)):
        attach(model)


def _needs_quantizer(model: object) -> bool:
    """Return whether something is a model of transformers that its own methods cannot save."""
    if not isinstance(model, PreTrainedModel):
        return False
    rotates = any(TRANSFORM in module._modules for module in model.modules())
    return rotates or any(map(_quantized, model.parameters()))


def _assemble_stored(
    model: PreTrainedModel, state_dict: dict[str, Any], prefix: str, *_: object
) -> None:
    """Put weights together that a file of our layout stores in parts: ``Trainer`` loads it so."""
    state_dict.pop(NOTE, None)
    for last, buffer in ((ROTATION, "hadamard"), (PRE_SCALE, "scale")):
        for stored in [name for name in state_dict if name.endswith(f".{last}")]:
            step = f"{stored.removesuffix(last)}{TRANSFORM}.{buffer}"
            state_dict[step] = state_dict.pop(stored)
    for name, parameter in model.named_parameters(prefix.removesuffix(".")):
        text = read_label(state_dict[name]) if name in state_dict else None
        if text is not None and _quantized(parameter):
            own = parameter.stored if isinstance(parameter, ExpertWeights) else parameter
            quantizer = parsed(text)
            parts = [state_dict.pop(f"{name}.{keyword}") for keyword in quantizer.keywords]
            inner = tensor_of(own)
            weight = quantizer.assemble(parts, inner.shape, own.dtype)
            weight = weight if inner is own else reshaped(weight, own.shape)
            is_own = own is parameter
            state_dict[name] = weight if is_own else ExpertWeights(weight, parameter.swapped)


def _footprint(model: PreTrainedModel, return_buffers: bool = True) -> int:
    """Return the bytes of a model; transformers counts values times the bytes of their dtype."""
    tensors = [*model.parameters(), *(model.buffers() if return_buffers else ())]
    return sum(tensor.nbytes for tensor in tensors)


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights of a model under the names of its checkpoints.

    Stacked experts are split where the checkpoints of the model store every expert apart, and tied
    weights are listed once. ``qtensor.checkpoints.save`` writes the result in any layout and in
    shards. Factors of inputs are left out: pass it ``calibration=Calibration.of(model)``.

    Args:
        model: a model of transformers.

    Returns:
        Quantized and plain tensors by name.

    Raises:
        QTensorError: it is not a model of transformers.
    """
    fits = hasattr(model, "all_tied_weights_keys")  # wrappers hand on those of their model
    rule, fix = "the model is one of transformers", "Use its state_dict()"
    check(fits, "weights", rule, type(model).__name__, fix)
    whole = without_quantizers(model.state_dict(keep_vars=True))
    found = {k: t for k, t in whole.items() if isinstance(t, Tensor)}
    plain = {key: t.detach() for key, t in found.items() if not _quantized(t)}
    kept = {*remove_tied_weights_from_state_dict(plain, model), *_untied(model, found)}
    state = {key: _experts_of(t.detach()) for key, t in found.items() if key in kept}
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    done = {}
    for key, t in revert_weight_conversion(model, state).items():
        tensor = t.stored if isinstance(t, ExpertWeights) else t
        if isinstance(tensor, QuantizedTensor) and tensor.ndim == 2:
            tensor = common_factors(tensor)
        done[key] = tensor
    return done


def _experts_of(tensor: Tensor) -> Tensor:
    """Return quantized weights (E, N, K) as those of experts, which can be split up."""
    stacked = isinstance(tensor, QuantizedTensor) and tensor.ndim == 3
    return ExpertWeights(tensor) if stacked else tensor


def _untied(model: PreTrainedModel, state: Mapping[str, Tensor]) -> Iterable[str]:
    """Return the names of quantized parameters, each parameter once.

    Of several names, the one that the model ties the others to is kept.
    """
    targets = model.all_tied_weights_keys
    names: dict[int, str] = {}
    for name in sorted(state, key=lambda name: name in targets):
        if _quantized(state[name]):
            names.setdefault(id(state[name]), name)
    return names.values()


def _quantized(tensor: object) -> bool:
    return isinstance(tensor, (QuantizedTensor, ExpertWeights))


def _plain_config(model: PreTrainedModel) -> dict[str, Any]:
    return without_quantization(model.config.to_dict())


def _set_fusions(config: PreTrainedConfig, fusions: dict[str, Any] | None) -> None:
    """Set or remove ``fusion_config``, which stops loaders that do not know our files."""
    config.fusion_config = fusions
    if not fusions:
        del config.fusion_config


def _open(files: list[str] | None) -> checkpoints.Checkpoint | None:
    """Return the open checkpoint of these files, or None if it is not a safetensors checkpoint."""
    if not files or not str(files[0]).endswith(".safetensors"):
        return None
    folder = os.path.dirname(os.path.abspath(files[0]))
    is_whole = [os.path.basename(file) for file in files] == ["model.safetensors"]
    return checkpoints.open(folder if is_whole else path_of(files), accept_rotated=True)


def _factor_names(checkpoint: checkpoints.Checkpoint) -> set[str]:
    """Return the last name parts of factors of activations and of the KV cache."""
    return {name.rpartition(".")[2] for name in checkpoint if checkpoint.is_factor(name)}


__all__ = [
    "ExpertWeights",
    "QTensorCache",
    "QTensorConfig",
    "QTensorQuantizer",
    "absorb_latent_attention",
    "attach",
    "kv_scales",
    "pretrained_config",
    "take_methods",
    "weights",
]
