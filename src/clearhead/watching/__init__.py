"""Watching a model: any Transformers model that goes through its attention interface, observed while it runs.

watch       ch.watch
naming      what layers are called
switching   sets the model's attention to ours and back
attending   the attention function that Transformers calls
masks       Transformers' masks as rules
recording   one layer while it runs
layers      one layer afterwards; summary: a line for each of its heads; saved: the file of all layers
seen        what watch gives, and ch.load
unseen      attention that watch cannot observe
"""
