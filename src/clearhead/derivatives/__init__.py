"""Derivatives of attention's results: first ones from the engines, all others from the definition over blocks of rows.

backward    gradients of a loss with respect to the inputs, from those with respect to the results
recomputed  the definition over blocks, and its derivatives; torch_recomputed: forward mode and second order by it
arguments   what a call gives PyTorch's graph: a Task, and tensors by name
function    a Task as a node of PyTorch's graph, and many calls at once
operator    a Task as the operator that PyTorch's compilers see
"""
