// What decisions about drawn samples say of all labels: the formula of likewise.spot_check (docs/method.md), in the page.

const Z = 1.959963984540054;

function wilsonEnd(share, count, side) {
  const spread = Z * Math.sqrt((share * (1 - share)) / count + (Z * Z) / (4 * count * count));
  return (share + (Z * Z) / (2 * count) + side * spread) / (1 + (Z * Z) / count);
}

// The share of a stratum that is wrong: [low, likely, high].
function stratumShare(size, decided, wrong) {
  const likely = wrong / decided;
  if (decided === size) return [likely, likely, likely];
  const independent = (decided * (size - 1)) / (size - decided);
  const end = (side) => wilsonEnd(Math.min(1, Math.max(0, likely + side / (2 * decided))), independent, side);
  const low = Math.max(end(-1), wrong / size);
  const high = Math.min(end(1), 1 - (decided - wrong) / size);
  return [Math.min(low, likely), likely, Math.max(high, likely)];
}

// sizes, decided, wrong: of each stratum. precision: of the flagged, null until one is decided; errors: of all labels,
// null until one of every stratum is decided.
function estimateErrors(sizes, decided, wrong) {
  const shares = sizes.map((size, h) => (decided[h] ? stratumShare(size, decided[h], wrong[h]) : null));
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const known = shares.map((share, h) => share && [sizes[h], ...share]).filter(Boolean);
  const missing = sizes.some((size, h) => size && !shares[h]);
  if (missing || !known.length) return { precision: shares[0], errors: null };
  const likely = sum(known.map(([size, , middle]) => size * middle));
  const below = Math.sqrt(sum(known.map(([size, low, middle]) => (size * (middle - low)) ** 2)));
  const above = Math.sqrt(sum(known.map(([size, , middle, high]) => (size * (high - middle)) ** 2)));
  const low = Math.max(likely - below, sum(wrong));
  const high = Math.min(likely + above, sum(sizes) - sum(decided) + sum(wrong));
  return { precision: shares[0], errors: [low, likely, high] };
}

// Only an unbroken beginning of the draw counts: what was decided further down was chosen, not drawn.
function countDraws({ samples, strata, sizes }, decisions) {
  const decided = sizes.map(() => 0);
  const wrong = sizes.map(() => 0);
  let seen = 0;
  while (seen < samples.length && decisions[samples[seen]]) {
    const { verdict } = decisions[samples[seen]];
    if (verdict !== "unsure" && verdict !== "drop") { // a copy to drop says nothing of its label
      decided[strata[seen]]++;
      wrong[strata[seen]] += verdict !== "right";
    }
    seen++;
  }
  return { seen, decided, wrong };
}

function describeEstimate(data, decisions) {
  const { sizes } = data.spotCheck;
  const { seen, decided, wrong } = countDraws(data.spotCheck, decisions);
  const { precision, errors } = estimateErrors(sizes, decided, wrong);
  const lines = [];
  if (precision) lines.push(`Of the ${sizes[0].toLocaleString("en")} flagged labels, ${percent(precision[1])} are wrong (95 % interval ${percent(precision[0])} to ${percent(precision[2])}).`);
  if (errors) {
    const [low, likely, high] = errors.map((value) => Math.round(value).toLocaleString("en"));
    lines.push(`Of all ${data.n.toLocaleString("en")} labels, about ${likely} are wrong (${low} to ${high}).`);
  }
  if (!lines.length) lines.push("Decide a few: the estimate appears once a flagged label is decided.");
  else if (!errors) lines.push("The estimate for all labels appears once a label from every part of the ranking is decided.");
  return { seen, lines };
}
