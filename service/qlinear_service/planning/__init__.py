"""What a layer must take on a GPU, and how it would be cut: `qlinear plan`. Needs no GPU."""
