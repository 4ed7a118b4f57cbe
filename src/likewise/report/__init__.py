"""From a run folder to one HTML file that opens from disk: no network, no torch, nothing computed but counts.

Data are embedded as one gzipped blob; scripts and styles are the page's own, without a library. Everything of the
user's is written by Jinja with autoescape, or set as text by the scripts. A server may give the same page with
`page(run, source=...)`, which then fetches the blob (`pack_payload`) from its own origin.
"""
