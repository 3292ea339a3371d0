"""One module per verb of the `qlinear` program."""
