// Source of samples and packs: this file or its server. Both return the same promises.
const BOOT = JSON.parse($("boot").textContent);
const SERVED = BOOT.mode === "served";
const cache = new Map();

async function ask(path) {
  const answer = await fetch(path, { credentials: "omit", redirect: "error" });
  const body = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
  if (!answer.ok) throw new Error(body.error || `the server answered ${answer.status}`);
  return body;
}

const FIELDS = {
  target: (s) => s.share, targets: (s) => s.targets, length: (s) => s.length, patches: (s) => s.patches,
  images: (s) => s.images, row: (s) => s.row, turns: (s) => s.turns,
};
const FLAGS = {
  "is:truncated": (s) => s.truncated,
  "is:suspicious": (s) => s.findings.some((found) => found.severity !== "note"),
};
const COMPARE = { "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b, "=": (a, b) => a === b };
const ORDER = {
  stored: null, longest: (s) => -s.length, shortest: (s) => s.length, patches: (s) => -s.patches, target: (s) => s.share,
};

// The query language of the server (vlmdata/inspect/query.py), for the samples in this file.
function parseQuery(text) {
  const tests = [], words = [];
  for (const word of text.split(/\s+/).filter(Boolean)) {
    const term = /^([a-z]+)(<=|>=|<|>|=)([0-9][0-9,_]*\.?[0-9]*)(%?)$/.exec(word);
    if (term && FIELDS[term[1]]) {
      const value = Number(term[3].replace(/[,_]/g, "")) / (term[4] ? 100 : 1);
      tests.push((s) => COMPARE[term[2]](FIELDS[term[1]](s), value));
    } else if (FLAGS[word]) tests.push(FLAGS[word]);
    else words.push(word);
  }
  return { tests, text: words.join(" ").toLowerCase() };
}

function textOf(index) {
  const key = `text-${index}`;
  if (!cache.has(key)) cache.set(key, parseSample(index).spans.map((span) => span.text).join("").toLowerCase());
  return cache.get(key);
}
function parseSample(index) {
  const key = `sample-${index}`;
  if (!cache.has(key)) cache.set(key, JSON.parse($(key).textContent));
  return cache.get(key);
}

const store = {
  async list(query, sort, start) {
    if (SERVED) return ask(`/api/samples?${new URLSearchParams({ query, sort, start })}`);
    const { tests, text } = parseQuery(query);
    let rows = BOOT.samples.filter((s) => tests.every((test) => test(s)));
    const candidates = rows.length;
    const named = rows.filter((s) => s.key === text);
    if (named.length) rows = named;
    else if (text) rows = rows.filter((s) => s.key.includes(text) || textOf(s.index).includes(text));
    if (ORDER[sort]) rows = [...rows].sort((a, b) => ORDER[sort](a) - ORDER[sort](b));
    return { rows, searched: candidates, candidates, done: true };
  },
  async sample(index) {
    if (!SERVED) {
      if (!$(`sample-${index}`)) throw new Error("this sample is not in this file");
      return parseSample(index);
    }
    const key = `sample-${index}`;
    if (!cache.has(key)) {
      if (cache.size > 60) cache.delete(cache.keys().next().value);
      cache.set(key, await ask(`/api/samples/${Number(index)}`));
    }
    return cache.get(key);
  },
  picture(sample, image) {
    return SERVED ? `/api/samples/${Number(sample.index)}/images/${Number(image.number)}${image.frame ? `?frame=${Number(image.patch)}` : ""}` : image.src || "data:,";
  },
  draws(picture) {
    return SERVED || "src" in picture;
  },
  thumbnail(row) {
    return SERVED ? `/api/samples/${Number(row.index)}/thumbnail` : row.thumbnail;
  },
  has(index) {
    return SERVED ? index >= 0 && index < (BOOT.card ? BOOT.card.totals.samples : 0) : Boolean($(`sample-${index}`));
  },
  async mixture() {
    return SERVED ? ask("/api/mixture") : BOOT.mixture;
  },
  async packs(start) {
    return SERVED ? ask(`/api/packs?start=${Number(start)}`) : BOOT.packs;
  },
};
