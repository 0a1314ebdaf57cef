"""What was seen of a model's attention: the layers of a run, and tables of them. Neither PyTorch nor Transformers.

watch       ch.watch
seen        what watch gives
layer       one layer; naming: what it is called
effects     the tables of `seen.strongest`, `seen.verify` and `seen.summary`
pieces      the tokens' texts, and their words and sentences; places: tokens by position, slice or word
"""
