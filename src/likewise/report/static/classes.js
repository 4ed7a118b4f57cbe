// Class by class: which are confused, with pairs that show it; what samples look like; mean similarity. Tables, for the keyboard.

const MOST_CLASSES = 40;
const MIXED_SHOWN = 6;

function makeClasses(state) {
  const { data } = state;
  if (!data.classes) return;
  const mixed = document.getElementById("mixed");
  if (mixed) mixed.append(...mixedParts(state));
  document.getElementById("confusion")?.append(confusionTable(state));
  const means = document.getElementById("class-similarity");
  if (data.classSimilarity) means.append(similarityTable(data));
  else means.append(element("p", {}, "There are too many classes for a table."));
}

// Neighbors of two classes, the most similar first; each pair once. Labels that look wrong are left out, here and below.
function mixedPairs(data, a, b) {
  const { values } = data.columns[groupColumn(data)];
  const found = new Map();
  for (let i = 0; i < data.n; i++) {
    if ((values[i] !== a && values[i] !== b) || looksWrong(data, i)) continue;
    for (let rank = 0; rank < data.k; rank++) {
      const j = data.neighbors[i * data.k + rank];
      if (values[j] === values[i] || (values[j] !== a && values[j] !== b) || looksWrong(data, j)) continue;
      const key = Math.min(i, j) * data.n + Math.max(i, j);
      if (!found.has(key)) found.set(key, { i: values[i] === a ? i : j, j: values[i] === a ? j : i, similarity: similarity(data, i, rank) });
    }
  }
  return [...found.values()].sort((p, q) => q.similarity - p.similarity);
}

// Which two classes are predicted as each other; where no prediction is wrong, which are neighbors of each other.
function mostMixed(data) {
  const found = mostMispredicted(data);
  return found.length ? found : mostNeighboring(data);
}

function mostMispredicted(data) {
  const { label, prediction } = data.columns;
  if (!label || !prediction || !isClass(data, "label") || !isClass(data, "prediction")) return [];
  const c = data.classes.length;
  const counts = new Map();
  const samples = new Uint32Array(c);
  for (let i = 0; i < data.n; i++) {
    const [mine, said] = [label.values[i], prediction.values[i]];
    if (looksWrong(data, i)) continue;
    samples[mine]++;
    if (said === mine) continue;
    const key = Math.min(mine, said) * c + Math.max(mine, said);
    counts.set(key, (counts.get(key) ?? 0) + 1);
  }
  return rankPairs(counts, samples, "samples are predicted as");
}

function rankPairs(counts, totals, words) {
  const c = totals.length;
  return [...counts].map(([key, count]) => {
    const [a, b] = [Math.floor(key / c), key % c];
    return { a, b, count, share: count / (totals[a] + totals[b]), words };
  }).sort((p, q) => q.count - p.count);
}

// How much of the company of two classes is of the other one, by rank of the neighbors' share.
function mostNeighboring(data) {
  const { values } = data.columns[groupColumn(data)];
  const c = data.classes.length;
  const counts = new Map();
  const neighbors = new Uint32Array(c);
  for (let i = 0; i < data.n; i++) {
    if (looksWrong(data, i)) continue;
    for (let rank = 0; rank < data.k; rank++) {
      const j = data.neighbors[i * data.k + rank];
      if (looksWrong(data, j)) continue;
      neighbors[values[i]]++;
      const other = values[j];
      if (other === values[i]) continue;
      const key = Math.min(values[i], other) * c + Math.max(values[i], other);
      counts.set(key, (counts.get(key) ?? 0) + 1);
    }
  }
  return rankPairs(counts, neighbors, "neighbors belong to");
}

function mixedParts(state) {
  const { data } = state;
  const pairs = mostMixed(data).slice(0, MIXED_SHOWN);
  if (!pairs.length) return [element("p", {}, "No two classes are confused: all neighbors share their class.")];
  return pairs.map(({ a, b, share, words }) => {
    const seen = ({ i, j }) => data.pictures.has(i) && data.pictures.has(j);
    const examples = mixedPairs(data, a, b).slice(0, 20).sort((p, q) => seen(q) - seen(p)).slice(0, 3); // among the most similar, those to be seen
    return element(
      "article",
      { class: "mix", "data-pair": `${a}:${b}` },
      element("h3", {}, `${data.classes[a]} and ${data.classes[b]}`),
      element("p", {}, `${percent(share)} of their ${words} the other class. `, button("Show them", () => selectNamed(state, `mixed:${a}:${b}`), { class: "link" })),
      element("div", { class: "examples" }, ...examples.map(({ i, j, similarity: s }) => element("div", { class: "pair" }, tile(state, i), element("span", { class: "alike", title: "similarity" }, s.toFixed(2)), tile(state, j)))),
    );
  });
}

// What a sample is taken for: by the network where it names classes, else by similar samples.
function takenFor(data) {
  const { prediction, suggested_label: suggested } = data.columns;
  return prediction && isClass(data, "prediction") ? { column: prediction, words: "predicted as" } : { column: suggested, words: "look like" };
}

function votesOf(data) {
  const c = data.classes.length;
  const { column } = takenFor(data);
  const votes = Array.from({ length: c }, () => new Array(c).fill(0));
  for (let i = 0; i < data.n; i++) votes[data.columns.label.values[i]][column.values[i]]++;
  return votes;
}

function confusionTable(state) {
  const { data } = state;
  const votes = votesOf(data);
  const open = (a, b) => () => selectNamed(state, `cell:${a}:${b}`);
  if (data.classes.length > MOST_CLASSES) return confusedPairs(data, votes, open);
  const most = Math.max(1, ...votes.flatMap((row, a) => row.filter((_, b) => a !== b)));
  return classTable(data.classes, (a, b) => {
    const count = votes[a][b];
    if (!count) return element("td", { class: "zero" }, "·");
    const strength = a === b ? 0 : Math.round((32 * count) / most) + 8;
    const style = a === b ? "" : `background: color-mix(in srgb, var(--signal) ${strength}%, var(--panel))`;
    const title = `${count} labeled ${data.classes[a]}, ${takenFor(data).words} ${data.classes[b]}`;
    return element("td", { class: a === b ? "diagonal" : "", style }, button(String(count), open(a, b), { title, "data-cell": `${a}:${b}`, "aria-label": title }));
  });
}

function confusedPairs(data, votes, open) {
  const pairs = votes.flatMap((row, a) => row.map((count, b) => ({ a, b, count })));
  const worst = pairs.filter(({ a, b, count }) => a !== b && count).sort((p, q) => q.count - p.count).slice(0, 40);
  return element("ol", {}, ...worst.map(({ a, b, count }) =>
    element("li", {}, button(`${data.classes[a]} → ${data.classes[b]}: ${count}`, open(a, b), { "data-cell": `${a}:${b}` })),
  ));
}

function similarityTable(data) {
  const means = data.classSimilarity;
  const classes = data.classes.slice(0, means.length);
  if (classes.length > MOST_CLASSES) return similarPairs(classes, means);
  const most = Math.max(1e-9, ...means.flat().map((v) => Math.abs(v ?? 0)));
  return classTable(classes, (a, b) => {
    const value = means[a][b];
    if (value == null) return element("td", { class: "zero", title: "no pair" }, "·");
    const strength = Math.round((45 * Math.abs(value)) / most);
    const style = `background: color-mix(in srgb, var(${value < 0 ? "--quiet" : "--accent"}) ${strength}%, var(--panel))`;
    return element("td", { style, title: `${classes[a]} and ${classes[b]}` }, value.toFixed(2));
  });
}

function similarPairs(classes, means) {
  const pairs = means.flatMap((row, a) => row.map((value, b) => ({ a, b, value })).filter(({ b, value }) => b > a && value != null));
  const most = pairs.sort((p, q) => q.value - p.value).slice(0, 40);
  return element("ol", {}, ...most.map(({ a, b, value }) => element("li", {}, `${classes[a]} and ${classes[b]}: ${value.toFixed(3)}`)));
}

function classTable(classes, cell) {
  const short = (name) => (name.length > 12 ? `${name.slice(0, 11)}…` : name);
  const head = element("tr", {}, element("td", {}), ...classes.map((name) => element("th", { scope: "col", title: name }, element("span", {}, short(name)))));
  const rows = classes.map((name, a) => element("tr", {}, element("th", { scope: "row", title: name }, short(name)), ...classes.map((_, b) => cell(a, b))));
  return element("table", { class: "matrix" }, element("thead", {}, head), element("tbody", {}, ...rows));
}
