"""Modules: they own parameters and state; the arithmetic is in ``functional/``."""
