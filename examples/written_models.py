"""Three small GPT-2s whose weights are written down and not trained, for the examples of docs/change.md.

    induction   after a word that the text had before, predicts what followed it there
    facts       knows in which city two towers stand
    language    answers in French if two words at the beginning ask for it

They have no layer norm, as in Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", so that each
head reads and writes exactly what is written here. The residual stream is cut into parts with a place for each word or
position: `word` and `position` come from the embeddings, and the other parts are written by heads.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel


class Words:
    """A tokenizer whose tokens are words."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> Tensor:
        """The ids of a text's words, (1, tokens)."""
        return torch.tensor([[self.words.index(word) for word in text.split()]])

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[i] for i in ids)


class Written:
    """A GPT-2 that does nothing yet, and the parts of its residual stream."""

    def __init__(self, words: str, parts: Sequence[str], *, layers: int, heads: int, positions: int) -> None:
        self.words = Words(words.split())
        sizes = {"word": len(self.words), "position": positions} | dict.fromkeys(parts, len(self.words))
        width = heads * max(-(-sum(sizes.values()) // heads), max(sizes.values()) + 1)  # each head can read a part
        stops = accumulate(sizes.values())
        self.parts = {
            name: torch.eye(width)[stop - sizes[name] : stop].T for name, stop in zip(sizes, stops, strict=True)
        }
        config = GPT2Config(
            n_layer=layers, n_head=heads, n_embd=width, n_inner=16, n_positions=positions, vocab_size=len(self.words),
            activation_function="relu", tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config).eval().requires_grad_(requires_grad=False)
        for parameter in self.model.parameters():
            parameter.zero_()
        self.body = self.model.transformer
        self.body.ln_f = nn.Identity()
        for block in self.body.h:
            block.ln_1 = block.ln_2 = nn.Identity()
        self.body.wte.weight += self["word"].T
        self.body.wpe.weight += self["position"].T
        self.model.lm_head.weight += self["answer"].T

    def __getitem__(self, part: str) -> Tensor:
        """The part's directions, (width, its size)."""
        return self.parts[part]

    def columns(self, part: str, *words: str) -> Tensor:
        """The sum of some words' directions in a part, (width, 1)."""
        return self[part][:, [self.words.words.index(word) for word in words]].sum(1, keepdim=True)

    def head(
        self, layer: int, head: int, *, reads: Tensor, writes: Tensor, query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write a head: logits (x·query)·(x·key), and its output is the weights' mean of x·reads, written to `writes`.

        query and key (width, at most d_k), reads and writes (width, at most d_v). A head without query and key attends
        evenly to all that it sees.
        """
        attn, width = self.body.h[layer].attn, self.body.config.n_embd
        d = width // self.body.config.n_head
        made = {0: query, 1: key, 2: reads}
        for place, matrix in made.items():
            if matrix is not None:
                start = place * width + head * d
                attn.c_attn.weight[:, start : start + matrix.shape[1]] += matrix * (d**0.5 if place == 0 else 1)
        attn.c_proj.weight[head * d : head * d + writes.shape[1]] += writes.T

    def neuron(self, layer: int, number: int, *, reads: Tensor, above: float, writes: Tensor) -> None:
        """Write a neuron of an MLP: relu(x·reads − above), written to `writes`."""
        mlp = self.body.h[layer].mlp
        mlp.c_fc.weight[:, number] += reads[:, 0]
        mlp.c_fc.bias[number] -= above
        mlp.c_proj.weight[number] += writes[:, 0]

    def previous(self, layer: int, head: int) -> None:
        """Write a head that attends to the token before and copies its word to the part `before`."""
        place = self["position"]
        before = place.roll(1, dims=1)  # the query at position i finds the key at i − 1
        self.head(layer, head, query=20 * place, key=before, reads=self["word"], writes=self["before"])


def induction() -> tuple[GPT2LMHeadModel, Words]:
    """Two layers of four heads. Head 1 of layer 0 and head 2 of layer 1 are one induction circuit.

    Layer 0, head 1 writes to each token which word came before it. Layer 1, head 2 attends from a word to the token
    that has the same word before it, and predicts that token. Where there is none, it attends to the first token.
    Layer 0, head 3 writes the same vector everywhere, which cancels a part of the position embeddings.
    """
    made = Written(". ant bee cat dog eel fox gnu hen owl pig", ["before", "answer"], layers=2, heads=4, positions=24)
    made.previous(0, 1)
    first = made["position"][:, :1]
    made.body.wpe.weight += 9 * made.columns("answer", ".").T
    everywhere = made["position"].sum(1, keepdim=True)
    made.head(0, 3, reads=everywhere, writes=-9 * made.columns("answer", "."))
    made.head(
        1, 2, query=torch.cat([8 * made["word"], 4 * everywhere], 1), key=torch.cat([made["before"], first], 1),
        reads=made["word"], writes=6 * made["answer"],
    )  # fmt: skip
    return made.model, made.words


def facts() -> tuple[GPT2LMHeadModel, Words]:
    """Six layers of two heads: eiffel tower, paris; cn tower, toronto.

    Layer 0, head 0 tells "tower" which word came before it. The MLP of layer 1 looks the city up there. In layers 3 and
    4, head 1 attends from the text's last word, "of", to the tower and copies the city, half the answer each.
    """
    words = "the eiffel cn tower is in city of paris toronto london rome"
    made = Written(words, ["before", "city", "answer"], layers=6, heads=2, positions=16)
    made.previous(0, 0)
    for number, (name, city) in enumerate([("eiffel", "paris"), ("cn", "toronto")]):
        both = made.columns("word", "tower") + made.columns("before", name)
        made.neuron(1, number, reads=both, above=1.5, writes=2 * made.columns("city", city))
    for layer in (3, 4):
        made.head(
            layer, 1, query=10 * made.columns("word", "of"), key=made.columns("word", "tower"),
            reads=made["city"], writes=3 * made["answer"],
        )  # fmt: skip
    return made.model, made.words
