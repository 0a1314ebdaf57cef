"""Attention for PyTorch models: layers, and the cache of keys and values that they decode with."""

from clearhead.errors import needing

with needing("PyTorch", "clearhead.nn", "torch"):
    import torch as torch
from clearhead.nn.cache import KVCache as KVCache
from clearhead.nn.layers import MultiHeadAttention as MultiHeadAttention
