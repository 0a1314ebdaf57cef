"""A kit for testing attention kernels: call `assert_attention(fn)` in your tests."""

from clearhead.testing.assertion import assert_attention as assert_attention
from clearhead.testing.drawing import KINDS as KINDS
