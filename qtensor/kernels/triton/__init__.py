"""Triton kernels for GPUs: the bytes of ``reference/``, checked without a GPU in the interpreter."""
