"""Watching a model: any Transformers model that goes through its attention interface, observed while it runs.

attending   the attention function that Transformers calls
masks       what its masks mean, as rules
recording   one layer while it runs
seen        what came of it; saved: on disk; summary: one line for each head
"""
