"""Rehearsals: the training script as one rank of a world whose other ranks do not exist."""
