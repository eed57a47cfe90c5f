"""Look into checkpoints: what they hold, whether they are sound, and how two of them differ."""
