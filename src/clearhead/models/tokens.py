"""The tokenizer that a GGUF file carries, as one of the library `tokenizers`: byte-level BPE, or SentencePiece's BPE.

The file names the expression that cuts a text before its pairs are merged (`tokenizer.ggml.pre`), and does not say what
it is; the table here is that of llama.cpp (llama-vocab.cpp) in the form in which Hugging Face's tokenizers have it.
"""

from typing import Any

from clearhead.errors import FileError
from clearhead.models.folder import ids_in, one_line
from clearhead.models.gguf import GGUF, damaged

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


# How a text is cut before its bytes are merged, by tokenizer.ggml.pre: the expression of which each match is a piece
# (None: GPT-2's, which the library has), and what else is done with it:
# digits    every digit is alone
# composed  characters are composed first (NFC)
# words     a piece that is in the vocabulary is not merged from its parts
# begins    a text begins with the beginning token where the file does not say
_DIGITS = None, {"digits"}
_LLAMA3 = rf"{_SHORT}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}", {"words", "begins"}
_DBRX = _LLAMA3[0], set[str]()
_QWEN2 = rf"{_SHORT}|{_WORDS}|\p{{N}}|{_REST}"

CUTS: dict[str, tuple[str | None, set[str]]] = {
    "default": (None, set()),
    "gpt-2": (None, set()),
    "olmo": (None, {"composed"}),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": (None, {"digits", "composed"}),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _DBRX,
    "smaug-bpe": _DBRX,
    "qwen2": (_QWEN2, {"composed"}),
    "stablelm2": (_QWEN2, {"composed"}),
    "deepseek-r1-qwen": (_QWEN2, set()),
    "tekken": (rf"{'|'.join(_CASED)}|\p{{N}}|{_REST_WITH_SLASH}", {"words"}),
    "gpt-4o": (rf"{'|'.join(f'{each}{_SHORT}?' for each in _CASED)}|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}", set()),
}
_UNKNOWN, _CONTROL, _USER, _BYTE = 2, 3, 4, 6  # tokenizer.ggml.token_type
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<turn|>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip


def tokenizer_of(file: GGUF, vocabulary: int) -> Any:
    """The file's tokenizer. Raises FileError where it is missing, damaged, or of a kind that is not known here."""
    data = file.metadata
    kind, words = data.get("tokenizer.ggml.model"), data.get("tokenizer.ggml.tokens")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words) or len(words) != vocabulary:
        count = len(words) if isinstance(words, list) else 0
        raise damaged(file.path, f"its tokenizer has {count} words, and its embeddings {vocabulary}.")
    makers = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in makers:
        raise FileError(f"{file.path}: a tokenizer of kind {kind!r} is not known here.", "gpt2 and llama are.")
    types = data.get("tokenizer.ggml.token_type")
    types = types if isinstance(types, list) and len(types) == len(words) else [1] * len(words)
    try:
        tokenizer, begins = makers[kind](file, words, types)
        _add_special(file, tokenizer, words, types, begins=data.get("tokenizer.ggml.add_bos_token", begins))
    except FileError:
        raise
    except Exception as error:  # of a list that is missing, or bare from the library for what does not fit together
        raise FileError(f"{file.path}: the tokenizer cannot be read: {one_line(error)}.") from None
    return tokenizer


def _byte_level(file: GGUF, words: list[str], _: list[int]) -> tuple[Any, bool]:
    """Byte-level BPE, as GPT-2 has it."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = file.metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in CUTS:
        raise FileError(
            f"{file.path}: its tokenizer cuts texts as {name!r} does, which is not known here.",
            f"{', '.join(CUTS)} are.",
        )
    expression, also = CUTS[name]
    pairs = [tuple(each.split(" ", 1)) for each in file.metadata["tokenizer.ggml.merges"]]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges="words" in also))
    if "composed" in also:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if "digits" in also else []
    if expression is not None:
        steps.append(pre_tokenizers.Split(Regex(expression), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=expression is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, "begins" in also


def _sentencepiece(file: GGUF, words: list[str], types: list[int]) -> tuple[Any, bool]:
    """SentencePiece's BPE with bytes for what is not in the vocabulary; its merges follow from the words' scores."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {word: number for number, word in enumerate(words)}
    unknown = next((word for word, kind in zip(words, types, strict=True) if kind == _UNKNOWN), None)
    merges = _merges(vocabulary, words, types, file.metadata["tokenizer.ggml.scores"])
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    parts = [normalizers.Prepend("▁")] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*parts, normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer, True


def _merges(
    vocabulary: dict[str, int], words: list[str], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """Every pair of words whose text together is a word, the one that makes the word of the highest score first."""
    pairs = []
    for word, kind, score in zip(words, types, scores, strict=True):
        if kind in (_CONTROL, _BYTE, _UNKNOWN):
            continue
        for middle in range(1, len(word)):
            first, second = word[:middle], word[middle:]
            if first in vocabulary and second in vocabulary:
                pairs.append((-score, vocabulary[first], vocabulary[second], first, second))
    return [(first, second) for *_, first, second in sorted(pairs)]


def _add_special(file: GGUF, tokenizer: Any, words: list[str], types: list[int], *, begins: bool) -> None:
    """Control tokens and words that users added are found before a text is cut; some begin or end every text."""
    from tokenizers import AddedToken, processors

    kinds = [(word, kind) for word, kind in zip(words, types, strict=True) if word]
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word, kind in kinds if kind == _USER])
    special_words = [word for word, kind in kinds if kind in (_CONTROL, _UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in special_words])
    begin = special(file, "bos") if begins else ""
    end = special(file, "eos") if file.metadata.get("tokenizer.ggml.add_eos_token", False) else ""
    if begin or end:
        ids = {begin: "tokenizer.ggml.bos_token_id", end: "tokenizer.ggml.eos_token_id"}
        used = {word: file.metadata[key] for word, key in ids.items() if word}
        single = " ".join(part for part in (begin, "$A", end) if part)
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(used.items()))


def special(file: GGUF, kind: str) -> str:
    """The text of a special token, such as "bos" or "eos"; "" where the file has none."""
    number, words = file.metadata.get(f"tokenizer.ggml.{kind}_token_id"), file.metadata["tokenizer.ggml.tokens"]
    return words[number] if isinstance(number, int) and 0 <= number < len(words) else ""


def chat_of(file: GGUF) -> tuple[str | None, dict[str, str], frozenset[int]]:
    """A file's chat template or None, the special tokens that it may write, and the ids that end a reply."""
    template = file.metadata.get("tokenizer.chat_template")
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
    words = {f"{name}_token": word for name, kind in names.items() if (word := special(file, kind))}
    return template if isinstance(template, str) else None, words, ends_of(file)


def ends_of(file: GGUF) -> frozenset[int]:
    """The ids of the tokens that end a reply: those that the file names, and words that llama.cpp takes for such."""
    data, words = file.metadata, file.metadata["tokenizer.ggml.tokens"]
    known = set(_ENDS) - ({"<|end|>"} if {"<|return|>", "<|call|>"} <= set(words) else set())  # gpt-oss ends otherwise
    named = [
        data.get(f"tokenizer.ggml.{kind}") for kind in ("eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids")
    ]
    found = [number for number, word in enumerate(words) if word in known]
    return frozenset(number for number in ids_in(found, *named) if number < len(words))
