"""Plan files: YAML, TOML and JSON as plain values, with the line of every key."""
