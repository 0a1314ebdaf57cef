"""Models and texts: how one token's output came to be.

explain        ch.explain; every_layer: all its attention, for the long page
gpt2           models in GPT-2's layout; checkpoint: what is checked before one is loaded
hub            models through Transformers
texts          tokens as a reader sees them
"""
