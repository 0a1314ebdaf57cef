"""clearhead as an attention of Transformers; importing this module registers it, and nothing else does it for you.

    import clearhead.hf

    model = AutoModel.from_pretrained(…, attn_implementation="clearhead")
    model.set_attn_implementation("clearhead")  # a model that there is already

Every model that `ch.watch` takes runs so: forward, training (dropout, gradient checkpointing), `torch.compile`,
`generate` with any cache, and batches with padding. Outputs are those of eager attention but for rounding; queries that
see only padding get 0, where eager attention takes the mean of everything. Time is O(queries·keys·d_k) for each head
and blocks that a mask forbids cost nothing: Transformers' masks (causal, sliding windows, chunks, padding, packed
sequences) stay rules, and no mask is stored. Compiled models and static caches get Transformers' own masks, where they
need any. Memory is O(queries + keys); dropout stores a byte for each weight.

Raises MissingExtraError without PyTorch and Transformers; a model raises RuleError where it wants its weights returned
(`output_attentions=True`: use `ch.watch`), or chooses its keys itself (sparse attention).

>>> import clearhead.hf, torch, transformers
>>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, eos_token_id=0, bos_token_id=0, vocab_size=9)
>>> model = transformers.GPT2LMHeadModel(config).eval()
>>> model.set_attn_implementation("clearhead")
>>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, min_new_tokens=2).shape
torch.Size([1, 5])
"""

# Everything that touches Transformers:
# attending   the attention function that Transformers calls
# masks       Transformers' masks as rules
# passes      sets the model's attention to ours and back; which layer is running, for which time
# watching    ch.watch: recording keeps one layer while it runs, derivatives what backward passes bring to it
# changing    ch.change, and seen.verify

from clearhead.errors import needing

with needing("PyTorch and Transformers", "clearhead.hf", "hf"):
    from clearhead.hf.attending import register

register()
