// Builds elements one by one and sets text only as text, so that nothing from a dataset is parsed as markup.
const SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (name === "data") for (const [key, each] of Object.entries(value)) node.dataset[key] = each;
    else if (name === "paint") for (const [property, each] of Object.entries(value)) node.style.setProperty(property, each);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const count = (value) => Number(value).toLocaleString("en-US");
const counted = (value, noun, plural = `${noun}s`) => `${count(value)} ${Number(value) === 1 ? noun : plural}`;
const percent = (value, digits = 1) => `${(100 * value).toFixed(digits)} %`;
function quantity(value, kind) {
  if (kind === "share") return percent(value);
  return kind === "integer" ? count(value) : value.toFixed(2);
}
const newlines = (text) => text.replaceAll("\n", "↵\n");
const oneLine = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥");
const MARKS = { fault: "✖", warning: "▲", note: "·" };
// Okabe and Ito's palette. Every use repeats the information as a letter or a number.
const PALETTE = ["#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#f0e442", "#0072b2", "#999999"];
const colour = (i) => PALETTE[i % PALETTE.length];
const letter = (i) => "abcdefghijklmnopqrstuvwxyz"[i % 26];

function facts(...pairs) {
  return el("dl", { class: "facts" }, pairs.filter(Boolean).map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}
// Folds notes that most samples share, since they say little about one sample.
function foldedFindings(all, box) {
  const usual = new Set(BOOT.card.findings.filter((group) => group.severity === "note" && group.count > BOOT.card.totals.samples / 2).map((group) => group.kind));
  const [folded, open] = [all.filter((found) => usual.has(found.kind)), all.filter((found) => !usual.has(found.kind))];
  const name = folded.length === 1 ? "1 note that holds for most samples" : `${folded.length} notes that hold for most samples`;
  return [open.map(box), folded.length ? el("details", { class: "notes" }, el("summary", {}, name), folded.map(box)) : null];
}
function findingBox(found, ...extra) {
  return el("div", { class: `finding ${found.severity}` },
    el("span", { class: "kind" }, `${MARKS[found.severity]} ${found.kind.replaceAll("_", " ")}`),
    el("p", {}, found.message, ...extra));
}
