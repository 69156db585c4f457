"""Commands of the `headrace` program, one a file: `add` declares its arguments, `run` does it."""
