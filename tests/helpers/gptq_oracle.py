"""GPTQ in float64, one column at a time, written from the paper for the tests."""

import numpy as np
import torch
from oracle.elements import ELEMENTS, encode
from rounding_cases import named_buffers, stored_factors

ELEMENT = {"mxfp6": ELEMENTS["e2m3"], "mxfp4": ELEMENTS["e2m1"]}


def gptq(weight, rows, fmt, damping=0.01):
    """Codes (N, K) and factors of GPTQ in float64, written from the paper: one column at a time.

    The factor of 32 columns is a power of two: the exponent of the maximum less that of the
    largest element (OCP Microscaling, 6.3).
    """
    element = ELEMENT[fmt]
    weight, rows = weight.detach().double().numpy().copy(), rows.detach().double().numpy()
    hessian = rows.T @ rows
    hessian += damping * np.mean(np.diag(hessian)) * np.eye(len(hessian))
    upper = np.linalg.cholesky(np.linalg.inv(hessian)).T
    codes = np.zeros(weight.shape, np.uint8)
    exponents = []
    for column in range(weight.shape[1]):
        if column % 32 == 0:
            largest = np.abs(weight[:, column : column + 32]).max(1)
            exponents.append(np.floor(np.log2(largest)) - element.emax)
            factor = 2.0 ** exponents[-1]
        scaled = weight[:, column] / factor
        # The package computes in float32: values this far from a tie have the same codes there.
        middles = (element.grid[1:] + element.grid[:-1]) / 2
        assert np.abs(np.abs(scaled)[:, None] - middles).min() > 4e-6
        codes[:, column] = encode(scaled.astype(np.float32), element)
        error = (weight[:, column] - element.values[codes[:, column]] * factor) / upper[
            column, column
        ]
        weight[:, column + 1 :] -= np.outer(error, upper[column, column + 1 :])
    return codes, np.stack(exponents, 1)


def assert_gptq(weight, plain, rows, fmt):
    """A quantized weight (N, K) has the bytes of the oracle."""
    codes, exponents = gptq(plain, rows, fmt)
    if fmt == "mxfp4":
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    expected = torch.from_numpy(codes)
    assert torch.equal(named_buffers(weight)["_rowwise_data"].view(torch.uint8), expected)
    factors = torch.from_numpy((exponents + 127).astype(np.uint8))
    assert torch.equal(stored_factors(weight).view(torch.uint8), factors)


def correlated(rows, columns, seed):
    draw = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns // 4, columns, generator=draw)
    noise = 0.3 * torch.randn(rows, columns, generator=draw)
    return torch.randn(rows, columns // 4, generator=draw) @ mix + noise
