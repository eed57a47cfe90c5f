"""Attention: masks, rotary embedding, packed sequences, and products of quantized operands."""
