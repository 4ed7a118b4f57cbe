// What is selected, which sample is open, which threshold counts: one place, and who listens.

function makeState(data) {
  const listeners = { selection: [], sample: [], threshold: [], theme: [], focus: [], decisions: [] };
  const tell = (event) => listeners[event].forEach((listener) => listener());
  const state = {
    data,
    selected: null, // an array of samples, or null for all
    what: "",
    name: null, // the address of a selection that has one
    sample: null,
    focus: null, // the sample under review, ringed on the map
    threshold: data.threshold,
    on: (event, listener) => listeners[event].push(listener),
    select(samples, what, name = null) {
      Object.assign(state, { selected: samples, what, name });
      tell("selection");
    },
    open(sample) {
      state.sample = sample;
      tell("sample");
    },
    setFocus(sample) {
      state.focus = sample;
      tell("focus");
    },
    setThreshold(value) {
      state.threshold = value;
      tell("threshold");
    },
    decided: () => tell("decisions"),
    themed: () => tell("theme"),
  };
  return state;
}

// Named selections, as steps, cells and links give them: "label_issue", "status:isolated", "cell:3:5", "search:cat" ...
function namedSelection(data, name) {
  const [kind, ...rest] = name.split(":");
  const found = SELECTIONS[kind]?.(data, rest) ?? truthSelection(data, kind);
  if (!found) return null;
  const samples = [];
  for (let i = 0; i < data.n; i++) if (found.test(i)) samples.push(i);
  return { samples, what: found.what };
}

const SELECTIONS = {
  __proto__: null, // a column may be called constructor
  status(data, [name]) {
    const column = data.columns.status;
    if (!column || !data.statuses[name]) return null;
    const code = column.texts.indexOf(name);
    return { test: (i) => column.values[i] === code, what: data.statuses[name].title };
  },
  cell(data, rest) {
    const { label, suggested_label: suggested } = data.columns;
    const [a, b] = rest.map(Number);
    if (!suggested || !data.classes[a] || !data.classes[b]) return null;
    return { test: (i) => label.values[i] === a && suggested.values[i] === b, what: `labeled ${data.classes[a]}, looks like ${data.classes[b]}` };
  },
  mixed(data, rest) {
    const group = groupColumn(data);
    const [a, b] = rest.map(Number);
    if (!group || !data.classes[a] || !data.classes[b]) return null;
    const mixed = new Set(mixedPairs(data, a, b).flatMap(({ i, j }) => [i, j]));
    return { test: (i) => mixed.has(i), what: `${data.classes[a]} and ${data.classes[b]} that are similar to each other` };
  },
  shift(data, [limit]) {
    const column = data.columns.shift;
    if (!column || !Number.isFinite(Number(limit))) return null;
    return { test: (i) => column.values[i] > Number(limit) && !looksWrong(data, i), what: "predictions to check, besides labels that look wrong" };
  },
  class(data, [number]) {
    const group = groupColumn(data);
    if (!group || !data.classes[number]) return null;
    return { test: (i) => data.columns[group].values[i] === Number(number), what: `${group} ${data.classes[number]}` };
  },
  search: (data, rest) => searched(data, rest.join(":")),
};

function truthSelection(data, name) {
  const column = data.columns[name];
  if (column?.kind !== "truth") return null;
  return { test: (i) => column.values[i], what: name === "label_issue" ? "labels that look wrong" : titleOf(data, name) };
}

// Samples of which a name, a class or a text of one's own holds the words; several words must all be there.
function searched(data, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return null;
  const named = Object.keys(data.columns).filter((name) => data.columns[name].kind === "text" || isClass(data, name));
  const parts = named.map((name) => {
    const { kind, texts, values } = data.columns[name];
    const written = kind === "text" ? texts : data.classes;
    return { values, hits: words.map((word) => written.map((value) => value.toLowerCase().includes(word))) };
  });
  const excerpt = (i) => (data.pictures.wide && data.pictures.has(i) ? data.pictures.text(i).toLowerCase() : "");
  return {
    test: (i) => words.every((word, w) => parts.some(({ values, hits }) => hits[w][values[i]]) || excerpt(i).includes(word)),
    what: `found for “${text}”`,
  };
}
