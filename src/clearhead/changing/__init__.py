"""Changing what a model attends to: edits as plain values, and their arithmetic in one call of attention.

edits.py      the edits
places.py     queries and keys by position, slice, vector or word
applying.py   one attention call, edited; NumPy and PyTorch alike
otherrun.py   another run's queries, keys and values in the place of this run's
change.py     `ch.change`: a Transformers model edited while it runs
"""
