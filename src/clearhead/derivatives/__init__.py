"""Derivatives of attention's results: first ones from the engines, all others from the definition over blocks of rows.

backward    gradients of a loss with respect to the inputs, from those with respect to the results
recomputed  the definition over blocks, and its derivatives
"""
