"""Training data of a rank: tokenisation, packing, streaming, collation."""
