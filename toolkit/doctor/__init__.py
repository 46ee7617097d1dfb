"""What this node can do: compiled DeepSpeed ops."""
