// The list of samples. It loads further pages as its end comes into view, so a dataset of any size opens at once.
const list = { query: "", sort: "stored", rows: [], next: 0, done: false, running: null, round: 0, at: -1 };
let items, status, searchBox, sentinel;

const QUICK = ["is:suspicious", "target<5%", "patches>4000", "is:truncated"];

function buildList() {
  searchBox = el("input", { type: "search", id: "search", placeholder: "key, text, target<5%, row=17 …", "aria-label": "Search samples", autocomplete: "off", spellcheck: "false" });
  let timer;
  searchBox.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(restart, 180); });
  const sort = el("select", { "aria-label": "Order", on: { change: () => { list.sort = sort.value; restart(); } } },
    [["stored", SERVED ? "as stored" : "as chosen"], ["longest", "longest"], ["shortest", "shortest"], ["patches", "most patches"], ["target", "smallest target share"]]
      .map(([value, name]) => el("option", { value }, name)));
  items = el("ol", { class: "items", id: "items" });
  sentinel = el("li", { class: "more" });
  items.append(sentinel);
  status = el("div", { class: "soft small", id: "found", role: "status" });
  new IntersectionObserver((entries) => { if (entries.some((entry) => entry.isIntersecting)) more(); }, { root: items, rootMargin: "300px" }).observe(sentinel);
  return el("aside", { class: "panel list", "aria-label": "Sample list" },
    el("div", { class: "controls" }, searchBox,
      el("div", { class: "chips" }, QUICK.map((word) => el("button", { type: "button", on: { click: () => toggleWord(word) } }, word))),
      el("div", { class: "row" }, sort, status)), items);
}

function toggleWord(word) {
  const words = searchBox.value.split(/\s+/).filter(Boolean);
  searchBox.value = (words.includes(word) ? words.filter((each) => each !== word) : [...words, word]).join(" ");
  restart();
}

function restart() {
  Object.assign(list, { query: searchBox.value.trim(), rows: [], next: 0, done: false, running: null, round: list.round + 1, at: -1 });
  items.replaceChildren(sentinel);
  sentinel.textContent = "";
  more();
}

function more() {
  if (list.done) return Promise.resolve();
  list.running ??= load(list.round);
  return list.running;
}

async function load(round) {
  try {
    const page = await store.list(list.query, list.sort, list.next);
    if (round !== list.round) return;
    Object.assign(list, { next: page.searched, done: page.done });
    const rows = page.rows.map((row, i) => itemOf(row, list.rows.length + i));
    list.rows.push(...page.rows);
    sentinel.before(...rows);
    const looked = page.done ? "" : `, ${count(page.searched)} of ${count(page.candidates)} searched`;
    status.textContent = `${count(list.rows.length)} found${looked}`;
    sentinel.textContent = page.done ? (list.rows.length ? "" : "no sample matches") : "scroll for more";
    mark();
  } catch (error) {
    if (round !== list.round) return;
    list.done = true;
    status.textContent = "";
    sentinel.replaceChildren(el("span", { class: "error" }, error.message));
  } finally {
    if (round === list.round) list.running = null;
  }
  // The end may still be in view, and an observer reports only changes.
  const box = items.getBoundingClientRect();
  if (round === list.round && !list.done && items.offsetParent && sentinel.getBoundingClientRect().top < box.bottom + 300) setTimeout(more, 0);
}

function itemOf(row) {
  const serious = row.findings.filter((found) => found.severity !== "note");
  const width = Math.max(100 * row.share, row.targets ? .7 : 0);
  const picture = row.images ? store.thumbnail(row) : null;
  return el("li", {}, el("a", { href: `#samples/${Number(row.index)}`, data: { index: row.index } },
    picture ? el("img", { class: "thumb", src: picture, alt: "", loading: "lazy", decoding: "async" }) : null,
    el("span", { class: "line" }, el("span", { class: "key mono" }, row.key), el("span", { class: "soft small" }, `row ${count(row.row)}`)),
    el("span", { class: "words small" }, row.text),
    el("span", { class: "line small soft" }, el("span", {}, `${counted(row.length, "token")}`), el("span", {}, `${percent(row.share)} targets`), el("span", {}, `${counted(row.patches, "patch", "patches")}`)),
    svg("svg", { class: "meter", viewBox: "0 0 100 4", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("rect", { width, height: 4 })),
    el("span", { class: "small row" }, serious.map((found) => el("span", { class: `badge ${found.severity}`, title: found.message }, `${MARKS[found.severity]} ${found.kind.replaceAll("_", " ")}`)),
      row.why ? el("span", { class: "soft" }, row.why) : null)));
}

function mark() {
  const current = view.sample === null ? -1 : view.sample;
  list.at = list.rows.findIndex((row) => row.index === current);
  for (const link of items.querySelectorAll("a")) {
    if (Number(link.dataset.index) === current) {
      link.setAttribute("aria-current", "true");
      link.scrollIntoView({ block: "nearest" });
    } else link.removeAttribute("aria-current");
  }
}

async function stepSample(by) {
  if (list.at + by >= list.rows.length && !list.done) await more();
  const row = list.rows[Math.min(Math.max(list.at + by, 0), list.rows.length - 1)];
  if (row) location.hash = `#samples/${Number(row.index)}`;
}
