"""A kit for people who write attention kernels: `assert_attention(fn)` in a test of theirs."""

from clearhead.testing.assertion import assert_attention as assert_attention
from clearhead.testing.drawing import KINDS as KINDS
