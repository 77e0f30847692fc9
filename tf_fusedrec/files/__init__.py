"""The form of rows on disk: hash order, shard files, manifests, saves. NumPy only; everything above may read it."""
