"""Decoders that run in NumPy and this library's own attention: GGUF files, checkpoint folders, the shipped model."""
