"""The dataset directory: schema, shards, index, manifest and ledger."""
