"""The words that commands take, with their help."""

from typing import Annotated

import typer

from likewise.cli.output import Format

Model = Annotated[
    str,
    typer.Argument(
        help="The model: `package.module:object` or `path/to/file.py:object`, a module or a function "
        "that makes one; or the settings.toml of a run, to start it again.",
        show_default=False,
    ),
]
Data = Annotated[
    str | None,
    typer.Argument(
        help="The data: a folder of classes with images, a .csv, .tsv, .parquet or .npz file, or an "
        "import string.",
        show_default=False,
    ),
]
Weights = Annotated[str | None, typer.Option(help="A state dict: .safetensors, or what torch.save wrote.")]
Label = Annotated[str | None, typer.Option(help="The column, or array, of labels.")]
TextColumn = Annotated[
    str | None, typer.Option(help="The column of texts; --prepare turns them into inputs.")
]
Columns = Annotated[
    str | None, typer.Option(help="The columns that are inputs, with commas; else all numeric.")
]
ImageSize = Annotated[int | None, typer.Option(help="Resize images to a square of so many pixels.")]
Gray = Annotated[bool, typer.Option("--gray", help="Read images as gray, one channel.")]
Prepare = Annotated[
    str | None, typer.Option(help="Import string of a function: one raw sample → the model's input.")
]
Show = Annotated[
    str | None,
    typer.Option(
        help="Import string of a function: sample number → what the report shows (image, text, dict, array)."
    ),
]
ShowColumns = Annotated[
    str | None,
    typer.Option(
        help="Columns to show of a row beside inputs and label, with commas; no others get into the report."
    ),
]
ExcerptLength = Annotated[int, typer.Option(help="Characters that the report shows of a text.")]
FollowLinks = Annotated[
    bool,
    typer.Option("--follow-links", help="Also read what links in a folder of images lead to outside of it."),
]
Classes = Annotated[str | None, typer.Option(help="Names of the classes, in order, with commas.")]
Limit = Annotated[int | None, typer.Option(help="Only so many samples.")]
Readout = Annotated[
    str,
    typer.Option(
        help="Whose gradients are compared: all_outputs, log_probabilities, label_against_rest, "
        "predicted_class, sequence_log_likelihood, token_log_likelihood, or an import string."
    ),
]
Parameters = Annotated[str | None, typer.Option(help="Only these parameters, with commas: `layer4.*,fc.*`.")]
Memory = Annotated[str, typer.Option(help="For gradients and pairs, beside the model: 4GB, 500MB.")]
Device = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, mps.")]
Form = Annotated[Format, typer.Option("--format", help="How results are written to stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only results.")]
