"""List the aten ops that dequantize their operands, and those that write back in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from qtensor.storage.base import is_quantized
from qtensor.storage.ops.table import Args, Kwargs, Op
from qtensor.storage.ops.write import plain, requantize_

if TYPE_CHECKING:
    from torch._C import Argument

_UNARY = """
abs neg sign sqrt rsqrt exp exp2 log log2 log1p expm1 reciprocal square sin cos tanh sigmoid erf
floor ceil round trunc relu gelu silu hardtanh leaky_relu elu softplus mish hardswish
hardsigmoid logical_not isnan isinf isfinite isposinf isneginf nan_to_num signbit frac
"""
_BINARY = """
add sub rsub mul div pow maximum minimum fmod remainder floor_divide true_divide atan2 eq ne lt
le gt ge lerp addcmul addcdiv where clamp clamp_min clamp_max masked_fill isclose logical_and
logical_or
"""
_REDUCE = """
sum mean amax amin max min aminmax norm linalg_vector_norm std var std_mean var_mean prod any
all argmax argmin median count_nonzero logsumexp cumsum equal allclose _local_scalar_dense item
is_nonzero nonzero _softmax _log_softmax native_layer_norm native_dropout topk sort histc
bincount ones_like full_like rand_like randn_like new_ones new_full zeros_like mse_loss
smooth_l1_loss huber_loss
"""
_DECOMPOSE = "_linalg_svd linalg_qr"
"""Adapters that start from the largest directions of a weight call these."""
_FOREACH = """
_foreach_add _foreach_sub _foreach_mul _foreach_div _foreach_neg _foreach_sqrt _foreach_abs
_foreach_norm _foreach_maximum _foreach_addcmul _foreach_addcdiv _foreach_lerp
_foreach_reciprocal _foreach_pow _foreach_max
"""
_IN_PLACE = """
add_ sub_ mul_ div_ pow_ neg_ abs_ sqrt_ clamp_ clamp_min_ clamp_max_ lerp_ addcmul_ addcdiv_
zero_ fill_ masked_fill_ normal_ uniform_ random_ trunc_ round_ sign_ relu_ nan_to_num_
reciprocal_ exp_ log_ erfinv_ bernoulli_ _foreach_add_ _foreach_sub_ _foreach_mul_ _foreach_div_
_foreach_neg_ _foreach_sqrt_ _foreach_addcmul_ _foreach_addcdiv_ _foreach_lerp_ _foreach_zero_
_foreach_copy_ _foreach_clamp_max_ _foreach_clamp_min_ _foreach_maximum_ _foreach_reciprocal_
_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_
"""

DEQUANTIZE_OPS = frozenset(f"{_UNARY} {_BINARY} {_REDUCE} {_DECOMPOSE} {_FOREACH}".split())
"""Ops that run on dequantized operands and return plain tensors, for arithmetic and optimizers."""

IN_PLACE_OPS = frozenset(_IN_PLACE.split())
"""In-place ops: operands are dequantized, and the result is written back through the quantizer."""


def dequantized(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Run ``func`` on dequantized operands; write results back to the arguments that it changes."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    plain_leaves = [plain(leaf) if is_quantized(leaf) else leaf for leaf in leaves]
    plain_args, plain_kwargs = pytree.tree_unflatten(plain_leaves, structure)
    result = func(*plain_args, **plain_kwargs)
    written = [
        (original, changed)
        for argument, original, changed in _arguments(func, args, kwargs, plain_args, plain_kwargs)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    for original, changed in written:
        _write_back(original, changed)
    if written and isinstance(result, torch.Tensor):
        # An in-place op returns the tensor that it changed.
        return written[0][0]
    return result


def _arguments(
    func: Op, args: Args, kwargs: Kwargs, plain_args: Args, plain_kwargs: Kwargs
) -> list[tuple[Argument, object, Any]]:
    """Return (schema argument, value from the caller, plain form) for each argument of the call."""
    schema = func._schema.arguments
    pairs = list(zip(schema, args, plain_args, strict=False))
    by_name = {a.name: a for a in schema}
    pairs += [(by_name[k], kwargs[k], plain_kwargs[k]) for k in kwargs]
    return pairs


def _write_back(original: object, changed: Any) -> None:
    if isinstance(original, (list, tuple)):
        for one, value in zip(original, changed, strict=True):
            _write_back(one, value)
    elif is_quantized(original):
        requantize_(original, changed)
