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
