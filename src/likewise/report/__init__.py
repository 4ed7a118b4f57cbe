"""The report of a run: one HTML file that opens from disk, without network access or torch; it computes only counts.

The data are embedded as one gzipped blob. Scripts and styles use no library. User data are written by Jinja with
autoescape, or set as text by the scripts. A server can serve the same page with `page(run, source=...)`, which then
fetches the blob (`pack_payload`) from its own origin.
"""
