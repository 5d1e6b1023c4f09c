let detail, browser, shown = { sample: null, folds: [], table: null };

function buildSamples(root) {
  detail = el("article", { class: "detail", "aria-label": "Sample" }, el("p", { class: "empty" }, "Choose a sample, or press j."));
  browser = el("div", { class: "browser" }, buildList(), detail);
  root.append(browser);
}

async function showSample(index) {
  view.sample = index;
  browser.classList.toggle("reading", index !== null);
  mark();
  if (index === null) return;
  let sample;
  try {
    sample = await store.sample(index);
  } catch (error) {
    detail.replaceChildren(backButton(), el("p", { class: "panel error" }, error.message));
    return;
  }
  if (view.sample === index) drawSample(sample);
}

const backButton = () => el("button", { type: "button", class: "back", on: { click: () => { location.hash = "#samples"; } } }, "← list");
function toggle(name, key, isOn, act) {
  const button = el("button", { type: "button", title: `(${key})`, "aria-pressed": String(isOn), data: { toggle: name } }, name);
  button.addEventListener("click", () => button.setAttribute("aria-pressed", String(act())));
  return button;
}

function drawSample(sample) {
  cursor.listeners = [(index) => showStrip(sample, index)];
  cursor.index = -1;
  $("strip").hidden = true;
  const text = textPanel(sample);
  shown = { sample, folds: text.folds, table: null, holder: text.holder };
  text.holder.classList.toggle("bounds", view.bounds);
  const legend = el("div", { class: "legend" }, el("span", { class: "tok target" }, "target"), el("span", { class: "tok special" }, "special or header"),
    el("span", {}, "↵ newline"), el("span", {}, "hover, or click and use ← →"));
  const buttons = el("div", { class: "row" }, toggle("unfold images", "u", false, toggleFolds), toggle("token bounds", "b", view.bounds, toggleBounds),
    toggle("patch grid", "g", view.grid, toggleGrid),
    ...(sample.boxes.length ? [toggle("boxes", "x", view.boxes, toggleBoxes)] : []), toggle("token table", "t", false, toggleTable));
  const images = sample.images.length ? el("div", { class: "panel" }, allMedia(sample)) : null;
  const tall = sample.images.some((image) => image.grid[1] > image.grid[2]);
  const reading = el("div", { class: "panel" }, legend, text.holder);
  detail.dataset.index = sample.index;
  shown.place = el("div", { class: "panel", hidden: true });
  detail.replaceChildren(
    el("header", {}, backButton(), el("h2", { class: "mono" }, sample.key),
      el("span", { class: "soft" }, `sample ${count(sample.index)} · source row ${count(sample.row)} of ${sample.source} · ${sample.shard}, bytes ${count(sample.offset)}–${count(sample.offset + sample.size)}`)),
    el("div", { class: "soft" }, `${counted(sample.length, "token")} + ${count(sample.padded - sample.length)} padding · ${counted(sample.targets, "target")} (${percent(sample.share)})${sample.truncated ? " · answer truncated" : ""}${sample.columns.map((column) => ` · ${column}`).join("")}`),
    ...foldedFindings(sample.findings, (found) => findingBox(found)).flat().filter(Boolean), buttons,
    el("div", { class: `split${images ? "" : " plain"}${tall ? " tall" : ""}` }, ...[images, reading].filter(Boolean)), plotOf(sample), shown.place);
}

function toggleFolds() {
  const open = !shown.folds.some((fold) => fold.isOpen());
  shown.folds.forEach((fold) => fold.toggle(open));
  return open;
}
function toggleBounds() {
  view.bounds = !view.bounds;
  shown.holder?.classList.toggle("bounds", view.bounds);
  return view.bounds;
}
function toggleGrid() {
  view.grid = !view.grid;
  for (const box of detail.querySelectorAll(".picture")) box.classList.toggle("bare", !view.grid);
  return view.grid;
}
function toggleBoxes() {
  view.boxes = !view.boxes;
  for (const box of detail.querySelectorAll(".picture")) box.classList.toggle("unboxed", !view.boxes);
  return view.boxes;
}
function toggleTable() {
  if (!shown.table) {
    shown.table = tokenTable(shown.sample);
    shown.place.append(el("h2", {}, "Tokens"), shown.table);
  }
  shown.place.hidden = !shown.place.hidden;
  if (!shown.place.hidden) shown.place.scrollIntoView({ block: "nearest" });
  return !shown.place.hidden;
}
