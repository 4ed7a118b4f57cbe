// Local density against agreement: who has company, and does the company agree?

const STATUSES = [
  ["ordinary", "similar samples share its class"],
  ["contested", "similar samples vote for another class"],
  ["isolated", "too few similar samples to judge by"],
];

function makeNeighborhoods(state) {
  const { data } = state;
  const place = document.getElementById("neighborhoods");
  if (!place) return;
  const { texts, values } = data.columns.status;
  const buttons = document.getElementById("status-buttons");
  STATUSES.forEach(([name, meaning], i) => {
    const code = texts.indexOf(name);
    const count = values.reduce((sum, value) => sum + (value === code), 0);
    buttons.append(
      element(
        "button",
        { type: "button", class: "status", "data-status": name, style: `--mark: ${colorOf(i)}`, onclick: () => selectNamed(state, `status:${name}`) },
        element("strong", {}, `${name} ${count.toLocaleString("en")}`),
        element("span", {}, meaning),
      ),
    );
  });
  const draw = () => Plotly.react(place, neighborhoodTraces(data), neighborhoodLayout(data), PLOT_OPTIONS);
  draw();
  state.on("theme", draw);
  place.on("plotly_click", (event) => state.open(event.points[0].customdata));
  place.on("plotly_selected", (event) => {
    if (event?.points.length) state.select(event.points.map((p) => p.customdata).sort((a, b) => a - b), "circled among neighborhoods", "neighborhoods");
  });
  place.on("plotly_deselect", () => state.select(null, "", "neighborhoods"));
}

function neighborhoodTraces(data) {
  const { status, local_density: density, agreement } = data.columns;
  const spread = (i) => (((i * 2654435761) % 1000) / 1000 - 0.5) * 0.06; // agreement takes few values
  return STATUSES.map(([name], color) => {
    const code = status.texts.indexOf(name);
    const samples = [];
    const drawn = drawable(data);
    status.values.forEach((value, i) => value === code && drawn(i) && samples.push(i));
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

function neighborhoodLayout(data) {
  return plotLayout({
    dragmode: "lasso",
    showlegend: false,
    xaxis: { title: { text: "local density" }, type: "log" },
    yaxis: { title: { text: "agreement with the prediction" }, range: [-0.07, 1.07] },
    uirevision: "neighborhoods",
  });
}
