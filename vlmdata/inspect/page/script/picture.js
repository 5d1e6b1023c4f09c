// An image under its grid: thin lines are patches of 16 pixels, strong ones tokens of 2 × 2 patches.
function gridPath(wide, high, step) {
  let path = "";
  for (let x = step; x < wide; x += step) path += `M${x} 0V${high}`;
  for (let y = step; y < high; y += step) path += `M0 ${y}H${wide}`;
  return path;
}

function pictureOf(sample, image) {
  const [, high, wide] = image.grid, across = wide / 2;
  const spot = svg("rect", { class: "spot", width: 2, height: 2, visibility: "hidden" });
  const overlay = svg("svg", { viewBox: `0 0 ${wide} ${high}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("path", { class: "lines fine", d: gridPath(wide, high, 1) }), svg("path", { class: "lines", d: gridPath(wide, high, 2) }), spot);
  const box = el("div", { class: `picture${view.grid ? "" : " bare"}`, data: { image: image.number } },
    el("img", { src: store.picture(sample, image), width: image.width, height: image.height, alt: `image ${image.number} as the model sees it`, decoding: "async" }), overlay);
  const point = (event) => {
    const area = overlay.getBoundingClientRect();
    const column = Math.floor((event.clientX - area.left) / area.width * across), row = Math.floor((event.clientY - area.top) / area.height * high / 2);
    if (column >= 0 && row >= 0 && column < across && row < high / 2) setCursor(image.start + row * across + column, "picture");
  };
  overlay.addEventListener("pointermove", point);
  overlay.addEventListener("pointerdown", point);
  cursor.listeners.push((index) => {
    const number = index - image.start, inside = number >= 0 && number < across * high / 2;
    spot.setAttribute("visibility", inside ? "visible" : "hidden");
    if (!inside) return;
    spot.setAttribute("x", 2 * (number % across));
    spot.setAttribute("y", 2 * Math.floor(number / across));
  });
  const source = image.source, steps = source.normalised || [];
  const from = source.width ? ` From a ${source.format} of ${source.width} × ${source.height}, ${source.mode}${steps.length ? `, normalised: ${steps.join(", ")}` : ""}` : "";
  return el("figure", {}, box, el("figcaption", { class: "small soft" },
    `image ${image.number}: ${image.width} × ${image.height} pixels, ${high} × ${wide} patches, ${count(image.tokens)} tokens from ${count(image.start)} on.${from}`));
}

function plotOf(sample) {
  const tokens = sample.tokens, wide = Math.max(sample.length - 1, 1);
  const most = Math.max(1, ...["t", "h", "w"].map((axis) => tokens[axis].reduce((a, b) => Math.max(a, b), 0)));
  const curve = (axis) => svg("path", { class: axis, d: "M" + tokens[axis].map((value, i) => `${i} ${most - value}`).join("L") });
  const zone = (span) => (span.kind === "image" ? "zone-image" : span.target ? "zone-target" : null);
  const at = svg("line", { class: "at", y1: 0, y2: most, x1: 0, x2: 0, visibility: "hidden" });
  const drawing = svg("svg", { viewBox: `0 0 ${wide} ${most}`, preserveAspectRatio: "none", role: "img", "aria-label": "t, h and w position of every token" },
    sample.spans.filter(zone).map((span) => svg("rect", { class: zone(span), x: span.start, y: 0, width: Math.max(span.stop - span.start - 1, .5), height: most })),
    ["t", "h", "w"].map(curve), at);
  drawing.addEventListener("pointermove", (event) => {
    const area = drawing.getBoundingClientRect();
    setCursor(Math.min(Math.max(Math.round((event.clientX - area.left) / area.width * wide), 0), sample.length - 1), "plot");
  });
  cursor.listeners.push((index) => {
    at.setAttribute("visibility", index < 0 ? "hidden" : "visible");
    at.setAttribute("x1", index);
    at.setAttribute("x2", index);
  });
  const legend = el("div", { class: "legend" }, [["t", "t, time"], ["h", "h, row"], ["w", "w, column"]].map(([axis, name]) => el("span", {}, el("span", { class: `key-line ${axis}` }), name)),
    el("span", {}, `0 to ${count(most)}, over ${count(sample.length)} tokens; shaded: image tokens, targets`));
  return el("div", { class: "panel plot" }, el("h2", {}, "Positions"), legend, drawing);
}
