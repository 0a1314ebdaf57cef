// Search while one types, by Sphinx's own index, and buttons that copy code without prompts and outputs. All from disk.

const WORDS = document.documentElement.lang.startsWith("zh")
  ? { copy: "复制", copied: "已复制", none: "没有结果" }
  : { copy: "copy", copied: "copied", none: "nothing found" };
const MOST = 12; // results

/** What of a block of code one would type: after prompts where there are any, without what was printed. */
function typed(text) {
  const lines = text.replace(/\n$/, "").split("\n");
  if (lines.some((line) => /^>>>/.test(line)))
    return lines.filter((line) => /^(>>>|\.\.\.)( |$)/.test(line)).map((line) => line.slice(4));
  const commands = lines.filter((line) => /^\$ /.test(line)).map((line) => line.slice(2));
  return commands.length ? commands : lines;
}

function copyButtons() {
  for (const pre of document.querySelectorAll("div.highlight pre")) {
    const text = typed(pre.textContent).join("\n");
    const button = Object.assign(document.createElement("button"), { className: "copy", textContent: WORDS.copy });
    button.addEventListener("click", async () => {
      await write(text);
      button.textContent = WORDS.copied;
      setTimeout(() => (button.textContent = WORDS.copy), 1500);
    });
    pre.parentElement.append(button);
  }
}

/** Put a text on the clipboard; pages from a disk may not have the newer way. */
async function write(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = Object.assign(document.createElement("textarea"), { value: text });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Load Sphinx's search and its index, once, when somebody is about to search. */
let loading = null;
function load(root, field) {
  const script = (name) =>
    new Promise((done) => {
      const one = Object.assign(document.createElement("script"), { src: root + name, onload: done });
      document.head.append(one);
    });
  loading ??= (async () => {
    if (typeof Search === "undefined") {
      let typed = field.value;
      field.addEventListener("input", () => (typed = field.value));
      await script("_static/language_data.js");
      await script("_static/searchtools.js"); // which empties the field
      field.value = typed;
    }
    if (!Search.hasIndex()) await script("searchindex.js");
  })();
  return loading;
}

/** The results for what stands in the field: [document, title, anchor, what it is, …], the best first. */
function resultsOf(query) {
  const asked = Search._parseQuery(query);
  localStorage.removeItem("sphinx_highlight_terms"); // nothing was chosen yet
  const results = Search._performSearch(...asked).reverse();
  const named = (each) => (each[1].toLowerCase().includes(query.toLowerCase()) ? 0 : 1);
  return results.sort((a, b) => named(a) - named(b)).slice(0, MOST);
}

function searchAsOneTypes() {
  const root = document.documentElement.dataset.content_root;
  const field = document.querySelector(".sidebar-search");
  if (!field) return;
  const list = Object.assign(document.createElement("div"), { className: "found" });
  list.setAttribute("role", "region");
  list.setAttribute("aria-live", "polite");
  list.hidden = true;
  field.form.after(list);
  field.autocomplete = "off";
  const show = async () => {
    await load(root, field);
    const query = field.value.trim();
    list.hidden = query.length < (/[\u3400-\u9fff]/.test(query) ? 1 : 2);
    if (list.hidden) return;
    const links = resultsOf(query).map(([name, title, anchor, about]) => {
      const link = Object.assign(document.createElement("a"), { href: `${root}${name}.html${anchor}` });
      const more = Object.assign(document.createElement("small"), { textContent: about ?? "" });
      link.append(title, " ", more);
      return link;
    });
    list.replaceChildren(...(links.length ? links : [WORDS.none]));
  };
  field.addEventListener("focus", () => load(root, field));
  field.addEventListener("input", show);
  const step = (event) => {
    const all = [field, ...list.querySelectorAll("a")];
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") list.hidden = true;
    if (!by || list.hidden) return;
    event.preventDefault();
    all[Math.min(all.length - 1, Math.max(0, all.indexOf(document.activeElement) + by))].focus();
  };
  for (const each of [field, list]) each.addEventListener("keydown", step);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.closest("input, textarea")) return;
    event.preventDefault();
    field.focus();
  });
}

copyButtons();
searchAsOneTypes();
