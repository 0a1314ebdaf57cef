"""Texts through models: how one token's output came to be.

explain         ch.explain: an answer's parts, heads and edges; explanation: what it gives
why_words       an explanation's sentences and tables; why_page: its page
steps           one head of a run, step by step; head_steps: what that gives, and what each head does
answers         the number that is explained; part_runs: the parts' effects; rerun: runs, and runs without each cause
attribution     what each part of the model adds to a logit, in exact sums
learning        a recorded training run
texts           tokens as a reader sees them, and the parts of a text
"""
