"""`likewise serve`: a run or an index as a live page on this machine.

service    answers about new inputs (images, texts, rows), in batches of those that wait; the review queue,
           decisions: no HTTP
app        the routes, what is refused, and the headers
openapi    what the routes accept and return
"""
