"""Configurations and commands of TRL, axolotl and LLaMA-Factory as a preset and training arguments, without importing the tools."""
