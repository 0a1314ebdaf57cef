"""Derivatives of attention's results: the first from the engines, the others from the definition over blocks of rows.

backward    gradients of a loss with respect to the inputs, from those with respect to the results
recomputed  the definition over blocks, and its derivatives; torch_recomputed: forward mode and second order from it
arguments   reads a call for PyTorch's graph: a Task, and tensors by name
function    a Task as a node of PyTorch's graph, also under vmap
operator    a Task as the operator that PyTorch's compilers see
"""
