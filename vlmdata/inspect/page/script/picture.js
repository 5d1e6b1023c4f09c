// An image with its grid: thin lines are patches, thick lines are tokens of merge × merge patches.
function gridPath(wide, high, step) {
  let path = "";
  for (let x = step; x < wide; x += step) path += `M${x} 0V${high}`;
  for (let y = step; y < high; y += step) path += `M0 ${y}H${wide}`;
  return path;
}

const seconds = (time) => time.toFixed(2);
const timesOf = (frame) => (frame.seconds.length ? ` at ${frame.seconds.map(seconds).join(" and ")} s` : "");

// An image, or a video as a strip of its temporal patches, each with the times of its frames.
function mediaOf(sample, image) {
  if (!image.frames.length) return pictureOf(sample, image);
  const drawn = picturesOf(image).filter((picture) => store.draws(picture)), source = image.source;
  const left = image.frames.length - drawn.length;
  const kept = new Set(image.frames.flatMap((frame) => frame.source)).size;
  const counts = kept ? `: ${count(kept)} kept, ${count(source.file_frames - kept)} dropped` : "";
  const from = source.width ? ` From a ${source.format} of ${source.width} × ${source.height}, ${count(source.file_frames)} frames at ${seconds(source.rate || 0)} a second${counts}.` : "";
  return el("figure", {}, el("div", { class: "frames" }, drawn.map((picture) => pictureOf(sample, picture))), el("figcaption", { class: "small soft" },
    `video ${image.number}: ${counted(image.frames.length, "temporal patch", "temporal patches")} of ${image.width} × ${image.height} pixels${left ? `, ${left} of them not in this file` : ""}, ${counted(image.tokens, "token")} from ${count(image.start)} on.${from}`));
}

// The tiles of an image stand in their places, all else one below the other.
function allMedia(sample) {
  const made = [];
  let tiles = null;
  for (const image of sample.images) {
    const figure = mediaOf(sample, image);
    if (!image.tile) {
      tiles = null;
      made.push(figure);
      continue;
    }
    if (!tiles || !image.source.view) made.push(tiles = el("div", { class: "mosaic" }));
    [figure.style.gridRow, figure.style.gridColumn] = image.tile.map((at) => String(at + 1));
    tiles.append(figure);
  }
  return made;
}

// The boxes and points of an image. A name points to its tokens; a token of a box marks the box.
function boxesIn(sample, image) {
  const share = (value, side) => `${100 * value / side}%`;
  const shown = sample.boxes.flatMap((found) => found.places.filter((place) => place.item === image.number).map((place) => [found, place.pixels]));
  return shown.map(([found, pixels]) => {
    const [x, y, right = x, bottom = y] = pixels, isPoint = pixels.length === 2;
    const name = el("button", { type: "button", tabindex: "-1" }, found.label || `${found.number}`);
    const node = el("div", { class: `box${isPoint ? " point" : ""}${found.fault ? " wrong" : ""}`, title: found.fault || null, data: { box: found.number }, paint: {
      "--ink-of-box": colour(found.number), left: share(x, image.width), top: share(y, image.height), width: share(right - x, image.width), height: share(bottom - y, image.height) } }, name);
    for (const event of ["pointerenter", "click", "focus"]) name.addEventListener(event, () => setCursor(found.start, "box"));
    cursor.listeners.push((index) => node.classList.toggle("current", index >= found.start && index < found.stop));
    return node;
  });
}

function pictureOf(sample, image) {
  const [, high, wide] = image.grid, merge = image.merge, across = wide / merge, down = high / merge;
  const spot = svg("rect", { class: "spot", width: merge, height: merge, visibility: "hidden" });
  const overlay = svg("svg", { viewBox: `0 0 ${wide} ${high}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("path", { class: "lines fine", d: gridPath(wide, high, 1) }), svg("path", { class: "lines", d: gridPath(wide, high, merge) }), spot);
  const box = el("div", { class: `picture${view.grid ? "" : " bare"}${view.boxes ? "" : " unboxed"}`, data: { image: image.number } },
    el("img", { src: store.picture(sample, image), width: image.width, height: image.height, alt: image.frame ? `video ${image.number}, temporal patch ${image.patch}` : `image ${image.number} as the model sees it`, decoding: "async", loading: image.frame ? "lazy" : "eager" }), overlay);
  if (!image.frame) box.append(...boxesIn(sample, image));
  const point = (event) => {
    const area = overlay.getBoundingClientRect();
    const column = Math.floor((event.clientX - area.left) / area.width * across), row = Math.floor((event.clientY - area.top) / area.height * down);
    if (column >= 0 && row >= 0 && column < across && row < down) setCursor(tokenOf(image, row * across + column), "picture");
  };
  overlay.addEventListener("pointermove", point);
  overlay.addEventListener("pointerdown", point);
  cursor.listeners.push((index) => {
    const number = index >= image.start && index < image.start + image.tokens ? cellOf(image, index) : -1, inside = number >= 0;
    spot.setAttribute("visibility", inside ? "visible" : "hidden");
    if (!inside) return;
    spot.setAttribute("x", merge * (number % across));
    spot.setAttribute("y", merge * Math.floor(number / across));
  });
  if (image.frame) return el("figure", {}, box, el("figcaption", { class: "small soft" }, `${image.patch}:${timesOf(image.frame)}${image.told === null ? "" : `, told ${seconds(image.told)} s`}`));
  if (image.tile) return el("figure", {}, box, el("figcaption", { class: "small soft" }, `image ${image.number}, from ${count(image.start)} on`));
  const source = image.source, steps = source.normalised || [];
  const from = source.width ? ` From a ${source.format} of ${source.width} × ${source.height}, ${source.mode}${steps.length ? `, normalised: ${steps.join(", ")}` : ""}` : "";
  return el("figure", {}, box, el("figcaption", { class: "small soft" },
    `image ${image.number}: ${image.width} × ${image.height} pixels, ${high} × ${wide} patches, ${counted(image.tokens, "token")} from ${count(image.start)} on.${from}`));
}

// Curves over token numbers; the frame moves, the drawing stays. A long text makes the few positions of an image
// invisible, so each image can fill the frame.
const lastOf = (image) => (image.frames.length ? image.frames[image.frames.length - 1].start + image.frames[0].tokens : image.start + image.tokens);
const AXES = { t: "t, time", h: "h, row", w: "w, column" };
function plotOf(sample) {
  const tokens = sample.tokens, axes = tokens.axes, colours = ["t", "h", "w"];
  const reach = (start, stop) => {
    let low = Infinity, high = -Infinity;
    for (const axis of axes) for (let i = start; i < stop; i += 1) { low = Math.min(low, tokens[axis][i]); high = Math.max(high, tokens[axis][i]); }
    return [low, Math.max(high, low + 1)];
  };
  const curve = (axis, i) => svg("path", { class: colours[i % 3], d: "M" + tokens[axis].map((value, i) => `${i} ${-value}`).join("L") });
  const zone = (span) => (span.kind === "image" ? "zone-image" : span.target ? "zone-target" : null);
  const [lowest, highest] = reach(0, sample.length), tall = highest - lowest;
  const at = svg("line", { class: "at", y1: -highest, y2: -lowest, x1: 0, x2: 0, visibility: "hidden" });
  const drawing = svg("svg", { preserveAspectRatio: "none", role: "img", "aria-label": `${axes.join(", ")} of each token` },
    sample.spans.filter(zone).map((span) => svg("rect", { class: zone(span), x: span.start, y: -highest, width: Math.max(span.stop - span.start - 1, .5), height: tall })),
    axes.map(curve), at);
  const range = el("span", {});
  const frame = { start: 0, stop: sample.length };
  function show(start, stop) {
    const [low, high] = reach(start, stop);
    Object.assign(frame, { start, stop });
    drawing.setAttribute("viewBox", `${start} ${-high} ${Math.max(stop - start - 1, 1)} ${high - low}`);
    range.textContent = `${count(low)} to ${count(high)}, tokens ${count(start)} to ${count(stop - 1)}; shaded: image tokens, targets`;
  }
  show(0, sample.length);
  drawing.addEventListener("pointermove", (event) => {
    const area = drawing.getBoundingClientRect(), wide = frame.stop - frame.start - 1;
    setCursor(frame.start + Math.min(Math.max(Math.round((event.clientX - area.left) / area.width * wide), 0), wide), "plot");
  });
  cursor.listeners.push((index) => {
    at.setAttribute("visibility", index < 0 ? "hidden" : "visible");
    at.setAttribute("x1", index);
    at.setAttribute("x2", index);
  });
  const frames = [["whole sample", 0, sample.length], ...sample.images.slice(0, 12).map((image) => [`${image.kind} ${image.number}`, image.start, lastOf(image)])];
  const buttons = frames.map(([name, start, stop], i) => el("button", { type: "button", "aria-pressed": String(i === 0), on: { click: (event) => {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button === event.currentTarget));
    show(start, stop);
  } } }, name));
  const legend = el("div", { class: "legend" }, axes.map((axis, i) => el("span", {}, el("span", { class: `key-line ${colours[i % 3]}` }), AXES[axis] || axis)), range);
  return el("div", { class: "panel plot" }, el("h2", {}, "Positions"), legend, drawing, frames.length > 1 ? el("div", { class: "chips frames" }, buttons) : null);
}
