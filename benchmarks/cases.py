"""The benchmark cases, in groups, with the multiply-adds that each needs and the bytes that it must read."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "backward", "decode", "observe"]


@dataclass(frozen=True, slots=True)
class Case:
    """One problem: q (batch, heads, queries, d), k and v (batch, kv_heads, keys, d)."""

    group: str
    kind: Kind
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    d: int
    dtype: str = "float32"
    causal: bool = False
    window: int | None = None

    @property
    def name(self) -> str:
        heads = f"h{self.heads}" if self.heads == self.kv_heads else f"h{self.heads}/{self.kv_heads}"
        length = f"n{self.queries}" if self.queries == self.keys else f"n{self.queries} m{self.keys}"
        rules = " causal" * self.causal + (f" window {self.window}" if self.window else "")
        return f"b{self.batch} {heads} {length} d{self.d} {self.dtype}{rules}"

    @property
    def visible(self) -> int:
        """The number of scores of one head that are not masked."""
        n, m = self.queries, self.keys
        if self.window is not None:
            return sum(min(i + 1, self.window) for i in range(n))
        return n * (n + 1) // 2 if self.causal else n * m

    @property
    def multiply_adds(self) -> int:
        products = 5 if self.kind == "backward" else 2
        return products * self.batch * self.heads * self.visible * self.d

    @property
    def bytes_read(self) -> int:
        """The bytes of keys and values, which decoding must read at least once."""
        return 2 * self.batch * self.kv_heads * self.keys * self.d * (4 if self.dtype == "float32" else 2)


def cases(*, quick: bool) -> list[Case]:
    """All cases; with `quick`, the first few of each group, which are the most telling."""
    results: list[Case] = []
    lengths = (512, 2048) if quick else (512, 1024, 2048, 4096, 8192)
    for d in (64, 128):
        results += [Case("full", "forward", 1, 8, 8, n, n, d) for n in lengths]
    for d in (64, 128):
        results += [
            Case("causal", "forward", 1, 8, 8, n, n, d, causal=True)
            for n in ((256, 2048) if quick else (256, *lengths))
        ]
    results += [Case("short", "forward", 16, 12, 12, 128, 128, 64), Case("short", "forward", 64, 8, 8, 32, 32, 64)]
    for n in (2048,) if quick else (2048, 4096, 8192, 16384):
        results.append(Case("window", "forward", 1, 8, 8, n, n, 64, causal=True, window=256))
    for dtype in ("bfloat16", "float16"):
        results += [
            Case(dtype, "forward", 1, 8, 8, n, n, d, dtype)
            for d in (64, 128)
            for n in ((2048,) if quick else (1024, 4096))
        ]
    for n in (1024,) if quick else (1024, 4096):
        results.append(Case("backward", "backward", 1, 8, 8, n, n, 64))
        results.append(Case("backward causal", "backward", 1, 8, 8, n, n, 64, causal=True))
        results.append(Case("backward one head", "backward", 1, 1, 1, n, n, 64, causal=True))
    results += [Case("tiny", "forward", 1, 1, 1, 4, 4, 512), Case("tiny", "forward", 1, 1, 1, 2, 2, 2)]
    if not quick:
        results.append(Case("decode", "decode", 4, 12, 12, 1, 3000, 64))
        results.append(Case("decode grouped", "decode", 1, 40, 8, 1, 8192, 64))
    for m in (8192,) if quick else (8192, 32768):
        results.append(Case("decode", "decode", 1, 32, 32, 1, m, 128))
        results.append(Case("decode grouped", "decode", 1, 32, 8, 1, m, 128))
        results.append(Case("decode grouped bfloat16", "decode", 1, 32, 8, 1, m, 128, "bfloat16"))
    for n in (1024,) if quick else (1024, 2048, 4096):
        results.append(Case("observe", "observe", 1, 8, 8, n, n, 64))
        results.append(Case("observe", "observe", 1, 8, 8, n, n, 64, causal=True))
    return results
