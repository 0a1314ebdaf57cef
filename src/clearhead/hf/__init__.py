"""clearhead as an attention implementation of Transformers; importing this module registers it.

    import clearhead.hf

    model = AutoModel.from_pretrained(…, attn_implementation="clearhead")
    model.set_attn_implementation("clearhead")  # for a model that exists already

Every model that `ch.watch` takes runs with it: forward, training (dropout, gradient checkpointing), `torch.compile`,
`generate` with any cache, and batches with padding. Outputs equal eager attention's up to rounding, except that queries
that see only padding give 0, where eager attention gives the mean of everything. Time is O(queries·keys·d_k) per head,
and blocks that a mask forbids cost nothing: Transformers' masks (causal, sliding windows, chunks, padding, packed
sequences) become rules, and no mask is stored. Compiled models and static caches use Transformers' own masks if they
need any. Memory is O(queries + keys); dropout stores one byte per weight.

Raises MissingExtraError without PyTorch and Transformers. A model raises RuleError if it asks for its weights
(`output_attentions=True`: use `ch.watch`) or chooses its keys itself (sparse attention).

>>> import clearhead.hf, torch, transformers
>>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, eos_token_id=0, bos_token_id=0, vocab_size=9)
>>> model = transformers.GPT2LMHeadModel(config).eval()
>>> model.set_attn_implementation("clearhead")
>>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, min_new_tokens=2).shape
torch.Size([1, 5])
"""

# Everything that touches Transformers:
# attending   the attention function that Transformers calls
# call        one call of attention, read: arrays, positions, mask
# masks       Transformers' masks as rules
# passes      switches the model's attention to ours and back; tells which layer is running, and which call of it
# watching    ch.watch: recording keeps one layer's calls, derivatives the gradients at its heads' outputs
# changing    ch.change, and seen.verify

from clearhead.errors import needing

with needing("PyTorch and Transformers", "clearhead.hf", "hf"):
    from clearhead.hf.attending import register

register()
