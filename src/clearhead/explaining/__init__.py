"""Explains a model's answer to a text: what made it, and how one token's output came to be.

explain         ch.explain: the parts, heads and edges that made an answer; explanation: its result
why_words       an explanation's sentences and tables; why_page: its page
steps           one head of a run, step by step; head_steps: its result, and what each head does
answers         the number that is explained; part_runs: the parts' effects; rerun: runs with and without each cause
attribution     what each part of the model adds to a logit, in exact sums
learning        a recorded training run
texts           tokens as a reader sees them, and the parts of a text
"""
