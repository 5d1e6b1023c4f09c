"""The collation service: makes packed batches for loaders on other machines (``vlmdata serve``).

A query is complete (:mod:`vlmdata.service.protocol`), and the plan is a pure function, so a server keeps nothing
about its clients. The path of a query:

1. ``server``: Arrow Flight. Reads the ticket, asks for the token (``access``), counts (``metrics``).
2. ``plans``: the plan of the epoch, from a small cache, and the request for the pack.
3. ``packs``: the whole pack, read and decoded once, by worker processes, for all ranks that share it. Their memory is
   bounded.
4. ``answer``: the rank's part or slice, as views of the pack, streamed in chunks.
"""
