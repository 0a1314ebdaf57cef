"""The public operations: attention, AttentionMatrix, rollout, their derivatives, and the operators for PyTorch.

attention          attention() and plan()
matrix             AttentionMatrix; factors: its arrays and rules; indexing: its indices; transposed: its transpose
edited             A.cut, A.boost and A.tempered; span_terms: several rules `spans` as one; softcaps: one for each head
given_logsumexp    a log-sum-exp that another kernel computed, checked
numpy_functions    what NumPy's functions and Python's operators do with a matrix; reductions: its sums and extremes
observation        the result of AttentionMatrix.observe, and how partial results are merged
rollout            attention rollout of one token through many layers
backward           gradients of a loss with respect to the inputs, from those with respect to the results
torch_operators    two PyTorch operators; torch_arguments: what they take; torch_graph: their callers;
                   torch_nodes: nodes of PyTorch's graph, with every derivative; torch_batching: torch.vmap
jax_derivatives    two primitives for JAX; jax_call: what they compute; jax_host: how the host is called
tangents           derivatives along a direction: forward mode and second order
"""
