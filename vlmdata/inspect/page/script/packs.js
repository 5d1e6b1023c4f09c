// Draws a pack as a bar of segments, and below it, at the same scale, the context-parallel rank of each token.
const packs = { next: 0, total: null, busy: false };
let packList, packEnd;

function buildPacks(root) {
  packList = el("div");
  packEnd = el("div", { class: "more" });
  root.append(packList, packEnd);
  new IntersectionObserver((entries) => { if (entries.some((entry) => entry.isIntersecting)) morePacks(); }, { rootMargin: "400px" }).observe(packEnd);
}

async function morePacks() {
  if (packs.busy || (packs.total !== null && (packs.next >= packs.total || !SERVED))) return;
  packs.busy = true;
  try {
    const page = await store.packs(packs.next);
    if (packs.total === null) packList.append(el("p", { class: "soft" }, `${counted(page.total, "batch", "batches")} in the epoch; ` + Object.entries(page.options).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`).join(", ")));
    packs.total = page.total;
    packs.next += page.batches.length;
    packList.append(...page.batches.map(packOf));
    const all = packs.next >= packs.total || !SERVED;
    packEnd.textContent = all ? (packs.next < packs.total ? `the first ${count(packs.next)} of ${count(packs.total)}; --serve shows all` : "") : "scroll for more";
    packs.busy = false;
    if (!all && packEnd.getBoundingClientRect().top < innerHeight + 400) setTimeout(morePacks, 0);
  } catch (error) {
    packs.total = 0;
    packEnd.replaceChildren(el("span", { class: "error" }, error.message));
  }
}

function packOf(batch) {
  const wide = Math.max(batch.total_tokens, batch.capacity || 0), several = batch.context_parallel > 1;
  const drawing = svg("svg", { viewBox: `0 0 1000 ${several ? 58 : 32}`, preserveAspectRatio: "none", role: "img", "aria-label": `batch ${batch.number}`, class: several ? "two" : "one" });
  const x = (token) => 1000 * token / wide;
  batch.segments.forEach((segment, i) => {
    const end = segment.start + segment.length;
    if (segment.length) drawing.append(svg("rect", { class: "seg", x: x(segment.start), y: 0, width: x(segment.length), height: 30, fill: colour(i), data: { segment: i }, on: { click: () => openSegment(segment) } },
      svg("title", {}, `${letter(i)}: ${segment.key}, ${counted(segment.length, "token")}, ${counted(segment.patches, "patch", "patches")}, ${percent(segment.cost_share)} of the cost`)));
    if (segment.stop > end) drawing.append(svg("rect", { class: "pad", x: x(end), y: 0, width: x(segment.stop - end), height: 30 }, svg("title", {}, `padding, ${counted(segment.stop - end, "token")}`)));
  });
  if (wide > batch.total_tokens) drawing.append(svg("rect", { class: "room", x: x(batch.total_tokens), y: 0, width: x(wide - batch.total_tokens), height: 30 }, svg("title", {}, `empty space, ${counted(wide - batch.total_tokens, "token")}`)));
  if (several) for (const share of batch.ranks) for (const [start, stop] of share.ranges) {
    drawing.append(svg("rect", { class: "cp", x: x(start), y: 36, width: x(stop - start), height: 20, fill: colour(share.rank), data: { rank: share.rank } },
      svg("title", {}, `context-parallel rank ${share.rank}: tokens ${count(start)}–${count(stop - 1)}`)));
  }
  // HTML over the drawing, because text inside the drawing would be stretched.
  const label = (kind, start, stop, text) => (stop - start > wide / 90 ? el("i", { class: kind, paint: { left: `${50 * (start + stop) / wide}%` } }, text) : null);
  const labels = [batch.segments.filter((s) => s.key).map((s, i) => label("of-segment", s.start, s.start + s.length, letter(i))),
    several ? batch.ranks.map((share) => share.ranges.map(([start, stop]) => label("of-rank", start, stop, share.rank))) : null];
  const link = (segment) => (store.has(segment.index) && segment.dataset === 0 ? el("a", { href: `#samples/${Number(segment.index)}` }, segment.key) : segment.key || "padded tail");
  const segments = el("table", { class: "table" }, headRow("", "key", "row", "tokens", "padding", "targets", "images", "patches", "cost"),
    el("tbody", {}, batch.segments.map((s, i) => el("tr", {}, el("td", {}, swatch(i), s.key ? letter(i) : ""), el("td", { class: "text" }, link(s)), [s.key ? count(s.source_row) : "", count(s.length), count(s.padding), count(s.targets), count(s.images), count(s.patches), percent(s.cost_share)].map((v) => el("td", {}, v))))));
  const ranks = several ? el("table", { class: "table" }, headRow("rank", "tokens", "true", "targets", "images", "patches"),
    el("tbody", {}, batch.ranks.map((r) => el("tr", {}, el("td", {}, swatch(r.rank), r.rank), [r.tokens, r.true_tokens, r.targets, r.images, r.patches].map((v) => el("td", {}, count(v))))))) : null;
  const used = batch.capacity ? ` · ${percent(batch.true_tokens / batch.capacity)} of the capacity ${count(batch.capacity)}` : "";
  return el("article", { class: "panel pack", data: { batch: batch.number } },
    el("div", { class: "row" }, el("h2", {}, `batch ${batch.number}`), el("span", { class: "soft" },
      `epoch ${batch.epoch}, step ${batch.step}, micro-batch ${batch.micro_batch} · ${batch.pack < 0 ? "empty" : `pack ${batch.pack}`} · ${counted(batch.true_tokens, "token")} + ${count(batch.padding)} padding${used} · ${counted(batch.targets, "target")} · ${(batch.cost * 2 ** 20 / 1e12).toFixed(1)} TFLOP`)),
    el("div", { class: "packbar" }, drawing, labels),
    el("div", { class: "small soft" }, (several ? "above: samples; below: the context-parallel rank of each token" : "samples; padding is pale") + (wide > batch.total_tokens ? "; the dashed area is empty" : "")),
    el("details", { open: batch.number === 0 }, el("summary", {}, "segments"), el("div", { class: "scroll" }, segments), ranks ? el("div", { class: "scroll" }, ranks) : null,
      el("p", { class: "small mono" }, `cu_seqlens ${batch.cu_seqlens.join(", ")}`), el("p", { class: "small mono" }, `cu_seqlens_padded ${batch.cu_seqlens_padded.join(", ")}`)));
}

const swatch = (i) => el("span", { class: "swatch", paint: { background: colour(i) } });
const headRow = (...names) => el("thead", {}, el("tr", {}, names.map((name) => el("th", { class: name === "key" ? "text" : "" }, name))));
function openSegment(segment) {
  if (segment.key && store.has(segment.index)) location.hash = `#samples/${Number(segment.index)}`;
}
