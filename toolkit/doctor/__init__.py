"""What this node can do, what is wrong with it, and how nodes differ; compiled DeepSpeed ops."""
