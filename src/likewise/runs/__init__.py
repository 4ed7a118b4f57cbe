"""From a model and a data set to a folder of results: the only place that writes them.

    run/  settings.toml       what was asked for; `likewise analyze run/settings.toml` starts it again
          manifest.json       what was run, on what, by which versions, at what cost; checksums
          samples.parquet     one row a sample
          neighbors.parquet   the most similar samples of each
          duplicates.parquet  pairs that are nearly the same
          details.parquet     how many samples are how similar to each; leading directions of the kernel
          pictures.parquet    what a person sees of some samples, small
          report.html         all of it, in one file that needs no network
          stages/             what each stage found, until all are done

A run that is killed goes on after the last stage that was noted; a folder of another model, data set,
readout, precision, options or versions is refused. One process at a time writes into a folder. Damaged files
are rebuilt. Nothing of the data is copied but pictures, capped, and no pickle is written or read.
"""
