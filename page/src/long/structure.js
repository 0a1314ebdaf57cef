// Which head a page opens with.

/**
 * The head that did most, where that is known; else the one whose weights are least like a uniform row and least on the
 * first key.
 * @param {any[]} runs @returns {Chosen}
 */
export function mostStructured(runs) {
  const best = { run: 0, layer: 0, head: 0, query: -1, key: -1 };
  let most = -Infinity;
  for (const [layer, { heads, keys, statistics }] of (runs[0]?.layers ?? []).entries())
    for (const head of heads.keys()) {
      const { entropy, sink, effect } = statistics;
      if (entropy[head] === null) continue;
      const structure = effect ? Math.abs(effect[head]) : (Math.log(keys) - entropy[head]) * (1 - (sink[head] ?? 0));
      if (structure > most) {
        most = structure;
        Object.assign(best, { layer, head });
      }
    }
  return best;
}
