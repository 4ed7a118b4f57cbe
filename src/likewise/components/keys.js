// The keys of a review: the same in the report, on the live page and in the notebook, and `?` shows them.

const REVIEW_KEYS = [
  { key: "l", verdict: "relabel", title: "Relabel", does: "give it the label that it looks like; if that is doubtful (…), confirm with Enter" },
  { key: "w", verdict: "wrong", title: "Wrong", does: "the label is wrong, and the right one is unknown: likewise apply leaves the sample out (--wrong keep keeps it)" },
  { key: "r", verdict: "right", title: "Right", does: "the label is right" },
  { key: "u", verdict: "unsure", title: "Unsure", does: "you looked, and cannot decide" },
  { key: "d", verdict: "drop", title: "Drop", does: "leave the sample out, whatever its label: a copy, or broken" },
  { key: "c", title: "Other class", does: "type the right class" },
  { key: "z", title: "Undo", does: "undo the last decision" },
  { key: "←", title: "Previous", does: "the sample before this one" },
  { key: "→", title: "Next", does: "the sample after this one" },
  { key: "?", title: "Keys", does: "show these keys" },
];

const VERDICT_OF_KEY = Object.assign(Object.create(null), Object.fromEntries(REVIEW_KEYS.filter(({ verdict }) => verdict).map(({ key, verdict }) => [key, verdict])));

// A window with all keys; `element` makes an element of a page.
function makeKeysWindow(element) {
  const rows = REVIEW_KEYS.map(({ key, title, does }) => element("tr", {}, element("th", { scope: "row" }, element("kbd", {}, key)), element("td", {}, element("strong", {}, title)), element("td", {}, does)));
  const box = element("dialog", { class: "review-keys", "aria-label": "Keys" });
  box.append(element("table", {}, element("tbody", {}, ...rows)), element("p", {}, "The keys work on the whole page, except while you type in a field or a sample is open."), element("button", { type: "button", onclick: () => box.close() }, "Close"));
  return box;
}
