"""Changes what a model attends to: edits as plain values, and their arithmetic in one call of attention.

edits       ch.change and the edits; edits_text: as the command line's options
applying    one attention call, edited; NumPy and PyTorch alike
"""
