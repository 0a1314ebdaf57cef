"""Texts through models: how one token's output came to be.

explain         ch.explain; explanation: what it gives, with its page; answer_words: what each head does
why             ch.why: parts of a text, heads and edges; why_lists: what it lists; why_page: its page
answers         the number that is explained; text_parts: the parts; integral: their effects; rerun: runs without them
derivatives     of the difference of two logits, by every head's output
forward         a forward pass, one of its heads, all of them for the long page
editing         edits of attention: checked, in force, and what they moved
stream          what a run wrote to the residual stream; recorded: the same from a Transformers model's modules
attribution     what each part of the model adds to a logit, in exact sums; attribution_words: in words
learning        a recorded training run
texts           tokens as a reader sees them, and windows of a long text
"""
