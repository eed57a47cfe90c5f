"""FP8 and FP4 GEMMs generated with CUTLASS: emitted, compiled by nvcc into plain C libraries, loaded and launched.

Importing starts no compiler and imports neither CUTLASS nor CUDA.
"""
