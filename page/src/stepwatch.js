// Which steps are in view: a step is drawn when it comes near the view.

export function watchSteps() {
  /** @type {Map<Element, () => void>} */
  const waiting = new Map();
  /** @type {Set<string>} steps that have been in view: they are drawn at once when the page is redrawn, so that nothing moves */
  const visited = new Set();
  /** @type {Set<Element>} */
  const inView = new Set();
  const look = (/** @type {IntersectionObserverEntry[]} */ entries) => {
    for (const { isIntersecting, target } of entries) {
      inView[isIntersecting ? "add" : "delete"](target);
      if (!isIntersecting) continue;
      visited.add(target.id);
      waiting.get(target)?.();
    }
  };
  const observer = new IntersectionObserver(look, { rootMargin: "600px" });
  return {
    inView,
    /** Before the page is drawn again. */
    restart() {
      observer.disconnect();
      waiting.clear();
      inView.clear();
    },
    whenSeen(/** @type {Element} */ element, /** @type {() => void} */ draw) {
      waiting.set(element, draw);
      observer.observe(element);
    },
    drawVisited(/** @type {boolean} */ all) {
      for (const [element, draw] of waiting) if (all || visited.has(element.id)) draw();
    },
  };
}
