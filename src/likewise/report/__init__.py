"""From a run folder to one HTML file that opens from disk: no network, no torch, nothing computed but counts.

The libraries (Plotly's 2-D bundle, Tabulator; both MIT) are embedded once, the data as one gzipped blob.
Everything of the user's is written by Jinja with autoescape, or set as text by the page's own scripts.
"""
