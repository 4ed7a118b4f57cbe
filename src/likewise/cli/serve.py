"""`likewise serve`: serve a run or an index as a live page on this machine."""

import os
import socket
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from likewise.cli.index import open_index
from likewise.cli.options import NEW_INPUTS, Form, Quiet, tokenization
from likewise.cli.output import Format, be_quiet, print_message, print_result, print_warning

if TYPE_CHECKING:
    from likewise.index import Index
    from likewise.runs.settings import Settings
    from likewise.serve.service import InputReader


def serve(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN|INDEX", help="The folder of a run or an index.", show_default=False)
    ],
    index: Annotated[
        Path | None, typer.Option(help="The index to ask about new inputs, if it is not RUN/index.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model, if it has moved.")] = None,
    weights: Annotated[str | None, typer.Option(help="Its weights, if they have moved.")] = None,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, mps.")] = "cpu",
    host: Annotated[
        str,
        typer.Option(
            help="The address to listen on; use one that other machines can reach only on networks you trust."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for any free one.")] = 0,
    opened: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    form: Form = Format.text,
    quiet: Quiet = False,
) -> None:
    """Serve a run or an index as a live page: ask about new inputs, review labels, see the report.

    By default, only this machine can reach the page, at an address with a random token. It writes nothing but
    decisions, into the run.

    Example: `likewise serve run --open`
    """
    be_quiet(quiet)
    try:
        import uvicorn

        from likewise.serve.app import build_app, new_token
    except ImportError as error:
        raise ImportError(
            'likewise serve needs starlette and uvicorn: pip install "likewise[serve]".'
        ) from error
    from likewise.manifest import kind_of
    from likewise.runs.result import Analysis
    from likewise.serve.service import Service

    is_index = kind_of(folder) == "index"
    run = None if is_index else Analysis(folder)
    place = folder if is_index else index or folder / "index"
    found, reader = None, None
    if is_index or index is not None or (place / "manifest.json").exists():
        found, settings = open_index(place, model, weights, None, device, False)
        reader = _reader(found, settings)
    else:
        print_message(
            f"note: {folder} has no index, so the page cannot answer questions about new inputs. Build one with "
            "likewise index, and pass it with --index."
        )
    service = Service(found, run, reader)
    if found is not None and reader is not None:
        print_message("warming up ...")
    service.warm_up()
    token = new_token()
    listening = _listen(host, port)
    name = f"[{host}]" if ":" in host else host
    address = f"http://{name}:{listening.getsockname()[1]}/{token}/"
    if host not in ("127.0.0.1", "localhost", "::1"):
        print_warning(
            f"warning: other machines can reach {host}: anyone who has the address can ask and decide."
        )
    print_result(form, {"address": address, "pid": os.getpid()}, address)
    print_message("Press Ctrl-C to stop.")
    if opened:
        webbrowser.open(address)
    app = build_app(service, token, (name,))
    config = uvicorn.Config(app, log_level="warning", timeout_keep_alive=30, server_header=False, ws="none")
    uvicorn.Server(config).run(sockets=[listening])


def _reader(index: "Index", settings: "Settings") -> "InputReader | None":
    from likewise.serve.service import reader_from_settings

    known: dict[str, Any] = {name: getattr(settings, name) for name in ("data", *NEW_INPUTS)}
    reader = reader_from_settings(index, {**known, "tokenization": tokenization(settings)})
    if reader is None:
        print_message(
            "note: the index does not say how to turn new inputs into inputs of the model, so the page cannot read "
            "any. Build the index from a folder of images, a table or texts, or with --prepare."
        )
    return reader


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise OSError(f"Cannot listen on {host}:{port} ({error.strerror}): choose another --port.") from error
    listening.listen(256)
    return listening
