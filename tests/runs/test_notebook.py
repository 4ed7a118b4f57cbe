"""The notebook widget: the map and the review queue in a real browser, selection and decisions in Python."""

import json
import re
import subprocess
import sys

import pytest
import torch
from browser import chromium
from traitlets import TraitError

import likewise as lw
from likewise.runs.review import Decision, ReviewQueue, static_html

notebook = pytest.importorskip("likewise.runs.notebook", reason='pip install "likewise[notebook]"')
HTML = """<!doctype html><meta charset=utf-8><style>{css}</style><div id=root></div>
<script type=module>
import widget from "./widget.js";
const state = {state};
const listeners = {{}};
const bytes = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
for (const name of ["_x", "_y", "_groups"]) state[name] = bytes(state[name]);
window.model = {{
  state,
  get: (name) => state[name],
  set: (name, value) => (state[name] = value),
  save_changes: () => window.changed(JSON.stringify([state.selected, state._decided])),
  on: (name, listener) => (listeners[name] ??= []).push(listener),
  off: (name, listener) => (listeners[name] = listeners[name].filter((other) => other !== listener)),
  send: async (content) => {{
    const reply = JSON.parse(await window.ask(JSON.stringify(content)));
    listeners["msg:custom"].forEach((listener) => listener(reply));
  }},
}};
window.stop = widget.render({{ model: window.model, el: document.getElementById("root") }});
document.body.dataset.ready = "yes";
</script>"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """150 samples of three classes, a tenth of them mislabeled."""
    torch.set_num_threads(1)
    chance = torch.Generator().manual_seed(0)
    truth = torch.arange(150) % 3
    x = torch.rand(150, 1, 8, 8, generator=chance) * 0.4
    x[torch.arange(150), 0, truth * 2] += 0.6
    y = torch.where(torch.arange(150) % 10 == 3, (truth + 1) % 3, truth)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("notebook") / "run"
    return lw.analyze(net, (x, y), out=folder, classes=["ant", "<b>bee</b>", "cow"])


def test_selection_and_decisions_are_python_objects(run, tmp_path):
    widget = run.show()
    widget.set_state(
        {"selected": [3, 7], "_decided": {"3": {"verdict": "relabel", "label": 1}, "1": {"verdict": "right"}}}
    )
    assert widget.selected == [3, 7] and widget.selected_table.index.tolist() == [3, 7]
    assert widget.decisions == [Decision(1, "right"), Decision(3, "relabel", 1)]
    assert lw.apply_decisions(run, widget.decisions).changes["sample"].tolist() == [1, 3]
    widget.save(tmp_path / "decisions.json")
    assert run.decision_reader.read(tmp_path / "decisions.json") == widget.decisions
    with pytest.raises(TraitError):
        widget.selected = ["a"]
    widget.set_state({"_decided": {"150": {"verdict": "right"}}})
    with pytest.raises(ValueError, match="does not have"):
        _ = widget.decisions


def test_entries_are_sent_as_they_are_asked_for(run):
    widget, sent = run.show(), []
    widget.send = lambda content, buffers=None: sent.append(content)
    widget._handle_custom_msg({"kind": "load", "id": 5, "start": 2, "count": 3}, [])
    assert sent == [{"id": 5, "entries": ReviewQueue(run).entries(2, 3)}]
    assert json.loads(json.dumps(sent)) == sent


def test_what_cannot_run_a_widget_shows_plain_html(run):
    shown = static_html(run)
    assert "<script" not in shown and "<b>bee</b>" in shown.replace("&lt;b&gt;bee&lt;/b&gt;", "<b>bee</b>")
    assert "&lt;b&gt;bee&lt;/b&gt;" in shown and len(re.findall("<circle", shown)) == 150
    bundle = run.show()._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert data["text/html"] == shown and "application/vnd.jupyter.widget-view+json" in data
    code = f"""
import sys
sys.modules["anywidget"] = None
import likewise
shown = likewise.Analysis({str(run.folder)!r}).show()
print(type(shown).__name__, "<svg" in shown._repr_html_())
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["StaticReview", "True"]


@pytest.fixture
def page(run):
    """The widget's own script in a browser, with a model whose other side is Python."""
    import base64

    widget = run.show()
    names = ("selected", "_decided", "_x", "_y", "_groups", "_has_groups", "_classes", "_total", "_flagged")
    values = {name: getattr(widget, name) for name in names}
    state = {k: base64.b64encode(v).decode() if isinstance(v, bytes) else v for k, v in values.items()}
    content = HTML.format(css=notebook.ReviewWidget._css, state=json.dumps(state).replace("<", "\\u003c"))
    files = {"/": (content, "text/html"), "/widget.js": (notebook.ReviewWidget._esm, "text/javascript")}

    def answer(route):
        body, kind = files.get("/" + route.request.url.rsplit("/", 1)[1], ("", "text/plain"))
        route.fulfill(body=str(body), content_type=kind)

    def changed(text):
        selected, decided = json.loads(text)
        widget.set_state({"selected": selected, "_decided": decided})

    def ask(text):
        sent = []
        widget.send = lambda content, buffers=None: sent.append(content)
        widget._handle_custom_msg(json.loads(text), [])
        return json.dumps(sent[0])

    with chromium() as browser:
        found = browser.new_page(viewport={"width": 900, "height": 1100})
        found.errors = []
        found.on("pageerror", lambda error: found.errors.append(str(error)))
        found.expose_function("changed", changed)
        found.expose_function("ask", ask)
        found.route("http://widget.test/**", answer)
        found.goto("http://widget.test/")
        found.wait_for_selector("body[data-ready=yes]")
        found.wait_for_selector(".lw-card")
        yield found, widget


@pytest.mark.browser
def test_the_lasso_and_the_keys_reach_python(run, page):
    page, widget = page
    box = page.locator(".lw-map").bounding_box()
    left, top, right, bottom = (
        box["x"] + 6,
        box["y"] + 6,
        box["x"] + box["width"] - 6,
        box["y"] + box["height"] - 6,
    )
    page.mouse.move(left, top)
    page.mouse.down()
    for x, y in ((right, top), (right, bottom), (left, bottom), (left, top)):
        page.mouse.move(x, y, steps=4)
    page.mouse.up()
    page.wait_for_selector("text=150 samples circled")
    assert widget.selected == list(range(150))
    page.locator(".lw-map").dblclick()
    assert widget.selected == []
    half = (left + right) / 2
    page.mouse.move(left, top)
    page.mouse.down()
    for x, y in ((half, top), (half, bottom), (left, bottom), (left, top)):
        page.mouse.move(x, y, steps=4)
    page.mouse.up()
    page.wait_for_selector("text=samples circled")
    xs = run.table["map_x"]
    margin = 12 / box["width"] * (xs.max() - xs.min())
    middle = (xs.min() + xs.max()) / 2
    assert (
        set(run.table.index[xs < middle - margin])
        <= set(widget.selected)
        <= set(run.table.index[xs < middle + margin])
    )
    first = int(page.get_attribute(".lw-card", "data-sample"))
    assert first == int(run.table["label_suspicion"][run.table["label_issue"]].idxmax())
    page.keyboard.press("w")  # the widget has no focus: a notebook's own keys are not taken
    assert widget.decisions == []
    page.focus(".lw-part:nth-child(2)")
    page.keyboard.press("l")
    page.wait_for_selector(f".lw-card:not([data-sample='{first}'])")
    assert widget.decisions == [Decision(first, "relabel", int(run.table["suggested_label"][first]))]
    page.focus(".lw-part:nth-child(2)")
    page.keyboard.press("z")
    page.wait_for_selector(f".lw-card[data-sample='{first}']")
    assert widget.decisions == [] and page.errors == []
    assert page.locator(".lw-question b").count() == 0  # a class name is text, never markup
    page.evaluate("window.stop()")
