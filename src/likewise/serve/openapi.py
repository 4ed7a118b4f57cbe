"""The OpenAPI document of the routes."""

from typing import Any

from likewise.version import VERSION

NUMBER = {"type": "number"}
MAYBE_NUMBER = {"type": ["number", "null"]}
TEXT = {"type": "string"}


def document() -> dict[str, Any]:
    """Return the OpenAPI document; paths are those of the routes, after the token."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "likewise serve",
            "version": VERSION,
            "description": "A run or an index as a live page on this machine. Every path except this one starts with "
            "the token that the command printed.",
        },
        "servers": [{"url": "/{token}", "variables": {"token": {"default": "TOKEN"}}}],
        "paths": {
            "/": {"get": _operation("The page.", {"text/html": TEXT})},
            "/report": {"get": _operation("The report of the run.", {"text/html": TEXT}, 404)},
            "/report-data": {
                "get": _operation("The data of the report, packed.", {"application/octet-stream": TEXT}, 404)
            },
            "/pictures/{sample}": {
                "get": _operation(
                    "The picture of a sample.", _json(_PICTURE), 404, _path("sample", {"type": "integer"})
                )
            },
            "/static/{name}": {
                "get": _operation(
                    "Scripts and styles of the page.", {"text/javascript": TEXT}, 404, _path("name", TEXT)
                )
            },
            "/about": {
                "get": _operation("What is served, and which new inputs are accepted.", _json(_ABOUT))
            },
            "/ask": {
                "post": {
                    **_operation(
                        "What the prediction of a new input rests on: neighbors, novelty, reasons for doubt.",
                        _json(_ANSWER),
                        *(400, 404, 408, 413, 415, 422, 503),
                        _query("k", "Number of neighbors.", 8, 1, 50),
                    ),
                    "requestBody": {
                        "required": True,
                        "description": "An image file; a text; or JSON with either text or row.",
                        "content": {
                            "image/*": {"schema": {"type": "string", "format": "binary"}},
                            "text/plain": {"schema": TEXT},
                            "application/json": {
                                "schema": {
                                    "type": "object",
                                    "properties": {"text": TEXT, "row": {"type": "object"}},
                                }
                            },
                        },
                    },
                }
            },
            "/suspects": {
                "get": _operation(
                    "Samples in review order, flagged labels first.",
                    _json(_SUSPECTS),
                    *(400, 404),
                    _query("start", "Position of the first sample.", 0, 0, None),
                    _query("count", "Number of samples.", 10, 1, 100),
                )
            },
            "/samples/{sample}": {
                "get": _operation(
                    "A sample with its neighbors.",
                    _json({"type": "object"}),
                    404,
                    _path("sample", {"type": "integer"}),
                )
            },
            "/decisions": {
                "get": _operation("The decisions in the run folder.", _json(_DECISIONS), 404),
                "post": {
                    **_operation(
                        "Add, change or (with verdict null) withdraw decisions; they are saved in the run folder.",
                        _json({"type": "object", "properties": {"decisions": {"type": "integer"}}}),
                        *(400, 404, 408, 413, 415, 422, 503),
                    ),
                    "requestBody": {
                        "required": True,
                        "content": {"application/json": {"schema": _DECISIONS}},
                    },
                },
            },
        },
        "components": {"schemas": {"Error": _ERROR}},
    }


_ERROR = {"type": "object", "required": ["error"], "properties": {"error": TEXT}}
_PICTURE = {
    "type": ["object", "null"],
    "properties": {"kind": {"enum": ["image", "text", "row", "signal"]}, "content": {}},
}
_NEIGHBOR = {
    "type": "object",
    "required": ["row", "name", "label_name", "similarity", "error"],
    "properties": {
        "row": {"type": "integer"},
        "name": TEXT,
        "label": {},
        "label_name": TEXT,
        "similarity": NUMBER,
        "error": {**NUMBER, "description": "Standard error of the similarity."},
        "picture": _PICTURE,
    },
}
_COUNTERFACTUAL = {
    "type": ["object", "null"],
    "description": "The fewest training samples that change the vote of similar ones; null without labels.",
    "required": ["votes_for", "would_be", "share", "leave_out", "relabel", "rows", "text"],
    "properties": {
        "votes_for": TEXT,
        "would_be": TEXT,
        "share": MAYBE_NUMBER,
        "leave_out": {"type": ["integer", "null"]},
        "relabel": {"type": ["integer", "null"]},
        "rows": {"type": "array", "items": {"type": "integer"}},
        "samples": {"type": "array", "items": {"type": "object"}},
        "text": TEXT,
    },
}
_ANSWER = {
    "type": "object",
    "required": ["prediction", "trusted", "reasons", "novelty", "neighbors"],
    "properties": {
        "prediction": {},
        "prediction_name": TEXT,
        "confidence": MAYBE_NUMBER,
        "trusted": {"type": "boolean"},
        "reasons": {"type": "array", "items": TEXT, "description": "Reasons to doubt the prediction."},
        "caveats": {"type": "array", "items": TEXT, "description": "What leaves it uncertain."},
        "verdict": {**TEXT, "description": "Reasons or caveats in words."},
        "label": {"type": ["integer", "null"], "description": "The label that the input came with."},
        "label_name": TEXT,
        "agreement": MAYBE_NUMBER,
        "shift": MAYBE_NUMBER,
        "novelty": MAYBE_NUMBER,
        "novelty_percentile": MAYBE_NUMBER,
        "novelty_error": MAYBE_NUMBER,
        "novelty_comparison": TEXT,
        "sketched": {"type": "array", "items": TEXT, "description": "Which numbers come from sketches."},
        "picture": _PICTURE,
        "neighbors": {"type": "array", "items": _NEIGHBOR},
        "counterfactual": _COUNTERFACTUAL,
    },
}
_ABOUT = {
    "type": "object",
    "required": ["model", "samples", "classes", "input", "columns", "run", "flagged", "report", "command"],
    "properties": {
        "model": TEXT,
        "samples": {"type": "integer"},
        "classes": {"type": ["array", "null"], "items": TEXT},
        "input": {"enum": ["image", "text", "row", None]},
        "columns": {"type": ["array", "null"], "items": TEXT},
        "run": {"type": ["string", "null"]},
        "flagged": {"type": ["integer", "null"]},
        "report": {"type": "boolean"},
        "command": {
            "type": ["string", "null"],
            "description": "The command that applies the decisions to the data.",
        },
    },
}
_SUSPECTS = {
    "type": "object",
    "required": ["total", "flagged", "start", "samples"],
    "properties": {
        "total": {"type": "integer"},
        "flagged": {"type": "integer"},
        "start": {"type": "integer"},
        "samples": {"type": "array", "items": {"type": "object"}},
    },
}
_DECISIONS = {
    "type": "object",
    "required": ["run", "decisions"],
    "properties": {
        "run": TEXT,
        "decisions": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["sample", "verdict"],
                "properties": {
                    "sample": {"type": "integer"},
                    "verdict": {"enum": ["wrong", "right", "unsure", "relabel", "drop", None]},
                    "label": {"type": ["integer", "string"]},
                },
            },
        },
    },
}
_REASONS = {
    400: "The request cannot be read.",
    404: "Not found.",
    408: "The request arrived too slowly.",
    413: "The request is too large.",
    415: "The content type is not accepted.",
    422: "The input was read but cannot be used; the error says why.",
    503: "Too many requests are waiting; try again.",
}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": schema}


def _operation(summary: str, content: dict[str, Any], *more: int | dict[str, Any]) -> dict[str, Any]:
    """Return an operation; numbers are its possible error codes, dicts are parameters."""
    responses: dict[str, Any] = {
        "200": {
            "description": summary,
            "content": {kind: {"schema": schema} for kind, schema in content.items()},
        }
    }
    for status in (number for number in more if isinstance(number, int)):
        schema = {"$ref": "#/components/schemas/Error"}
        responses[str(status)] = {
            "description": _REASONS[status],
            "content": {"application/json": {"schema": schema}},
        }
    found: dict[str, Any] = {"summary": summary, "responses": responses}
    parameters = [part for part in more if isinstance(part, dict)]
    return {**found, "parameters": parameters} if parameters else found


def _query(name: str, description: str, default: int, least: int, most: int | None) -> dict[str, Any]:
    schema = {"type": "integer", "default": default, "minimum": least}
    schema |= {} if most is None else {"maximum": most}
    return {"name": name, "in": "query", "description": description, "schema": schema}


def _path(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": schema}
