"""FP8 and FP4 GEMM kernels, generated with CUTLASS and compiled by nvcc into plain C libraries.

Importing this package starts no compiler and imports neither CUTLASS nor CUDA.
"""
