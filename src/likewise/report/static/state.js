// What is selected and filtered, which sample is open, which threshold counts: one place, and who listens.

function makeState(data) {
  const listeners = { selection: [], sample: [], threshold: [], theme: [], focus: [], decisions: [] };
  const tell = (event) => listeners[event].forEach((listener) => listener());
  const state = {
    data,
    selected: null, // the samples that map, pictures, table and review show: an array, or null for all
    group: null, // those that were circled, searched or opened by a link, before the filters
    what: "", // the group in words
    name: null, // its address, if it has one
    filters: new Map(), // column -> what its values must be, as typed into the table's second row
    sample: null,
    focus: null, // the sample under review, ringed on the map
    threshold: data.threshold,
    on: (event, listener) => listeners[event].push(listener),
    select(samples, what, name = null) {
      Object.assign(state, { group: samples, what, name });
      refresh();
    },
    filter(entries) {
      for (const [name, wanted] of entries) wanted ? state.filters.set(name, wanted) : state.filters.delete(name);
      refresh();
    },
    showAll() {
      state.filters.clear();
      state.select(null, "");
    },
    describe: () => [state.group && state.what, ...[...state.filters].map(([name, wanted]) => filterText(data, name, wanted))].filter(Boolean).join(", "),
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
  const refresh = () => {
    const tests = [...state.filters].map(([name, wanted]) => filterTest(data, name, wanted));
    const all = state.group ?? (tests.length ? Array.from({ length: data.n }, (_, i) => i) : null);
    state.selected = tests.length ? all.filter((i) => tests.every((test) => test(i))) : all;
    tell("selection");
  };
  return state;
}

const isNumeric = (data, name) => name === "sample" || (["f", "i"].includes(data.columns[name].kind) && !isClass(data, name));

// The values to choose among, where they are few.
function choicesOf(data, name) {
  if (name === "sample" || isNumeric(data, name)) return null;
  const { kind, texts } = data.columns[name];
  const all = kind === "truth" ? ["yes", "no"] : name === "status" ? texts.map((text) => data.statuses[text].title) : kind === "text" ? texts : data.classes;
  return all.length <= 40 ? all : null;
}

function filterTest(data, name, wanted) {
  if (name === "sample") return (i) => i === Number(wanted);
  if (isNumeric(data, name)) {
    const least = Number(wanted);
    return Number.isNaN(least) ? () => true : (i) => data.columns[name].values[i] >= least;
  }
  if (wanted.startsWith("=") && choicesOf(data, name)) return (i) => shown(data, name, i) === wanted.slice(1);
  const part = wanted.toLowerCase();
  return (i) => shown(data, name, i).toLowerCase().includes(part);
}

function filterText(data, name, wanted) {
  const title = titleOf(data, name);
  if (name === "sample") return `${title} ${wanted}`;
  if (isNumeric(data, name)) return `${title} at least ${wanted}`;
  return wanted.startsWith("=") && choicesOf(data, name) ? `${title} ${wanted.slice(1)}` : `${title} has “${wanted}”`;
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
    const { column, words } = takenFor(data);
    return { test: (i) => label.values[i] === a && column.values[i] === b, what: `labeled ${data.classes[a]}, ${words} ${data.classes[b]}` };
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
    return { test: (i) => column.values[i] > Number(limit) && !looksWrong(data, i), what: "predictions to check, except labels that look wrong" };
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

// The sample that a text is the number of, or null.
function numbered(data, text) {
  const number = /^\s*#?(\d+)\s*$/.exec(text);
  return number && Number(number[1]) < data.n ? Number(number[1]) : null;
}

// Samples of which a name, a class or a text of one's own holds the words; several words must all be there. A number is
// that sample, and a class of just this name.
function searched(data, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return null;
  const number = numbered(data, text);
  if (number != null) {
    const group = groupColumn(data);
    const named = group ? data.classes.indexOf(text.trim()) : -1;
    const what = named < 0 ? `sample ${number}` : `sample ${number}, and ${group} ${text.trim()}`;
    return { test: (i) => i === number || (named >= 0 && data.columns[group].values[i] === named), what };
  }
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
