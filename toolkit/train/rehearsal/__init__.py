"""The training script alone: one rank of a world whose other ranks are not there."""
