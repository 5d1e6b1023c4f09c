"""Streams packed batches of an epoch plan, in order and resumable, reading only what each rank needs.

The path of a batch, with the module of each step:

1. ``stream``: a ``RankStream`` yields one ``PackRequest`` (``request``) per batch of its rank, with the places of all
   samples and images and the layout of the buffer (``layout``).
2. ``workers``: a buffer is leased (``buffers``), and ``assemble`` fills it from the ``shards``, in this process
   or ahead of time in a worker.
3. ``session``: ``batch_of`` (``batches``) makes the buffer a ``PackedBatch``, which ``device`` may copy to a GPU. The
   session returns it as a ``LoadedBatch``, with the position of the next batch.
4. ``loader``: ``StreamingLoader`` keeps that position, which is its entire state (``state``).
"""
