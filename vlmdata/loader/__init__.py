"""Streams packed batches of an epoch plan, in order and resumable, reading only what each rank needs.

The path of a batch:

1. ``request``: which samples. A ``RankStream`` yields one ``PackRequest`` per batch of its rank: what the index says of
   the pack, what to read of it, and the places of the arrays in the buffer.
2. ``fill``: their bytes into a buffer. A worker, or this process, reads and decodes them.
3. ``feed``: batches to the consumer. A ``Session`` has several requests under way, makes each filled buffer a
   ``PackedBatch``, and may copy it to a GPU.
4. ``loader``: ``StreamingLoader`` keeps the position of the next batch, which is its entire state (``state``).
"""
