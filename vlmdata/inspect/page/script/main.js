// Selects views by the URL fragment, so that back, forward and links work. Also handles theme and keys.
const view = { name: "", sample: null, grid: true, boxes: true, bounds: false };
const built = new Set();
// A page of several datasets has no overview and no samples.
const BUILD = { ...(BOOT.card ? { overview: buildOverview, samples: buildSamples } : {}), mixture: buildMixture, packs: buildPacks };
for (const link of document.querySelectorAll("nav a")) link.hidden = !BUILD[link.dataset.view];

function route() {
  const [name, part] = location.hash.slice(1).split("/");
  view.name = Object.hasOwn(BUILD, name) ? name : Object.keys(BUILD)[0];
  for (const each of Object.keys(BUILD)) $(each).hidden = each !== view.name;
  if (!built.has(view.name)) {
    built.add(view.name);
    BUILD[view.name]($(view.name));
  }
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === view.name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (view.name !== "samples") $("strip").hidden = true;
  if (view.name === "samples") showSample(/^\d{1,15}$/.test(part || "") ? Number(part) : null);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
}
const preferred = matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = false;
preferred.addEventListener("change", () => { if (!chosenTheme) setTheme(preferred.matches ? "dark" : "light"); });
function flipTheme() {
  chosenTheme = true;
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
}

function press(name) {
  if (view.name === "samples" && shown.sample) detail.querySelector(`[data-toggle="${name}"]`)?.click();
}
const KEYS = {
  o: () => { location.hash = "#overview"; },
  s: () => { location.hash = "#samples"; },
  m: () => { location.hash = "#mixture"; },
  p: () => { location.hash = "#packs"; },
  j: () => stepFrom(1),
  k: () => stepFrom(-1),
  ArrowRight: () => moveToken(1),
  ArrowLeft: () => moveToken(-1),
  "/": () => { location.hash.startsWith("#samples") || (location.hash = "#samples"); setTimeout(() => $("search")?.focus(), 0); },
  u: () => press("unfold images"),
  b: () => press("token bounds"),
  g: () => press("patch grid"),
  x: () => press("boxes"),
  t: () => press("token table"),
  d: flipTheme,
  "?": () => $("keys").showModal(),
  Escape: () => { if (view.name === "samples") location.hash = "#samples"; },
};
function stepFrom(by) {
  if (view.name !== "samples") location.hash = "#samples";
  setTimeout(() => stepSample(by), 0);
}
function moveToken(by) {
  if (view.name !== "samples" || !shown.sample || view.sample === null) return;
  setCursor(Math.min(Math.max(cursor.index + by, 0), shown.sample.length - 1), "keys");
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open) return;
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const act = Object.hasOwn(KEYS, event.key) ? KEYS[event.key] : null;
  if (!act) return;
  event.preventDefault();
  act();
});
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); $("main").focus(); });
$("theme").addEventListener("click", flipTheme);
$("help").addEventListener("click", () => $("keys").showModal());
addEventListener("hashchange", route);
setTheme(preferred.matches ? "dark" : "light");
route();
