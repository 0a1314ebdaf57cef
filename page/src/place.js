// The chosen place, shared by all rooms of the page.

/** @param {Chosen} chosen @returns {Place} */
export function newPlace(chosen) {
  /** @type {Map<string, (place: Place) => void>} */
  const rooms = new Map();
  const place = /** @type {Place} */ ({
    chosen,
    live: null,
    follow: (room, follow) => void rooms.set(room, follow),
    choose(from, change) {
      const differs = Object.entries(change).some(
        ([name, value]) => chosen[/** @type {keyof Chosen} */ (name)] !== value,
      );
      Object.assign(chosen, change);
      if (differs) tell(from);
    },
    again: () => tell(""),
  });
  const tell = (/** @type {string} */ from) => {
    for (const [room, follow] of rooms) if (room !== from) follow(place);
  };
  return place;
}

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
