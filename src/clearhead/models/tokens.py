"""Builds a GGUF file's tokenizer with the library `tokenizers`: byte-level BPE, or SentencePiece's BPE.

The file names the expression that splits a text before pairs are merged (`tokenizer.ggml.pre`), but does not give it.
The table here is llama.cpp's (llama-vocab.cpp), in the form of Hugging Face's tokenizers.
"""

import warnings
from typing import Any

from clearhead.errors import FileError
from clearhead.models.folder import one_line
from clearhead.models.gguf import GGUF, damaged
from clearhead.models.protocol import ids_in

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


# How a text is split before its bytes are merged, by tokenizer.ggml.pre: expressions that split it one after the other,
# each match a piece (none: GPT-2's, which the library has), and further settings:
# digits    every digit is a piece
# composed  characters are composed first (NFC)
# words     a piece that is in the vocabulary is one token, without merging
# begins    a text begins with the beginning token, unless the file says otherwise
_DIGITS = (), {"digits"}
_LLAMA3 = (rf"{_SHORT}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",), {"words", "begins"}
_DBRX = _LLAMA3[0], set[str]()
_QWEN2 = (rf"{_SHORT}|{_WORDS}|\p{{N}}|{_REST}",)
_GPT4O = (rf"{'|'.join(f'{each}{_SHORT}?' for each in _CASED)}|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}",), set[str]()
_SIGNS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3 = r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", rf"{_SIGNS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CUTS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "default": ((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"), set()),  # llama.cpp's default
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "mellum", "exaone4", "trillion", "mpt"), ((), set())),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), ((r" ?[^(\s|.,!?…。，、।۔،)]+",), set())),
    "olmo": ((), {"composed"}),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    "command-r": ((), {"digits", "composed"}),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _DBRX),
    **dict.fromkeys(("glm4", "glm5"), (_LLAMA3[0], {"words"})),
    **dict.fromkeys(("qwen2", "stablelm2", "hunyuan", "megrez"), (_QWEN2, {"composed"})),
    "deepseek-r1-qwen": (_QWEN2, set()),
    "qwen35": ((_QWEN2[0].replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"^\s\p{L}", r"^\s\p{L}\p{M}"),), {"composed"}),
    "falcon": ((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"), set()),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), (_DEEPSEEK3, set())),
    "tekken": ((rf"{'|'.join(_CASED)}|\p{{N}}|{_REST_WITH_SLASH}",), {"words", "begins"}),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
}
_UNKNOWN, _CONTROL, _USER, _BYTE = 2, 3, 4, 6  # tokenizer.ggml.token_type
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<turn|>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip


_KINDS = ("gpt2", "llama", "gemma4")  # byte-level BPE, and SentencePiece's with and without scores


def check(file: GGUF, vocabulary: int) -> list[str]:
    """Check the file's tokenizer and return its words. Raises FileError for a damaged or unknown tokenizer."""
    data = file.metadata
    kind, words, cut = (data.get(f"tokenizer.ggml.{key}") for key in ("model", "tokens", "pre"))
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words) or len(words) != vocabulary:
        count = len(words) if isinstance(words, list) else 0
        raise damaged(file.path, f"its tokenizer has {count} words, and its embeddings {vocabulary}.")
    if kind not in _KINDS:
        raise FileError(f"{file.path}: tokenizer kind {kind!r} is not supported.", f"supported: {', '.join(_KINDS)}.")
    wanted = "scores" if kind == "llama" else "merges"
    if not isinstance(data.get(f"tokenizer.ggml.{wanted}"), list):
        raise FileError(f"{file.path} has no tokenizer.ggml.{wanted}, which its tokenizer needs to merge words.")
    if kind == "gpt2" and cut is not None and (not isinstance(cut, str) or cut not in CUTS):
        what = f"{file.path}: its tokenizer splits texts as {cut!r} does, which is not supported."
        raise FileError(what, f"supported: {', '.join(CUTS)}.")
    return words


def tokenizer_of(file: GGUF, vocabulary: int) -> Any:
    """Build the file's tokenizer. Raises FileError if it is missing, damaged or of an unknown kind."""
    words, data = check(file, vocabulary), file.metadata
    make = _byte_level if data["tokenizer.ggml.model"] == "gpt2" else _sentencepiece
    types = data.get("tokenizer.ggml.token_type")
    types = types if isinstance(types, list) and len(types) == len(words) else [1] * len(words)
    try:
        tokenizer, begins = make(file, words, types)
        _add_special(file, tokenizer, words, types, begins=data.get("tokenizer.ggml.add_bos_token", begins))
    except FileError:
        raise
    except Exception as error:  # a list is missing, or the library raises bare Exception because lists do not fit
        raise FileError(f"{file.path}: the tokenizer cannot be read: {one_line(error)}.") from None
    return tokenizer


def _byte_level(file: GGUF, words: list[str], _: list[int]) -> tuple[Any, bool]:
    """Build byte-level BPE, as GPT-2 has it."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = file.metadata.get("tokenizer.ggml.pre", "default")
    if name == "default":
        warnings.warn(
            f"{file.path} does not say how its tokenizer splits texts (tokenizer.ggml.pre). llama.cpp's default splits "
            "them, so answers may be worse than the model's: use a newer file of the model, or its folder.",
            stacklevel=2,
        )
    expressions, also = CUTS[name]
    pairs = [tuple(each.split(" ", 1)) for each in file.metadata["tokenizer.ggml.merges"]]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges="words" in also))
    if "composed" in also:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if "digits" in also else []
    steps += [pre_tokenizers.Split(Regex(each), "isolated") for each in expressions]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not expressions))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, "begins" in also


def _sentencepiece(file: GGUF, words: list[str], types: list[int]) -> tuple[Any, bool]:
    """Build SentencePiece's BPE, with bytes for unknown characters; the words' scores give the merges."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {word: number for number, word in enumerate(words)}
    unknown = next((word for word, kind in zip(words, types, strict=True) if kind == _UNKNOWN), None)
    if "tokenizer.ggml.merges" in file.metadata:  # Gemma 4
        merges = [tuple(each.split(" ", 1)) for each in file.metadata["tokenizer.ggml.merges"]]
    else:
        merges = _merges(vocabulary, words, types, file.metadata["tokenizer.ggml.scores"])
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    is_llama = file.metadata["tokenizer.ggml.model"] == "llama"
    prefixed = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", is_llama))
    parts = [normalizers.Prepend("▁")] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*parts, normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer, True


def _merges(
    vocabulary: dict[str, int], words: list[str], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """List the pairs of words that join into a word, pairs that make the word with the highest score first."""
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
    """Add control tokens and user-defined words, which match before a text is split; some begin or end every text."""
    from tokenizers import AddedToken, processors

    added, named = file.metadata.get("tokenizer.ggml.added_tokens", ()), str(file.metadata.get("general.name")).lower()
    if unknown := [word for word in added if word not in tokenizer.get_vocab()]:
        raise FileError(f"{file.path}: it adds the token {unknown[0]!r}, but does not say its id.")
    ends, stripping = ends_of(file), "phi-3" in named or "phi3" in named  # as llama.cpp: the file does not say it
    users, controls = list[Any](), list[Any]()
    for number, (word, kind) in enumerate(zip(words, types, strict=True)):
        strips = stripping and word not in ("<unk>", "<s>", "<|endoftext|>")  # strips the spaces that follow
        if word and (kind in (_CONTROL, _UNKNOWN) or number in ends):
            controls.append(AddedToken(word, normalized=False, special=True, rstrip=strips))
        elif word and (kind == _USER or word in added):
            users.append(AddedToken(word, normalized=False, rstrip=strips))
    tokenizer.add_tokens(users)
    tokenizer.add_special_tokens(controls)
    begin = special(file, "bos") if begins else ""
    end = special(file, "eos") if file.metadata.get("tokenizer.ggml.add_eos_token", False) else ""
    if begin or end:
        ids = {begin: "tokenizer.ggml.bos_token_id", end: "tokenizer.ggml.eos_token_id"}
        used = {word: file.metadata[key] for word, key in ids.items() if word}
        single = " ".join(part for part in (begin, "$A", end) if part)
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(used.items()))


def special(file: GGUF, kind: str) -> str:
    """Return the text of a special token, such as "bos" or "eos"; "" if the file has none."""
    number, words = file.metadata.get(f"tokenizer.ggml.{kind}_token_id"), file.metadata["tokenizer.ggml.tokens"]
    return words[number] if isinstance(number, int) and 0 <= number < len(words) else ""


def chat_of(file: GGUF) -> tuple[str | None, dict[str, str], frozenset[int]]:
    """Return a file's chat template or None, the special tokens that it may write, and the ids that end a reply."""
    template = file.metadata.get("tokenizer.chat_template")
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
    words = {f"{name}_token": word for name, kind in names.items() if (word := special(file, kind))}
    return template if isinstance(template, str) else None, words, ends_of(file)


def ends_of(file: GGUF) -> frozenset[int]:
    """Return the ids that end a reply: those that the file names, and those of words that end one in llama.cpp."""
    data, words = file.metadata, file.metadata["tokenizer.ggml.tokens"]
    known = set(_ENDS) - ({"<|end|>"} if {"<|return|>", "<|call|>"} <= set(words) else set())  # gpt-oss ends otherwise
    named = [
        data.get(f"tokenizer.ggml.{kind}") for kind in ("eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids")
    ]
    found = [number for number, word in enumerate(words) if word in known]
    return frozenset(number for number in ids_in(found, *named) if number < len(words))
