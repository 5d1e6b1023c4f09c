"""The collation service: batches that other machines make. ``server`` makes them, ``client`` is the loader's side.

Both speak ``protocol``, and name servers as in ``address``.
"""
