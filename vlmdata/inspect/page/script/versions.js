// Lists the versions of the dataset, and what changed between two. Samples of the version that is shown are links.
let versionsDiff;

async function buildVersions(root) {
  try {
    root.append(...versionsOf(await store.versions()));
  } catch (error) {
    root.append(el("p", { class: "error" }, error.message));
  }
}

function versionsOf(found) {
  const or = (value) => (value === null || value === undefined ? "–" : count(value));
  const numbers = found.versions.map((each) => each.number);
  const table = el("div", { class: "panel wide scroll" }, el("table", { class: "table", id: "versions-table" },
    headRow("version", "parent", "samples", "rows kept", "made", "removed", "shards", "added", "removed", "fingerprint"),
    el("tbody", {}, found.versions.map((each) => el("tr", {}, [
      each.number === found.shown ? `${each.number} (shown)` : each.number,
      each.parent === null && each.parent_fingerprint !== null ? "pruned" : or(each.parent), count(each.samples),
      or(each.rows.kept), or(each.rows.made), or(each.rows.removed), count(each.shards), or(each.shards_added), or(each.shards_removed),
      each.fingerprint.slice(0, 16)].map((value) => el("td", {}, value)))))));
  if (numbers.length < 2) return [el("p", { class: "soft" }, "The dataset has only this version."), table];
  versionsDiff = el("div", { id: "versions-diff" });
  const choice = (label, chosen) => {
    const select = el("select", { "aria-label": label, on: { change: show } }, numbers.map((number) => el("option", { value: number, selected: number === chosen }, `version ${number}`)));
    return select;
  };
  const at = Math.max(numbers.indexOf(found.shown), 1);
  const [first, second] = [choice("from version", numbers[at - 1]), choice("to version", numbers[at])];
  async function show() {
    const asked = [first.value, second.value].join();
    try {
      const compared = await store.compareVersions(Number(first.value), Number(second.value));
      if (asked === [first.value, second.value].join()) versionsDiff.replaceChildren(...diffOf(found, compared));
    } catch (error) {
      versionsDiff.replaceChildren(el("p", { class: "error" }, error.message));
    }
  }
  show();
  return [table, el("div", { class: "panel wide" }, el("h2", {}, "What changed"), el("div", { class: "row" }, first, "to", second), versionsDiff)];
}

function diffOf(found, diff) {
  const group = (name, title, part) => el("div", { data: { group: name } }, el("h3", {}, `${count(part.count)} ${title}`),
    el("p", {}, part.samples.map((sample) => [sample.index === null ? el("span", { class: "mono" }, sample.key) : sampleLink(sample.index, sample.key),
      sample.parts.length ? ` (${sample.parts.join(", ")})` : "", " "])),
    part.count > part.samples.length ? el("p", { class: "soft small" }, `… and ${count(part.count - part.samples.length)} more; vlmdata diff --json lists all`) : null);
  return [
    el("p", {}, `${count(diff.equal)} equal`, diff.moved ? `; ${count(diff.moved)} of those only in version ${diff.first} are in version ${diff.second} under another key` : ""),
    ...diff.settings.map(([name, one, other]) => el("p", {}, `${name}: ${one}, then ${other}`)),
    group("changed", "changed", diff.changed), group("removed", `only in version ${diff.first}`, diff.only_first), group("added", `only in version ${diff.second}`, diff.only_second),
    el("p", { class: "soft small" }, `An edited row gets a new key. This page opens samples of version ${found.shown}; for others: vlmdata inspect ${found.place}@N --serve`),
  ];
}
