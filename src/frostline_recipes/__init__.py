"""Working systems built on frostline."""
