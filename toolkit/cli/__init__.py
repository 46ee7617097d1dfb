"""The `toolkit` command line: a module per group of commands, registered in `program`.

A command module parses options and prints; the work is imported inside the command, so that `toolkit --help` answers in
a fraction of a second and no light command imports torch.
"""
