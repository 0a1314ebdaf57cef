"""The help of every option in Chinese: what stands in English in the parsers, and what argparse says itself."""

import os
import re
from collections.abc import Mapping
from unicodedata import east_asian_width

CHINESE = {
    # argparse's own
    "usage: ": "用法：",
    "options": "选项",
    "positional arguments": "参数",
    "show this help message and exit": "显示帮助并退出",
    "show program's version number and exit": "显示版本号并退出",
    # the commands
    "exact attention, with weights that stay visible": "精确的注意力，权重始终可见",
    "show how one token's attention output came to be": "逐步显示一个词元的注意力输出是怎么来的",
    "print the shape and cost of every step of a layer": "列出一层中每一步的形状和计算量",
    "show with numbers why scores are divided by √d_k": "用数字说明得分为什么要除以 √d_k",
    "watch a small model learn W_Q, W_K and W_V": "看一个小模型怎样学出 W_Q、W_K 和 W_V",
    "compute a file's attention step by step and check its claims": "逐步计算文件中的注意力，并核对其中给出的结果",
    "name the mistake in your attention code from its result": "根据您的代码给出的结果，指出注意力算错在哪里",
    "look at every head of a long text in the browser (needs an extra, see below)": (
        "在浏览器中查看长文本的每一个头（需另装组件，见下文）"
    ),
    "check every engine of this machine against the reference, and time it": "用参考实现检查本机的每个引擎，并测速",
    "say what is installed and which engine runs": "列出已安装的内容，以及会用哪个引擎",
    # their options
    "English or Chinese; default: that of the locale": "英文或中文；默认：按系统语言",
    "write every number to FILE as JSON; - is standard output": "把所有数字以 JSON 写入 FILE；- 表示标准输出",
    "write the page that shows it, one self-contained file; - is standard output": (
        "写成网页，只有一个文件；- 表示标准输出"
    ),
    "the text to run through the model": "要让模型读的文本",
    "read the text from FILE (- is standard input) without its last newline; with --html, every head": (
        "从 FILE 读取文本（- 表示标准输入），不含末尾的换行；与 --html 合用时显示每一个头"
    ),
    "with --file: cut a text with more tokens than the model has positions into windows, and show each": (
        "与 --file 合用：文本的词元数超过模型的位置数时，切成若干窗口分别显示"
    ),
    "with --file and --html: the heads whose weights are exact": "与 --file、--html 合用：哪些头的权重保持精确",
    "with --file and --html: store q and k as float16 or bfloat16": (
        "与 --file、--html 合用：q 和 k 以 float16 或 bfloat16 存储"
    ),
    "a GPT-2 directory, or with Transformers any model's directory or name; default: the shipped one": (
        "GPT-2 的目录；装有 Transformers 时可为任意模型的目录或名称；默认：随包附带的模型"
    ),
    "the layer, from 0; default: that of the head with the least entropy": "层，从 0 数起；默认：最集中的头所在的层",
    "the head, from 0; default: the one with the least entropy": "头，从 0 数起；默认：最集中的头",
    "whose output: a position or a word; default: the last token": "看谁的输出：一个位置或一个词；默认：最后一个词元",
    "first let the model continue the text by N tokens": "先让模型在文本后面续写 N 个词元",
    "run the text also with queries Q not seeing keys K, and compare (see below)": (
        "让查询 Q 看不到键 K，再运行一次并对比（见下文）"
    ),
    "run it also with X added to the logits of keys K, and compare": "给键 K 的 logit 加上 X，再运行一次并对比",
    "run it also with these heads' outputs set to 0, and compare; without a value: those of --layer and --head": (
        "把这些头的输出置为 0，再运行一次并对比；不给值时，取 --layer 和 --head 指定的头"
    ),
    "why TOKEN comes next: what the edges, tokens and heads behind it did; default: the likeliest": (
        "为什么下一个是 TOKEN：起作用的边、词元和头，并逐个去掉后重新运行；默认：最可能的词元"
    ),
    "with --why: the token to compare with; default: the likeliest other one": (
        "与 --why 合用：与哪个词元相比；默认：其余词元中最可能的一个"
    ),
    "n=12, or n for a symbol (see below)": "n=12，或只写 n 表示符号（见下文）",
    "the values of d_k; default: 1,4,16,64,256": "d_k 的取值；默认：1,4,16,64,256",
    "keys of each query; default: 16": "每个查询的键数；默认：16",
    "the training step to show, or the recorded one before it; default: the last": (
        "显示哪一个训练步，没有记录则取之前最近的一步；默认：最后一步"
    ),
    "the head to print, from 0; default: where a claim is wrong, else 0": (
        "打印哪个头，从 0 数起；默认：结果有错的那个，否则为 0"
    ),
    "the batch entry to print, from 0; default: as --head": "打印哪个批次条目，从 0 数起；默认同 --head",
    "instead of the steps, the layer with each of these numbers of heads, side by side, such as 1,8": (
        "不显示步骤，而是并排对比这些头数下的同一层，例如 1,8"
    ),
    "whose lengths and angles to print, from 0; default: as --head": (
        "打印哪个查询的长度和夹角，从 0 数起；默认同 --head"
    ),
    "a .npz, .json, .safetensors or .pt file": ".npz、.json、.safetensors 或 .pt 文件",
    "a file that seen.save wrote, or a model; default: the shipped one": (
        "seen.save 写的文件，或一个模型；默认：随包附带的模型"
    ),
    "the text to run through MODEL; - is standard input": "要让 MODEL 读的文本；- 表示标准输入",
    "with --text-file: cut a long text into windows": "与 --text-file 合用：把长文本切成若干窗口",
    "the port; default: a free one": "端口；默认：任一空闲端口",
    "do not open a browser, only print the address": "不打开浏览器，只给出地址",
    "threads for each engine; default: all cores": "每个引擎用多少线程；默认：全部核心",
    "as JSON": "以 JSON 输出",
}


def of_locale(environment: Mapping[str, str] = os.environ) -> str:
    """The language that a process's locale asks for, "en" or "zh", as gettext reads it."""
    locale = next(filter(None, map(environment.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), "C")
    if locale.partition(".")[0] in ("C", "POSIX"):  # then LANGUAGE does not count
        return "en"
    return "zh" if (environment.get("LANGUAGE") or locale).lower().startswith("zh") else "en"


def columns(text: str) -> int:
    """How many columns of a terminal the text takes."""
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in text)


def broken(text: str, width: int) -> list[str]:
    """Chinese text in lines of at most `width` columns; not within a name, and not before punctuation."""
    lines = [""]
    for part in re.findall(r"(?:[\x21-\x7e]+|[^\x21-\x7e])[，。；：、）]*\s*", text):
        if lines[-1] and columns(lines[-1] + part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]
