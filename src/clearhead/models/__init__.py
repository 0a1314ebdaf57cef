"""Language models: finding, reading and running them.

protocol        what `explain` needs of a model: tokens, and every layer's attention in one forward pass
finding         load_model finds a model by its path or name; models_here lists the models on this machine
model           a decoder in NumPy with its tokenizer; it runs texts, watched or changed
tokenizer       texts as tokens; chats: messages as one text; tokens: the tokenizer of a GGUF file
decoder         the forward pass, with a key-value cache; mlp: one or experts; variants: changed runs and derivatives
families        a decoder's sizes, and what differs between Llama, Gemma and the others, as data; norms, positions
weights         packed, memory-mapped tensors and products with them; tensors: which tensors a decoder has
gguf folder     readers of the two formats in which decoders are stored
hub             models that run in Transformers, and the checks before they are loaded
"""
