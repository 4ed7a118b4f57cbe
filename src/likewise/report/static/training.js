// What the record of training says of each label: which were easy, which were never believed.

function makeTraining(state) {
  const { data } = state;
  const place = document.getElementById("training");
  if (!place) return;
  const { margin, label_suspicion: suspicion } = data.columns;
  const scatter = makeScatter(place, data, {
    label: "Training margin against suspicion. The table holds both columns.",
    axes: { x: { title: titleOf(data, "margin") }, y: { title: titleOf(data, "label_suspicion"), min: -0.04, max: 1.04 } },
    onCircle: (samples) => state.select(samples, "circled in the training story"),
    onOpen: (sample) => state.open(sample),
    describe: (sample) => describePoint(data, sample, "margin"),
  });
  const known = Float32Array.from(margin.values, (value) => (Number.isNaN(value) ? 0 : value));
  const flagged = data.columns.label_issue.values;
  const paint = () => scatter.setColors(Uint8Array.from(flagged), [rgbOf(STATUS_COLORS[0]), rgbOf(STATUS_COLORS[1])], []);
  scatter.setPlaces(known, suspicion.values);
  paint();
  state.on("theme", paint);
  state.on("selection", () => scatter.setSelected(state.selected));
  const against = known.reduce((sum, value) => sum + (value < 0), 0);
  document.getElementById("training-what").textContent = `Training mostly contradicted ${counted(against, "label")}; right: easy to learn, top: suspicious. Orange: looks wrong.`;
}
