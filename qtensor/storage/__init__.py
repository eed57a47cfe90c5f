"""Storages and tensor subclasses: inner buffers, a nominal dtype, a quantizer."""
