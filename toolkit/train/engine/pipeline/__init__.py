"""Pipeline parallelism: stages of a Hugging Face decoder, run by torch.distributed.pipelining in an own loop."""
