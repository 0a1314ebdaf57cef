"""Attention for PyTorch models: a layer, and the key-value cache that it decodes with."""

from clearhead.errors import needing

with needing("PyTorch", "clearhead.nn", "torch"):
    import torch as torch
from clearhead.nn.cache import KVCache as KVCache
from clearhead.nn.layers import MultiHeadAttention as MultiHeadAttention
