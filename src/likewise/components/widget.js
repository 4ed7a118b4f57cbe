
// --- the notebook widget: the map and the review queue, in step with Python ------------------------------------------

function numbers(view, Type) {
  if (view == null) return null;
  const { buffer, byteOffset, byteLength } = view.buffer ? view : new DataView(view);
  return new Type(buffer.slice(byteOffset, byteOffset + byteLength));
}

function render({ model, el }) {
  el.classList.add("likewise");
  const mapPart = element("div", { class: "lw-part" });
  const reviewPart = element("div", { class: "lw-part" });
  el.append(mapPart, reviewPart);

  const map = mountMap(mapPart, {
    x: numbers(model.get("_x"), Float32Array),
    y: numbers(model.get("_y"), Float32Array),
    groups: model.get("_has_groups") ? numbers(model.get("_groups"), Int32Array) : null,
    names: model.get("_classes"),
    select(samples) {
      model.set("selected", samples);
      model.save_changes();
    },
  });

  const waiting = new Map();
  let asked = 0;
  const receive = (message) => {
    waiting.get(message.id)?.(message.entries);
    waiting.delete(message.id);
  };
  model.on("msg:custom", receive);
  const review = mountReview(reviewPart, {
    classes: model.get("_classes"),
    total: model.get("_total"),
    flagged: model.get("_flagged"),
    decisions: model.get("_decided"),
    load: (start, count) =>
      new Promise((resolve) => {
        waiting.set(++asked, resolve);
        model.send({ kind: "load", id: asked, start, count });
      }),
    decide(sample, decision) {
      const known = { ...model.get("_decided") };
      if (decision) known[sample] = decision;
      else delete known[sample];
      model.set("_decided", known);
      model.save_changes();
    },
  });
  const update = () => review.update(model.get("_decided"));
  model.on("change:_decided", update);
  return () => {
    model.off("msg:custom", receive);
    model.off("change:_decided", update);
    map.stop();
    review.stop();
  };
}

export default { render };
