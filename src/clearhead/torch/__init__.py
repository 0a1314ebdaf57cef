"""PyTorch's attention on clearhead's engines: by one import line, or by one call for code that is not yours.

from clearhead.torch import scaled_dot_product_attention   # a function with PyTorch's signature
clearhead.torch.activate()                                 # replaces PyTorch's own on the CPU, whoever calls it
"""

from clearhead.errors import needing

with needing("PyTorch", "clearhead.torch", "torch"):
    import torch as torch
from clearhead.torch.activation import activate as activate
from clearhead.torch.activation import active as active
from clearhead.torch.activation import deactivate as deactivate
from clearhead.torch.activation import explain as explain
from clearhead.torch.sdpa import dropped as dropped
from clearhead.torch.sdpa import scaled_dot_product_attention as scaled_dot_product_attention
from clearhead.torch.varlen import varlen_attn as varlen_attn
