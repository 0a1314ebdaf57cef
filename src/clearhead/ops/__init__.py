"""The public operations: attention, AttentionMatrix, rollout, their derivatives, and the operators for PyTorch.

attention          attention() and plan(); fast_calls: the same call again goes straight to the kernel;
                   torch_fast_calls: those of tensors with a graph
matrix             AttentionMatrix; matrix_data: its arrays and rules; indexing: its indices, its transpose
lazy_matrix        what NumPy may ask of a matrix that is never stored
observable         one method for each statistic and each effect
causes             CauseMatrix: what each edge did; cause_inputs: what it is made of; spans_cut: whole spans cut at once
edited             A.cut, A.boost and A.tempered; span_terms: several rules `spans` as one; softcap_per_head
given_logsumexp    a log-sum-exp that another kernel computed, checked
observation        the result of AttentionMatrix.observe, and how partial results are merged
rollout            attention rollout and relevance of one token through many layers
torch_operators    PyTorch's operator; torch_arguments: what it takes; torch_passes: what it computes; torch_graph: its
                   caller; torch_derivatives: nodes of PyTorch's graph (torch_nodes); torch_batching: torch.vmap
graphed            whether PyTorch records, traces or transforms a call
torch_recomputed   forward mode and second order, by derivatives/recomputed.py
"""
