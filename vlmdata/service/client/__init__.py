"""Batches from a collation service (``vlmdata serve``) instead of from shards.

The client opens the datasets' manifests and indices from the service, so it has plans, keys and state like any loader.
Only the filling of a batch's buffer happens elsewhere:

1. ``address``: ``grpc://host:8815,host2:8815`` becomes a list of servers.
2. ``protocol``: a query names the data, the plan and the position of a batch. It is all that a server needs.
3. ``connection``: one server. Sends a query and receives the bytes of a buffer.
4. ``servers``: all servers. Chooses one, goes to the next after a failure, and hedges slow answers.
5. ``filler``: what the loader asks for the buffers of a rank's batches, several queries ahead.
"""
