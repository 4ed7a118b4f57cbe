// The pictures of what is selected, the most telling first.

const AT_ONCE = 48;

function makeGallery(state) {
  const { data } = state;
  const place = document.getElementById("gallery");
  const what = document.getElementById("gallery-what");
  const more = document.getElementById("gallery-more");
  const ranked = rankedBy(data);
  const rank = data.columns[ranked];
  let order = [];
  let count = 0;
  const grow = () => {
    order.slice(count, count + AT_ONCE).forEach((sample) => place.append(tile(state, sample, rounded(rank.values[sample]), data.columns.label_issue?.values[sample] ? "flagged" : "")));
    count = Math.min(order.length, count + AT_ONCE);
    more.hidden = count >= order.length;
  };
  const fill = () => {
    order = (state.selected ? [...state.selected] : Array.from({ length: data.n }, (_, i) => i)).sort((a, b) => rank.values[b] - rank.values[a]);
    count = 0;
    place.replaceChildren();
    const by = { label_suspicion: "most suspicious label first", target_suspicion: "most suspicious target first", error: "largest error first", novelty: "most novel first" }[ranked];
    what.textContent = `${state.selected ? state.describe() : "all"} · ${counted(order.length, "sample")} · ${by}`;
    place.dataset.count = order.length;
    grow();
  };
  more.addEventListener("click", grow);
  state.on("selection", fill);
  fill();
}
