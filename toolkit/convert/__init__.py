"""Configurations and commands of TRL, axolotl and LLaMA-Factory as a preset and arguments, without importing them."""
