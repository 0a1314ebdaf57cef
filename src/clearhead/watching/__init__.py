"""What was seen of a model's attention: the layers of a run, and tables of them. Neither PyTorch nor Transformers.

watch       ch.watch
seen        what watch gives, and ch.load
layer       one layer; naming: what it is called; saved: all layers of a run, and their file
summary     a line for each head, and what a notebook's cell shows
effects     what edges and heads did: the tables of `seen.strongest`, `seen.heads` and `seen.verify`
spans       what whole spans of tokens did: the table of `seen.spans`, whose tokens dividing.py divides
pieces      the tokens' texts, and their words and sentences; places: tokens by position, slice or word
"""
