"""What every layer uses: errors, formats, texts, buffer shapes, and the registry of quantizers."""
