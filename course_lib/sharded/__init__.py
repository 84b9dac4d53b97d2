"""The teaching implementations: written to be read, proven against PyTorch's own."""
