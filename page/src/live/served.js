// The page of `clearhead serve`: a box to type or chat in, the answer as it comes, then why, in the rooms of every page.
// What the reader takes away is a run of the model on this machine, and its change stands beside the estimate.

import { openPage } from "../container.js";
import { columnHead, h, select, table, tableRow } from "../dom.js";
import { bare, percent, short, spelled, withSign } from "../numbers.js";
import { button } from "./bar.js";
import { mark } from "./room.js";

/** Asks the server for a run, and takes its lines as they come. @param {any} asked @param {AbortSignal} signal @param {(line: any) => void} take */
async function ask(asked, signal, take) {
  const response = await fetch("run", { method: "POST", body: JSON.stringify(asked), signal });
  if (!response.ok) throw new Error(response.status === 409 ? "serve busy" : await response.text());
  const reader = /** @type {ReadableStream} */ (response.body).pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) take(JSON.parse(line));
  }
}

/** @param {Page} page @param {(page: Page, live: (page: Page, place: Place) => Live) => (shell: Shell) => void} openRooms */
export function openServed({ header }, openRooms) {
  const { model } = header.serve;
  const here = String(crypto.getRandomValues(new Uint32Array(2)));
  const state = { model, text: "", said: "", note: "", chat: false };
  let question = /** @type {any} */ ({ before: [] });
  let running = /** @type {AbortController | null} */ (null);
  let [draw, update] = [(/** @type {Shell} */ _) => {}, () => {}];
  let shell = /** @type {any} */ (null);

  /** One run, in place of the one before. @param {any} asked @param {(line: any) => void} take */
  async function run(asked, take) {
    running?.abort();
    const mine = (running = new AbortController());
    let note = "";
    state.note = "serve runs";
    update();
    const each = (/** @type {any} */ line) => (line.error ? (note = line.error) : mine === running && take(line));
    await ask({ ...asked, ["page"]: here }, mine.signal, each).catch(({ name, message }) => {
      note = name === "AbortError" ? "" : name === "TypeError" ? "serve ended" : message;
    });
    if (mine !== running) return;
    running = null;
    state.note = note;
    update();
  }

  /** Lets the model answer, and says why; `again`: as it did before the page was loaded anew. @param {any} asked */
  function answer(asked, again = false) {
    question = asked;
    if (!asked.against) state.said = "";
    run({ ...asked, again }, async ({ said, stage, page, number, chat }) => {
      state.said = said ?? state.said;
      state.note = stage ? `serve ${stage}` : state.note;
      if (!page) return update();
      history.replaceState(null, "", location.pathname); // the place on the map was another answer's
      Object.assign(state, { chat, text: chat ? "" : asked.text });
      const made = await openPage((id) => page[id] ?? "");
      Object.assign(header.words, made.header.words);
      draw = openRooms(made, (_, place) =>
        without(made, place, asked, (one, line) => run({ number, ...one }, line), answer),
      );
      shell.redraw();
    });
  }

  /** Asks what is typed; a message follows those before it. */
  function send() {
    const { text, said, chat } = state;
    const spoken = [question.text, said].map((content, at) => ({ role: at ? "assistant" : "user", content }));
    if (text.trim()) answer({ model: state.model, text, before: chat && said ? [...question.before, ...spoken] : [] });
  }

  return (/** @type {Shell} */ drawn) => {
    shell = drawn;
    const anew = (/** @type {string} */ model) => {
      Object.assign(state, { model, said: "", chat: false });
      update();
    };
    const bar = askingBar(shell, header.serve, state, () => (running ? running.abort() : send()), send, anew);
    update = () => bar.update(Boolean(running), question.text);
    shell.key("t", () => bar.box.focus());
    shell.main.append(bar.element);
    update();
    draw(shell);
    if (header.serve.last && !question.text) answer(header.serve.last, true);
  };
}

/**
 * The box to type in, the choice of the model, and the answer as it comes.
 * @param {Shell} shell @param {any} serve @param {{model: string, text: string, said: string, note: string, chat: boolean}} state
 * @param {() => void} act      asks, or stops the run @param {() => void} send @param {(model: string) => void} anew
 */
function askingBar({ t }, { models, shipped }, state, act, send, anew) {
  const named = { "aria-label": t("serve text"), placeholder: t("serve text"), spellcheck: "false" };
  const onkeydown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  };
  const oninput = () => (state.text = box.value);
  const box = h("textarea", { id: "serve-text", rows: 2, ...named, oninput, onkeydown });
  const options = models.map((/** @type {any} */ { name, size, reason }) => [
    name,
    `${name === shipped ? t("serve shipped") : name} ${reason || size}`,
  ]);
  const choice = select("serve-model", options, state.model, anew);
  choice.ariaLabel = t("serve model");
  const asks = h("button", { id: "serve-ask", onclick: act });
  const fresh = h("button", { onclick: () => anew(state.model) }, t("serve new"));
  const [said, note] = [h("p.said", { "aria-live": "polite" }), h("p", { role: "status" })];
  const element = h("div.try.served", h("div.try-line", choice, fresh), h("div.try-line", box, asks), said, note);
  return {
    ...{ box, element },
    update(/** @type {boolean} */ running, /** @type {string} */ question) {
      if (box.value !== state.text) box.value = state.text;
      asks.textContent = t(running ? "serve stop" : "serve ask");
      element.ariaBusy = String(running);
      fresh.hidden = !state.chat;
      said.replaceChildren(...(state.said ? [h("b", question), " ", state.said.trim()] : []));
      note.className = state.note ? "ribbon" : "note";
      note.textContent = /^serve \w+$/.test(state.note) ? t(state.note) : state.note || t("serve how");
    },
  };
}

/**
 * What the reader takes away from an answer's run, as the rooms of a live page ask for it.
 * @param {Page} page @param {Place} place @param {any} asked @param {(one: any, take: (line: any) => void) => void} run @param {(asked: any) => void} answer
 */
function without({ header: { why, runs, tokens } }, { chosen, follow }, asked, run, answer) {
  const trials = /** @type {any[]} */ ([]);
  const named = (/** @type {number} */ token) => bare(tokens[token] ?? "", 12);
  const head = () => ({ layer: runs[0].layers[chosen.layer].name, head: chosen.head });
  const take = (/** @type {any} */ one, what = "", off = /** @type {any[]} */ ([])) =>
    run(one, ({ without: line }) => {
      const named = line.text ? spelled(line.text, 60) : `${head().layer}.${chosen.head}${what}`;
      trials.unshift({ ...line, off, what: named });
      live.update();
    });
  const live = /** @type {any} */ ({
    state: asked,
    edges: () => {}, // those of the answer are drawn
    mark: () => mark(trials[0] ?? { hidden: [], off: [] }),
    type: (/** @type {string} */ text) => answer({ ...asked, text, answer: null, against: null }),
    strike: () => take({ word: chosen.query }),
    turn: () => take({ head: [chosen.layer, chosen.head] }, "", [[chosen.layer, chosen.head]]),
    cut: (key = chosen.key, query = chosen.query) =>
      key >= 0 && take({ edge: [chosen.layer, chosen.head, query, key] }, ` ${named(query)} → ${named(key)}`),
    bar(/** @type {Shell} */ { t, key }) {
      const sentence = () => take({ sentence: chosen.query });
      const acts = Object.entries({ x: live.strike, s: sentence, c: () => live.cut(), h: live.turn });
      const buttons = acts.map(([sign, act]) => button(key, sign, act));
      const said = t("serve against");
      const rival = h("input", { id: "serve-against", "aria-label": said, placeholder: said, autocomplete: "off" });
      const compare = () => rival.value.trim() && answer({ ...asked, answer: why.answer, against: rival.value });
      rival.onkeydown = (event) => void (event.key === "Enter" && !event.isComposing && compare()); // false cancels
      const tried = h("div.pan", { role: "status" });
      const columns = ["without", "share", "truth", "estimate", "then"].map((name) => columnHead(t(`serve ${name}`)));
      const rowOf = (/** @type {any} */ { what, was, share, truth, estimate, likeliest, probability }) =>
        tableRow(h("bdi", what), [
          `${percent(was)} → ${percent(share)}`,
          withSign(truth, short),
          estimate === null ? "—" : withSign(estimate, short),
          h("td", h("bdi", spelled(likeliest)), ` ${percent(probability)}`),
        ]);
      live.update = () => {
        const token = named(chosen.query);
        const names = { ...head(), token, query: token, key: named(Math.max(chosen.key, 0)) };
        const words = [t("try hide", names), t("serve sentence", names), t("try cut", names), t("serve off", names)];
        buttons.forEach(({ say }, at) => say(words[at]));
        buttons[2].element.disabled = chosen.key < 0 || chosen.key > chosen.query;
        tried.replaceChildren(...(trials.length ? [table("table", columns, trials.map(rowOf))] : []));
        live.mark();
      };
      follow("live", live.update);
      const taken = buttons.map(({ element }) => element);
      const line = h("div.try-line", rival, h("button", { onclick: compare }, t("serve compare")));
      return h("div.try", h("div.taken", taken), line, tried);
    },
  });
  return live;
}
