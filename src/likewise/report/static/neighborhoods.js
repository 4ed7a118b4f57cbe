// How many samples are close to each, and do they agree with its prediction?

function makeNeighborhoods(state) {
  const { data } = state;
  const place = document.getElementById("neighborhoods");
  if (!place) return;
  const { texts, values } = data.columns.status;
  const order = Object.keys(data.statuses);
  document.getElementById("status-buttons").append(
    ...order.map((name, i) => {
      const code = texts.indexOf(name);
      const count = values.reduce((sum, value) => sum + (value === code), 0);
      return element(
        "button",
        { type: "button", class: "status", "data-status": name, style: `--mark: ${STATUS_COLORS[i]}`, onclick: () => selectNamed(state, `status:${name}`) },
        element("strong", {}, `${data.statuses[name].title} · ${count.toLocaleString("en")}`),
        element("span", {}, data.statuses[name].meaning),
      );
    }),
  );
  const { local_density: density, agreement } = data.columns;
  const x = Float32Array.from(density.values, (value) => Math.log10(Math.max(value, 0.5)));
  const spread = (i) => (((i * 2654435761) % 1000) / 1000 - 0.5) * 0.05; // agreement takes few values
  const y = Float32Array.from({ length: data.n }, (_, i) => (agreement ? agreement.values[i] : 0.5) + spread(i));
  const scatter = makeScatter(place, data, {
    label: "Local density against agreement of the neighbors; the buttons above select each kind of sample.",
    axes: { x: { title: `${titleOf(data, "local_density")} (samples, log scale)`, log: true }, y: { title: titleOf(data, "agreement"), min: -0.06, max: 1.06 } },
    onCircle: (samples) => (samples ? state.select(samples, "circled among neighborhoods") : state.showAll()),
    onOpen: (sample) => state.open(sample),
    describe: (sample) => describePoint(data, sample, "status"),
  });
  const paint = () => scatter.setColors(Uint8Array.from(values, (code) => order.indexOf(texts[code])), STATUS_COLORS.map(rgbOf), []);
  scatter.setPlaces(x, y);
  paint();
  state.on("theme", paint);
  state.on("selection", () => scatter.setSelected(state.selected));
}

const STATUS_COLORS = ["#7f8a94", "#d55e00", "#0072b2"];
