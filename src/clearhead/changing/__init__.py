"""Changing what a model attends to: edits as plain values, and their arithmetic in one call of attention.

change      ch.change: a Transformers model edited while it runs
edits       the edits; edits_text: as the command line's options
places      queries and keys by position, slice, vector or word
texts       the texts that a model runs over
applying    one attention call, edited, and otherrun: with another run's arrays; NumPy and PyTorch alike
tensors     the few operations that they need on both
"""
