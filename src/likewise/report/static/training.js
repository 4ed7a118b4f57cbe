// What the record of training says of each label: the map of data set cartography, by confidence and variability.

function makeTraining(state) {
  const { data } = state;
  const place = document.getElementById("training");
  if (!place) return;
  const { training_confidence: confidence, training_variability: variability, forgetting, margin, label_issue: flagged } = data.columns;
  const known = (column) => Float32Array.from(column.values, (value) => (Number.isNaN(value) ? 0 : value));
  const scatter = makeScatter(place, data, {
    label: "Variability against confidence over training. The table holds both columns.",
    axes: { x: { title: titleOf(data, "training_variability"), min: -0.02, max: 0.54 }, y: { title: titleOf(data, "training_confidence"), min: -0.04, max: 1.04 } },
    onCircle: (samples) => (samples ? state.select(samples, "circled in the training story") : state.showAll()),
    onOpen: (sample) => state.open(sample),
    describe: (sample) => [...describePoint(data, sample, "training_confidence"), `forgotten ${counted(forgetting.values[sample], "time")}`],
  });
  const paint = () => scatter.setColors(Uint8Array.from(flagged.values), [rgbOf(STATUS_COLORS[0]), rgbOf(STATUS_COLORS[1])], []);
  scatter.setPlaces(known(variability), known(confidence));
  paint();
  state.on("theme", paint);
  state.on("selection", () => scatter.setSelected(state.selected));
  const count = (test) => Array.from({ length: data.n }, (_, i) => i).filter(test);
  const hard = count((i) => confidence.values[i] < 0.25);
  const forgotten = count((i) => forgetting.values[i] >= 2);
  const against = count((i) => margin.values[i] < 0);
  const show = (samples, what) => button(`${samples.length.toLocaleString("en")} ${what}`, () => { state.select(samples, what); goToSamples(); }, { class: "link" });
  document.getElementById("training-what").replaceChildren("Vertical: ", term(data, "training_confidence"), "; samples at the top are easy to learn, those at the bottom often have wrong labels. Horizontal: ", term(data, "training_variability"), "; samples on the right are ambiguous. Orange: looks wrong. ", show(against, "labels that training mostly contradicted"), " · ", show(hard, "with a confidence below 0.25"), " · ", show(forgotten, "forgotten twice or more"));
}
