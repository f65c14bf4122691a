"""The `frostline` command. Imported by nothing; heavy imports stay inside the functions."""
