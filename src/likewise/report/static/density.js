// The histogram of mean similarity, with a typical sample of each bin.

const DENSITY_BINS = { narrow: 14, wide: 10 }; // by how much room a sample takes

function makeDensity(state) {
  const { data } = state;
  const values = data.columns.density.values;
  const [low, high] = ends(values, data.n);
  const count = DENSITY_BINS[data.pictures.wide ? "wide" : "narrow"];
  const width = (high - low) / count || 1;
  const bins = Array.from({ length: count }, () => []);
  values.forEach((value, i) => bins[Math.min(count - 1, Math.floor((value - low) / width))].push(i));
  const most = Math.max(...bins.map((bin) => bin.length));
  document.getElementById("density").append(
    ...bins.map((samples, i) => {
      const from = low + i * width;
      const title = `${titleOf(data, "density")} ${rounded(from)} to ${rounded(from + width)}`;
      const typical = typicalOf(data, samples);
      return element(
        "div",
        { class: "bin" },
        element(
          "button",
          { type: "button", class: "bar-button", "aria-label": `${title}: ${counted(samples.length, "sample")}`, disabled: !samples.length, "data-count": samples.length, onclick: () => { state.select(samples, title); goToSamples(); } },
          element("span", { class: "count" }, samples.length.toLocaleString("en")),
          element("span", { class: "bar", style: `height: ${samples.length ? Math.max(2, (110 * samples.length) / most) : 0}px` }),
        ),
        typical == null ? element("span", { class: "picture none small" }) : tile(state, typical, rounded(from)),
      );
    }),
  );
}

// The sample nearest the middle of a bin, among those with a picture if there are any.
function typicalOf(data, samples) {
  if (!samples.length) return null;
  const values = data.columns.density.values;
  const sorted = [...samples].sort((a, b) => values[a] - values[b]);
  const middle = values[sorted[Math.floor(sorted.length / 2)]];
  const pictured = sorted.filter((i) => data.pictures.has(i));
  const among = pictured.length ? pictured : sorted;
  return among.reduce((best, i) => (Math.abs(values[i] - middle) < Math.abs(values[best] - middle) ? i : best));
}
