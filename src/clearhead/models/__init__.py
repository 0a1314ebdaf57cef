"""Language models, and what is asked of them.

protocol        what `explain` needs of a model: tokens, and every layer's attention in one forward pass
finding         load_model: a model by its path or name; those on this machine
model           a decoder in NumPy with its tokenizer, and a text's run, watched or changed
tokenizer       texts as tokens; chats: messages as a text, by a template; tokens: the tokenizer of a GGUF file
decoder         its forward pass, with keys and values kept; mlp: one or experts; variants: other runs, and derivatives
families        its sizes, and what differs between Llama, Gemma and the others, as data; norms, positions
weights         packed and memory-mapped tensors, products with them; tensors: which of them a decoder has
gguf folder     the two forms in which decoders are stored
hub             models through Transformers, and what is checked before one is loaded
"""
