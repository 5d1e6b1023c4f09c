"""The dataset directory: its schema, shards, index, manifest, ledger, and the audit of all of them."""
