"""What `qlinear doctor` looks at: one finding for each thing that serving needs."""
