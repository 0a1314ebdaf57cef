"""The public operations: attention, AttentionMatrix, rollout, and what stands behind them.

attention          attention() and plan()
matrix             AttentionMatrix
lazy_matrix        what weights and effects have in common: indices, products, the transpose, what NumPy may ask
causes             EffectMatrix: what each edge did
edited             A.cut, A.boost and A.tempered; span_terms: several rules `spans` as one, a softcap for each head
given_logsumexp    a log-sum-exp that another kernel computed, checked
observation        the result of AttentionMatrix.observe, and how partial results are merged
rollout            attention rollout of one token through many layers
torch_recorded     what a matrix answers where PyTorch records, transforms or traces; torch_sharded: of DTensors
"""
