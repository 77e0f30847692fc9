"""How ids and rows travel between ranks: collectives, who is where (topology), messages, the all-to-all of a lookup."""
