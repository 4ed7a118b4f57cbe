"""`likewise serve` by HTTP: answers, decisions, and what is refused; nothing but decisions is ever written."""

import io
import json
import random
import urllib.error
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image
from serve_process import CLASSES, content_of

import likewise as lw
from likewise.report.payload import pack_payload, read_run
from likewise.serve import openapi
from likewise.serve.app import STATIC, routes
from likewise.serve.service import Batcher, Service


def call(address, body=None, kind=None, method=None, **headers):
    """Return the status and what JSON says."""
    if kind is not None:
        headers["Content-Type"] = kind
    data = body.encode() if isinstance(body, str) else body
    request = urllib.request.Request(
        address, data, {k.replace("_", "-"): v for k, v in headers.items()}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            content = response.read()
            return response.status, json.loads(content) if "json" in response.headers[
                "Content-Type"
            ] else content
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def image(size=(8, 8), form="PNG", color=200):
    out = io.BytesIO()
    Image.new("L", size, color).save(out, form)
    return out.getvalue()


def test_an_image_is_answered_as_the_index_answers_it(served, place):
    path = place / "images" / "bee" / "001.png"
    status, found = call(served.address + "ask?k=4", path.read_bytes(), "image/png")
    assert status == 200 and found["prediction_name"] in CLASSES and len(found["neighbors"]) == 4
    near = found["neighbors"][0]
    assert near["name"] == "bee/001.png" and near["similarity"] > 0.99 and near["picture"]["kind"] == "image"
    status, about = call(served.address + "about")
    assert about["command"] == "likewise apply run run/decisions.json"
    assert about["input"] == "image" and about["classes"] == list(CLASSES) and about["report"]


def test_an_answer_says_what_would_change_it(served, place):
    run = lw.Analysis(place / "run")
    index = lw.Index(place / "run" / "index")
    seen = set()
    for path in sorted((place / "images").glob("*/00*.png")):
        found = call(served.address + "ask?k=4", path.read_bytes(), "image/png")[1]
        change = found["counterfactual"]
        assert change["text"].endswith("was not trained again.")
        seen.add(change["leave_out"] is not None)
        if change["leave_out"] is not None:
            assert (
                len(change["rows"]) == min(12, change["leave_out"])
                and change["relabel"] <= change["leave_out"]
            )
            assert {index.sample(row).label_name for row in change["rows"]} == {change["votes_for"]}
            assert [sample["row"] for sample in change["samples"]] == change["rows"]
            assert change["samples"][0]["picture"]["kind"] == "image"
            assert change["would_be"] in CLASSES and change["would_be"] != change["votes_for"]
    assert True in seen and len(run.table) == len(index)


def test_the_report_is_the_same_page_with_its_data_and_pictures_fetched(served, place):
    run = read_run(place / "run")
    status, page = call(served.address + "report")
    assert status == 200 and b'data-source="report-data"' in page
    assert b"likewise apply run run/decisions.json" in page
    assert call(served.address + "report-data") == (
        200,
        pack_payload(run, picture_source="pictures/{sample}"),
    )
    status, found = call(served.address + "pictures/3")
    assert (
        status == 200 and found["kind"] == "image" and found["content"].startswith("data:image/webp;base64,")
    )
    assert call(served.address + "pictures/150")[0] == 404


def test_texts_and_rows_are_answered(start):
    server = start("texts")
    try:
        for body, kind in (("red green", "text/plain"), (json.dumps({"text": "net.py"}), "application/json")):
            status, found = call(server.address + "ask", body, kind)
            assert status == 200 and found["neighbors"][0]["picture"]["kind"] == "text"
        status, found = call(server.address + "ask", "crash", "text/plain")
        assert status == 422 and "no such word" in found["error"]
        assert call(server.address + "suspects")[0] == call(server.address + "decisions")[0] == 404
        for path in ("report", "report-data", "pictures/0"):
            assert call(server.address + path)[0] == 404
    finally:
        server.stop()
    server = start("rows")
    try:
        row = {"a": 0.1, "b": "0.2", "c": -1, "d": 0.5}
        _, one = call(server.address + "ask", json.dumps({"row": row}), "application/json")
        other = {name: row[name] for name in "dcba"}
        _, two = call(server.address + "ask", json.dumps({"row": other}), "application/json")
        assert one["neighbors"] == two["neighbors"]  # columns are known by name, not by place
        assert call(server.address + "about")[1]["columns"] == ["b", "a", "d", "c"]
        for wrong, word in (
            ({"a": 1}, "missing"),
            ({**row, "e": 1}, "unknown"),
            ({**row, "a": "x"}, "numbers"),
        ):
            status, found = call(server.address + "ask", json.dumps({"row": wrong}), "application/json")
            assert status == 422 and word in found["error"], found
    finally:
        server.stop()


def test_decisions_are_saved_in_the_run_and_taken_back(served, place):
    before = content_of(place)
    run = lw.Analysis(place / "run")
    status, found = call(served.address + "suspects?count=3")
    assert status == 200 and found["flagged"] == int(run.table["label_issue"].sum())
    samples = [entry["sample"] for entry in found["samples"]]
    assert samples[0] == int(run.table["label_suspicion"][run.table["label_issue"]].idxmax())
    later = call(served.address + "suspects?start=2&count=1")[1]["samples"]
    assert later == found["samples"][2:]

    def decide(*entries, run=run.manifest["data"]):
        body = json.dumps({"run": run, "decisions": list(entries)})
        return call(served.address + "decisions", body, "application/json")

    assert decide({"sample": samples[0], "verdict": "relabel", "label": 1}) == (200, {"decisions": 1})
    assert decide({"sample": samples[1], "verdict": "right"}) == (200, {"decisions": 2})
    saved = lw.apply_decisions(run, place / "run" / "decisions.json")
    assert saved.changes["sample"].tolist() == sorted(samples[:2])
    assert call(served.address + "decisions")[1]["decisions"][0]["sample"] == min(samples[:2])
    assert decide({"sample": samples[0], "verdict": None}) == (200, {"decisions": 1})
    kept = (place / "run" / "decisions.json").read_bytes()
    refused = (
        decide({"sample": 150, "verdict": "right"}),
        decide({"sample": samples[0], "verdict": "burn"}),
        decide({"sample": samples[0], "verdict": "right"}, run="0" * 64),
        decide({"sample": [1], "verdict": None}),
        decide("right"),
    )
    assert all(status == 422 and found["error"] for status, found in refused), refused
    assert (place / "run" / "decisions.json").read_bytes() == kept
    (place / "run" / "decisions.json").unlink()
    assert content_of(place) == before
    assert lw.Analysis(place / "run").table is not None


def test_other_hosts_origins_tokens_and_methods_are_refused(served):
    root = served.address.rsplit("/", 2)[0]
    assert call(served.address + "about", Host="evil.example")[0] == 421
    assert call(served.address + "about", Origin="http://evil.example")[0] == 403
    assert call(served.address + "about", Origin=root)[0] == 200
    assert (
        call(served.address + "about", Host=root.removeprefix("http://").replace("127.0.0.1", "localhost"))[0]
        == 200
    )
    for path in ("/", "/about", "/guess/about", "/guess/ask", "/../about"):
        assert call(root + path)[0] == 404
    assert call(served.address + "ask")[0] == call(served.address + "about", b"", method="DELETE")[0] == 405
    with urllib.request.urlopen(served.address) as response:
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        assert response.headers["Referrer-Policy"] == "no-referrer" and "server" not in response.headers


def test_uploads_that_are_too_large_of_no_type_or_bombs_get_a_clear_error(served):
    ask = served.address + "ask"
    whole = zlib.compress(b"\0" * 10)
    bomb = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", bytes.fromhex("0000ea600000ea600800000000"))
        + chunk(b"IDAT", whole)
    )
    cases = (
        (bytes(20_000_001), "image/png", 413, "bytes"),
        (bomb, "image/png", 413, "too large once decoded"),
        (b"", "image/png", 400, "empty"),
        (b"GIF89a", "image/gif", 422, "cannot be read as an image"),
        (b"<svg/>", "image/svg+xml", 415, "found image/svg+xml"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "image/png", 422, "cannot be read"),
        (image((9, 9)), "image/png", 422, "inputs"),
        (b"hello", "text/plain", 415, "of kind image"),
        (b'{"row": {}}', "application/json", 415, "of kind image"),
        (b"[" * 100_000, "application/json", 400, "not JSON"),
        (b'{"image": "/etc/passwd"}', "application/json", 400, "Expected"),
        (b"x", "multipart/form-data; boundary=x", 415, "found multipart/form-data"),
    )
    for body, kind, expected, words in cases:
        status, found = call(ask, body, kind)
        assert status == expected and words in found["error"], (kind, status, found)
    for query in ("k=0", "k=51", "k=x", "k=-1", "k=1e9", "k=²"):
        assert call(f"{ask}?{urllib.parse.quote(query, safe='=')}", image(), "image/png")[0] == 400
    assert call(served.address + "samples/150")[0] == 404


def chunk(kind, content):
    return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")


def test_two_hundred_fuzzed_uploads_neither_crash_nor_write(served, place):
    before, chance = content_of(place), random.Random(0)
    good = [image(form=form) for form in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")]
    kinds = (
        "image/png",
        "image/jpeg",
        "application/octet-stream",
        "text/plain",
        "application/json",
        "../../etc",
        "",
    )
    paths = (
        "ask",
        "ask?k=5",
        "decisions",
        "static/../../net.py",
        "static/..%2f..%2fnet.py",
        "samples/../report",
    )

    def fuzz(seed):
        own = random.Random(seed)
        body = bytearray(own.choice(good))
        for _ in range(own.randrange(12)):
            body[own.randrange(len(body))] = own.randrange(256)
        if own.random() < 0.3:
            body = body[: own.randrange(len(body))] + own.randbytes(own.randrange(200))
        headers = {"X_File_Name": "../../../tmp/evil.png", "Content_Disposition": 'filename="../evil"'}
        return call(served.address + own.choice(paths), bytes(body), own.choice(kinds), **headers)

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(fuzz, [chance.random() for _ in range(200)]))
    statuses = [status for status, _ in found]
    assert set(statuses) <= {200, 400, 404, 405, 413, 415, 422} and 200 in statuses, sorted(set(statuses))
    assert all("error" in answer for status, answer in found if status != 200)
    assert served.alive and call(served.address + "ask", image(), "image/png")[0] == 200
    assert content_of(place) == before


def test_fifty_clients_are_answered_together(served):
    pictures = [image(color=10 + 4 * i) for i in range(50)]
    alone = [call(served.address + "ask?k=3", picture, "image/png")[1] for picture in pictures[:5]]
    with ThreadPoolExecutor(50) as threads:
        found = list(threads.map(lambda p: call(served.address + "ask?k=3", p, "image/png"), pictures))
    assert [status for status, _ in found] == [200] * 50
    for (_, one), expected in zip(found[:5], alone, strict=True):
        assert one["prediction"] == expected["prediction"]
        assert [n["row"] for n in one["neighbors"]] == [n["row"] for n in expected["neighbors"]]


def test_the_document_agrees_with_the_routes(served, place):
    status, found = call(served.address.rsplit("/", 2)[0] + "/openapi.json")
    assert status == 200 and found == json.loads(json.dumps(openapi.document()))
    service = Service(None, lw.Analysis(place / "run"), None)
    known = {
        (r.path.replace(":int", ""), m.lower())
        for r in routes(service, Batcher(service.explain))
        for m in r.methods
    }
    told = {(path, method) for path, methods in found["paths"].items() for method in methods}
    assert known - {(path, "head") for path, _ in known} == told
    answers = {
        "/about": call(served.address + "about")[1],
        "/suspects": call(served.address + "suspects")[1],
        "/decisions": call(served.address + "decisions")[1],
        "/ask": call(served.address + "ask", image(), "image/png")[1],
    }
    for path, answer in answers.items():
        operation = found["paths"][path]["post" if path == "/ask" else "get"]
        schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
        assert set(schema["required"]) <= set(answer) <= set(schema["properties"]), path
    assert all(path.exists() for paths, _ in STATIC.values() for path in paths)


def test_a_run_with_unreadable_decisions_is_not_served(place, tmp_path):
    import shutil

    shutil.copytree(place / "run", tmp_path / "run")
    (tmp_path / "run" / "decisions.json").write_text('{"run": "another", "decisions": []}')
    with pytest.raises(ValueError, match="another data set"):
        Service(None, lw.Analysis(tmp_path / "run"), None)
