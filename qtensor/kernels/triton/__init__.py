"""Triton kernels for GPUs. They write the bytes of ``reference/``.

Triton's interpreter runs them without a GPU, and tests compare the bytes.
"""
