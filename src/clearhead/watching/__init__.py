"""What `ch.watch` saw of a model: its layers, and tables of them. Imports neither PyTorch nor Transformers.

watch       ch.watch
seen        Seen, the object that watch yields
layer       one layer; naming: the names of layers
effects     the tables of `seen.strongest`, `seen.verify` and `seen.summary`
pieces      tokens as pieces of a text: words, sentences; places: finds tokens by position, slice or word
"""
