"""Captions of heads: each kind of head, built on purpose, is called what it is, and even weights are the baseline."""

import re

import numpy as np
import pytest

import clearhead as ch
from clearhead.view import captions as module
from clearhead.view.captions import KINDS, captions
from clearhead.view.head_summary import HeadSummary, even_heads, summarise_heads
from seeds import fresh
