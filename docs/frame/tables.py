"""The pages of every score rule and every statistic, from the two tables of the core."""

import re
from inspect import getdoc

import clearhead
from clearhead.core.rules import RULES
from clearhead.core.statistics import STATISTICS
from frame.docstrings import ENTRY, inline

RULES_TOP = """# Score rules

The same keywords everywhere: `ch.attention`, `ch.AttentionMatrix`, `ch.trace`, `ch.diagnose` and the others take them.
All are optional, and they can be combined; they act on a score in the order of this table. "Forbids" says whether a
rule can forbid a query to attend to a key; what is forbidden costs no arithmetic where a whole block is forbidden.

| rule | value | forbids |
| --- | --- | --- |
"""
STATISTICS_TOP = """# Statistics

What `A.observe(…)`, `ch.watch(model, …)` and the methods of the same names can be asked for. a_ij is the weight and
s_ij the logit of query i and key j: what the softmax sees. Statistics are per query head, after the batch axes.

| statistic | ask for it by | definition | axes | pass |
| --- | --- | --- | --- | --- |
"""
STATISTICS_END = """
One pass over the keys computes the output and everything of the first pass together; one more computes everything of
the second, which needs the final log-sum-exp. `distance` and `diagonal` need positions: where queries and keys differ
in number, give `query_offset`. A row with nothing to attend to has output 0, log-sum-exp −∞ and entropy 0.
"""
ASKED = {"flag": "True", "count": "8", "size": "(256, 256)", "labels": "(query_labels, key_labels)"}


def pages() -> dict[str, str]:
    """Both pages. ValueError where the docstring of `attention` lacks a rule."""
    shown = documented_rules()
    left = [name for name in RULES if name not in shown]
    if left:
        raise ValueError(f"the docstring of attention says nothing of {', '.join(left)}")
    rules = "".join(f"| `{name}` | {shown[name]} | {'yes' if rule.forbids else ''} |\n" for name, rule in RULES.items())
    seen = ""
    for name, each in STATISTICS.items():
        asked = "`v`" if each.asked == "v" else f"`{name}={ASKED[each.asked]}`"
        number = "first" if each.computed == "rows" else "second"
        seen += f"| `{name}` | {asked} | {inline(each.definition)} | {', '.join(each.axes)} | {number} |\n"
    return {"reference/rules": RULES_TOP + rules, "reference/statistics": STATISTICS_TOP + seen + STATISTICS_END}


def documented_rules() -> dict[str, str]:
    """What the docstring of `attention` says of each rule."""
    shown: dict[str, str] = {}
    names: list[str] = []
    for line in (getdoc(clearhead.attention) or "").splitlines():
        if result := ENTRY.fullmatch(line):
            names = re.split(r", ", result[1])
            shown |= dict.fromkeys(names, result[2])
        elif line.startswith(" ") and names:
            shown |= {name: f"{shown[name]} {line.strip()}" for name in names}
        else:
            names = []
    return {name: inline(text) for name, text in shown.items() if name in RULES}
