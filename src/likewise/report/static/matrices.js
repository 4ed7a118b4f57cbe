// Class by class: what neighbors vote for, and mean similarity. Tables, so that a keyboard can walk them.

const MOST_CLASSES = 40;

function makeMatrices(state) {
  const { data } = state;
  if (!data.classes) return;
  const confusion = document.getElementById("confusion");
  if (confusion) confusion.append(confusionTable(state));
  document.getElementById("class-similarity").append(similarityTable(data));
}

function votesOf(data) {
  const c = data.classes.length;
  const votes = Array.from({ length: c }, () => new Array(c).fill(0));
  for (let i = 0; i < data.n; i++) votes[data.columns.label.values[i]][data.columns.suggested_label.values[i]]++;
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
    const strength = a === b ? 0 : Math.round((85 * count) / most) + 10;
    const style = a === b ? "" : `background: color-mix(in srgb, var(--alarm) ${strength}%, transparent)`;
    const title = `${count} labeled ${data.classes[a]}, neighbors vote ${data.classes[b]}`;
    return element("td", { class: a === b ? "diagonal" : "", style }, element("button", { type: "button", title, "data-cell": `${a}:${b}`, onclick: open(a, b) }, String(count)));
  });
}

function confusedPairs(data, votes, open) {
  const pairs = votes.flatMap((row, a) => row.map((count, b) => ({ a, b, count })));
  const worst = pairs.filter(({ a, b, count }) => a !== b && count).sort((p, q) => q.count - p.count).slice(0, 40);
  return element("ol", {}, ...worst.map(({ a, b, count }) =>
    element("li", {}, element("button", { type: "button", "data-cell": `${a}:${b}`, onclick: open(a, b) }, `${data.classes[a]} → ${data.classes[b]}: ${count}`)),
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
    const strength = Math.round((80 * Math.abs(value)) / most);
    const style = `background: color-mix(in srgb, var(${value < 0 ? "--cold" : "--warm"}) ${strength}%, transparent)`;
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
