"""The public operations: attention, AttentionMatrix, rollout, and what stands behind them.

attention          attention() and plan()
matrix             AttentionMatrix
lazy_matrix        what NumPy may ask of a matrix that is never stored
observable         one method for each statistic
causes             EffectMatrix: what each edge did, and whole spans
edited             A.cut, A.boost and A.tempered; span_terms: several rules `spans` as one, a softcap for each head
given_logsumexp    a log-sum-exp that another kernel computed, checked
observation        the result of AttentionMatrix.observe, and how partial results are merged
rollout            attention rollout of one token through many layers
torch_recorded     what a matrix answers where PyTorch records, transforms or traces; torch_sharded: of DTensors
"""
