// The map: every sample as a point, colored by a column; a lasso selects.

const HAS_WEBGL = Boolean(document.createElement("canvas").getContext("webgl"));

// How points are drawn, and which: without WebGL, many would take too long, and some stand for all.
const plotType = (data) => (data.n > data.mostPointsAsSvg && HAS_WEBGL ? "scattergl" : "scatter");
const drawable = (data) => {
  const step = HAS_WEBGL ? 1 : Math.ceil(data.n / data.mostPointsAsSvg);
  return (sample) => sample % step === 0;
};

function makeMap(state) {
  const { data } = state;
  const place = document.getElementById("map");
  const color = document.getElementById("color");
  for (const name of colorable(data)) color.append(element("option", { value: name }, name.replaceAll("_", " ")));
  const draw = () => {
    const layout = plotLayout({
      dragmode: "lasso",
      showlegend: true,
      legend: { orientation: "h", y: -0.06, itemsizing: "constant" },
      xaxis: { zeroline: true },
      yaxis: { zeroline: true, scaleanchor: "x" },
      uirevision: "map",
    });
    Plotly.react(place, tracesOf(data, color.value), layout, PLOT_OPTIONS);
    marked(place, state);
  };
  draw();
  color.addEventListener("change", draw);
  state.on("theme", draw);
  place.on("plotly_selected", (event) => {
    if (!event) return;
    const samples = event.points.map((point) => point.customdata).sort((a, b) => a - b);
    if (samples.length) state.select(samples, "circled on the map", "map");
  });
  place.on("plotly_deselect", () => state.select(null, "", "map"));
  place.on("plotly_click", (event) => state.open(event.points[0].customdata));
  state.on("selection", () => state.from !== "map" && marked(place, state));
}

function colorable(data) {
  const wanted = ["label", "prediction", "density", "local_density", "label_suspicion", "shift", "novelty", "agreement", "status", "hard_neighbors", "uncertainty", "error"];
  return [...wanted, ...data.ownColumns].filter((name) => data.columns[name]);
}

function tracesOf(data, name) {
  const type = plotType(data);
  const size = data.n > 20000 ? 3 : data.n > 3000 ? 4 : 6;
  const groups = groupsOf(data, name);
  const everyone = Array.from({ length: data.n }, (_, i) => i);
  const trace = (all, more) => traceOf(all.filter(drawable(data)), more);
  const traceOf = (samples, more) => ({
    type,
    mode: "markers",
    x: samples.map((i) => data.columns.map_x.values[i]),
    y: samples.map((i) => data.columns.map_y.values[i]),
    customdata: samples,
    ...hovers(data, samples, name),
    unselected: { marker: { opacity: 0.12 } },
    ...more,
  });
  if (groups) {
    return groups.map(({ title, samples }, i) =>
      trace(samples, { name: plain(title), marker: { size, color: colorOf(i), symbol: symbolOf(i, data.n), opacity: 0.8 } }),
    );
  }
  const values = data.columns[name].values;
  const marker = {
    size,
    opacity: 0.85,
    color: everyone.filter(drawable(data)).map((i) => values[i]),
    colorscale: "Cividis",
    colorbar: { thickness: 10, title: { text: name.replaceAll("_", " "), side: "right" } },
  };
  return [trace(everyone, { name: name.replaceAll("_", " "), marker, showlegend: false })];
}

// The samples of each class, text or truth; null for numbers, and for more classes than can be told apart.
function groupsOf(data, name) {
  const { kind, values, texts } = data.columns[name];
  if (kind === "f" || (kind === "i" && !CLASS_COLUMNS.has(name))) return null; // numbers
  const found = new Map();
  values.forEach((value, i) => found.has(value) ? found.get(value).push(i) : found.set(value, [i]));
  if (found.size > 20) return null;
  const titles = kind === "text" ? texts : kind === "truth" ? ["no", "yes"] : data.classes;
  return [...found.entries()].sort((a, b) => a[0] - b[0]).map(([value, samples]) => ({ title: titles?.[value] ?? value, samples }));
}

// What is told of a point; of many points only the number, for texts take time to make.
function hovers(data, samples, name) {
  if (data.n > data.mostPointsAsSvg) return { hovertemplate: "sample %{customdata}<extra>%{fullData.name}</extra>" };
  return { text: samples.map((i) => plain(hover(data, i, name))), hovertemplate: "%{text}<extra></extra>" };
}

function hover(data, sample, name) {
  const parts = [data.columns.name ? shown(data, "name", sample) : `sample ${sample}`];
  if (data.columns.label) parts.push(`label ${shown(data, "label", sample)}`);
  if (name !== "label") parts.push(`${name} ${shown(data, name, sample)}`);
  return parts.join(" · ");
}

// Show what is selected elsewhere on the map.
function marked(place, state) {
  const chosen = state.selected && new Set(state.selected);
  const points = place.data.map((trace) => {
    if (!chosen) return null;
    const found = [];
    trace.customdata.forEach((sample, i) => chosen.has(sample) && found.push(i));
    return found;
  });
  Plotly.restyle(place, { selectedpoints: points });
}
