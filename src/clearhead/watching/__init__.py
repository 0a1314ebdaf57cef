"""Watching a model: any Transformers model that goes through its attention interface, observed while it runs.

looking     ch.watch
switching   the model's attention set to ours and back
attending   the attention function that Transformers calls
masks       what its masks mean, as rules
recording   one layer while it runs
layers      one layer afterwards; summary: a line for each of its heads; saved: on disk
seen        all layers, and ch.load
"""
