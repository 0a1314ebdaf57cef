"""What was seen of a model's attention: the layers of a run, and tables of them. Neither PyTorch nor Transformers.

watch       ch.watch
seen        what watch gives, and ch.load
layer       one layer; naming: what it is called; saved: all layers of a run, and their file
effects     the tables of `seen.strongest`, `seen.heads`, `seen.verify` and `seen.summary`, and a notebook's cell
pieces      the tokens' texts, and their words and sentences; places: tokens by position, slice or word
"""
