"""The attention layers of Transformers' models: how they are named, called, recorded and kept.

switching   sets the model's attention to ours and back; which modules are attention
attending   the attention function that Transformers calls; packed: in batches without padding
masks       Transformers' masks as rules
passes      which layer is running, and for which time
naming      what layers are called
recording   one layer while it runs
derivatives the derivative by each layer's outputs, as backward passes bring it
layer       one layer afterwards; saved: all layers of a run, and their file
pieces      the tokens' texts, and their words and sentences
"""
