"""Watching a model: any Transformers model that goes through its attention interface, observed while it runs.

watch       ch.watch
seen        what watch gives, and ch.load
summary     a line for each head, and what a notebook's cell shows
effects     what edges and heads did: the tables of `seen.strongest` and `seen.heads`
spans       what whole spans of tokens did: the table of `seen.spans`, whose tokens dividing.py divides
verifying   what cutting edges really changes: the table of `seen.verify`
"""
