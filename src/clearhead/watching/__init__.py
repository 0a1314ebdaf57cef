"""Watching a model: any Transformers model that goes through its attention interface, observed while it runs.

watch       ch.watch
naming      what layers are called
switching   sets the model's attention to ours and back
attending   the attention function that Transformers calls
masks       Transformers' masks as rules
recording   one layer while it runs
derivatives the derivative by each layer's outputs, as backward passes bring it
layers      one layer afterwards; summary: a line for each of its heads; saved: the file of all layers
effects     what edges and heads did: the tables of `seen.strongest` and `seen.heads`
seen        what watch gives, and ch.load
unseen      attention that watch cannot observe
"""
