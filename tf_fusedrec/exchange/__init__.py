"""Moves ids, rows and gradients between ranks: collectives, the topology, messages, the all-to-alls of a lookup."""
