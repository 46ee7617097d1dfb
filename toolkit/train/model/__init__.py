"""Load the model, add adapters, freeze parameters, and save the result."""
