function sampleLink(index, text) {
  return store.has(index) ? el("a", { href: `#samples/${Number(index)}` }, text) : el("span", { class: "mono" }, text);
}

function tile(value, name, remark) {
  return el("div", { class: "panel tile" }, el("b", {}, value), el("span", {}, name), remark ? el("div", { class: "soft small" }, remark) : null);
}

function binLabel(low, high, kind) {
  if (kind === "integer") return high - low === 1 ? count(low) : `${count(low)}–${count(high - 1)}`;
  if (kind === "share") return `${+(100 * low).toPrecision(4)}–${+(100 * high).toPrecision(4)} %`;
  return `${+low.toPrecision(4)}–${+high.toPrecision(4)}`;
}

function chart(histogram) {
  const width = 340, height = 118, base = height - 16, most = Math.max(...histogram.counts), step = width / histogram.counts.length;
  const growing = histogram.scale === "log" ? el("span", { class: "soft small" }, " bins grow") : null;
  const bars = histogram.counts.map((value, i) => {
    const tall = value ? Math.max((base - 14) * value / most, 1.5) : 0;
    const label = `${binLabel(histogram.edges[i], histogram.edges[i + 1], histogram.kind)}: ${count(value)}`;
    return svg("g", {}, svg("title", {}, label),
      svg("rect", { class: "value", x: i * step + 1, y: base - tall, width: Math.max(step - 2, 1), height: tall, rx: 2 }),
      value ? svg("text", { x: (i + .5) * step, y: base - tall - 3, "text-anchor": "middle" }, count(value)) : null,
      svg("rect", { class: "hit", x: i * step, y: 0, width: step, height: base }));
  });
  const whole = histogram.kind === "integer", last = histogram.edges.at(-1) - (whole ? 1 : 0);
  const ends = [[histogram.edges[0], "start", 0], [last, "end", width]].filter(([value], i) => i === 0 || !whole || value > histogram.edges[0])
    .map(([value, anchor, x]) => svg("text", { x, y: height - 2, "text-anchor": anchor }, quantity(value, histogram.kind)));
  const of = Object.fromEntries(histogram.percentiles);
  return el("div", { class: "panel" }, el("h2", {}, histogram.title, growing),
    svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `histogram of ${histogram.title}` }, bars, ends),
    el("div", { class: "soft small" }, `min ${quantity(of[0], histogram.kind)} · median ${quantity(of[50], histogram.kind)} · p95 ${quantity(of[95], histogram.kind)} · max ${quantity(of[100], histogram.kind)}`));
}

function findingsPanel(card) {
  const serious = card.findings.filter((group) => group.severity !== "note").length;
  const looked = `checked the index of ${card.totals.samples === 1 ? "the only sample" : `all ${count(card.totals.samples)} samples`} and the tokens of ${count(card.checked)}`;
  const boxes = foldedFindings(card.findings, (group) => findingBox(
    { ...group, message: `${count(group.count)} of ${count(card.totals.samples)}: ${group.meaning}. ` },
    group.examples.map((example) => el("span", { title: example.message }, sampleLink(example.index, example.key), " "))));
  const rejected = card.totals.rejected, rows = counted(rejected, "row");
  return el("div", { class: "panel wide" }, el("h2", {}, serious ? "Findings" : "Nothing suspicious in the samples"), el("div", { class: "soft small" }, looked),
    rejected ? el("div", { class: "finding warning rejects" }, el("span", { class: "kind" }, `${MARKS.warning} ${rows} rejected`),
      el("p", {}, card.rejects.map((group) => `${group.reason.replaceAll("_", " ")} ${count(group.count)}`).join(", "), " ",
        el("button", { type: "button", on: { click: () => $("rejects").scrollIntoView() } }, "show"))) : null, boxes);
}

function buildOverview(root) {
  const card = BOOT.card, totals = card.totals;
  const tokens = Math.max(totals.tokens, 1);
  fill(root, {}, [
    el("div", { class: "tiles" },
      tile(count(totals.samples), "samples", totals.truncated ? `${count(totals.truncated)} truncated` : `of ${counted(totals.rows, "source row")}`),
      tile(count(totals.tokens), "tokens", `+ ${count(totals.padding)} padding`),
      tile(percent(totals.targets / tokens), "targets", `${counted(totals.targets, "token")}`),
      tile(count(totals.items), "images", `${counted(totals.patches, "patch", "patches")}`),
      tile(`${(totals.bytes / 1e6).toLocaleString("en-US", { maximumFractionDigits: 1 })} MB`, "on disk", `${counted(card.shards, "shard")}`),
      tile(count(totals.rejected), "rows rejected", percent(totals.rejected / Math.max(totals.rows, 1), 2))),
    findingsPanel(card),
    el("div", { class: "grid charts" }, card.histograms.map(chart)),
    el("div", { class: "grid charts" }, card.extremes.map((group) => el("div", { class: "panel" }, el("h2", {}, group.title),
      el("table", { class: "table" }, el("tbody", {}, group.samples.map((s) => el("tr", {},
        el("td", {}, quantity(s.value, group.kind)), el("td", { class: "text" }, sampleLink(s.index, s.key)), el("td", { class: "soft" }, `row ${count(s.source_row)}`)))))))),
    card.rejects.length ? el("div", { class: "panel wide", id: "rejects" }, el("h2", {}, "Rejected rows"), el("div", { class: "scroll" }, el("table", { class: "table" },
      el("thead", {}, el("tr", {}, el("th", {}, "rows"), el("th", { class: "text" }, "reason"), el("th", { class: "text" }, "first row"))),
      el("tbody", {}, card.rejects.map((group) => el("tr", {}, el("td", {}, count(group.count)), el("td", { class: "text" }, group.reason),
        el("td", { class: "text" }, group.examples.length ? `row ${group.examples[0][0]}: ${group.examples[0][1]}` : ""))))))) : null,
    el("div", { class: "panel wide" }, el("h2", {}, "Identity"), facts(
      ["fingerprint", card.fingerprint], ["configuration", card.config_hash], ["directory", card.directory],
      ["source", card.source_name],
      ["tokenizer", `${card.tokenizer.name}, ${count(card.tokenizer.vocab_size)} ids, ${card.tokenizer.fingerprint.slice(0, 16)}`],
      ["written by", `${card.created_by}, format ${card.schema_version}`]))]);
}
