"""The public operations: attention, AttentionMatrix, rollout, and what stands behind them.

attention          attention() and plan()
matrix             AttentionMatrix
lazy_matrix        what weights and effects have in common: indices, products, the transpose, NumPy's protocols
causes             EffectMatrix: the effect of every edge
edited             A.cut, A.boost and A.tempered; span_terms: merges several rules `spans` into one
given_logsumexp    a log-sum-exp that another kernel computed, checked
observation        the result of AttentionMatrix.observe, and how partial results are merged
rollout            attention rollout of one token through many layers
torch_recorded     the matrix where PyTorch records, transforms or traces a graph; torch_sharded: the same for DTensors
"""
