// What is selected, which sample is open, which threshold counts: one place, and who listens.

function makeState(data) {
  const listeners = { selection: [], sample: [], threshold: [], theme: [] };
  const state = {
    data,
    selected: null, // an array of samples, or null for all
    what: "",
    from: "",
    sample: null,
    threshold: data.threshold,
    on: (event, listener) => listeners[event].push(listener),
    select(samples, what, from) {
      Object.assign(state, { selected: samples, what, from });
      listeners.selection.forEach((listener) => listener());
    },
    open(sample) {
      state.sample = sample;
      listeners.sample.forEach((listener) => listener());
    },
    setThreshold(value) {
      state.threshold = value;
      listeners.threshold.forEach((listener) => listener());
    },
    themed: () => listeners.theme.forEach((listener) => listener()),
  };
  return state;
}

// Named selections, as cards, cells and links give them: "label_issue", "status:isolated", "cell:3:5" ...
function namedSelection(data, name) {
  const samples = (test) => Array.from({ length: data.n }, (_, i) => i).filter(test);
  const [kind, ...rest] = name.split(":");
  const columns = data.columns;
  if (kind === "status" && columns.status) {
    const code = columns.status.texts.indexOf(rest[0]);
    return { samples: samples((i) => columns.status.values[i] === code), what: rest[0] };
  }
  if (kind === "cell" && columns.suggested_label) {
    const [label, vote] = rest.map(Number);
    const what = `labeled ${data.classes[label]}, neighbors vote ${data.classes[vote]}`;
    return { samples: samples((i) => columns.label.values[i] === label && columns.suggested_label.values[i] === vote), what };
  }
  if (kind === "shift" && columns.shift) {
    const [limit] = rest.map(Number);
    return { samples: samples((i) => columns.shift.values[i] > limit), what: "predictions to distrust" };
  }
  if (columns[kind]?.kind === "truth") {
    const what = kind === "label_issue" ? "labels that look wrong" : kind.replaceAll("_", " ");
    return { samples: samples((i) => columns[kind].values[i]), what };
  }
  return null;
}
