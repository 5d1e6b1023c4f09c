// The text of a sample, token by token, and its table. Text, picture, plot and table share `cursor`.
const cursor = { index: -1, listeners: [] };

function setCursor(index, from) {
  if (index === cursor.index) return;
  cursor.index = index;
  for (const listen of cursor.listeners) listen(index, from);
}

// What is drawn of an item: an image, or each temporal patch of a video as a picture of its own.
function picturesOf(image) {
  if (!image.frames.length) return [image];
  return image.frames.map((frame) => ({ ...image, ...frame, frame, grid: [1, image.grid[1], image.grid[2]] }));
}
function imageAt(sample, index) {
  return sample.images.flatMap(picturesOf).find((image) => index >= image.start && index < image.start + image.tokens);
}
// The merged patch that a token of an image shows, -1 for none, and the token that shows a merged patch.
const cellOf = (image, index) => {
  const number = index - image.start, cells = image.grid[1] * image.grid[2] / image.merge ** 2;
  return image.cells ? image.cells[number] ?? -1 : number < cells ? number : -1;
};
const tokenOf = (image, cell) => image.start + (image.cells ? image.cells.indexOf(cell) : cell);
function tokensAcross(image) {
  const across = image.grid[2] / image.merge, second = image.cells ? image.cells.indexOf(across) : across;
  return second > 0 ? second : image.tokens;
}
const shownText = (sample, index) => sample.tokens.text[index] ?? sample.spans.find((span) => index < span.stop).text;

function textPanel(sample) {
  const holder = el("div", { class: "tokens", tabindex: "0", role: "application", "aria-label": "Tokens; arrow keys move" });
  const nodes = new Map(), folds = [];
  const suspects = sample.findings.filter((found) => found.tokens).map((found) => found.tokens);
  let turn = null, into = null, marked = null, boxed = [];
  sample.spans.forEach((span) => {
    if (span.turn !== turn) {
      turn = span.turn;
      into = el("div");
      holder.append(el("section", { class: `turn ${/^[a-z]+$/.test(span.role) ? span.role : ""}` }, el("h3", {}, span.role || "no turn"), into));
    }
    if (span.kind === "image") into.append(foldOf(sample, span, nodes, folds));
    else for (let i = span.start; i < span.stop; i += 1) {
      const suspect = suspects.some(([start, stop]) => i >= start && i < stop);
      const node = el("span", { class: `tok ${span.kind}${span.target ? " target" : ""}${suspect ? " suspect" : ""}`, data: { i } }, newlines(sample.tokens.text[i]));
      nodes.set(i, node);
      into.append(node);
    }
  });
  listenToTokens(holder, sample);
  cursor.listeners.push((index, from) => {
    marked?.classList.remove("current");
    for (const node of boxed) node.classList.remove("boxed");
    boxed = sample.boxes.filter((found) => index >= found.start && index < found.stop)
      .flatMap((found) => Array.from({ length: found.stop - found.start }, (_, i) => nodes.get(found.start + i))).filter(Boolean);
    for (const node of boxed) node.classList.add("boxed");
    for (const fold of folds) fold.show(index);
    marked = nodes.get(index);
    marked?.classList.add("current");
    if (from === "keys" || from === "box") marked?.scrollIntoView({ block: "nearest" });
  });
  return { holder, folds };
}

function foldOf(sample, span, nodes, folds) {
  const total = span.stop - span.start;
  const name = `${span.text} × ${count(total)}`;
  const button = el("button", { type: "button", class: "fold", data: { i: span.start }, title: "Unfold (u)", "aria-expanded": "false" }, name);
  const box = el("div", { class: "cells", hidden: true });
  const fold = {
    toggle(open = box.hidden) {
      if (open && !box.childElementCount) {
        for (let i = span.start; i < span.stop; i += 1) {
          const cell = el("span", { class: `cell${span.target ? " target" : ""}`, data: { i } });
          nodes.set(i, cell);
          box.append(cell);
        }
        const image = imageAt(sample, span.start);
        const across = image ? tokensAcross(image) : 0;
        if (image && across <= 60) box.style.setProperty("grid-template-columns", `repeat(${across}, 11px)`);
      }
      box.hidden = !open;
      button.setAttribute("aria-expanded", String(open));
    },
    isOpen: () => !box.hidden,
    show(index) {
      const inside = index >= span.start && index < span.stop;
      button.classList.toggle("current", inside);
      button.textContent = inside ? `${span.text} ${count(index - span.start + 1)} of ${count(total)}` : name;
    },
  };
  button.addEventListener("click", () => fold.toggle());
  // Moving along the folded chip steps through its tokens.
  button.addEventListener("pointermove", (event) => {
    const area = button.getBoundingClientRect();
    const part = Math.min(Math.max((event.clientX - area.left) / area.width, 0), .9999);
    setCursor(span.start + Math.floor(part * total), "text");
    event.stopPropagation();
  });
  folds.push(fold);
  return [button, box].reduce((all, node) => (all.append(node), all), document.createDocumentFragment());
}

function listenToTokens(holder, sample) {
  const at = (event) => event.target.closest("[data-i]");
  holder.addEventListener("pointerover", (event) => {
    const node = at(event);
    if (node && !node.classList.contains("fold")) setCursor(Number(node.dataset.i), "text");
  });
  holder.addEventListener("click", (event) => { const node = at(event); if (node && !node.classList.contains("fold")) setCursor(Number(node.dataset.i), "text"); });
  holder.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    setCursor(Math.min(Math.max(cursor.index + by, 0), sample.length - 1), "keys");
  });
}

function showStrip(sample, index) {
  const strip = $("strip");
  strip.hidden = index < 0;
  if (index < 0) return;
  const tokens = sample.tokens, label = tokens.label[index], image = imageAt(sample, index);
  const parts = [["token", count(index)], ["id", tokens.id[index]], ["label", label < 0 ? `−${-label} (no loss)` : label],
    ["mask", `${tokens.mask[index]} ${tokens.mask[index] ? "(target)" : ""}`],
    ...(tokens.weight ? [["weight", tokens.weight[index]]] : []), [tokens.axes.join(" "), tokens.axes.map((axis) => tokens[axis][index]).join(" ")]];
  if (image) {
    const merge = image.merge, across = image.grid[2] / merge, cell = cellOf(image, index);
    const patches = (place) => (merge > 1 ? `${merge * place}–${merge * (place + 1) - 1}` : place);
    const shown = image.frame ? `, temporal patch ${image.patch}${timesOf(image.frame)}` : "";
    parts.push([image.kind, `${image.number}${shown}, ${cell < 0 ? "no patches" : `patch rows ${patches(Math.floor(cell / across))}, columns ${patches(cell % across)}`}`]);
  }
  strip.replaceChildren(el("span", { class: "what" }, oneLine(shownText(sample, index)) || "(rest of a character)"),
    ...parts.map(([name, value]) => el("span", {}, el("span", { class: "soft" }, `${name} `), el("b", { data: { field: name } }, value))));
}

const ROWS_AT_ONCE = 300;
function tokenTable(sample) {
  const body = el("tbody"), tokens = sample.tokens, rows = new Map();
  const columns = ["index", "id", "text", "label", "mask", ...(tokens.weight ? ["weight"] : []), ...tokens.axes];
  const plan = [];
  for (const span of sample.spans) {
    const folded = span.kind === "image" && span.stop - span.start > 5;
    for (let i = span.start; i < span.stop; i += 1) {
      if (folded && i === span.start + 2) { plan.push(-(span.stop - span.start - 4)); i = span.stop - 3; } else plan.push(i);
    }
  }
  let next = 0;
  const button = el("button", { type: "button", on: { click: () => extend() } }, "show more");
  function extend() {
    for (const i of plan.slice(next, next + ROWS_AT_ONCE)) {
      if (i < 0) { body.append(el("tr", {}, el("td", {}, "…"), el("td"), el("td", { class: "text soft", colspan: columns.length - 2 }, `${count(-i)} more image tokens`))); continue; }
      const row = el("tr", { class: tokens.mask[i] ? "target" : "", data: { i } }, el("td", {}, i), el("td", {}, tokens.id[i]),
        el("td", { class: "text" }, oneLine(shownText(sample, i))), columns.slice(3).map((name) => el("td", {}, tokens[name][i])));
      rows.set(i, row);
      body.append(row);
    }
    next += ROWS_AT_ONCE;
    button.hidden = next >= plan.length;
  }
  extend();
  body.addEventListener("pointerover", (event) => { const row = event.target.closest("[data-i]"); if (row) setCursor(Number(row.dataset.i), "table"); });
  cursor.listeners.push((index) => { body.querySelector(".current")?.classList.remove("current"); rows.get(index)?.classList.add("current"); });
  return el("div", {}, el("div", { class: "scroll" }, el("table", { class: "table", id: "token-table" },
    el("thead", {}, el("tr", {}, columns.map((name) => el("th", { class: name === "text" ? "text" : "" }, name)))), body)), button);
}
