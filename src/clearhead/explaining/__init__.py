"""Models and texts: how one token's output came to be.

explain        ch.explain; explanation: what it gives, with its page; every_layer: all its attention, for the long page
gpt2           models in GPT-2's layout; functions: what is between their linear maps
derivatives    what one logit is above another, by every head's output; cutting: the same without one edge
hub            models through Transformers; checkpoint: what is checked before one is loaded
running        a forward pass and one of its heads; windows: of a longer text
stream         what a run wrote to the residual stream; recorded: the same from a Transformers model's modules
way            what each part of the model adds to a logit, in exact sums; way_told: in words
why            ch.why: one token against another; derivatives of their logits; cutting: run again without an edge
functions      the functions between a GPT-2's linear maps, each with its derivative
editing        one layer's attention with edits; edit_checks: their words and layers; moving: what they moved
generating     the likeliest next tokens, with a cache
texts          tokens as a reader sees them
"""
