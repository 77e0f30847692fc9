"""Parts that several models have: encoders, norms, inputs of numbers, pooled histories, dropout of events."""
