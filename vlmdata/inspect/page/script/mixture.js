// Draws the share of each dataset over the steps as stacked bars. Numbers repeat the colours, which recur after eight.
const UNITS = [["sample_share", "samples"], ["token_share", "tokens"], ["target_share", "targets"]];

async function buildMixture(root) {
  try {
    const found = await store.mixture();
    root.append(...mixtureOf(found.datasets, found.parts));
  } catch (error) {
    root.append(el("p", { class: "error" }, error.message));
  }
}

function mixtureOf(names, parts) {
  if (!parts.length) return [el("p", { class: "empty" }, "The dataset has no samples.")];
  const first = parts[0].first_step, steps = parts.reduce((sum, part) => sum + part.steps, 0);
  const changes = parts.filter((part) => part.changed).map((part) => count(part.first_step));
  const sums = names.map((_, i) => ["samples", "tokens", "targets"].map((unit) => parts.reduce((sum, part) => sum + part.datasets[i][unit], 0)));
  const totals = [0, 1, 2].map((unit) => sums.reduce((sum, each) => sum + each[unit], 0));
  const range = `steps ${count(first)} to ${count(first + steps - 1)} of the run, from 0`;
  return [
    el("p", { class: "soft" }, `${range}, in ${counted(parts.length, "part")}`,
      changes.length ? `; the settings change at step ${changes.join(", ")}` : "", names.length === 1 ? "; one dataset, so all of each step is of it" : ""),
    el("div", { class: "panel wide scroll" }, el("table", { class: "table", id: "mixture-totals" },
      headRow("dataset", "samples", "share", "tokens", "share", "targets", "share"),
      el("tbody", {}, names.map((name, i) => el("tr", {}, el("td", { class: "text" }, swatch(i), `${i + 1} ${name}`),
        sums[i].map((value, unit) => [el("td", {}, count(value)), el("td", {}, percent(value / Math.max(totals[unit], 1)))])))))),
    names.length === 1 ? null : UNITS.map(([field, title]) => mixtureChart(names, parts, field, title, first, steps)),
    el("details", {}, el("summary", {}, "shares as numbers"), el("div", { class: "scroll" }, el("table", { class: "table" },
      headRow("steps", "epoch", ...names),
      el("tbody", {}, parts.map((part) => el("tr", {}, el("td", {}, stepsOf(part)), el("td", {}, count(part.epoch)),
        part.datasets.map((share) => el("td", {}, UNITS.map(([field]) => percent(share[field])).join(" · "))))))),
      el("p", { class: "small soft" }, "of samples · of tokens · of targets"))),
  ].flat().filter(Boolean);
}

const stepsOf = (part) => (part.steps === 1 ? count(part.first_step) : `${count(part.first_step)}–${count(part.first_step + part.steps - 1)}`);

function mixtureChart(names, parts, field, title, first, steps) {
  const high = 120, x = (step) => 1000 * (step - first) / steps;
  const drawing = svg("svg", { viewBox: `0 0 1000 ${high}`, preserveAspectRatio: "none", role: "img", "aria-label": `share of ${title} by dataset over the steps` });
  const largest = names.map(() => ({ area: 0 }));
  for (const part of parts) {
    let top = 0;
    part.datasets.forEach((share, i) => {
      const value = share[field], tall = high * value, area = value * part.steps;
      if (value > 0) drawing.append(svg("rect", { x: x(part.first_step), y: top, width: x(part.first_step + part.steps) - x(part.first_step), height: tall, fill: colour(i), data: { dataset: i } },
        svg("title", {}, `${names[i]}: ${percent(value)} of the ${title} of steps ${stepsOf(part)} (epoch ${part.epoch})`)));
      if (value > .1 && area > largest[i].area) largest[i] = { area, left: (x(part.first_step) + x(part.first_step + part.steps)) / 20, top: 100 * (top + tall / 2) / high };
      top += tall;
    });
  }
  for (const part of parts) if (part.changed) drawing.append(svg("line", { class: "change", x1: x(part.first_step), x2: x(part.first_step), y1: 0, y2: high }, svg("title", {}, `the settings change at step ${part.first_step}`)));
  const labels = largest.map((at, i) => (at.area ? el("i", { paint: { left: `${at.left}%`, top: `${at.top}%` } }, i + 1) : null));
  return el("div", { class: "panel wide mixture", data: { unit: title } }, el("h2", {}, `Share of ${title}`),
    el("div", { class: "plot" }, drawing, labels),
    el("div", { class: "row small soft" }, el("span", {}, `step ${count(first)}`), el("span", { class: "end" }, `step ${count(first + steps - 1)}`)));
}
