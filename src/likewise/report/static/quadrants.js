// Density against agreement: four kinds of samples.

const QUADRANTS = [
  ["isolated", "few are like it, and they agree"],
  ["ordinary", "many are like it, and they agree"],
  ["contested", "few are like it, and they disagree"],
  ["indistinguishable", "many are like it, and they disagree"],
];

function makeQuadrants(state) {
  const { data } = state;
  const place = document.getElementById("quadrants");
  if (!place) return;
  const { texts, values } = data.columns.quadrant;
  const buttons = document.getElementById("quadrant-buttons");
  QUADRANTS.forEach(([name, meaning], i) => {
    const code = texts.indexOf(name);
    const count = values.reduce((sum, value) => sum + (value === code), 0);
    buttons.append(
      element(
        "button",
        { type: "button", class: "quadrant", "data-quadrant": name, style: `--mark: ${colorOf(i)}`, onclick: () => selectNamed(state, `quadrant:${name}`) },
        element("strong", {}, `${name} ${count.toLocaleString("en")}`),
        element("span", {}, meaning),
      ),
    );
  });
  const draw = () => Plotly.react(place, quadrantTraces(data), quadrantLayout(data), PLOT_OPTIONS);
  draw();
  state.on("theme", draw);
  place.on("plotly_click", (event) => state.open(event.points[0].customdata));
  place.on("plotly_selected", (event) => {
    if (event?.points.length) state.select(event.points.map((p) => p.customdata).sort((a, b) => a - b), "circled in the quadrants", "quadrants");
  });
  place.on("plotly_deselect", () => state.select(null, "", "quadrants"));
}

function quadrantTraces(data) {
  const { quadrant, local_density: density, agreement } = data.columns;
  const spread = (i) => (((i * 2654435761) % 1000) / 1000 - 0.5) * 0.06; // agreement takes few values
  return QUADRANTS.map(([name], color) => {
    const code = quadrant.texts.indexOf(name);
    const samples = [];
    const drawn = drawable(data);
    quadrant.values.forEach((value, i) => value === code && drawn(i) && samples.push(i));
    return {
      type: plotType(data),
      mode: "markers",
      name,
      x: samples.map((i) => density.values[i]),
      y: samples.map((i) => agreement.values[i] + spread(i)),
      customdata: samples,
      ...hovers(data, samples, "agreement"),
      marker: { size: data.n > 20000 ? 3 : 5, color: colorOf(color), symbol: symbolOf(color, data.n), opacity: 0.7 },
      unselected: { marker: { opacity: 0.12 } },
    };
  });
}

function quadrantLayout(data) {
  const sorted = Float32Array.from(data.columns.local_density.values).sort();
  const cut = sorted[Math.floor(sorted.length / 2)] / 4;
  const line = (more) => ({ type: "line", line: { color: styleOf("--quiet"), width: 1, dash: "dot" }, ...more });
  return plotLayout({
    dragmode: "lasso",
    showlegend: false,
    xaxis: { title: { text: "local density" }, type: "log" },
    yaxis: { title: { text: "agreement of neighbors" }, range: [-0.07, 1.07] },
    shapes: [line({ x0: cut, x1: cut, y0: 0, y1: 1, yref: "paper" }), line({ y0: 0.5, y1: 0.5, x0: 0, x1: 1, xref: "paper" })],
    uirevision: "quadrants",
  });
}
