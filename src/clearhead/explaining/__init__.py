"""Texts through models: how one token's output came to be.

explain         ch.explain; explanation: what it gives, with its page; head_captions: what each head does
why             ch.why: one token against another; why_page: its page; derivatives of their logits, ablation of edges
forward         a forward pass, one of its heads, all of them for the long page
editing         edits of attention: checked, in force, and what they moved
stream          what a run wrote to the residual stream; recorded: the same from a Transformers model's modules
attribution     what each part of the model adds to a logit, in exact sums; attribution_words: in words
learning        a recorded training run
texts           tokens as a reader sees them, and windows of a long text
"""
