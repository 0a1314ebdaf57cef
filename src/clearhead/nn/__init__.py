"""Attention for PyTorch models: layers, and the cache of keys and values that they decode with."""

from clearhead.errors import MissingExtraError

try:
    import torch as torch
except ImportError as error:
    raise MissingExtraError(f"clearhead.nn needs PyTorch: {error}.", "pip install 'clearhead[torch]'") from None
from clearhead.nn.cache import KVCache as KVCache
from clearhead.nn.converted import convert as convert
from clearhead.nn.layers import MultiHeadAttention as MultiHeadAttention
from clearhead.nn.layers import SingleHeadAttention as SingleHeadAttention
